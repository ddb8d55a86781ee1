"""Sequences shared by ranks under FSDP2: torch's own `context_parallel`, and heads exchanged for tokens (Ulysses).

All three run the plain stack, sharded over all ranks as *fsdp2_tuned* does it. Layers call torch's attention, which is
another function while a microbatch runs: that is how `context_parallel` works, and the exchange of heads does the same.
Only positions have to be told, for a rank does not have tokens from 0 on.

torch knows no attention of CPUs that shares sequences. Tests lend it one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method

from benchmarks.bench.contender import Contender
from benchmarks.bench.peers.fsdp2 import Fsdp2, Options
from benchmarks.bench.plain import Exchange, PlainModel
from benchmarks.bench.workload import Workload
from hocket.model.documents import Microbatch, Packing
from hocket.model.layers import Attention
from hocket.program.mesh import Mesh

METHODS = {"gather": "allgather", "ring": "alltoall"}
"""How keys and values travel, and torch's name for it."""


def gather(workload: Workload, rank: int, device: torch.device) -> Contender:
    """torch's context parallelism, gathering all keys and values."""
    return OfTorch(workload, rank, device, "gather")


def ring(workload: Workload, rank: int, device: torch.device) -> Contender:
    """torch's context parallelism, handing keys and values on from rank to rank."""
    return OfTorch(workload, rank, device, "ring")


def heads(workload: Workload, rank: int, device: torch.device) -> Contender:
    """All tokens of a part of the heads (DeepSpeed-Ulysses, arXiv 2309.14509), with synchronous all-to-alls."""
    return Ulysses(workload, rank, device, "heads")


@dataclass
class Place:
    """Which tokens of sequences a rank has, in all of its layers."""

    length: int
    """Tokens of a sequence."""
    position_S: Tensor | None = None


class SharedAttention(Attention):
    """Attention whose tokens stand anywhere in their sequences."""

    place: Place

    def _table(self, seq: int, documents: Packing | None, device: torch.device) -> Tensor | None:
        table = super()._table(self.place.length, None, device)
        return table if table is None or self.place.position_S is None else table.index_select(1, self.place.position_S)


@lru_cache(maxsize=8)
def _mesh(mesh: Mesh, device: str) -> DeviceMesh:
    """The ranks that share this rank's sequences."""
    return init_device_mesh(device, (mesh.dp, mesh.cp), mesh_dim_names=("dp", "cp"))["cp"]


class Shared(Fsdp2):
    """Plain steps under `fully_shard` whose sequences ranks share."""

    method = ""

    def __init__(self, workload: Workload, rank: int, device: torch.device, method: str) -> None:
        _refuse(workload, method)
        self.method = method
        self.place = Place(workload.config.data.sequence_length)
        self.cp = _mesh(workload.mesh, device.type)
        super().__init__(workload, rank, device, Options(tuned=True))

    def plain(self, rank: int, exchange: Exchange | None) -> PlainModel:
        model = super().plain(rank, exchange)
        for number, layer in model.layers.items():
            attention: Any = layer
            own = SharedAttention(self.workload.config.model, attention.attn.linears, int(number))
            own.place, attention.attn = self.place, own
        return model

    def passes(self, microbatch: Microbatch) -> Tensor:
        position_1S = torch.arange(self.place.length, device=microbatch.ids.device).unsqueeze(0)
        with self.shared(microbatch, position_1S) as (own, positions):
            self.place.position_S = positions.squeeze(0)
            return super().passes(own)

    @contextlib.contextmanager
    def shared(self, microbatch: Microbatch, position_1S: Tensor) -> Iterator[tuple[Microbatch, Tensor]]:
        """This rank's tokens and their positions, [1, S / ranks]. Attention inside is that of whole sequences."""
        raise NotImplementedError
        yield

    def _settings(self) -> dict[str, str]:
        return {**super()._settings(), "sequences": f"over {self.cp.size()} ranks by {self.method}"}


class OfTorch(Shared):
    """`torch.distributed.tensor.experimental.context_parallel`: the first and last chunks of sequences in pairs."""

    @contextlib.contextmanager
    def shared(self, microbatch: Microbatch, position_1S: Tensor) -> Iterator[tuple[Microbatch, Tensor]]:
        set_rotate_method(METHODS[self.method])
        buffers = [microbatch.ids.clone(), microbatch.targets.clone(), position_1S]  # it changes them in place
        with context_parallel(self.cp, buffers=buffers, buffer_seq_dims=[1] * 3, no_restore_buffers=set(buffers)):
            yield replace(microbatch, ids=buffers[0], targets=buffers[1]), buffers[2]


class Ulysses(Shared):
    """Each rank has neighbouring tokens, and in attention all tokens of its heads."""

    @contextlib.contextmanager
    def shared(self, microbatch: Microbatch, position_1S: Tensor) -> Iterator[tuple[Microbatch, Tensor]]:
        ranks, mine = self.cp.size(), self.cp.get_local_rank()
        ids, targets, positions = (
            x.chunk(ranks, 1)[mine].contiguous() for x in (microbatch.ids, microbatch.targets, position_1S)
        )
        whole, group = F.scaled_dot_product_attention, self.cp.get_group()

        def exchanged(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
            parts = torch.cat([x.unflatten(1, (ranks, -1)) for x in (q, k, v)], 2).movedim(1, 0)
            rows_BHSN = _AllToAll.apply(parts, group).movedim(0, 2).flatten(2, 3)
            out_BHSN = whole(*rows_BHSN.split([x.shape[1] // ranks for x in (q, k, v)], 1), **how)
            back = _AllToAll.apply(out_BHSN.unflatten(2, (ranks, -1)).movedim(2, 0), group)
            return back.movedim(0, 1).flatten(1, 2)

        F.scaled_dot_product_attention = exchanged  # pyrefly: ignore[bad-assignment]
        try:
            yield replace(microbatch, ids=ids, targets=targets), positions
        finally:
            F.scaled_dot_product_attention = whole


class _AllToAll(torch.autograd.Function):
    """Sends the r-th part, [P, ...], to rank r."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, parts = group, parts.contiguous()
        out = torch.empty_like(parts)
        dist.all_to_all_single(out, parts, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        return _AllToAll.apply(g, ctx.group), None


def _refuse(workload: Workload, method: str) -> None:
    """Raise ValueError for what torch's attention would compute otherwise here, or not at all."""
    m, ranks = workload.config.model, workload.mesh.cp
    name, problem = ("ulysses" if method == "heads" else f"torch_cp_{method}"), ""
    if m.latent or m.sinks or any(m.windows()) or any(m.deltas()):
        problem = "knows plain causal attention alone; fix: a model without windows, sinks, latents and delta nets"
    elif method == "heads" and (m.kv_heads % ranks or m.heads % ranks):
        problem = f"model.kv_heads = {m.kv_heads} do not divide by mesh.cp = {ranks}; fix: fewer ranks, or leave it out"
    elif workload.compile:
        problem = "has not been tried compiled; fix: --compile off"
    if problem:
        raise ValueError(f"against = {name} (command line): {problem}")
