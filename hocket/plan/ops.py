"""The vocabulary of a plan: what a training step is made of, and how it is laid out over ranks.

A step is a `Program`: for each pipeline rank, a list of `Op`. The order of the list is the order in
which the host issues the ops; the ops of one lane run in that order. Everything else in `plan/` is a
function over this value. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

Verb = Literal[
    "fwd", "recompute", "bwd", "wgrad", "send", "recv", "gather", "release", "add", "reduce", "step", "update",
]  # fmt: skip
"""fwd, recompute (forward once more, for the backward), bwd (input gradients), wgrad (weight gradients), pipeline send
and recv, gather and release of a unit's weights, add of a unit's gradients to those of earlier microbatches, reduce of
them over ranks, the optimizer step, and the update of one unit by what the step before has reduced."""

Part = Literal[
    "embed", "attn", "dispatch", "experts", "combine", "unpermute", "mlp", "head",
    "act", "grad",
    "dense",
    "all", "norm",
]  # fmt: skip
"""What an op works on. Parts of the model (first row); what a send or recv carries: a chunk's output
activation or its input gradient; a unit (embed, dense, experts, head); and the whole rank, for the step: `all` of it,
or the gradients' `norm` alone, if updates are left to the step that follows."""

Lane = Literal[
    "compute", "a2a", "send_act", "recv_act", "send_grad", "recv_grad", "send_act_back", "send_grad_back",
    "gather", "reduce", "update",
]  # fmt: skip
"""An ordered queue of work: on a GPU a CUDA stream, on a CPU a queue. Sends and receives have lanes of their own,
because a send is done only when its receiver is ready, and must not hold up this rank's own receives. For the same
reason a rank that sends activations to both of its neighbours (`Layout.turning`) has a lane for either of them. What is
received comes in the order in which it is read, so one lane for both will do."""

LANES: tuple[Lane, ...] = get_args(Lane)

COMPUTING: tuple[Lane, ...] = ("compute", "update")
"""Lanes whose ops compute: the model's, and the optimizer's where weights are updated beside it. The others carry
communication."""

Unit = Literal["embed", "dense", "experts", "head"]
"""A class of units. One unit is what is gathered and reduced as one: `dense` of layer 3, say."""

UNITS: tuple[Unit, ...] = ("embed", "dense", "experts", "head")

UNIT_OF: Mapping[str, Unit] = {
    "embed": "embed", "attn": "dense", "mlp": "dense", "experts": "experts", "head": "head",
}  # fmt: skip
"""The class of units that holds the weights of a part (see `Layout.unit` for tied embeddings)."""

Recomputable = Literal["attn", "experts", "mlp"]
"""The parts that can be recomputed: those that keep more between forward and backward than they read."""


def recomputable(kinds: Collection[str]) -> tuple[Recomputable, ...]:
    """Those of them that layers of these kinds have."""
    there = {"attn": True, "experts": "moe" in kinds, "mlp": "dense" in kinds}
    return tuple(part for part in get_args(Recomputable) if there[part])


Key = tuple[str, str, int, int, int]
"""(verb, part, microbatch, chunk, layer): names an op uniquely within one rank."""


