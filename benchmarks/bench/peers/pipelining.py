"""torch.distributed.pipelining: 1F1B, interleaved 1F1B and the zero-bubble V order over stages of the plain stack.

Weights of a stage lie whole on its rank if no other rank shares them; else they are under `fully_shard`, gathered once
a step and their gradients reduced once a step, which is how that library uses FSDP2. Experts move rows by synchronous
all-to-alls between the data-parallel ranks of one pipeline rank.

The schedules would divide all gradients by the number of microbatches in the end, and with them those of the
load-balancing loss, which has that factor already. So they are told not to, and the loss is divided.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks.bench.contender import Contender
from benchmarks.bench.peers.fsdp2 import shard
from benchmarks.bench.plain import Exchange, MainWeights, PlainModel, adamw, fill, optimizer_name, plain_model
from benchmarks.bench.workload import Workload
from hocket.layers.linears import cross_entropy
from hocket.model.documents import Microbatch
from hocket.model.moe import MoELayer
from hocket.program.mesh import Mesh
from hocket.program.ops import Layout
from hocket.program.stages import layout_of


@dataclass(frozen=True)
class Order:
    """A schedule of the library."""

    name: str
    """The contender's."""
    schedule: str
    """Class in `torch.distributed.pipelining.schedules`."""
    chunks: int
    """Stages per rank; 0 takes plan.chunks."""
    v: bool = False
    """Whether a rank's second stage counts from the end: rank 0 has the first and the last stage."""
    splits_backward: bool = False
    """Whether weight gradients are computed apart from input gradients."""


ONE_F_ONE_B = Order("pipelining_1f1b", "Schedule1F1B", 1)
INTERLEAVED = Order("pipelining_interleaved", "ScheduleInterleaved1F1B", 0)
ZERO_BUBBLE = Order("pipelining_zb", "ScheduleZBVZeroBubble", 2, v=True, splits_backward=True)


def one_f_one_b(workload: Workload, rank: int, device: torch.device) -> Contender:
    """1F1B, one stage per rank."""
    return Pipelining(workload, rank, device, ONE_F_ONE_B)


def interleaved(workload: Workload, rank: int, device: torch.device) -> Contender:
    """Interleaved 1F1B, plan.chunks stages per rank."""
    return Pipelining(workload, rank, device, INTERLEAVED)


def zero_bubble(workload: Workload, rank: int, device: torch.device) -> Contender:
    """The zero-bubble V order (Qi et al. 2024), two stages per rank."""
    return Pipelining(workload, rank, device, ZERO_BUBBLE)


