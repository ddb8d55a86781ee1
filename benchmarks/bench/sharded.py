"""`hocket.fully_shard` as contenders: the plain stack, sharded without a plan, in the ways that make its speed.

The units are those of FSDP2 when it is tuned: each layer, embedding and head. Experts that are spread over ranks are
exchanged synchronously, and sharded over the ranks that hold the same ones. Every step begins as after an update, also
without an optimizer: weights are cast and gathered anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import hocket
from benchmarks.bench.contender import Contender
from benchmarks.bench.peers.fsdp2 import meshes
from benchmarks.bench.plain import Exchange, adamw, backward, first_value, optimizer_name, plain_model
from benchmarks.bench.workload import Workload
from hocket.config import Strategy
from hocket.fsdp.buffers import Offload
from hocket.fsdp.module_context import ShardContext
from hocket.fsdp.options import ShardTransport
from hocket.fsdp.sharded_parameter import ShardedParameter
from hocket.model.documents import Microbatch
from hocket.program.mesh import SMS

PREFETCH = 2
"""Units that are gathered ahead."""


@dataclass(frozen=True)
class How:
    """How `fully_shard` is used."""

    transport: ShardTransport = "auto"
    """`auto` is NCCL's kernels on GPUs, where a user's would be copy engines."""
    fp32_wire: bool = False
    strategy: Strategy = "optim_grads_params"
    offload: Offload = "none"


def fully_shard(workload: Workload, rank: int, device: torch.device) -> Contender:
    return Sharded(workload, rank, device, How())


def copy_engine(workload: Workload, rank: int, device: torch.device) -> Contender:
    return Sharded(workload, rank, device, How("copy_engine"))


def copy_engine_gathers(workload: Workload, rank: int, device: torch.device) -> Contender:
    return Sharded(workload, rank, device, How("copy_engine_gathers"))


def fp32_wire(workload: Workload, rank: int, device: torch.device) -> Contender:
    return Sharded(workload, rank, device, How(fp32_wire=True))


def optim(workload: Workload, rank: int, device: torch.device) -> Contender:
    return Sharded(workload, rank, device, How(strategy="optim"))


def optim_copy_engine(workload: Workload, rank: int, device: torch.device) -> Contender:
    return Sharded(workload, rank, device, How("copy_engine", strategy="optim"))


def offload(workload: Workload, rank: int, device: torch.device) -> Contender:
    return Sharded(workload, rank, device, How(offload="pinned"))


def no_shard(workload: Workload, rank: int, device: torch.device) -> Contender:
    return Sharded(workload, rank, device, How(strategy="no_shard"))


def null(workload: Workload, rank: int, device: torch.device) -> Contender:
    """The same program without communication: a step's bound. Its losses mean nothing.

    Its gathered weights have memory that stays, full of normal numbers: without a gather memory holds anything, and a
    GPU that computes on that may draw less power.
    """
    contender = Sharded(workload, rank, device, How("null"))
    for buffer in (buffer for unit in contender.context.units for buffer in unit.full.values()):
        buffer.allocate()
        buffer.flat.normal_(std=0.02)
        buffer.free = _stay  # pyrefly: ignore
    return contender


def _stay() -> None: ...


class Sharded:
    """Plain steps over a model under `hocket.fully_shard`."""

    def __init__(self, workload: Workload, rank: int, device: torch.device, how: How) -> None:
        self.workload, self.how = workload, how
        mesh, where = workload.mesh, workload.mesh.coordinates(rank)
        self.grid = meshes(mesh, device.type)[1] if mesh.ep > 1 else None
        exchange = None if self.grid is None else Exchange(self.grid.get_group("ep"), mesh.ep, where.ep)
        self.model = plain_model(workload, rank, exchange=exchange)
        assert self.model.embed is not None
        assert self.model.head is not None
        options = hocket.ShardOptions(
            prefetch=PREFETCH,
            transport="nccl" if how.transport == "auto" and device.type == "cuda" else how.transport,
            offload=how.offload,
            device=device,
        )
        precision = hocket.Precision(compute=workload.dtype, wire=torch.float32 if how.fp32_wire else None)
        self.context = hocket.fully_shard(
            self.model,
            units=[self.model.embed, *self.model.layers.values(), self.model.head],
            strategy=how.strategy,
            place=self._place(where.ep),
            precision=precision,
            options=options,
        )
        fill(self.model, self.context, workload, rank)
        self.optimizer: torch.optim.Optimizer | None = None
        if workload.optimizer:
            shards = [shard for shard in self.model.parameters() if isinstance(shard, ShardedParameter)]
            self.optimizer = adamw(shards, [shard.ndim for shard in shards], workload)
        self.settings: Mapping[str, str] = self._settings(options, device)

    def _place(self, position: int) -> Callable[[str, nn.Parameter], hocket.sharding.Placement | None] | None:
        """Where experts go that are spread over ranks: they see the tokens of all of these."""
        if self.grid is None:
            return None
        mesh = self.workload.mesh
        experts = hocket.sharding.Placement(self.grid["edp"], divide=float(mesh.dp), part=(position, mesh.ep))
        return lambda name, param: experts if ".experts." in name else None

    def _settings(self, options: hocket.ShardOptions, device: torch.device) -> dict[str, str]:
        dtype, how, mesh = self.workload.config.precision.compute, self.how, self.workload.mesh
        late = how.strategy in ("no_shard", "optim")
        found = {
            "strategy": how.strategy,
            "units": "each layer, embedding, head",
            "weights": f"fp32 shards, cast to {dtype} as they are gathered",
            "memory of gathered weights": "whole, until the next update" if late else "dynamic",
            "prefetch": f"{PREFETCH} units",
            "transport": f"{TRANSPORTS[how.transport]}; {_KERNELS}" if device.type == "cuda" else "gloo",
            "process groups": "one for gathers, one for reductions",
            "reduce": f"{'fp32' if how.fp32_wire else dtype}, {'once a step' if late else 'after every microbatch'}",
            "staging": f"{options.staging} buffers",
            "optimizer": optimizer_name(self.workload, "on fp32 shards, unit by unit"),
            "compile": "each layer" if self.workload.compile else "off",
        }
        if how.offload != "none":
            found["weights"] = f"fp32 shards on the host, {how.offload}, cast there to {dtype}"
            found["optimizer"] = optimizer_name(self.workload, "on the host")
        if mesh.ep > 1:
            found["experts"] = f"synchronous all-to-all, sharded over {mesh.edp} ranks"
        if how.strategy == "no_shard":
            found |= {"weights": f"fp32 and {dtype}, whole on every rank", "memory of gathered weights": "none"}
            found["optimizer"] = found["optimizer"].replace("fp32 shards", "whole fp32 weights, on every rank")
        return found

    def step(self, microbatches: Sequence[Microbatch]) -> Tensor:
        losses, count = [], len(microbatches)
        for number, microbatch in enumerate(microbatches, 1):
            more = self.context.accumulating() if number < count else contextlib.nullcontext()
            with more:
                losses.append(backward(self.model, microbatch, count))
        if self.optimizer is not None:
            hocket.sharding.step_and_gather(self.context, self.optimizer)
        else:
            self.context.finish_step()
            self.context.weights_updated()
        self.model.zero_grad(set_to_none=True)
        return torch.stack(losses).mean()

    def close(self) -> None:
        del self.model, self.context, self.optimizer


TRANSPORTS: dict[ShardTransport, str] = {
    "auto": "NCCL",
    "copy_engine": "copy engines; reductions as exchanges and one kernel that adds up",
    "copy_engine_gathers": "copy engines for gathers, NCCL for reductions",
    "null": "null",
}
"""What a contender's transport is on GPUs, for its settings."""
_KERNELS = f"NCCL's kernels have at most {SMS} SMs"


def fill(model: nn.Module, context: ShardContext, workload: Workload, rank: int) -> None:
    """Give a model from the meta device its first values, and its buffers theirs, which is 0."""
    model.to_empty(device=context.param_groups[0].main.device)
    for name, param in model.named_parameters():
        param.data = first_value(name, param.shape, workload, rank, context.device)
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            module._buffers[key] = torch.zeros_like(buffer, device=context.device)
