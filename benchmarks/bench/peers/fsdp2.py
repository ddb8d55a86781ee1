"""torch FSDP2 (`fully_shard`): with its defaults, and tuned.

One FSDP unit per layer. By default embedding and head belong to the root's unit. Tuned, they are units of their own,
layers fetch the weights of the next two explicitly in forward and backward, the head (and the last layer) keep theirs
until backward, which needs them at once, and gradients of several microbatches are reduced together where memory
allows. Dense weights are sharded over all data-parallel ranks; experts over those that hold the same ones, and if
there is one such rank they are ordinary parameters whose gradients need no communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from benchmarks.bench.contender import Contender
from benchmarks.bench.plain import Exchange, MainWeights, PlainModel, adamw, backward, fill, optimizer_name, plain_model
from benchmarks.bench.workload import Workload
from hocket.model.documents import Microbatch
from hocket.model.moe import MoELayer
from hocket.program.mesh import Mesh

PREFETCH = 2
"""Units that are fetched ahead when tuned."""
LATE_REDUCE_SHARE = 0.15
"""Share of a GPU's memory that unsharded gradients may take when tuned."""


@dataclass(frozen=True)
class Options:
    """How FSDP2 is used."""

    tuned: bool = False
    fp32_reduce: bool = False
    kept: bool = False
    """Whether weights stay gathered from forward to backward."""


def fsdp2(workload: Workload, rank: int, device: torch.device) -> Contender:
    return Fsdp2(workload, rank, device, Options())


def fsdp2_fp32(workload: Workload, rank: int, device: torch.device) -> Contender:
    return Fsdp2(workload, rank, device, Options(fp32_reduce=True))


def fsdp2_tuned(workload: Workload, rank: int, device: torch.device) -> Contender:
    return Fsdp2(workload, rank, device, Options(tuned=True))


def fsdp2_tuned_fp32(workload: Workload, rank: int, device: torch.device) -> Contender:
    return Fsdp2(workload, rank, device, Options(tuned=True, fp32_reduce=True))


def fsdp2_kept(workload: Workload, rank: int, device: torch.device) -> Contender:
    return Fsdp2(workload, rank, device, Options(tuned=True, kept=True))


def ep_sync(workload: Workload, rank: int, device: torch.device) -> Contender:
    """Experts on other ranks, reached by synchronous all-to-alls; dense weights under FSDP2 with its defaults."""
    return Fsdp2(workload, rank, device, Options())


@lru_cache(maxsize=8)
def meshes(mesh: Mesh, device: str) -> tuple[DeviceMesh, DeviceMesh]:
    """(all ranks whose tokens differ, [edp, ep]): made once per process."""
    grid = init_device_mesh(device, (mesh.edp, mesh.ep), mesh_dim_names=("edp", "ep"))
    return init_device_mesh(device, (mesh.data,), mesh_dim_names=("dp",)), grid