def layout(workload: Workload, order: Order) -> Layout:
    """Which stage holds which layers. Raises ValueError if the order cannot run this workload."""
    config = workload.config
    pp, microbatches, chunks = config.mesh.pp, config.train.microbatches, order.chunks or config.plan.chunks
    stages = pp * chunks
    if pp == 1:
        raise _refusal(order, "needs a pipeline, and mesh.pp = 1", "mesh.pp = 2 or more")
    if order is INTERLEAVED and chunks == 1:
        raise _refusal(order, "needs several stages per rank, and plan.chunks = 1", "plan.chunks = 2 or more")
    if stages > config.model.layers:
        raise _refusal(
            order, f"needs {stages} stages, and the model has {config.model.layers} layers", "more model.layers"
        )
    if microbatches < pp or (order is INTERLEAVED and microbatches % (microbatches // pp)):
        wanted = f"a multiple of mesh.pp = {pp}" if order is INTERLEAVED else f"{pp} or more"
        raise _refusal(order, f"cannot order train.microbatches = {microbatches}", f"train.microbatches = {wanted}")
    if chunks == config.plan.chunks:
        return layout_of(config)
    return Layout(config.model.kinds(), pp, chunks, config.mesh.ep)


def _refusal(order: Order, problem: str, fix: str) -> ValueError:
    return ValueError(f"against = {order.name} (command line): {problem}; fix: {fix}, or leave it out")


@lru_cache(maxsize=8)
def meshes(mesh: Mesh, device: str) -> tuple[DeviceMesh, DeviceMesh]:
    """([pp, dp], [pp, edp, ep]) of all ranks: made once per process."""
    dense = init_device_mesh(device, (mesh.pp, mesh.dp), mesh_dim_names=("pp", "dp"))
    return dense, init_device_mesh(device, (mesh.pp, mesh.edp, mesh.ep), mesh_dim_names=("pp", "edp", "ep"))


class Stage(nn.Module):
    """One stage: hidden states [B, S, D], or ids [B, S] if it is the first; the last one gives logits [B, S, V]."""

    def __init__(self, model: PlainModel) -> None:
        super().__init__()
        self.embed, self.layers, self.head = model.embed, model.layers, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


class HeldStage(PipelineStage):
    """The library's stage, for layers with functions of their own in autograd.

    Between the two halves of a split backward the library keeps nodes of the graph, but not what is above them, and in
    torch 2.11 a node written in Python lives only as long as that. So here a microbatch's graph stays until its weight
    gradients are there. What it saves is needed until then anyway, but for what lies above the topmost weight.
    """

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        self.held: dict[int, list[Any]] = {}
        """By microbatch: nodes above its outputs."""

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not full_backward:
            ends = [*self.fwd_cache[bwd_chunk_id][0], *([] if loss is None else [loss])]
            # A view's node is one of C++, which owns what is below it.
            self.held[bwd_chunk_id] = [end.view_as(end).grad_fn for end in ends if end.requires_grad]
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self.held.pop(bwd_chunk_id, None)


class Pipelining:
    """The stages of this rank under one schedule of the library."""

    def __init__(self, workload: Workload, rank: int, device: torch.device, order: Order) -> None:
        if order.splits_backward:  # a compiled layer has one backward for inputs and weights
            workload = dataclasses.replace(workload, compile=False)
        self.workload, self.device = workload, device
        mesh, where = workload.mesh, workload.mesh.coordinates(rank)
        self.layout = layout(workload, order)
        self.dense, self.grid = meshes(mesh, device.type)
        chunks, pp, last = self.layout.chunks, mesh.pp, self.layout.stages - 1
        numbers = [pp * c + (pp - 1 - where.pp if order.v and c % 2 else where.pp) for c in range(chunks)]
        self.has_first, self.has_last = 0 in numbers, last in numbers
        self.modules = [self._module(stage, rank) for stage in numbers]
        self.optimizers = [self._optimizer(module, rank) for module in self.modules] if workload.optimizer else []
        stages = [self._stage(module, stage) for module, stage in zip(self.modules, numbers, strict=True)]
        self.schedule = getattr(schedules, order.schedule)(
            stages if chunks > 1 else stages[0],
            n_microbatches=workload.config.train.microbatches,
            loss_fn=self._loss,
            scale_grads=False,
        )
        self.settings: Mapping[str, str] = self._settings(order)

    def _module(self, stage: int, rank: int) -> Stage:
        """One stage with first values: bf16 or fp32 weights if they lie whole here, else fp32 shards."""
        workload, mesh, last = self.workload, self.workload.mesh, self.layout.stages - 1
        where = mesh.coordinates(rank)
        exchange = Exchange(self.grid.get_group("ep"), mesh.ep, where.ep) if mesh.ep > 1 else None
        layers = self.layout.layers(stage % mesh.pp, stage // mesh.pp)
        first_last = dict(first=stage == 0, last=stage == last)
        module = Stage(plain_model(workload, rank, layers=layers, **first_last, exchange=exchange))
        for name in whole_names(module, mesh):
            param = module.get_parameter(name)
            param.data = param.data.to(workload.dtype)
        if mesh.dp > 1:
            self._shard(module)
        module.to_empty(device=self.device)
        fill(module, workload, rank, self.device)
        return module

    def _shard(self, module: Stage) -> None:
        mesh, dtype = self.workload.mesh, self.workload.dtype
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        ignored = {module.get_parameter(name) for name in whole_names(module, mesh)}
        layers = list(module.layers.values())
        if mesh.ep > 1 and mesh.edp > 1:
            for layer in layers:
                if isinstance(layer, MoELayer):
                    shard(layer.experts, self.grid["edp"], policy, reshard=False)
                    layer.experts.set_gradient_divide_factor(float(mesh.dp))  # pyrefly: ignore[not-callable]
                    # gloo cannot multiply while it sums, and NCCL's result is wrong in bf16 (torch 2.11).
                    layer.experts.set_force_sum_reduction_for_comms(True)  # pyrefly: ignore[not-callable]
        for unit in (module.embed, *layers, module.head, module):
            if unit is not None:
                shard(unit, self.dense["dp"], policy, reshard=False, ignored=ignored)

    def _optimizer(self, module: Stage, rank: int) -> list[torch.optim.Optimizer | MainWeights]:
        mesh, named = self.workload.mesh, dict(module.named_parameters())
        whole = {name: named.pop(name) for name in whole_names(module, mesh)}
        found: list[torch.optim.Optimizer | MainWeights] = []
        if named:
            found.append(adamw(named.values(), [param.dim() for param in named.values()], self.workload))
        if whole:
            found.append(MainWeights(whole, self.workload, rank, scale=1.0 / mesh.dp))
        return found

    def _stage(self, module: Stage, stage: int) -> PipelineStage:
        """The library's stage. Shapes are given, so that it need not find out by running the first microbatch."""
        config, last = self.workload.config, self.layout.stages - 1
        shape = (config.train.sequences, config.data.sequence_length)

        def hidden(width: int) -> Tensor:
            return torch.empty(*shape, width, dtype=self.workload.dtype, device="meta", requires_grad=True)

        ids = torch.empty(shape, dtype=torch.int64, device="meta")
        return HeldStage(
            module,
            stage,
            self.layout.stages,
            self.device,
            input_args=ids if stage == 0 else hidden(config.model.hidden),
            output_args=hidden(config.model.vocab if stage == last else config.model.hidden),
            group=self.dense.get_group("pp"),
        )

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss / self.workload.config.train.microbatches

    def step(self, microbatches: Sequence[Microbatch]) -> Tensor:
        losses: list[Tensor] = []
        ids = [torch.cat([microbatch.ids for microbatch in microbatches])] if self.has_first else []
        last: dict[str, Any] = {}
        if self.has_last:
            last = dict(target=torch.cat([microbatch.targets for microbatch in microbatches]), losses=losses)
        self.schedule.step(*ids, **last, return_outputs=False)
        for optimizers in self.optimizers:
            for optimizer in optimizers:
                optimizer.step()
        for module in self.modules:
            module.zero_grad(set_to_none=True)
        return torch.stack(losses).detach().sum() if losses else torch.zeros((), device=self.device)

    def _settings(self, order: Order) -> dict[str, str]:
        workload, mesh = self.workload, self.workload.mesh
        dtype = workload.config.precision.compute
        sharded = f"fully_shard over {mesh.dp} ranks, gathered once a step, {dtype} reduce once a step"
        found = {
            "schedule": f"{order.schedule}, {self.layout.chunks} stages per rank, layers from {self.layout.bounds}",
            "shapes": "given, not inferred",
            "weights": sharded if mesh.dp > 1 else f"whole on their rank, {dtype}",
            "gradients": f"summed over microbatches in {dtype}, by autograd",
            "optimizer": optimizer_name(workload, "fp32 main weights"),
            "compile": "each layer" if workload.compile else "off",
        }
        if order.splits_backward:
            found["compile"] = "off: the library cannot split the backward of compiled code"
        if mesh.ep > 1:
            share = f"sharded over {mesh.edp} ranks" if mesh.edp > 1 else "whole on their rank"
            found["experts"] = f"synchronous all-to-all, {share}"
        return found

    def close(self) -> None:
        del self.schedule, self.modules, self.optimizers


def whole_names(module: nn.Module, mesh: Mesh) -> list[str]:
    """Names of parameters that no other rank has: all without data parallelism, experts if all ranks have others."""
    if mesh.dp == 1:
        return [name for name, _ in module.named_parameters()]
    if mesh.ep > 1 and mesh.edp == 1:
        return [name for name, _ in module.named_parameters() if ".experts." in name]
    return []
