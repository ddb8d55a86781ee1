"""The vocabulary of a plan: what a training step is made of, and how it is laid out over ranks.

A step is a `Program`: for each pipeline rank, a list of `Op`. The host issues the ops in list order, and the ops of one
lane run in that order. Everything else in `program/` is a function over this value. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from hocket.config.plan import part_and_layers
from hocket.program.parts import UNITS as UNITS
from hocket.program.parts import LayerKind, Part
from hocket.program.parts import Unit as Unit
from hocket.program.transformer import DISPATCHED, EMBED, HEAD, STANDARD, standard_types

Verb = Literal[
    "fwd", "recompute", "bwd", "wgrad", "send", "recv", "gather", "release", "add", "reduce", "step",
    "collect", "orthogonalise", "scatter", "update", "offload", "reload",
]  # fmt: skip
"""fwd; recompute (forward again, for the backward); offload and reload (a part's saved tensors to host memory and
back); bwd (input gradients); wgrad (weight gradients); pipeline send and recv; gather and release of a unit's weights;
add (a unit's gradients to those of earlier microbatches); reduce (gradients over ranks); the optimizer step; update (of
one unit, with the gradients that the last step reduced). Where Muon needs whole matrices of a sharded unit, three ops
come before its update: collect (all-gathers the gradients' averages), orthogonalise (each rank's own matrices) and
scatter (of the results)."""

Lane = str
"""An ordered queue of work: on a GPU a CUDA stream, on a CPU a queue. Sends and receives have separate lanes, because a
send is done only when its receiver is ready, and must not delay this rank's own receives. For the same reason a rank
that sends activations to both neighbours (`Layout.turning`) has a send lane for each. Received tensors arrive in the
order in which they are read, so one receive lane is enough for both."""

LANES: tuple[Lane, ...] = (
    "compute", "a2a", "send_act", "recv_act", "send_grad", "recv_grad", "send_act_back", "send_grad_back",
    "gather", "reduce", "update",
)  # fmt: skip
"""The lanes of every layout; parts may add others: see `Layout.lanes`."""

COMPUTING: tuple[Lane, ...] = ("compute", "update")
"""Lanes whose ops compute: the model's, and the optimizer's where updates overlap with it. The other lanes
communicate."""

HOST: tuple[Lane, Lane] = ("offload", "reload")
"""Lanes of the ops of the same name, in layouts that offload."""

TIED = "tied"
"""The `part` of sends and receives of a tied embedding that two pipeline ranks have."""

WHOLE_MATRICES = ("collect", "orthogonalise", "scatter")
"""Verbs that Muon needs before it updates a sharded unit, in order."""

UNIT_VERBS = ("gather", "release", "add", "reduce", *WHOLE_MATRICES, "update")
"""Verbs whose op works on a whole unit, named by `Op.part`."""


def recomputable(kinds: Collection[str], cp: int = 2) -> tuple[str, ...]:
    """The recomputable parts of hocket's own layers of these kinds: those that keep more than they read."""
    parts = (part for kind in standard_types(tuple(kinds), cp, again=True) for part in kind.parts)
    return tuple(sorted({part.name for part in parts if part.recomputable}))


def offloadable(kinds: Collection[str]) -> tuple[str, ...]:
    """The parts of hocket's own layers of these kinds whose saved tensors can be offloaded."""
    parts = (part for kind in standard_types(tuple(kinds)) for part in kind.parts)
    return tuple(sorted({part.name for part in parts if part.offloadable}))


Key = tuple[str, str, int, int, int]
"""(verb, part, microbatch, chunk, layer): names an op uniquely within one rank."""


