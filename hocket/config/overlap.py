"""Section `overlap`: how communication is hidden, and what that needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast, get_args

from hocket.config.rule import MANY, Between, Each, Form, OnlyWith, Rule, Switch

Update = Literal["auto", "end", "next_step"]
"""When the weights of a planned step are updated. See docs/overlap.md, Updates."""

Role = Literal["qkv", "proj", "fc1", "fc2"]
"""The weights of a tensor-parallel layer. In forward qkv and fc1 gather tokens, proj and fc2 sum them."""
Direction = Literal["forward", "backward"]
Method = Literal["off", "bulk", "ring", "pipeline"]
"""How a product overlaps with its communication."""
ROLES: tuple[Role, ...] = get_args(Role)
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
COLUMNS = ("qkv", "fc1")


def possible(role: str, direction: str) -> tuple[Method, ...]:
    """The methods that the layers of a role have in a direction (`layers/tensor.py` has the table)."""
    if role in COLUMNS:
        return ("off", "ring") if direction == "forward" else ("off", "bulk", "pipeline")
    return ("off", "pipeline") if direction == "forward" else ("off", "ring")


def place_and_method(item: str) -> tuple[str, Method]:
    """(role and direction such as fc1_forward, or nothing for all, and method) of an item of `overlap.tp.method`."""
    where, _, method = item.rpartition(":")
    return where, cast(Method, method)


def check_tensor_method(item: str) -> None:
    """Raise ValueError for an invalid item of `overlap.tp.method`."""
    where, method = place_and_method(item)
    if method not in get_args(Method):
        raise ValueError(f"{method!r} is none of {', '.join(get_args(Method))}")
    places = [f"{role}_{direction}" for role in ROLES for direction in DIRECTIONS]
    if ":" in item and where not in places:
        raise ValueError(f"{where!r} is none of {', '.join(places)}")
    if where and method not in (can := possible(*where.split("_"))):
        raise ValueError(f"these layers, {where.split('_')[1]}, can be {' or '.join(can)}, not {method}")


def attention_of(text: str) -> int:
    """The number of layers in `overlap.pp.defer_layers` = attn:2; -1 for attn. Raises ValueError for other texts."""
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
    """What data-parallel ranks shard: nothing, the optimizer's state, also gradients, or also weights. The rest is
    replicated. no_shard and optim keep a step's gradients unsharded, and reduce them once, in the last microbatch. auto
    shards as little as fits into memory, if that makes a step shorter or moves fewer bytes."""
    prefetch: Annotated[
        int, Between(0, MANY), OnlyWith("shared weights"), OnlyWith("overlap.dp.strategy other than no_shard")
    ] = 2
    """Number of layer passes by which a gather precedes the op that reads it."""
    update: Update = "auto"
    """When weights are updated. end updates all of them when a step ends. next_step updates unit by unit at the start
    of the next step, on its own lane, so that first gathers and forwards overlap updates of other units. auto is
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
    """How many layers of a chunk, the last of its backward, compute their weight gradients after the chunk has sent its
    gradient. -1 means all. attn:2 means those of attention alone in two layers (with mesh.cp above 1 those of its keys
    and values), attn in all. auto makes the step as short as possible."""
    defer_head: Annotated[
        int | Literal["auto"],
        Between(-1),
        OnlyWith("mesh.pp above 1", idle=(0,)),
        OnlyWith("overlap.defer_wgrad = on", idle=(0,)),
    ] = "auto"
    """For how many microbatches, from the last, the weight gradient of the head (the projection onto the vocabulary)
    waits until its rank has nothing else to compute. -1 means all. auto takes as many as shorten the step and fit into
    memory."""

    @property
    def late(self) -> tuple[int, Literal["attn", "all"]]:
        """Layers and parts of `defer_layers`; `auto` counts as attn:1."""
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
    """Who knows the number of rows for each expert. host: the host waits for the counts in every layer. device: only
    the device knows them, which needs buffers of a fixed size. auto is device in replayed steps."""
    room: Annotated[float, Between(1), OnlyWith("overlap.ep.splits = device", idle=(2.0,))] = 2.0
    """With splits = device, the rows that a rank has room for, as a multiple of an even load. A step that needs more
    runs again with splits that the host knows, and later steps have more room."""
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
    """How products and communication overlap, in the layers that support it. ring gathers in pieces (qkv and fc1
    forward, proj and fc2 backward). pipeline sums in pieces (the other way round). bulk overlaps backward's second
    gather with the following ops (qkv and fc1). off does not overlap, and also applies to layers without the method.
    fc1_forward:off sets one role and direction, out of qkv, proj, fc1 (with the head) and fc2. auto chooses the others
    by the shapes of layers."""

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
    """Communication between context-parallel ranks for attention."""

    method: Annotated[Literal["auto", "gather", "heads"], OnlyWith("mesh.cp above 1", idle=("gather",))] = "auto"
    """What ranks that share sequences exchange. gather: keys and values, for each rank's own queries, and their
    gradients. heads: queries, keys and values, so that each rank has all tokens of some heads, and their outputs
    (Ulysses); mesh.cp divides a tensor-parallel rank's heads. auto is gather, or heads if a step is predicted to be 1%
    shorter with it."""


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
    """Run weight gradients as separate ops, at the places that the layer order gives them."""