class Op(NamedTuple):
    """One operation of one rank.

    `microbatch` counts the residencies of the unit (0, 1, ...) for gather and release. `layer` is the
    layer's number in the whole model, -1 where no layer is meant. `deps` and `frees` are positions in the
    same rank's list: ops that must be done before this one, and ops whose output is dropped once this one
    has been issued. `slot` is the weight slot of a gather or release, and the gradient slot of a wgrad, add
    or reduce; -1 means none.
    """

    verb: Verb
    part: Part
    microbatch: int = -1
    chunk: int = -1
    layer: int = -1
    lane: Lane = "compute"
    slot: int = -1
    deps: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()

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
    """Where the layers live: pipeline ranks, virtual stages and the kind of each layer.

    `kinds[i]` is the kind of layer i, `dense` or `moe`. Virtual stage s holds the layers
    `range(bounds[s], bounds[s + 1])`; there are `pp * chunks` of them. It is chunk `s // pp` of pipeline rank `s % pp`,
    round after round through the ranks; with `turning`, every other round goes through them backwards, so that with two
    chunks stages make a V and the last rank hands on to itself. With `ep == 1` a MoE layer needs no all-to-all, so it
    has no dispatch and no combine; with `per_rank` rows are sent once per token and rank, and nothing of what comes
    back is kept for backward; with `placed` rows arrive where their experts want them, who keep them as they are; with
    `uncounted` no host waits until it knows how many they are.
    `tied` says that the head uses the embedding's weights, so that both belong to one unit.
    The parts in `recompute` keep nothing but their inputs from forward to backward.
    """

    kinds: tuple[Literal["dense", "moe"], ...]
    pp: int = 1
    chunks: int = 1
    ep: int = 1
    bounds: tuple[int, ...] = ()
    tied: bool = False
    turning: bool = False
    per_rank: bool = False
    placed: bool = False
    uncounted: bool = False
    recompute: tuple[Recomputable, ...] = ()

    def __post_init__(self) -> None:
        if self.pp < 1 or self.chunks < 1 or self.ep < 1:
            raise ValueError(f"pp={self.pp}, chunks={self.chunks} and ep={self.ep} must all be at least 1")
        if any(kind not in ("dense", "moe") for kind in self.kinds):
            raise ValueError(f"layer kinds must be 'dense' or 'moe', got {sorted(set(self.kinds))}")
        if self.tied and self.pp * self.chunks > 1:
            raise ValueError(
                f"tied embeddings need one virtual stage that holds embedding and head, got pp={self.pp} and "
                f"chunks={self.chunks}: use pp=1 and chunks=1, or model.tied=False"
            )
        if not self.bounds:
            object.__setattr__(self, "bounds", even_bounds(len(self.kinds), self.stages))
        b = self.bounds
        if len(b) != self.stages + 1 or b[0] != 0 or b[-1] != len(self.kinds):
            raise ValueError(
                f"bounds must be {self.stages + 1} numbers from 0 to {len(self.kinds)} "
                f"(pp={self.pp} x chunks={self.chunks} stages, {len(self.kinds)} layers), got {b}"
            )
        if any(hi <= lo for lo, hi in pairwise(b)):
            raise ValueError(f"every virtual stage needs at least one layer, got bounds {b}")

    @property
    def stages(self) -> int:
        return self.pp * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        return chunk * self.pp + (self.pp - 1 - rank if self.turns(chunk) else rank)

    def owner(self, stage: int) -> tuple[int, int]:
        """(rank, chunk) of a virtual stage."""
        chunk, place = divmod(stage, self.pp)
        return (self.pp - 1 - place if self.turns(chunk) else place), chunk

    def turns(self, chunk: int) -> bool:
        """Whether a chunk's activations go through the ranks backwards."""
        return self.turning and chunk % 2 == 1

    def before(self, rank: int, chunk: int) -> tuple[int, int] | None:
        """(rank, chunk) of the stage before a chunk's; None for the first."""
        stage = self.stage(rank, chunk)
        return self.owner(stage - 1) if stage else None

    def behind(self, rank: int, chunk: int) -> tuple[int, int] | None:
        """(rank, chunk) of the stage behind a chunk's; None for the last."""
        stage = self.stage(rank, chunk) + 1
        return self.owner(stage) if stage < self.stages else None

    def receives(self, rank: int, chunk: int, part: str) -> bool:
        """Whether a chunk's input activation, or the gradient of its output, comes from another rank."""
        source = self.before(rank, chunk) if part == "act" else self.behind(rank, chunk)
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
        return self.behind(rank, chunk) is None

    def forward_parts(self, layer: int) -> tuple[Part, ...]:
        """The parts of a layer in forward order."""
        if self.kinds[layer] == "dense":
            return ("attn", "mlp")
        if self.ep == 1:
            return ("attn", "experts", "unpermute")
        return ("attn", "dispatch", "experts", "combine", "unpermute")

    def unit(self, part: str) -> Unit | None:
        """The class of units that holds the weights of a part; None for a part without weights."""
        return "embed" if self.tied and part == "head" else UNIT_OF.get(part)

    def weighted_parts(self, layer: int) -> tuple[Part, ...]:
        """The parts of a layer that own weights, in forward order."""
        return ("attn", "mlp") if self.kinds[layer] == "dense" else ("attn", "experts")

    def peer(self, op: Op, rank: int) -> tuple[int, Key]:
        """(pipeline rank, key) of the op that a send or recv of `rank` is matched with; of none if there is none."""
        forward = (op.part == "act") == (op.verb == "send")
        other, chunk = (self.behind if forward else self.before)(rank, op.chunk) or (rank, -1)
        verb = "recv" if op.verb == "send" else "send"
        return other, (verb, op.part, op.microbatch, chunk, -1)


def even_bounds(layers: int, stages: int) -> tuple[int, ...]:
    """Split layers over stages as evenly as possible; the first stages take one more where it is uneven."""
    if layers < stages:
        raise ValueError(
            f"{layers} layers cannot fill {stages} virtual stages (pp x chunks): use fewer stages or chunks"
        )
    share, extra = divmod(layers, stages)
    return tuple(s * share + min(s, extra) for s in range(stages + 1))


@dataclass(frozen=True)
class Program:
    """One optimizer step of every pipeline rank.

    All data-, expert- and tensor-parallel ranks of a pipeline stage run the same list. `weight_slots` and
    `grad_slots` give the number of slots each class of units has on every rank; a class that is missing in
    `weight_slots` is never gathered: each rank holds its weights whole.
    `in_flight` is the largest number of chunk activations each rank may hold at once. `notes` are remarks
    for the user, such as "nothing is merged".
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