class Op(NamedTuple):
    """One operation of one rank.

    `microbatch` counts this unit's gathers (0, 1, ...) for gather and release. `layer` is the layer's number in the
    whole model; -1 for none. `deps` and `frees` are positions in the same rank's list: ops that must be done before
    this one, and ops whose output is dropped once this one has been issued. `slot` is the weight slot of a gather or
    release; the gradient slot of a wgrad, add or reduce; the whole-matrix slot of a collect, orthogonalise, scatter and
    the update after them; the host-memory slot of an offload or reload; -1 for none. With a tied embedding on two
    ranks, `chunk` of the step is that of this rank's embedding or head.
    """

    verb: Verb
    part: str
    """What it works on: a part of the model (`program/parts.py`). For a send or recv: `act`, a chunk's output
    activation; `grad`, its input gradient; or `tied`, a step's gradient of a tied embedding. For the verbs in
    `UNIT_VERBS`: a class of units. For the step: `all`, or `norm` if it only computes the gradients' norm and leaves
    updates to the next step."""
    microbatch: int = -1
    chunk: int = -1
    layer: int = -1
    lane: Lane = "compute"
    slot: int = -1
    deps: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()
    trims: tuple[int, ...] = ()
    """Positions of ops whose output loses the share of its first reader, before the rest: see `values.first_reader`."""

    @property
    def key(self) -> Key:
        return self[:5]

    def __str__(self) -> str:
        """Short name, for example `bwd attn m3 c1 l5` or `gather experts t0 c1 l5 s2`."""
        count = "t" if self.verb in ("gather", "release") else "m"
        fields = [
            (count, self.microbatch),
            ("c", self.chunk),
            ("l", self.layer),
            ("s", self.slot),
        ]
        return " ".join([self.verb, self.part, *(f"{name}{value}" for name, value in fields if value >= 0)])


