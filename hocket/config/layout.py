"""The settings of sections `mesh` and `plan`, and what groups of ranks are for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from hocket.config.bounds import MANY, MOST_RANKS, Between, Form, OnlyWith
from hocket.config.overlap import Switch

Strategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
"""Which parts of a model data-parallel ranks shard, from nothing to everything. See docs/fsdp.md, Strategies."""

Purpose = Literal[
    "gather_dense",
    "reduce_dense",
    "gather_experts",
    "reduce_experts",
    "replicas",
    "a2a",
    "tp",
    "cp",
    "pp_fwd",
    "pp_bwd",
    "control",
]
"""The use of a process group. Every purpose has groups of its own, so no two lanes share a group."""

RECOMPUTED, OFFLOADED = ("attn", "dispatch", "experts", "kv", "mlp"), ("attn", "experts", "mlp")
"""Parts of hocket's own layers that `plan.recompute` and `plan.offload` may name."""

Steps = list[tuple[int, int]]
"""Ranks as sums of multiples: (how many multiples, of which number) for each. The first varies slowest."""


def part_and_layers(text: str) -> tuple[str, int | None]:
    """(part, number of layers of each stage) that an item of `plan.recompute` or `plan.offload` names; None for all.

    `attn` means all layers, `attn:2` the first two of each virtual stage. Raises ValueError for any other text.
    """
    part, colon, count = text.partition(":")
    if colon and (not count.isdecimal() or int(count) < 1):
        raise ValueError(f"{text!r} is no part with a number of layers, such as attn:2")
    return part, int(count) if colon else None


