"""Muon on shards: each matrix is put together on one rank, made orthogonal there, and its parts travel back.

Note: [Whole matrices in turn]
The average is elementwise, so each rank has its part of it. The iteration needs the whole matrix. So for each unit,
behind the last reduction of a step,

    all-gather       the averages in bf16, in which the iteration begins anyway
    iterate          each matrix on one rank of the group, in turn
    reduce-scatter   the results: a sum in which all ranks but one have zeros, so it is exact

Ranks that hold weights whole iterate all of them, and communicate nothing. Nothing of this runs beside other compute.

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
from hocket.fsdp.planned.unit import Piece, PlannedUnit


@dataclass(frozen=True)
class MuonOptions:
    """Settings of Muon."""

    takes: Callable[[str, Sequence[int]], bool]
    """Whether it updates a parameter, by its name and its shape in the whole model."""
    decays: Callable[[str, Sequence[int]], bool]
    weight_decay: float = 0.1
    momentum: float = 0.95
    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"


def matrices_of(name: str, weight: Tensor) -> list[Tensor]:
    """The matrices of a weight, [output, input] each: views. See Note: [What is one matrix]."""
    halves = 2 if name.endswith(".w_gate_up") else 1
    if ".experts." in name:
        return [half.mT for expert in weight for half in expert.chunk(halves, 1)]
    return list(weight.chunk(halves))


class PlannedMuon:
    """Muon of one rank's sharded model, for the parameters that its options take."""

    def __init__(self, model: PlannedModel, options: MuonOptions) -> None:
        self.model, self.options = model, options
        self.momenta: dict[str, tuple[Piece, Tensor]] = {}
        """The averages of what this rank keeps, by name: live, 1-D, fp32."""
        self._units: list[tuple[PlannedUnit, list[int]]] = []
        self._turn = 0
        for unit in model.units.values():
            names = [member.name for member in unit.group.members]
            pieces = [piece for piece in unit.pieces() if options.takes(piece.name, piece.shape)]
            self.momenta |= {piece.name: (piece, torch.zeros_like(piece.main)) for piece in pieces}
            taken = [
                i for i, shard in enumerate(unit.group.shards) if options.takes(names[i], unit.group.place_of(shard)[0])
            ]
            if taken:
                self._units.append((unit, taken))
        self._buffers = self._allocate()

    def _allocate(self) -> dict[int, tuple[Tensor, Tensor]]:
        """By number of ranks in the group that shares a unit: what is gathered, and results. Every rank calls this."""
        found: dict[int, tuple[Tensor, Tensor]] = {}
        dense = [unit for unit, _ in self._units if unit.kind != "experts"]
        experts = [unit for unit, _ in self._units if unit.kind == "experts"]
        for number, units in enumerate((dense, experts)):
            if not units:
                continue
            group = units[0].group.groups.reduce
            length = max(unit.group.layout.total for unit in units)
            both = [torch.empty(0), torch.empty(0)]
            with group.window(2 * length) as window:
                for i in range(2):
                    both[i] = torch.zeros(length, dtype=torch.bfloat16, device=self.model.device)
            self.model.add_window(window)
            found[number] = both[0], both[1]
        return found

    @torch.no_grad()
    def step(self, lr: float, skipped: Tensor | None) -> None:
        """Update all that is taken, by its gradients. Where `skipped` is true, on the device, nothing changes."""
        self._turn = 0
        for unit, taken in self._units:
            self._step(unit, taken, lr, skipped)

    def _step(self, unit: PlannedUnit, taken: Sequence[int], lr: float, skipped: Tensor | None) -> None:
        group, total = unit.group, unit.group.layout.total
        gathered, results = (buffer[:total] for buffer in self._buffers[int(unit.kind == "experts")])
        alone = group.keeps_all
        size = group.main.numel()
        mine = gathered if alone else gathered[group.position * size :][:size]
        here = group.kept.slices(group.position)
        for i in taken:
            shard = group.shards[i]
            if shard.hi > shard.lo:
                piece, momentum = self.momenta[group.members[i].name]
                mine[here[i]] = self._averaged(piece.grad, momentum, skipped)
        if not alone:
            group.groups.reduce.all_gather(gathered, mine).wait()
        results.zero_()
        self._iterate(unit, taken, gathered, results, alone)
        update = results.float() if alone else torch.empty(size, dtype=torch.float32, device=self.model.device)
        if not alone:
            group.groups.reduce.reduce_sum(results, update, 1.0, add=False).wait()
        for i in taken:
            shard = group.shards[i]
            if shard.hi > shard.lo:
                self._move(self.momenta[group.members[i].name][0], update[here[i]], lr, skipped)

    def _averaged(self, grad: Tensor, momentum: Tensor, skipped: Tensor | None) -> Tensor:
        """Move the average, and return Nesterov's look ahead of it."""
        beta = self.options.momentum
        moved = momentum.lerp(grad, 1 - beta)
        momentum.copy_(moved if skipped is None else torch.where(skipped, momentum, moved))
        return grad.lerp(moved, beta)

    def _iterate(self, unit: PlannedUnit, taken: Sequence[int], gathered: Tensor, results: Tensor, alone: bool) -> None:
        """Write the orthogonal matrices that are this rank's turn into their place among the results."""
        layout, reduce = unit.group.layout, unit.group.groups.reduce
        sources, targets = layout.views(gathered), layout.views(results)
        for i in taken:
            name = unit.group.members[i].name
            pairs = list(zip(matrices_of(name, sources[i]), matrices_of(name, targets[i]), strict=True))
            ranks = 1 if alone else reduce.size
            own = [pair for n, pair in enumerate(pairs) if alone or (self._turn + n) % ranks == reduce.rank]
            self._turn += len(pairs)
            together = len(own) if gathered.is_cuda else 1  # on a CPU one by one: the same bits on any mesh
            for first in range(0, len(own), max(1, together)):
                some = own[first : first + together]
                made = orthogonal(torch.stack([source for source, _ in some]))
                for matrix, (_, target) in zip(made, some, strict=True):
                    target.copy_(matrix)

    def _move(self, piece: Piece, update: Tensor, lr: float, skipped: Tensor | None) -> None:
        options, main = self.options, piece.main
        decay = options.weight_decay if options.decays(piece.name, piece.shape) else 0.0
        shape = matrices_of(piece.name, torch.empty(piece.shape, device="meta"))[0].shape
        moved = (main * (1 - lr * decay)).add_(update, alpha=-lr * factor_of(shape, options.scale))
        main.copy_(moved if skipped is None else torch.where(skipped, main, moved))
