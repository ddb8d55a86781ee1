"""Section `plan`: stages, the order of microbatches, recomputed and offloaded parts, recorded steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from hocket.config.rule import MANY, Between, Each, Form, OnlyWith, Rule, Switch, Words, leaf

RECOMPUTED, OFFLOADED = ("attn", "dispatch", "experts", "kv", "mlp"), ("attn", "experts", "mlp")
"""Parts of hocket's own layers that `plan.recompute` and `plan.offload` may name."""

ZERO_BUBBLE = ("zb_h1", "zb_v")
"""Orders with separate steps for all weight gradients."""


def part_and_layers(text: str) -> tuple[str, int | None]:
    """(part, layers per stage) of an item of `plan.recompute` or `plan.offload`; None means all layers.

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
class PlanConfig:
    """How one optimizer step is ordered."""

    order: Literal["auto", "sequential", "1f1b", "interleaved", "zb_h1", "zb_v", "merged_v"] = "auto"
    """Order of microbatches over pipeline ranks. auto picks sequential, 1f1b or interleaved from pp and chunks. zb_h1
    and zb_v fill the bubble with weight gradients. zb_v and merged_v have two chunks per rank, placed as a V. merged_v
    merges forwards of one chunk with backwards of the other."""
    chunks: Annotated[int, Between(1, 1024)] = 1
    """Virtual pipeline stages per rank."""
    layers_per_stage: Annotated[tuple[int | Literal["auto"], ...], Between(0)] = ("auto",)
    """Layers of every virtual stage; empty splits evenly. The first stage (with the embedding) and the last (with the
    head) may have 0. auto balances the compute time of ranks, including embedding and head, if that shortens the step
    and fits into memory."""
    group: Annotated[int, Between(0, MANY), OnlyWith("plan.order = interleaved and plan.chunks above 1", idle=(0,))] = 0
    """Microbatches that pass through a chunk before the next chunk's turn, in the interleaved order. 0 means the fewest
    that work: mesh.pp."""
    recompute: Annotated[tuple[str, ...], part_of(RECOMPUTED)] = ()
    """Parts of layers, out of attn, dispatch, experts, kv and mlp, that keep only their inputs after forward, and run
    forward again before their backward. That takes less memory and more time. attn includes the norms, the router and
    the shared expert. dispatch makes the rows of experts again, and sends them again to other ranks. kv gathers keys
    and values again, with context parallelism. attn:2 recomputes attn in the first two layers of each virtual stage,
    attn in all layers. auto recomputes as few parts in as few layers as the memory allows."""
    offload: Annotated[tuple[str, ...], part_of(OFFLOADED)] = ()
    """Parts of layers, out of attn, experts and mlp, whose saved tensors are kept in host memory. They are copied there
    after forward, and back before backward, during compute. attn:2 means attn in the first two layers of each virtual
    stage. auto is as few parts in as few layers as let a step fit into memory, if that takes less time than to
    recompute."""
    loss_pieces: Annotated[int | Literal["auto"], Between(1, MANY)] = 1
    """Pieces of a microbatch's tokens that pass through the head one after the other, so that only one piece's logits
    are in memory. Backward computes them again: the head has four products instead of three. auto is as many as let a
    step fit into memory, and 1 if it fits without."""
    graphs: Switch = "auto"
    """Record a step's GPU work once and replay it as one CUDA graph. The optimizer runs after the graph. auto is on if
    the host would otherwise be late, and memory allows it."""
    layer_order: Annotated[
        str,
        OnlyWith("overlap.ep.merge = on", idle=("literature",)),
        OnlyWith("deferred weight gradients", idle=("literature",)),
    ] = "literature"
    """Order of parts inside one merged layer step: literature, early_release, wgrad_last, or your own order such as "cB
    aF eB dF eW dB eF cF aB uB aW uF" (hocket/program/layer.py spells out the named ones)."""

    @property
    def split(self) -> tuple[int, ...]:
        """Layers of every virtual stage; empty if they are even, or not chosen yet."""
        return tuple(count for count in self.layers_per_stage if count != "auto")

    @property
    def pieces(self) -> int:
        """`loss_pieces`; 1 if not chosen yet."""
        return 1 if self.loss_pieces == "auto" else self.loss_pieces

    @property
    def zero_bubble(self) -> bool:
        """Whether the order has separate steps for all weight gradients."""
        return self.order in ZERO_BUBBLE

    @property
    def fills_bubble(self) -> bool:
        """Whether the order has separate steps for some weight gradients, which fill the bubble."""
        return self.zero_bubble or self.order == "merged_v"

    @property
    def turning(self) -> bool:
        """Whether the stages go down the ranks and up again, as a V."""
        return self.order in ("zb_v", "merged_v")


