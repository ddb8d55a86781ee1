"""megatron-fsdp: NVIDIA's FSDP, stable (`fully_shard_model`) and experimental (`experimental.fully_shard`).

Both take whole parameters in the compute dtype and keep fp32 main weights and fp32 main gradients in flat shards.
The stable one's optimizer wrapper steps once with zero gradients when it is made, which would move the bias correction
and decay the weights. So AdamW is given views of the flat shards here, in both.

Note: [Experts on one rank alone]
With gradients sent in another dtype than they are summed in, the stable library adds the gradient of a group with one
member to itself. So where some group has one member, all gradients are sent in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.bench.contender import Contender
from benchmarks.bench.plain import (
    Exchange,
    PlainModel,
    adamw,
    backward,
    first_value,
    materialize,
    optimizer_name,
    plain_model,
)
from benchmarks.bench.workload import Workload
from hocket.model.documents import Microbatch
from hocket.model.layers import DenseLayer
from hocket.model.moe import MoELayer
from hocket.model.transformer import Embed, Head
from hocket.program.mesh import Mesh, Purpose

UNITS = [Embed, DenseLayer, MoELayer, Head]


def megatron_fsdp(workload: Workload, rank: int, device: torch.device) -> Contender:
    """The stable library with the settings that measured best: double buffers, a group of its own for gathers."""
    return Stable(workload, rank, device)


def experimental(workload: Workload, rank: int, device: torch.device) -> Contender:
    """The rewrite that comes with the package.

    Not with its buffers in symmetric memory: there the process ends without a word in its first step (torch 2.11,
    NVLink multicast off).
    """
    return Experimental(workload, rank, device)


@lru_cache(maxsize=8)
def meshes(mesh: Mesh, device: str) -> tuple[DeviceMesh, DeviceMesh]:
    """([dp, tp], [dp = edp, ep, tp]) of all ranks, with a tp axis of one rank, which the library wants to have."""
    dense = init_device_mesh(device, (mesh.dp, 1), mesh_dim_names=("dp", "tp"))
    return dense, init_device_mesh(device, (mesh.edp, mesh.ep, 1), mesh_dim_names=("dp", "ep", "tp"))


@lru_cache(maxsize=8)
def gather_group(mesh: Mesh, purpose: Purpose, rank: int) -> Any:
    """A second group of the ranks that share weights, so that gathers and reductions need not wait for each other."""
    made = {ranks: dist.new_group(list(ranks)) for ranks in mesh.groups(purpose)}
    return next(group for ranks, group in made.items() if rank in ranks)


def build(workload: Workload, rank: int, device: torch.device, grid: DeviceMesh) -> PlainModel:
    """The plain stack with first values in the compute dtype."""
    mesh, where = workload.mesh, workload.mesh.coordinates(rank)
    exchange = Exchange(grid.get_group("ep"), mesh.ep, where.ep) if mesh.ep > 1 else None
    model = plain_model(workload, rank, exchange=exchange)
    materialize(model, workload, rank, device)
    return model


class Shards:
    """AdamW on views of flat fp32 shards. `factor` multiplies each gradient first."""

    def __init__(self, mains: Sequence[Tensor], dims: Sequence[int], factor: Sequence[float], work: Workload) -> None:
        self.mains, self.factor = list(mains), list(factor)
        self.adamw = adamw(self.mains, dims, work)

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor]) -> None:
        if any(factor != 1.0 for factor in self.factor):
            torch._foreach_mul_(list(grads), self.factor)
        for main, grad in zip(self.mains, grads, strict=True):
            main.grad = grad
        self.adamw.step()
        for main in self.mains:
            main.grad = None


class Stable:
    """Plain steps over a model under `fully_shard_model`."""

    def __init__(self, workload: Workload, rank: int, device: torch.device) -> None:
        # The package is an optional peer: only its users need it.
        from megatron_fsdp.fully_shard import fully_shard_model  # pyrefly: ignore[missing-import]
        from megatron_fsdp.mixed_precision import MixedPrecisionPolicy  # pyrefly: ignore[missing-import]

        mesh = workload.mesh
        dense, grid = meshes(mesh, device.type)
        moe = "moe" in workload.config.model.kinds()
        alone = mesh.dp == 1 or (moe and mesh.edp == 1)
        wire = torch.float32 if alone else workload.dtype
        module = build(workload, rank, device, grid)
        _keep_fp32_values(module, workload, rank, device)
        options: dict[str, Any] = dict(
            zero_dp_strategy="optim_grads_params",
            fsdp_double_buffer=True,
            sync_model_each_microbatch=False,
            preproc_state_dict_for_dcp_ckpt=False,
            # Experts are averaged over more ranks than share them, so with experts sums are scaled at the end.
            average_in_collective=not moe,
            calculate_per_token_loss=moe,
        )
        self.model: Any = fully_shard_model(
            module,
            device_mesh=dense,
            dp_shard_dim="dp",
            tp_dim="tp",
            expt_device_mesh=grid["dp", "tp"],  # asked for by average_in_collective, with or without experts
            fsdp_group_ag=gather_group(mesh, "gather_dense", rank),
            expt_fsdp_group_ag=gather_group(mesh, "gather_experts", rank),
            fsdp_unit_modules=UNITS,
            device=device,
            mixed_precision_policy=MixedPrecisionPolicy(
                main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=wire
            ),
            **options,
        )
        self.owned: list[Any] = []
        self.optimizer = self._shards(workload, 1.0 / mesh.dp if moe else 1.0) if workload.optimizer else None
        self.settings: Mapping[str, str] = {
            "megatron_fsdp": ", ".join(f"{name} = {value}" for name, value in options.items()),
            "units": ", ".join(unit.__name__ for unit in UNITS),
            "groups": "gathers and reductions on groups of their own",
            "precision": f"fp32 main weights and gradients, gradients sent in {str(wire).removeprefix('torch.')}",
            "prefetch and queue": "the library's defaults (10^9 elements, limited by the double buffer)",
            "optimizer": optimizer_name(workload, "on the library's fp32 shards"),
            "compile": "each layer" if workload.compile else "off",
            "experts": f"synchronous all-to-all over {mesh.ep} ranks, sharded over {mesh.edp}" if moe else "none",
        }

    def _shards(self, workload: Workload, factor: float) -> Shards:
        named = [param for _, param in self.model.param_and_grad_buffer.optimizer_named_parameters]
        self.owned = [param for param in named if param.to_local().numel()]
        mains = [param.detach().to_local() for param in self.owned]
        dims = [param.dim() for param in self.owned]
        return Shards(mains, dims, [factor] * len(mains), workload)

    def step(self, microbatches: Sequence[Microbatch]) -> Tensor:
        losses = [backward(self.model, microbatch, len(microbatches)) for microbatch in microbatches]
        self.model.finish_grad_sync()
        if self.optimizer is not None:
            self.optimizer.step([param.grad.to_local() for param in self.owned])
            self.model.install_optimized_model_weights()
        self.model.zero_grad_buffer()
        return torch.stack(losses).mean()

    def close(self) -> None:
        del self.model, self.optimizer, self.owned


def _keep_fp32_values(model: nn.Module, workload: Workload, rank: int, device: torch.device) -> None:
    """Give parameters the method by which the library asks for values of more precision than their own."""
    for name, param in model.named_parameters():
        value: Callable[[], Tensor] = partial(first_value, name, param.shape, workload, rank, device)
        setattr(param, "get_high_precision_init_val", value)  # noqa: B010, a tensor has no such attribute
        setattr(param, "clear_high_precision_init_val", lambda: None)  # noqa: B010


class Experimental:
    """Plain steps over a model under `megatron_fsdp.experimental.fully_shard`."""

    def __init__(self, workload: Workload, rank: int, device: torch.device) -> None:
        from megatron_fsdp.experimental import Flat, Placements, fully_shard  # pyrefly: ignore[missing-import]
        from megatron_fsdp.mixed_precision import MixedPrecisionPolicy  # pyrefly: ignore[missing-import]

        mesh = workload.mesh
        dense, grid = meshes(mesh, device.type)
        self.model = build(workload, rank, device, grid)
        flat = Placements(dp_axes=[0], parameter=[Flat()], gradient=[Flat()], optimizer=[Flat()])
        policy = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)
        for module in _bottom_up(self.model, mesh.ep > 1):
            ranks = grid["dp"] if mesh.ep > 1 and module in _experts(self.model) else dense["dp"]
            fully_shard(module, ranks, flat, policy, use_symm_mem=False)
        self.groups: list[tuple[str, Any]] = []
        for path, module in self.model.named_modules():
            self.groups += [(path, group) for group in getattr(module, "parameter_groups", ())]
        for path, group in self.groups:
            _fill(path, group, workload, rank, device)
        self.optimizer = self._shards(workload) if workload.optimizer else None
        self.settings: Mapping[str, str] = {
            "megatron_fsdp.experimental": "placements = Flat, use_symm_mem = False",
            "units": "embedding, each layer, experts of other ranks, head",
            "precision": f"fp32 main weights and gradients, gradients sent in {workload.config.precision.compute}",
            "prefetch": "the library's: the next unit",
            "optimizer": optimizer_name(workload, "on the library's fp32 shards"),
            "compile": "each layer" if workload.compile else "off",
        }

    def _shards(self, workload: Workload) -> Shards:
        """The optimizer. Experts' gradients are averaged over edp ranks, and must be over dp."""
        mains, dims, factors = [], [], []
        self.grads: list[Tensor] = []
        for path, group in self.groups:
            factor = 1.0 / workload.mesh.ep if path.endswith(".experts") else 1.0
            for index, shape in enumerate(group.main_weight.layout.tensor_shapes):
                main = group.main_weight.get_local_tensor(index)
                if main.numel():
                    mains.append(main)
                    dims.append(len(shape))
                    factors.append(factor)
                    self.grads.append(group.main_grad.get_local_tensor(index))
        return Shards(mains, dims, factors, workload)

    def step(self, microbatches: Sequence[Microbatch]) -> Tensor:
        losses = [backward(self.model, microbatch, len(microbatches)) for microbatch in microbatches]
        if self.optimizer is not None:
            self.optimizer.step(self.grads)
        for _, group in self.groups:
            if self.optimizer is not None:
                group.sync_model_weight_from_main_weight()
            for param in group.sharded_parameters:
                param.grad = None
        return torch.stack(losses).mean()

    def close(self) -> None:
        del self.model, self.groups, self.optimizer


def _experts(model: PlainModel) -> list[nn.Module]:
    return [layer.experts for layer in model.layers.values() if isinstance(layer, MoELayer)]


def _bottom_up(model: PlainModel, split_experts: bool) -> list[nn.Module]:
    """Modules in the order in which they must be sharded: what a module contains before it."""
    assert model.embed is not None
    assert model.head is not None
    return [*(_experts(model) if split_experts else []), *model.layers.values(), model.embed, model.head, model]


def _fill(path: str, group: Any, workload: Workload, rank: int, device: torch.device) -> None:
    """Put exact fp32 first values into a group's main weights."""
    from megatron_fsdp.experimental import DBuffer  # pyrefly: ignore[missing-import]

    shapes = zip(group.parameter_names, group.main_weight.layout.tensor_shapes, strict=True)
    values = [first_value(f"{path}.{name}".lstrip("."), shape, workload, rank, device) for name, shape in shapes]
    whole = DBuffer.distribute_tensors(values, group.mesh, group.main_weight.placements)
    group.main_weight.local_buffer.copy_(whole.local_buffer)
    group.sync_model_weight_from_main_weight()
