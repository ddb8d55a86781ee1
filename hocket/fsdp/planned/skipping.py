"""Steps that must not be taken: their gradient is not finite, or its norm is far above those of the steps before.

Note: [A step that is not taken]
The norm of all gradients is there before any weight is updated, in the step or at the beginning of the next one, and
all ranks have the same. So they decide alike, from that number alone. The host does not wait for the decision: it
stays on the device, where each update asks for it and writes nothing; the count of its steps stays as well.

A step that is not taken changes nothing but the position in the text and the count of the run's steps, by which the
learning rate goes: weights, averages, the count of AdamW's corrections and balance biases stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

WINDOW = 128
"""Steps whose norms are remembered."""
ENOUGH = 16
"""Norms without which no step is said to be far above them."""


class Verdict(NamedTuple):
    """What the norm of a step's gradients has decided: on the device, the same on every rank."""

    skipped: Tensor
    """Whether nothing is to be updated, a bool."""
    factor: Tensor
    """What gradients are multiplied with, so that their norm is not above the largest one allowed; fp64."""
    lr: float


class StepGuard:
    """Judges the norms of one run's gradients. The same on every rank."""

    def __init__(self, device: torch.device, factor: float = 0.0) -> None:
        """A norm is a spike above `factor` times the median of the last ones; with 0, none is."""
        self._factor = factor
        self.skipped = torch.zeros((), dtype=torch.bool, device=device)
        """Whether the last step was not taken."""
        self.total = torch.zeros((), dtype=torch.int64, device=device)
        """Steps that were not taken so far."""
        self._norms = torch.full((WINDOW,), torch.nan, dtype=torch.float64, device=device)
        """Of the last steps that were taken, oldest first, behind nan where there were fewer."""

    def judge(self, norm: Tensor) -> Tensor:
        """Whether the step of a gradient of this norm, fp64, is to be skipped: a bool on the device. No host waits."""
        self.skipped = ~norm.isfinite()
        if self._factor:
            self.skipped = self.skipped | (norm > self._factor * self._usual())
            longer = torch.cat([self._norms[1:], norm.reshape(1)])
            self._norms = torch.where(self.skipped, self._norms, longer)
        self.total = self.total + self.skipped
        return self.skipped

    def _usual(self) -> Tensor:
        """The median of the norms that are remembered, fp64: the lower of two. Infinite while there are not enough."""
        known = WINDOW - self._norms.isnan().sum()
        median = self._norms.sort().values.gather(0, ((known - 1) // 2).clamp(min=0).reshape(1)).squeeze(0)
        return torch.where(known >= ENOUGH, median, torch.inf)

    @property
    def usual(self) -> float:
        """The norm with which others are compared. Waits for the device."""
        return float(self._usual())

    @property
    def norms(self) -> list[float]:
        """The norms that are remembered. Waits for the device."""
        return self._norms[~self._norms.isnan()].tolist()

    @property
    def remembered(self) -> dict[str, Tensor]:
        """All that `go_on` takes, by name: live tensors."""
        return {"skipped": self.total, "norms": self._norms}

    def go_on(self, total: int, norms: Sequence[float]) -> None:
        """Remember what another guard did."""
        self.total.fill_(total)
        self._norms.fill_(torch.nan)
        if norms := norms[-WINDOW:]:
            self._norms[-len(norms) :] = self._norms.new_tensor(norms)