def part_of(parts: tuple[str, ...]) -> Form:
    """The form of an item that names one of these parts."""

    def read(text: str) -> None:
        part, _ = part_and_layers(text)
        if part not in parts:
            raise ValueError(f"{part!r} is none of the parts {', '.join(parts)}")

    return Form(read, "attn:2")


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How ranks are arranged. There are pp * dp * cp * tp ranks. ep divides dp * cp * tp."""

    pp: Annotated[int, Between(1, 1024)] = 1
    """Pipeline ranks."""
    dp: Annotated[int, Between(1, MOST_RANKS)] = 1
    """Data-parallel ranks of each pipeline rank. Dense weights are sharded over dp * cp ranks, or over `shard` of
    them."""
    cp: Annotated[int, Between(1, MOST_RANKS)] = 1
    """Context-parallel ranks of each data-parallel rank: each has 2 of 2 * cp chunks of every sequence, or with
    data.packing chunks that go by documents. Layers gather keys and values of the other chunks before attention."""
    ep: Annotated[int, Between(1, MOST_RANKS)] = 1
    """Expert-parallel ranks: neighbours among the dp * cp * tp ranks of a pipeline rank, whose tokens all differ.
    Expert weights are sharded over the remaining dp * cp * tp / ep ranks."""
    tp: Annotated[int, Between(1, MOST_RANKS)] = 1
    """Tensor-parallel ranks of each context-parallel rank. They share its tokens, heads, MLP columns and vocabulary."""
    shard: Annotated[int, Between(0, MOST_RANKS)] = 0
    """Neighbours among the dp * cp ranks that share one copy of the weights; 0 means all of them. ep divides shard *
    tp. If it is less than dp * cp, there are dp * cp / shard replicas (HSDP). Gathers and reduces then stay among shard
    ranks, such as those of a host. A step sums its gradients over the replicas once, after the last microbatch's
    reduces."""

    @property
    def data(self) -> int:
        """Ranks of a pipeline rank whose tokens all differ, over which weights are sharded."""
        return self.dp * self.cp

    @property
    def replicas(self) -> int:
        """Copies of the weights among the dp * cp ranks."""
        return self.data // (self.shard or self.data)

    @property
    def world(self) -> int:
        """All ranks."""
        return self.pp * self.data * self.tp

    def grid(self, purpose: Purpose) -> tuple[Steps, Steps]:
        """The groups for a purpose: (members of a group, counted from its first; first members of all groups).

        Pipeline groups join neighbours. This leaves out the groups that join the last rank with the first, and the
        groups behind a turn: see `Mesh.groups`.
        """
        row, shard, replicas = self.data * self.tp, (self.shard or self.data) * self.tp, self.replicas
        match purpose:
            case "gather_dense" | "reduce_dense":
                return [(shard // self.tp, self.tp)], [(self.pp * replicas, shard), (self.tp, 1)]
            case "gather_experts" | "reduce_experts":
                return [(max(1, shard // self.ep), self.ep)], [(self.pp * replicas, shard), (self.ep, 1)]
            case "replicas":
                return [(replicas, shard)], [(self.pp, row), (shard, 1)]
            case "a2a":
                return [(self.ep, 1)], [(max(1, self.world // self.ep), self.ep)]
            case "tp":
                return [(self.tp, 1)], [(self.pp * self.data, self.tp)]
            case "cp":
                return [(self.cp, self.tp)], [(self.pp * self.dp, self.cp * self.tp), (self.tp, 1)]
            case "pp_fwd" | "pp_bwd":
                return [(min(self.pp, 2), row)], [(max(self.pp - 1, 1), row), (row, 1)]
            case "control":
                return [(self.world, 1)], []

    def members(self, purpose: Purpose) -> int:
        """Ranks of one group."""
        return math.prod(count for count, _ in self.grid(purpose)[0])


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How one optimizer step is ordered."""

    order: Literal["auto", "sequential", "1f1b", "interleaved", "zb_h1", "zb_v", "merged_v"] = "auto"
    """Order of microbatches over pipeline ranks. auto picks sequential, 1f1b or interleaved from pp and chunks. zb_h1
    and zb_v fill the bubble with weight gradients. zb_v and merged_v have two chunks per rank, placed as a V. merged_v
    merges forwards of one chunk with backwards of the other."""
    chunks: Annotated[int, Between(1, 1024)] = 1
    """Virtual pipeline stages per rank."""
    layers_per_stage: Annotated[tuple[int | Literal["auto"], ...], Between(0)] = ("auto",)
    """Layers of every virtual stage; empty splits evenly. The first stage, with the embedding, and the last, with the
    head, may have 0. auto lets all ranks compute for the same time, embedding and head included, if that shortens the
    step and fits into memory."""
    group: Annotated[int, Between(0, MANY), OnlyWith("plan.order = interleaved and plan.chunks above 1", idle=(0,))] = 0
    """Microbatches that pass through a chunk before the next chunk's turn, in the interleaved order. 0 means the fewest
    that work: mesh.pp, or 1.5 * mesh.pp with a stride of 3."""
    stride: Annotated[Literal[2, 3], OnlyWith("mesh.pp above 1", idle=(2,))] = 2
    """Warm-up steps by which neighbouring ranks of a merged order differ. 3 gives a p2p transfer a step of its own, and
    keeps more activations."""
    recompute: Annotated[tuple[str, ...], part_of(RECOMPUTED)] = ()
    """Parts of layers, out of attn, dispatch, experts, kv and mlp, that keep only their inputs after forward, and run
    forward again before their backward. That takes less memory and more time. attn includes the norms, the router and
    the shared expert. dispatch makes the rows of experts again, and sends them again where experts are on other ranks.
    kv gathers keys and values again, where ranks share sequences. attn:2 recomputes attn in the first two layers of
    each virtual stage, and attn in all layers. auto recomputes as few parts in as few layers as the memory allows."""
    offload: Annotated[tuple[str, ...], part_of(OFFLOADED)] = ()
    """Parts of layers, out of attn, experts and mlp, that keep in the host's memory what their backward needs. It is
    copied there behind their forward, and back ahead of their backward, beside compute. attn:2 means attn in the first
    two layers of each virtual stage. auto is as few parts in as few layers as let a step fit into memory, where that
    takes less time than to recompute."""
    loss_pieces: Annotated[int | Literal["auto"], Between(1, MANY)] = 1
    """Pieces of a microbatch's tokens that go through the head one after the other, so that only the logits of one are
    in memory. Backward makes them once more: the head has four products in place of three. auto is as many as let a
    step fit into memory, and 1 if it fits without."""
    graphs: Switch = "auto"
    """Record a step's calls to the GPU once and replay them as one CUDA graph. The optimizer runs after the graph. auto
    is on if the host would be late otherwise, and memory allows it."""
    layer_order: Annotated[
        str,
        OnlyWith(
            "overlap.ep.merge = on",
            idle=(
                "auto",
                "literature",
            ),
        ),
        OnlyWith(
            "deferred weight gradients",
            idle=(
                "auto",
                "literature",
            ),
        ),
    ] = "auto"
    """Order of parts inside one merged layer step: literature, early_release, wgrad_last, or an order of your own such
    as "cB aF eB dF eW dB eF cF aB uB aW uF" (hocket/program/layer.py spells out the named ones). auto is literature, or
    the order that simulations find shorter where all-to-alls are long."""

    @property
    def split(self) -> tuple[int, ...]:
        """Layers of every virtual stage; empty if they are even, or not chosen yet."""
        return tuple(count for count in self.layers_per_stage if count != "auto")

    @property
    def pieces(self) -> int:
        """`loss_pieces`; 1 if they are not chosen yet."""
        return 1 if self.loss_pieces == "auto" else self.loss_pieces

    @property
    def turning(self) -> bool:
        """Whether the stages go down the ranks and up again, as a V."""
        return self.order in ("zb_v", "merged_v")
