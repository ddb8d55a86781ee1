"""The settings of section `overlap`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, cast, get_args

from hocket.config.bounds import MANY, Between, Form, OnlyWith

Switch = Literal["auto", "on", "off"]

Update = Literal["auto", "end", "next_step"]
"""When the weights of a planned step are updated. See docs/overlap.md, Updates."""

Role = Literal["qkv", "proj", "fc1", "fc2"]
"""The weights of a tensor-parallel layer. In forward qkv and fc1 gather tokens, proj and fc2 sum them."""
Direction = Literal["forward", "backward"]
Method = Literal["off", "bulk", "ring", "pipeline"]
"""How a product and the communication beside it overlap."""
ROLES: tuple[Role, ...] = get_args(Role)
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
COLUMNS = ("qkv", "fc1")


def possible(role: str, direction: str) -> tuple[Method, ...]:
    """What the layers of a role can do in a direction (`layers/tensor.py` has the table)."""
    if role in COLUMNS:
        return ("off", "ring") if direction == "forward" else ("off", "bulk", "pipeline")
    return ("off", "pipeline") if direction == "forward" else ("off", "ring")


def place_and_method(item: str) -> tuple[str, Method]:
    """(role and direction such as fc1_forward, or nothing for all, and method) of an item of `overlap.tp.method`."""
    where, _, method = item.rpartition(":")
    return where, cast(Method, method)


def check_tensor_method(item: str) -> None:
    """Raise ValueError for a text that is no item of `overlap.tp.method`."""
    where, method = place_and_method(item)
    if method not in get_args(Method):
        raise ValueError(f"{method!r} is none of {', '.join(get_args(Method))}")
    places = [f"{role}_{direction}" for role in ROLES for direction in DIRECTIONS]
    if ":" in item and where not in places:
        raise ValueError(f"{where!r} is none of {', '.join(places)}")
    if where and method not in (can := possible(*where.split("_"))):
        raise ValueError(f"these layers, {where.split('_')[1]}, can be {' or '.join(can)}, not {method}")


def attention_of(text: str) -> int:
    """The layers of a text such as attn:2 of `overlap.pp.defer_layers`; -1 for attn. Raises ValueError for others."""
    part, colon, count = text.partition(":")
    if part != "attn" or (colon and (not count.isdecimal() or int(count) < 1)):
        raise ValueError(f"{text!r} is neither a number of layers nor attn with one")
    return int(count) if colon else -1


@dataclass(frozen=True, kw_only=True)
class DataOverlap:
    """Gathers of weights and reduces of gradients."""

    strategy: Annotated[
        Literal["auto", "no_shard", "optim", "optim_grads", "optim_grads_params"],
        OnlyWith("shared weights", idle=("optim_grads_params",)),
    ] = "optim_grads_params"
    """What data-parallel ranks shard: nothing, the optimizer's state, also gradients, or also weights. Each rank keeps
    the rest whole. no_shard and optim keep a step's gradients whole, and reduce them once, in the last microbatch.
    auto shards as little as fits into memory, if that makes a step shorter or moves fewer bytes."""
    prefetch: Annotated[
        int, Between(0, MANY), OnlyWith("shared weights"), OnlyWith("overlap.dp.strategy other than no_shard")
    ] = 2
    """Number of layer passes by which a gather runs ahead of the op that reads it."""
    update: Update = "auto"
    """When weights are updated. end updates all of them when a step ends. next_step updates unit by unit when the next
    step begins, on a lane of its own: the first gathers and forwards run beside the updates of other units. auto is
    next_step if copy engines gather, AdamW updates, no step is replayed, and this hides 2% of a step or more even if
    forwards gain nothing."""


@dataclass(frozen=True, kw_only=True)
class PipelineOverlap:
    """Sends between pipeline ranks."""

    defer_layers: Annotated[
        int | str,
        Between(-1),
        Form(attention_of, "attn:2"),
        OnlyWith("mesh.pp above 1", idle=(0,)),
        OnlyWith("overlap.defer_wgrad = on", idle=(0,)),
        OnlyWith("plan.order other than zb_h1 or zb_v", idle=(0,)),
    ] = "auto"
    """How many layers of a chunk compute their weight gradients after the chunk has sent its gradient. They are the
    last layers of its backward. -1 means all layers. attn:2 means those of attention alone in two layers, attn in all.
    auto makes the step as short as possible."""
    defer_head: Annotated[
        int | Literal["auto"],
        Between(-1),
        OnlyWith("mesh.pp above 1", idle=(0,)),
        OnlyWith("overlap.defer_wgrad = on", idle=(0,)),
    ] = "auto"
    """For how many microbatches the weight gradient of the head, the projection onto the vocabulary, waits until its
    rank has nothing else to compute. They are the last microbatches. -1 means all of them. auto takes as many as
    shorten the step and fit into memory."""

    @property
    def late(self) -> tuple[int, Literal["attn", "all"]]:
        """Layers and parts of `defer_layers`: attention of one as long as it is open."""
        if isinstance(self.defer_layers, int):
            return self.defer_layers, "all"
        return (1 if self.defer_layers == "auto" else attention_of(self.defer_layers)), "attn"


@dataclass(frozen=True, kw_only=True)
class ExpertOverlap:
    """All-to-alls of experts."""

    merge: Switch = "auto"
    """Merge the forward of one microbatch with the backward of another, layer by layer."""
    merge_ends: Switch = "auto"
    """Merge two forwards, or two backwards, where a merged order begins and ends. It keeps one more activation."""
    splits: Annotated[
        Literal["auto", "host", "device"],
        OnlyWith("mesh.ep above 1", idle=("host",)),
        OnlyWith("a model with experts", idle=("host",)),
    ] = "auto"
    """Where the number of rows that travel to each expert is known. host: the host waits for these numbers in every
    layer. device: only the device knows them, which needs room of a fixed size. auto is device in replayed steps."""
    room: Annotated[float, Between(1), OnlyWith("overlap.ep.splits = device", idle=(2.0,))] = 2.0
    """Rows that a rank has room for, as a multiple of the rows of an even load, with splits = device. A step that needs
    more room runs again with splits that the host knows, and the steps after it have more room."""
    copies: Annotated[Literal["auto", "per_expert", "per_rank"], OnlyWith("mesh.ep above 1", idle=("per_expert",))] = (
        "auto"
    )
    """How often a token's hidden state is sent: once for each of its experts, or once for each rank that has some of
    them. With per_rank that rank sums its experts' outputs. auto sends fewer bytes if compute does not hide them."""


