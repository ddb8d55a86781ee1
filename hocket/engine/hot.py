"""Which experts are cloned in a step: decided before it, by the loads of the step before, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hocket.fsdp.planned.clones import UnitClones
from hocket.fsdp.planned.unit import PlannedUnit
from hocket.model.moe import MoELayer
from hocket.parallel.clones import ClonedExperts
from hocket.program.cloning import choose
from hocket.program.values import UnitName


class HotExperts:
    """The clones of all MoE layers of one rank."""

    def __init__(self, layers: Mapping[int, MoELayer], units: Mapping[UnitName, PlannedUnit]) -> None:
        self._layers: dict[int, tuple[ClonedExperts, UnitClones]] = {}
        """By number. There are none where nothing is cloned."""
        for (_, _, number), unit in units.items():
            if unit.clones is not None:
                cloned = layers[number].cloned
                assert cloned is not None
                self._layers[number] = cloned, unit.clones
        self._before = False

    def choose(self, loads: Mapping[int, Tensor], rehearse: Callable[[], None]) -> None:
        """Choose the next step's clones by `loads`, rows per expert by layer; without any, there are no clones.

        Waits for the loads. Where there are clones for the first time, kernels may be new: the step is a rehearsal.
        """
        if not self._layers:
            return
        if not loads:  # no step has been made, or what it knew is lost
            loads = {
                number: torch.zeros(cloned.experts, dtype=torch.int64) for number, (cloned, _) in self._layers.items()
            }
        rows = torch.stack([loads[number] for number in self._layers]).tolist()
        for (cloned, moved), counts in zip(self._layers.values(), rows, strict=True):
            cloned.choose(choose(counts, cloned.ranks, cloned.seats))
            moved.choose(cloned.clones)
        if not self._before and any(cloned.clones for cloned, _ in self._layers.values()):
            self._before = True
            rehearse()