@dataclass(frozen=True)
class Layout:
    """Where the layers are: pipeline ranks, virtual stages and the kind of each layer.

    `kinds[i]` names the kind of layer i, and `types` describes all kinds. The default is hocket's own `dense` and
    `moe`, and those with a window (`program/transformer.py`). Virtual stage s has the layers `range(bounds[s], bounds[s
    + 1])`; there are `pp * chunks` stages. It is chunk `s // pp` of pipeline rank `s % pp`, round after round through
    the ranks. With `turning`, every other round goes through the ranks backwards: with two chunks the stages form a V,
    and the last rank sends to itself. The first stage has the embedding, the last the head; either may have no layers.

    With `cp` above 1 each rank has a part of every sequence; layers gather keys and values, or exchange `heads`. With
    `ep == 1` a MoE layer has no dispatch and no combine. With `per_rank` a row is sent once per token and target rank,
    and received results are not kept for backward. With `placed` rows arrive grouped by expert, so experts make no
    copy. With `uncounted` the host never waits for row counts. With `tied` the head uses the embedding's weights, so
    both belong to one unit, whose chunk counts as 0; see Note: [One embedding on two ranks] in `shard.py`.

    The parts in `recompute` keep only their inputs from forward to backward: `attn` in all layers, `attn:2` in the
    first two of each virtual stage. The saved tensors of those in `offload` are kept in host memory.
    """

    kinds: tuple[str, ...]
    pp: int = 1
    chunks: int = 1
    ep: int = 1
    cp: int = 1
    heads: bool = False
    bounds: tuple[int, ...] = ()
    tied: bool = False
    turning: bool = False
    per_rank: bool = False
    placed: bool = False
    uncounted: bool = False
    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    types: tuple[LayerKind, ...] = ()

    def __post_init__(self) -> None:
        if min(self.pp, self.chunks, self.ep, self.cp) < 1:
            sizes = f"pp={self.pp}, chunks={self.chunks}, ep={self.ep} and cp={self.cp}"
            raise ValueError(f"{sizes} must all be at least 1")
        unknown = sorted({kind for kind in self.kinds if kind not in self.by_kind})
        if unknown:
            known = ", ".join(self.by_kind) or " and ".join(STANDARD)
            raise ValueError(f"no description of layers of kind {unknown[0]!r}: there are {known}")
        _check_types(self.layer_types)
        if self.recompute:
            again = {*recomputable(STANDARD), *(p.name for kind in self.types for p in kind.parts if p.recomputable)}
            if wrong := [part for part, _ in map(part_and_layers, self.recompute) if part not in again]:
                raise ValueError(f"part {wrong[0]!r} cannot be recomputed: there are {', '.join(sorted(again))}")
        if self.offload:
            away = {*offloadable(STANDARD), *(p.name for kind in self.types for p in kind.parts if p.offloadable)}
            if wrong := [part for part, _ in map(part_and_layers, self.offload) if part not in away]:
                raise ValueError(f"part {wrong[0]!r} cannot be offloaded: there are {', '.join(sorted(away))}")
        if not self.bounds:
            object.__setattr__(self, "bounds", even_bounds(len(self.kinds), self.stages))
        b = self.bounds
        if len(b) != self.stages + 1 or b[0] != 0 or b[-1] != len(self.kinds):
            raise ValueError(
                f"bounds must be {self.stages + 1} numbers from 0 to {len(self.kinds)} "
                f"(pp={self.pp} x chunks={self.chunks} stages, {len(self.kinds)} layers), got {b}"
            )
        if any(hi < lo for lo, hi in pairwise(b)) or any(hi == lo for lo, hi in pairwise(b[1:-1])) or not b[-1]:
            raise ValueError(f"only the first and the last virtual stage may be without layers, got bounds {b}")

    @property
    def stages(self) -> int:
        return self.pp * self.chunks

    @cached_property
    def apart(self) -> Mapping[int, int]:
        """If embedding and head are tied but on two ranks: rank -> the chunk that has its one."""
        ends = (self.owner(0), self.owner(self.stages - 1))
        return dict(ends) if self.tied and ends[0][0] != ends[1][0] else {}

    def stage(self, rank: int, chunk: int) -> int:
        return chunk * self.pp + (self.pp - 1 - rank if self.turns(chunk) else rank)

    def owner(self, stage: int) -> tuple[int, int]:
        """(rank, chunk) of a virtual stage."""
        chunk, place = divmod(stage, self.pp)
        return (self.pp - 1 - place if self.turns(chunk) else place), chunk

    def turns(self, chunk: int) -> bool:
        """Whether a chunk's activations pass through the ranks backwards."""
        return self.turning and chunk % 2 == 1

    def before(self, rank: int, chunk: int) -> tuple[int, int] | None:
        """(rank, chunk) of the stage before a chunk's; None for the first."""
        stage = self.stage(rank, chunk)
        return self.owner(stage - 1) if stage else None

    def after(self, rank: int, chunk: int) -> tuple[int, int] | None:
        """(rank, chunk) of the stage after a chunk's; None for the last."""
        stage = self.stage(rank, chunk) + 1
        return self.owner(stage) if stage < self.stages else None

    def receives(self, rank: int, chunk: int, part: str) -> bool:
        """Whether a chunk's input activation, or the gradient of its output, comes from another rank."""
        source = self.before(rank, chunk) if part == "act" else self.after(rank, chunk)
        return source is not None and source[0] != rank

    def sends(self, rank: int, chunk: int, part: str) -> bool:
        """Whether a chunk's output activation, or the gradient of its input, goes to another rank."""
        return self.receives(rank, chunk, "grad" if part == "act" else "act")

    def layers(self, rank: int, chunk: int) -> range:
        """The layers of one chunk of one pipeline rank."""
        s = self.stage(rank, chunk)
        return range(self.bounds[s], self.bounds[s + 1])

    def is_first(self, rank: int, chunk: int) -> bool:
        return self.before(rank, chunk) is None

    def is_last(self, rank: int, chunk: int) -> bool:
        return self.after(rank, chunk) is None

    @cached_property
    def layer_types(self) -> tuple[LayerKind, ...]:
        """The descriptions of all kinds of layers: `types`, or by default hocket's own."""
        if self.types:
            return self.types
        moved = {"ep": self.ep, "per_rank": self.per_rank, "placed": self.placed, "uncounted": self.uncounted}
        moved["again"] = self._dispatches_again
        return standard_types(self.kinds, self.cp, self.heads, **moved)

    @cached_property
    def by_kind(self) -> Mapping[str, LayerKind]:
        """The description of each kind of layer."""
        return {kind.name: kind for kind in self.layer_types}

    @cached_property
    def _parts(self) -> Mapping[str, Part]:
        """One part of each name. Parts of one name agree in unit and lane in all kinds."""
        ends = (EMBED, HEAD)
        return {part.name: part for part in (*(part for kind in self.layer_types for part in kind.parts), *ends)}

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """All lanes of a rank: those of every layout, then those that parts add."""
        host = HOST if self.offload else ()
        return tuple(dict.fromkeys([*LANES, *host, *(part.lane for kind in self.layer_types for part in kind.parts)]))

    def type_of(self, layer: int) -> LayerKind:
        """The description of a layer."""
        return self.by_kind[self.kinds[layer]]

    def part(self, name: str, layer: int = -1) -> Part:
        """The description of a part: of a layer, or of the model's ends with layer -1."""
        found = self._parts.get(name) if layer < 0 else self.type_of(layer).by_name.get(name)
        if found is None:
            raise ValueError(f"layer {layer} has no part {name!r}" if layer >= 0 else f"the model has no part {name!r}")
        return found

    def has_part(self, name: str, layer: int) -> bool:
        """Whether a layer, or with layer -1 one of the model's ends, has such a part."""
        if layer < 0:
            return name in (EMBED.name, HEAD.name)
        return layer < len(self.kinds) and name in self.type_of(layer).by_name

    def forward_parts(self, layer: int) -> tuple[str, ...]:
        """The names of a layer's parts in forward order."""
        return tuple(self.type_of(layer).by_name)

    def weighted_parts(self, layer: int) -> tuple[str, ...]:
        """The names of the parts of a layer that own weights, in forward order."""
        return tuple(part.name for part in self.type_of(layer).weighted)

    def unit(self, part: str) -> Unit | None:
        """The class of units with a part's weights; None for a part without weights, and for a name that is no part."""
        if self.tied and part == HEAD.name:
            return EMBED.unit
        found = self._parts.get(part)
        return found.unit if found is not None else None

    def units(self, rank: int) -> list[tuple[Unit, str]]:
        """(class, kind of the layer) of every unit of a pipeline rank."""
        units: list[tuple[Unit, str]] = []
        for chunk in range(self.chunks):
            if self.is_first(rank, chunk):
                units.append(("embed", ""))
            for kind in map(self.type_of, self.layers(rank, chunk)):
                units += [(unit, kind.name) for unit in dict.fromkeys(part.unit for part in kind.weighted) if unit]
            if self.is_last(rank, chunk) and not (self.tied and ("embed", "") in units):
                units.append(("embed" if self.tied else "head", ""))
        return units

    @cached_property
    def _dispatches_again(self) -> bool:
        """Whether some layers dispatch their rows again for backward."""
        return DISPATCHED in (part for part, _ in map(part_and_layers, self.recompute))

    @property
    def makes_rows_later(self) -> bool:
        """Whether experts' rows are made from tokens at dispatch, so that they are not saved."""
        return self._dispatches_again and not (self.per_rank and self.ep > 1)

    @cached_property
    def recomputed(self) -> frozenset[tuple[str, int]]:
        """(part, layer) of all recomputed parts, which keep only their inputs from forward to backward."""
        return frozenset(where for where in self._named(self.recompute) if self.part(*where).recomputable)

    @cached_property
    def offloaded(self) -> frozenset[tuple[str, int]]:
        """(part, layer) of all parts whose saved tensors are offloaded."""
        return frozenset(where for where in self._named(self.offload) if self.part(*where).offloadable)

    def _named(self, items: tuple[str, ...]) -> Iterator[tuple[str, int]]:
        """(part, layer) of all that items such as `attn:2` select."""
        for part, count in map(part_and_layers, items):
            for start, stop in pairwise(self.bounds):
                yield from ((part, layer) for layer in range(start, stop)[:count] if self.has_part(part, layer))

    def recomputes(self, part: str, layer: int) -> bool:
        """Whether a part of a layer is in `recomputed`."""
        return (part, layer) in self.recomputed

    def offloads(self, part: str, layer: int) -> bool:
        """Whether a part of a layer is in `offloaded`."""
        return (part, layer) in self.offloaded

    def recomputing(self, part: str, kind: str) -> int:
        """How many layers of a kind recompute a part."""
        return sum(self.recomputes(part, layer) for layer, name in enumerate(self.kinds) if name == kind)

    def peer(self, op: Op, rank: int) -> tuple[int, Key]:
        """(pipeline rank, key) of the op that matches a send or recv of `rank`; a key of no op if there is none."""
        forward = (op.part == "act") == (op.verb == "send")
        verb = "recv" if op.verb == "send" else "send"
        if op.part == TIED:
            other, chunk = next((end for end in self.apart.items() if end[0] != rank), (rank, -1))
            return other, (verb, TIED, op.microbatch, chunk, -1)
        other, chunk = (self.after if forward else self.before)(rank, op.chunk) or (rank, -1)
        return other, (verb, op.part, op.microbatch, chunk, -1)