@dataclass(frozen=True, kw_only=True)
class TensorOverlap:
    """Gathers and sums of tokens inside tensor-parallel layers. In forward qkv and fc1 gather, proj and fc2 sum."""

    method: Annotated[
        tuple[str, ...], Form(check_tensor_method, "ring, or fc1_forward:off"), OnlyWith("mesh.tp above 1")
    ] = ("auto",)
    """How products and communication overlap, in the layers that allow it. ring gathers piece by piece (qkv and fc1
    forward, proj and fc2 backward). pipeline sums piece by piece (the other way round). bulk runs backward's second
    gather beside the ops that follow (qkv and fc1). off is one after the other, also for layers that do not allow the
    method. fc1_forward:off sets one role and direction, out of qkv, proj, fc1 (with the head) and fc2. auto chooses by
    the shapes of layers what is not set so."""

    def named(self) -> dict[str, Method]:
        """Role and direction, such as fc1_forward -> the method that is set for it."""
        return {where: method for where, method in map(place_and_method, self._items()) if where}

    def way(self, role: Role, direction: Direction) -> Method:
        """The method of one role in one direction, in a resolved configuration."""
        common: Method = next((method for where, method in map(place_and_method, self._items()) if not where), "off")
        return self.named().get(f"{role}_{direction}", common if common in possible(role, direction) else "off")

    @property
    def open(self) -> bool:
        """Whether some method is not set."""
        return len(self.named()) < len(ROLES) * len(DIRECTIONS) and all(":" in x or x == "auto" for x in self.method)

    def _items(self) -> Iterator[str]:
        return (item for item in self.method if item != "auto")


@dataclass(frozen=True, kw_only=True)
class ContextOverlap:
    """What context-parallel ranks tell each other for attention."""

    method: Annotated[Literal["auto", "gather", "heads"], OnlyWith("mesh.cp above 1", idle=("gather",))] = "auto"
    """What travels between ranks that share sequences. gather: keys and values, which each rank's own queries meet, and
    their gradients. heads: queries, keys and values, so that each rank has all tokens of some heads, and what these
    find (Ulysses); mesh.cp divides a tensor-parallel rank's heads. auto is gather, or heads if a step is predicted to
    be 1% shorter with them."""


@dataclass(frozen=True, kw_only=True)
class OverlapConfig:
    """How communication is hidden: one section for each kind, and the settings that concern several kinds."""

    dp: DataOverlap = field(default_factory=DataOverlap)
    """Gathers of weights and reduces of gradients."""
    pp: PipelineOverlap = field(default_factory=PipelineOverlap)
    """Sends between pipeline ranks."""
    ep: ExpertOverlap = field(default_factory=ExpertOverlap)
    """All-to-alls of experts."""
    tp: TensorOverlap = field(default_factory=TensorOverlap)
    """Gathers and sums inside tensor-parallel layers."""
    cp: ContextOverlap = field(default_factory=ContextOverlap)
    """Keys, values and heads of sequences that ranks share."""
    defer_wgrad: Switch = "auto"
    """Run weight gradients as ops of their own, at the places that the layer order gives them."""