class Fsdp2:
    """Plain steps over a model under `fully_shard`."""

    def __init__(self, workload: Workload, rank: int, device: torch.device, options: Options) -> None:
        self.workload, self.options = workload, options
        mesh, where = workload.mesh, workload.mesh.coordinates(rank)
        self.dp, self.grid = meshes(mesh, device.type)
        exchange = Exchange(self.grid.get_group("ep"), mesh.ep, where.ep) if mesh.ep > 1 else None
        self.model = self.plain(rank, exchange)
        self.late_reduce = options.tuned and self._fits(device)
        self._shard()
        self.model.to_empty(device=device)
        fill(self.model, workload, rank, device)
        self.optimizers: list[torch.optim.Optimizer | MainWeights] = []
        if workload.optimizer:
            sharded = {n: p for n, p in self.model.named_parameters() if n not in self.whole}
            self.optimizers.append(adamw(sharded.values(), [p.dim() for p in sharded.values()], workload))
            if self.whole:
                named = dict(self.model.named_parameters())
                whole = {name: named[name] for name in self.whole}
                self.optimizers.append(MainWeights(whole, workload, rank, scale=1.0 / mesh.data))
        self.settings = self._settings()

    def plain(self, rank: int, exchange: Exchange | None) -> PlainModel:
        """The model before it is sharded, on the meta device."""
        return plain_model(self.workload, rank, exchange=exchange)

    def passes(self, microbatch: Microbatch) -> Tensor:
        """Forward and backward of a microbatch; its loss."""
        return backward(self.model, microbatch, self.workload.config.train.microbatches)

    def _fits(self, device: torch.device) -> bool:
        """Whether unsharded gradients of all weights of this rank may stay until the last microbatch."""
        if self.workload.config.train.microbatches == 1 or device.type != "cuda":
            return True
        width = 4 if self.options.fp32_reduce else 2
        need = sum(param.numel() * width for param in self.model.parameters())
        return need <= LATE_REDUCE_SHARE * torch.cuda.get_device_properties(device).total_memory

    def _shard(self) -> None:
        """Put layers, experts and the rest under FSDP. `whole` are the names of parameters that stay as they are."""
        model, dtype, mesh = self.model, self.workload.dtype, self.workload.mesh
        reduce = torch.float32 if self.options.fp32_reduce else dtype
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce)
        layers = list(model.layers.values())
        moved = [layer.experts for layer in layers if isinstance(layer, MoELayer)] if mesh.ep > 1 else []
        self.whole: set[str] = set()
        ignored: set[nn.Parameter] = set()
        if mesh.edp == 1:
            for experts in moved:
                experts.to(dtype)
            ignored = {param for experts in moved for param in experts.parameters()}
            self.whole = {name for name, param in model.named_parameters() if param in ignored}
        else:
            for experts in moved:
                shard(experts, self.grid["edp"], policy)
                assert isinstance(experts, FSDPModule)
                experts.set_gradient_divide_factor(float(mesh.data))
                # gloo cannot multiply while it sums, and NCCL's result is wrong in bf16 (torch 2.11).
                experts.set_force_sum_reduction_for_comms(True)
        for layer in layers:
            keep = self.options.kept or (self.options.tuned and layer is layers[-1])
            shard(layer, self.dp, policy, reshard=not keep, ignored=ignored)
        if self.options.tuned:
            assert model.embed is not None
            assert model.head is not None
            shard(model.embed, self.dp, policy, reshard=not self.options.kept)
            shard(model.head, self.dp, policy, reshard=False)
        shard(model, self.dp, policy, ignored=ignored)
        if self.options.tuned:
            prefetch(model)

    def _settings(self) -> dict[str, str]:
        dtype, tuned, mesh = self.workload.config.precision.compute, self.options.tuned, self.workload.mesh
        ahead = f"{PREFETCH} layers ahead, explicit, in forward and backward"
        late = "once a step" if self.late_reduce else "after every microbatch"
        kept = "none: reshard_after_forward=False" if self.options.kept else ""
        found = {
            "weights": f"fp32 shards, cast to {dtype} before every gather",
            "units": "each layer, embedding, head" if tuned else "each layer; embedding and head in the root",
            "reshard after forward": kept or ("all but last layer and head" if tuned else "all but the root"),
            "prefetch": ahead if tuned else "default (implicit)",
            "reduce": f"{'fp32' if self.options.fp32_reduce else dtype}, {late}",
            "memory from the process group": "off: it serves NVLink multicast, which is off",
            "optimizer": optimizer_name(self.workload, "on fp32 shards"),
            "compile": "each layer" if self.workload.compile else "off",
        }
        if mesh.ep > 1:
            found["experts"] = (
                f"synchronous all-to-all, sharded over {mesh.edp} ranks"
                if mesh.edp > 1
                else (f"synchronous all-to-all, {dtype} weights whole on their rank")
            )
        return found

    def step(self, microbatches: Sequence[Microbatch]) -> Tensor:
        losses = []
        sharded = self.model
        assert isinstance(sharded, FSDPModule)
        for number, microbatch in enumerate(microbatches, 1):
            last = number == len(microbatches)
            sharded.set_is_last_backward(last)
            if self.late_reduce:
                sharded.set_requires_gradient_sync(last)
            losses.append(self.passes(microbatch))
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return torch.stack(losses).mean()

    def close(self) -> None:
        del self.model, self.optimizers


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    *,
    reshard: bool | None = None,
    ignored: set[nn.Parameter] | None = None,
) -> None:
    """`fully_shard`; without `reshard` its own default, which is to reshard all but the root."""
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, ignored_params=ignored or None)


def prefetch(model: PlainModel) -> None:
    """Have every unit fetch the next ones in forward, and those before it in backward."""
    assert model.embed is not None
    assert model.head is not None
    order: list[nn.Module] = [model.embed, *model.layers.values(), model.head]
    for position, module in enumerate(order):
        ahead = [part for unit in order[position + 1 : position + 1 + PREFETCH] for part in parts(unit)]
        before = [part for unit in order[max(0, position - PREFETCH) : position][::-1] for part in parts(unit)]
        assert isinstance(module, FSDPModule)
        module.set_modules_to_forward_prefetch(ahead)
        module.set_modules_to_backward_prefetch(before)


def parts(unit: nn.Module) -> list[FSDPModule]:
    """The FSDP modules of a unit: a layer, and its experts if they are sharded over other ranks."""
    return [module for module in unit.modules() if isinstance(module, FSDPModule)]