def tied_lane(verb: Verb, first: bool) -> Lane:
    """The lane on which the first or last stage's rank sends or receives a gradient of a tied embedding.

    The last rank and the first are neighbours in the ring of pipeline ranks.
    """
    return f"{verb}_{'grad' if first == (verb == 'send') else 'act'}"


def stops_host(op: Op, layout: Layout) -> bool:
    """Whether the host waits for row counts while it issues this op."""
    there = op.verb == "fwd" and layout.has_part(op.part, op.layer)
    return there and layout.part(op.part, op.layer).counted


def _check_types(types: tuple[LayerKind, ...]) -> None:
    """Checks that parts of one name have the same unit and lane, because a name alone identifies them in places.

    And that parts of one letter have the same role, because templates identify parts by their letters.
    """
    seen: dict[str, Part] = {EMBED.name: EMBED, HEAD.name: HEAD}
    early: dict[str, bool] = {}
    for kind in types:
        for part in kind.parts:
            if early.setdefault(part.letter, part.early) != part.early:
                raise ValueError(
                    f"layer kind {kind.name!r}: part {part.name!r} shares its letter with one that is early"
                )
            other = seen.setdefault(part.name, part)
            if (other.unit, other.lane, other.purpose) != (part.unit, part.lane, part.purpose):
                raise ValueError(
                    f"layer kind {kind.name!r}: another part {part.name!r} has another unit, lane or purpose"
                )