MOST_PASSES = 200_000
"""Microbatches times layers of a step: above, planning takes over two million operations, or half a minute."""


CHUNKS = {
    "1f1b": range(1, 2),
    "zb_h1": range(1, 2),
    "zb_v": range(2, 3),
    "merged_v": range(2, 3),
    "interleaved": range(2, 1025),
}
"""Order -> the allowed numbers of chunks per rank."""


def _fewest_microbatches(c: Any) -> int:
    """The fewest microbatches that an order works with."""
    if c.plan.order == "merged_v":
        return 2 * c.mesh.pp
    return c.mesh.pp if c.plan.zero_bubble or c.plan.order == "interleaved" else 1


def named_parts(items: tuple[str, ...]) -> tuple[str, ...]:
    """The parts that items such as `attn:2` name."""
    return tuple(text.partition(":")[0] for text in items)


def _named_twice(items: tuple[str, ...]) -> bool:
    """Whether items name a part twice, or combine auto with others."""
    parts = named_parts(items)
    return len(set(parts)) < len(parts) or {"auto"} < set(parts)


def _graphed(c: Any) -> bool:
    return c.plan.graphs == "on"


PLAN_RULES: tuple[Rule | Each, ...] = (
    # Stages
    Rule(
        ("plan.chunks", "mesh.pp", "model.layers"),
        lambda c, h: c.stages > c.model.layers + 2,
        "mesh.pp = {mesh.pp} x plan.chunks = {plan.chunks} is {stages} virtual stages, too many for model.layers = "
        "{model.layers}: only the first and the last may be without layers",
        "make mesh.pp x plan.chunks at most model.layers + 2",
    ),
    Rule(
        ("plan.layers_per_stage", "mesh.pp", "plan.chunks"),
        lambda c, h: len(c.plan.split) not in (0, c.stages),
        "mesh.pp = {mesh.pp} x plan.chunks = {plan.chunks} needs {stages} numbers",
        "give {stages} numbers, or leave plan.layers_per_stage out",
    ),
    Rule(
        ("plan.layers_per_stage", "model.layers"),
        lambda c, h: bool(c.plan.split) and sum(c.plan.split) != c.model.layers,
        "the stages' layers do not add up to model.layers = {model.layers}",
        "numbers that add up to {model.layers}, or leave plan.layers_per_stage out",
    ),
    Rule(
        ("plan.layers_per_stage",),
        lambda c, h: 0 in c.plan.split[1:-1] or c.plan.split == (0,),
        "only the first stage, with the embedding, and the last, with the head, may be without layers",
        "1 or more layers for all other stages, or leave plan.layers_per_stage out",
    ),
    Rule(
        ("plan.layers_per_stage",),
        lambda c, h: "auto" in c.plan.layers_per_stage and len(c.plan.layers_per_stage) > 1,
        "auto goes with no number",
        "plan.layers_per_stage = auto, or a number for each stage",
    ),
    # Order of microbatches
    Rule(
        ("plan.order", "plan.chunks"),
        lambda c, h: c.plan.order in CHUNKS and c.plan.chunks not in CHUNKS[c.plan.order],
        "in the order {plan.order} plan.chunks is {chunks}, not {plan.chunks}",
        "plan.chunks = {chunks}, or another plan.order",
    ),
    Rule(
        ("plan.order", "mesh.pp"),
        lambda c, h: c.plan.fills_bubble and c.mesh.pp == 1,
        "with one pipeline rank there is no bubble to fill",
        "mesh.pp = 2 or more, or plan.order = auto",
    ),
    Rule(
        ("train.microbatches", "mesh.pp", "plan.chunks"),
        lambda c, h: c.train.microbatches < _fewest_microbatches(c),
        "the order {plan.order} is made for {fewest} microbatches or more on mesh.pp = {mesh.pp} ranks",
        "train.microbatches = {fewest} or more, or another plan.order",
    ),
    Rule(
        ("train.microbatches", "model.layers"),
        lambda c, h: c.train.microbatches * c.model.layers > MOST_PASSES,
        "{train.microbatches} microbatches through {model.layers} layers are a plan of millions of operations, which "
        "takes minutes to make and to check",
        "train.microbatches = {most_microbatches} or fewer (of more train.sequences)",
    ),
    Rule(
        ("plan.group", "mesh.pp", "train.microbatches"),
        lambda c, h: c.plan.group > 0 and not c.mesh.pp <= c.plan.group <= c.train.microbatches,
        "a group has at least mesh.pp = {mesh.pp} microbatches, and at most train.microbatches = {train.microbatches}",
        "plan.group = 0, which means the smallest that works",
    ),
    # Parts of layers
    Each(
        {"plan.recompute": "", "plan.offload": ""},
        ("{it}",),
        lambda c, h, it: _named_twice(leaf(c, it)),
        "each part is named once, and auto goes with no part",
        "each part once in {it}, or {it} = auto",
    ),
    Rule(
        ("plan.loss_pieces", "data.sequence_length"),
        lambda c, h: c.plan.pieces > c.tokens > 0,
        "a rank has {tokens} tokens of a microbatch, and a piece has at least one",
        "plan.loss_pieces = {tokens} or fewer",
    ),
    # Recorded steps
    Rule(
        ("plan.graphs", "train.device"),
        lambda c, h: _graphed(c) and c.train.device != "cuda",
        "a graph is of calls to a GPU, and the ranks compute on CPUs",
        "train.device = cuda, or plan.graphs = off",
    ),
    Rule(
        ("plan.graphs", "overlap.ep.splits"),
        lambda c, h: _graphed(c) and c.rows_travel and c.overlap.ep.splits != "device",
        "a step cannot be recorded in which the host waits for the counts of experts' rows",
        "overlap.ep.splits = device, or plan.graphs = off",
    ),
    Rule(
        ("plan.graphs", "model.delta_heads"),
        lambda c, h: _graphed(c) and any(c.model.deltas()),
        "no step with gated delta nets is recorded: their kernels are chosen while they run",
        "plan.graphs = off",
    ),
    Rule(
        ("plan.graphs", "overlap.dp.update"),
        lambda c, h: _graphed(c) and c.overlap.dp.update == "next_step" and c.optimizer.name == "muon",
        "a recorded step cannot have Muon's updates in it, whose learning rate the host tells",
        "overlap.dp.update = end, or plan.graphs = off",
    ),
    Rule(
        ("plan.graphs", "mesh.cp", "data.packing"),
        lambda c, h: c.mesh.cp > 1 and _graphed(c) and c.data.packing != "off",
        "documents decide which keys a chunk attends to, so no recorded step serves another batch",
        "plan.graphs = off, or data.packing = off",
    ),
)


PLAN_WORDS: Words = {
    "chunks": lambda c, h: f"{(n := CHUNKS[c.plan.order]).start}{' or more' * (len(n) > 1)}",
    "fewest": lambda c, h: _fewest_microbatches(c),
    "most_microbatches": lambda c, h: MOST_PASSES // c.model.layers,
}
