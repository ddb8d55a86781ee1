"""Muon on shards: each matrix is put together on one rank, made orthogonal there, and its parts travel back.

Note: [Each matrix on one rank]
The average is elementwise, so each rank has its part of it. The iteration needs the whole matrix. So each unit has,
behind the last reduction of a step,

    collect         an all-gather of the averages in bf16, in which the iteration begins anyway
    orthogonalise   each matrix on one rank of the group, such that all have about as much to compute
    scatter         a reduce-scatter of the results: a sum in which all ranks but one have zeros, so it is exact
    update          the move of the weights

With `overlap.dp.update = next_step` these are ops of the plan, at the beginning of the next step: see
`Note: [Whole matrices of sharded units]` in `program/shard.py`. Otherwise the step op does all of it, unit by unit, and
nothing runs beside it. Ranks that hold weights whole iterate all of them in the update, and communicate nothing.

Note: [What is one matrix]
Gate and up projections are stacked in one weight here and are two matrices, as in the models of Hugging Face; queries,
keys and values are weights of their own. Each expert has its own matrices. Experts' weights have their input width
first, so they are turned over: `original` scales by the shape of output by input width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hocket.fsdp.orthogonal import factor_of, orthogonal
from hocket.fsdp.planned.model import PlannedModel
from hocket.fsdp.planned.skipping import Verdict
from hocket.fsdp.planned.unit import Piece, PlannedUnit
from hocket.program.ops import WHOLE_MATRICES
from hocket.runtime.comm import Pending


@dataclass(frozen=True)
class MuonOptions:
    """Settings of Muon."""

    takes: Callable[[str, Sequence[int]], bool]
    """Whether it updates a parameter, by its name and its shape in the whole model."""
    decays: Callable[[str, Sequence[int]], bool]
    weight_decay: float = 0.1
    momentum: float = 0.95
    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    slots: int = 1
    """Units of a class that are under way at once."""


def matrices_of(name: str, weight: Tensor) -> list[Tensor]:
    """The matrices of a weight, [output, input] each: views. See Note: [What is one matrix]."""
    halves = 2 if name.endswith(".w_gate_up") else 1
    if ".experts." in name:
        return [half.mT for expert in weight for half in expert.chunk(halves, 1)]
    return list(weight.chunk(halves))


def _owners(unit: PlannedUnit, taken: Sequence[int]) -> list[list[int]]:
    """Of each matrix of the members that are taken, the rank that iterates it: the one with the least so far.

    -1 for all of them, where each keeps the unit whole. The largest matrices are given out first.
    """
    views = unit.group.layout.views(torch.empty(unit.group.layout.total, device="meta"))
    counts = [[m.shape for m in matrices_of(unit.group.members[i].name, views[i])] for i in taken]
    owners, work = [[-1] * len(shapes) for shapes in counts], [0] * unit.group.groups.reduce.size
    if unit.group.keeps_all:
        return owners
    places = [(min(shape) * shape.numel(), k, n) for k, shapes in enumerate(counts) for n, shape in enumerate(shapes)]
    for products, k, n in sorted(places, key=lambda place: -place[0]):
        owners[k][n] = rank = work.index(min(work))
        work[rank] += products
    return owners


@dataclass
class _Slot:
    """Memory of one unit at a time."""

    whole: Tensor
    """Its averages, and then the results in their place: bf16."""
    parts: Tensor
    """What this rank keeps of the results: fp32."""


@dataclass
class _UnderWay:
    """A unit between its collect and its update."""

    slot: _Slot
    done: str
    pending: Pending


class PlannedMuon:
    """Muon of one rank's sharded model, for the parameters that its options take."""

    def __init__(self, model: PlannedModel, options: MuonOptions) -> None:
        self.model, self.options = model, options
        self.momenta: dict[str, tuple[Piece, Tensor]] = {}
        """The averages of what this rank keeps, by name: live, 1-D, fp32."""
        self._taken: dict[PlannedUnit, list[int]] = {}
        self._owners: dict[PlannedUnit, list[list[int]]] = {}
        self._under_way: dict[PlannedUnit, _UnderWay] = {}
        for unit in model.units.values():
            names = [member.name for member in unit.group.members]
            pieces = [piece for piece in unit.pieces() if options.takes(piece.name, piece.shape)]
            self.momenta |= {piece.name: (piece, torch.zeros_like(piece.main)) for piece in pieces}
            taken = [
                i
                for i, shard in enumerate(unit.group.shards)
                if options.takes(names[i], unit.group.span_of(shard).shape)
            ]
            if taken:
                self._taken[unit] = taken
                self._owners[unit] = _owners(unit, taken)
        self._slots = {kind: self._allocate(kind) for kind in ("dense", "experts")}

    def _allocate(self, kind: str) -> list[_Slot]:
        """The slots of a class of units. Every rank calls this."""
        groups = [unit.group for unit in self._taken if unit.kind == kind]
        if not groups:
            return []
        length, part = (max(sizes) for sizes in zip(*((g.layout.total, g.main.numel()) for g in groups), strict=True))
        device, found = self.model.device, list[_Slot]()
        for _ in range(1 if groups[0].keeps_all else self.options.slots):
            whole = torch.zeros(length, dtype=torch.bfloat16, device=device)
            found.append(_Slot(whole, torch.empty(part, device=device)))
        return found

    def takes(self, unit: PlannedUnit) -> bool:
        """Whether it updates some of a unit."""
        return unit in self._taken

    def begun(self, unit: PlannedUnit) -> bool:
        """Whether a unit's averages have been moved, but not its weights."""
        return unit in self._under_way

    @torch.no_grad()
    def go_on(self, verb: str, unit: PlannedUnit, slot: int, verdict: Verdict) -> Pending:
        """Do one of `WHOLE_MATRICES` with a unit, each in its turn. No average changes in a step that is skipped."""
        if verb == "collect":
            assert unit not in self._under_way, f"{unit} is collected twice"
            place = self._slots[unit.kind][slot]
            for other in self._under_way.values():
                if other.slot is place:  # on a CPU what is sent from there may still be under way
                    other.pending.wait()
            self._under_way[unit] = _UnderWay(place, "", Pending())
        of, group = self._under_way[unit], unit.group
        of.pending.wait()
        whole, parts = of.slot.whole[: group.layout.total], of.slot.parts[: group.main.numel()]
        of.pending, of.done = Pending(), verb
        match verb:
            case "collect":
                mine = whole if group.keeps_all else whole[group.position * parts.numel() :][: parts.numel()]
                self._average(unit, mine, verdict)
                if not group.keeps_all:
                    of.pending = group.groups.reduce.all_gather(whole, mine)
            case "orthogonalise":
                self._iterate(unit, whole)
            case "scatter" if group.keeps_all:
                parts.copy_(whole)
            case _:
                of.pending = group.groups.reduce.reduce_sum(whole, parts, 1.0, add=False)
        return of.pending

    @torch.no_grad()
    def update(self, unit: PlannedUnit, verdict: Verdict) -> None:
        """Move the weights of a unit, behind what is left to do before. Nothing changes in a step that is skipped."""
        done = self._under_way[unit].done if unit in self._under_way else ""
        for verb in WHOLE_MATRICES[WHOLE_MATRICES.index(done) + 1 if done else 0 :]:
            self.go_on(verb, unit, 0, verdict)
        of, here = self._under_way.pop(unit), unit.group.kept.slices(unit.group.position)
        of.pending.wait()
        for i in self._kept(unit):
            self._move(self.momenta[unit.group.members[i].name][0], of.slot.parts[here[i]], verdict)

    def _kept(self, unit: PlannedUnit) -> list[int]:
        """The members that it updates and of which this rank keeps something."""
        return [i for i in self._taken[unit] if unit.group.shards[i].hi > unit.group.shards[i].lo]

    def _average(self, unit: PlannedUnit, mine: Tensor, verdict: Verdict) -> None:
        here = unit.group.kept.slices(unit.group.position)
        for i in self._kept(unit):
            piece, momentum = self.momenta[unit.group.members[i].name]
            mine[here[i]] = self._averaged(piece.grad * verdict.factor.float(), momentum, verdict.skipped)

    def _averaged(self, grad: Tensor, momentum: Tensor, skipped: Tensor) -> Tensor:
        """Move the average, and return Nesterov's look ahead of it."""
        beta = self.options.momentum
        moved = momentum.lerp(grad, 1 - beta)
        momentum.copy_(torch.where(skipped, momentum, moved))
        return grad.lerp(moved, beta)

    def _iterate(self, unit: PlannedUnit, whole: Tensor) -> None:
        """Put this rank's matrices, made orthogonal, in the place of all averages; zeros in that of the others."""
        found: list[tuple[Tensor, Tensor]] = []
        views = unit.group.layout.views(whole)
        for i, owners in zip(self._taken[unit], self._owners[unit], strict=True):
            matrices = matrices_of(unit.group.members[i].name, views[i])
            own = [m for m, rank in zip(matrices, owners, strict=True) if rank in (-1, unit.group.groups.reduce.rank)]
            together = len(own) if whole.is_cuda else 1  # on a CPU one by one: the same bits on any mesh
            for first in range(0, len(own), max(1, together)):
                some = own[first : first + together]
                found += zip(some, orthogonal(torch.stack(some)), strict=True)
        whole.zero_()
        for place, matrix in found:
            place.copy_(matrix)

    def _move(self, piece: Piece, update: Tensor, verdict: Verdict) -> None:
        options, main, lr = self.options, piece.main, verdict.lr
        decay = options.weight_decay if options.decays(piece.name, piece.shape) else 0.0
        shape = matrices_of(piece.name, torch.empty(piece.shape, device="meta"))[0].shape
        moved = (main * (1 - lr * decay)).add_(update, alpha=-lr * factor_of(shape, options.scale))
        main.copy_(torch.where(verdict.skipped, main, moved))