TENSOR, CONTEXT = "overlap.tp.method", "overlap.cp.method"


def on_device(c: Any) -> bool:
    """Whether rows are stored into the memory of other GPUs."""
    return c.overlap.ep.splits == "device" and c.train.device == "cuda"


def _heads(c: Any) -> bool:
    """Whether ranks that share sequences exchange heads."""
    return c.mesh.cp > 1 and c.overlap.cp.method == "heads"


def _own(c: Any, heads: int) -> int:
    """Number of heads of a tensor-parallel rank."""
    return max(1, heads // c.mesh.tp)


OVERLAP_RULES: tuple[Rule | Each, ...] = (
    # Merged steps
    Rule(
        ("overlap.ep.merge", "mesh.ep", "model.experts"),
        lambda c, h: c.overlap.ep.merge == "on" and not c.rows_travel,
        "no expert all-to-all is hidden, since there is none (mesh.ep = {mesh.ep}); steps are merged all the same",
        "mesh.ep = 2 or more in a model with experts, or overlap.ep.merge = auto",
        remark=True,
    ),
    Rule(
        ("overlap.ep.merge", "plan.order"),
        lambda c, h: c.plan.zero_bubble and c.overlap.ep.merge == "on",
        "in the order {plan.order} forwards and backwards run apart, so that weight gradients can fill the bubble",
        "overlap.ep.merge = off, or plan.order = auto",
    ),
    Rule(
        ("overlap.ep.merge", "plan.order"),
        lambda c, h: c.plan.order == "merged_v" and c.overlap.ep.merge == "off",
        "in the order merged_v forwards and backwards run merged",
        "overlap.ep.merge = on, or plan.order = zb_v, where they run apart",
    ),
    Rule(
        ("overlap.ep.merge", "plan.order"),
        lambda c, h: c.overlap.ep.merge == "on" and c.plan.order == "sequential" and c.stages > 1,
        "in the sequential order each microbatch ends before the next one starts, so there is nothing to merge",
        "plan.order = auto, or overlap.ep.merge = off",
    ),
    Rule(
        ("overlap.ep.merge_ends", "overlap.ep.merge"),
        lambda c, h: c.overlap.ep.merge_ends == "on" and c.overlap.ep.merge == "off",
        "there are no ends of a merged order where nothing is merged",
        "overlap.ep.merge = on, or overlap.ep.merge_ends = off",
    ),
    Rule(
        ("overlap.ep.merge_ends", "plan.order"),
        lambda c, h: c.plan.order == "merged_v" and c.overlap.ep.merge_ends == "on",
        "in the order merged_v no two microbatches follow each other on one chunk where it ends",
        "overlap.ep.merge_ends = off, or plan.order = interleaved",
    ),
    Rule(
        ("overlap.ep.merge_ends", "train.microbatches"),
        lambda c, h: c.overlap.ep.merge_ends == "on" and c.overlap.ep.merge == "on" and c.train.microbatches == 1,
        "one microbatch has no other one to merge with at the ends",
        "train.microbatches = 2 or more, or overlap.ep.merge_ends = off",
    ),
    Rule(
        ("overlap.ep.merge_ends", "mesh.cp"),
        lambda c, h: c.mesh.cp > 1 and c.overlap.ep.merge_ends == "on",
        "pairs at the ends have an order for layers that have their sequences whole",
        "overlap.ep.merge_ends = off, or mesh.cp = 1",
    ),
    # Weight gradients that wait
    Rule(
        ("overlap.defer_wgrad", "plan.order"),
        lambda c, h: c.plan.fills_bubble and c.overlap.defer_wgrad == "off",
        "the order {plan.order} fills the bubble with weight gradients, so they must be able to wait",
        "overlap.defer_wgrad = on, or plan.order = auto",
    ),
    Rule(
        ("overlap.pp.defer_head", "model.tied", "plan.order"),
        lambda c, h: c.overlap.pp.defer_head not in (0, "auto") and c.model.tied and c.plan.turning,
        "one rank has the embedding and the head, which are tied: a gradient would wait for its other half",
        "overlap.pp.defer_head = 0, or model.tied = False",
    ),
    Rule(
        ("overlap.pp.defer_head", "train.microbatches"),
        lambda c, h: c.overlap.pp.defer_head != "auto" and c.overlap.pp.defer_head > c.train.microbatches,
        "a step has {train.microbatches} microbatches",
        "overlap.pp.defer_head = -1, which means all of them",
        only_if_set=True,
    ),
    # Rows of experts
    Rule(
        ("overlap.ep.copies", "overlap.ep.splits"),
        lambda c, h: c.overlap.ep.copies == "per_rank" and c.overlap.ep.splits == "device",
        "where the device alone knows splits, every choice's row is stored at its place, so there is one for each",
        "overlap.ep.copies = per_expert, or overlap.ep.splits = host",
    ),
    Rule(
        ("overlap.ep.splits", "precision.compute"),
        lambda c, h: on_device(c) and c.precision.dtype != "bf16",
        "on GPUs products of experts in {precision.compute} need a host that knows where each expert's rows end",
        "precision.compute = bf16, or overlap.ep.splits = host",
    ),
    Rule(
        ("overlap.ep.splits",),
        lambda c, h: on_device(c) and bool(h.no_peer_memory),
        "{host.no_peer_memory}, and rows are stored there",
        "overlap.ep.splits = host",
    ),
    # Heads that are exchanged
    Rule(
        (CONTEXT, "model.kv_lora_rank"),
        lambda c, h: _heads(c) and c.model.latent,
        "the latents of latent attention belong to no head, and are less than keys and values of all heads",
        "overlap.cp.method = gather",
    ),
    Rule(
        (CONTEXT, "model.sinks"),
        lambda c, h: _heads(c) and c.model.sinks,
        "sinks are weights of all heads, and a rank computes attention of some",
        "overlap.cp.method = gather",
    ),
    Rule(
        (CONTEXT, "mesh.cp", "model.heads"),
        lambda c, h: _heads(c) and _own(c, c.model.heads) % c.mesh.cp != 0,
        "{mesh.cp} ranks cannot have as many of {model.heads}{shares_of_heads} heads each",
        "overlap.cp.method = gather, or a mesh.cp that divides model.heads{shares_of_heads}",
    ),
    Rule(
        (CONTEXT, "mesh.cp", "model.kv_heads"),
        lambda c, h: (
            _heads(c) and bool(_own(c, c.model.kv_heads) % c.mesh.cp and c.mesh.cp % _own(c, c.model.kv_heads))
        ),
        "{mesh.cp} ranks can neither share {model.kv_heads}{shares_of_heads} heads of keys and values evenly nor have "
        "each of them as often",
        "overlap.cp.method = gather, a mesh.cp that divides model.kv_heads{shares_of_heads}, or a mesh.cp that is a "
        "multiple of model.kv_heads{shares_of_heads}",
    ),
)
