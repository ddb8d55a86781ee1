"""Slots: the few full-size buffers in which gathered weights and fresh gradients live.

All slots are allocated once, and nothing else of full size ever exists. So the memory of sharded training is
`count * length` per class of units, by construction: a plan that needs more slots says so before it runs, and an op
that would need a slot in use is a mistake in the plan, reported with both units' names.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Slots:
    """`count` flat buffers of `length` elements for one class of units. A unit uses the front of a slot."""

    def __init__(
        self, name: str, count: int, length: int, dtype: torch.dtype, device: torch.device, eight: bool = False
    ) -> None:
        """With `eight`, what is in them at first are numbers in fp8."""
        self.name = name
        # Normal numbers, so that a run without communication computes on something like weights.
        filled = torch.empty(count, length, dtype=dtype, device=device).normal_(std=0.02)
        if eight:
            numbers = torch.empty(length * dtype.itemsize, dtype=dtype, device=device).normal_()
            filled.view(torch.uint8).copy_(numbers.to(torch.float8_e4m3fn).view(torch.uint8))
        # Each with versions of its own: a gather into one, by a thread of gloo, is no change of what lies in another.
        self.buffers: tuple[Tensor, ...] = tuple(buffer.data for buffer in filled.unbind())
        self.holders: list[object | None] = [None] * count

    def __len__(self) -> int:
        return len(self.buffers)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def claim(self, slot: int, unit: object) -> None:
        """Let `unit` use a slot, which it may already hold."""
        assert 0 <= slot < len(self.buffers), f"{unit} wants {self.name} slot {slot} of {len(self.buffers)}"
        holder = self.holders[slot]
        assert holder is None or holder is unit, f"{unit} wants {self.name} slot {slot}, which {holder} holds"
        self.holders[slot] = unit

    def free(self, slot: int) -> None:
        """End the use of a slot. Its content stays until somebody writes over it."""
        self.holders[slot] = None