def even_bounds(layers: int, stages: int) -> tuple[int, ...]:
    """Split layers over stages as evenly as possible; the first stages take one more where it is uneven.

    With one stage more than layers the last has only the head; with two more, the first has only the embedding.
    """
    if not layers or layers + 2 < stages:
        raise ValueError(
            f"{layers} layers cannot fill {stages} virtual stages (pp x chunks), of which only the first and the last "
            "may be without layers: use fewer stages or chunks"
        )
    if layers < stages:
        first = stages - layers - 1
        return tuple(min(max(stage - first, 0), layers) for stage in range(stages + 1))
    share, extra = divmod(layers, stages)
    return tuple(s * share + min(s, extra) for s in range(stages + 1))


@dataclass(frozen=True)
class Program:
    """One optimizer step of every pipeline rank.

    All data-, expert- and tensor-parallel ranks of a pipeline stage run the same list. `weight_slots` and
    `grad_slots` give the number of slots of each class of units on every rank. A class that is missing in
    `weight_slots` is never gathered: each rank holds its weights whole. `in_flight` is the largest number of chunk
    activations that each rank may hold at once. `notes` are remarks for the user, such as "nothing is merged".
    """

    layout: Layout
    microbatches: int
    ranks: tuple[tuple[Op, ...], ...]
    weight_slots: Mapping[str, int] = field(default_factory=dict)
    grad_slots: Mapping[str, int] = field(default_factory=dict)
    in_flight: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[tuple[int, int, Op]]:
        """(rank, position, op) of every op."""
        for rank, ops in enumerate(self.ranks):
            for position, op in enumerate(ops):
                yield rank, position, op

    def __len__(self) -> int:
        return sum(len(ops) for ops in self.ranks)
