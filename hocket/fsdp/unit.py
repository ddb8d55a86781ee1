"""A sharded unit: the parameters that are gathered and reduced as one.

A unit owns three shards of its flat layout: `main` (fp32, what the optimizer updates), `weight` (compute dtype, what
is gathered; the same tensor if compute is fp32) and `main_grad` (fp32). Its full weights and gradients exist only in
slots, for as long as the plan says. There are no phases: the state of a unit is how many leases readers hold on its
gathered weights, at which version they were gathered, and which gradient slots it writes. So any number of
microbatches may be inside, and weights of before the last optimizer step cannot be read by mistake.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.fsdp.layout import FlatLayout
from hocket.fsdp.storage import Slots
from hocket.plan.ops import Unit as UnitKind
from hocket.runtime.comm import Group, Pending
from hocket.runtime.weights import Weight


@dataclass(frozen=True)
class UnitSharding:
    """What all units of one class share."""

    gather: Group
    reduce: Group
    weight_slots: Slots | None
    """None if the group has one member."""
    grad_slots: Slots
    divide: int
    """Gradients are summed over the reduce group and divided by this."""
    expert_parallel: tuple[int, int] = (0, 1)
    """(position, size) of this rank among the ranks that split the experts; dimension 0 of experts' weights."""


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that this rank keeps: elements `lo:hi` of the whole model's parameter, flattened."""

    name: str
    shape: tuple[int, ...]
    """Shape of the parameter in the whole model; for experts, with the experts of all ranks."""
    lo: int
    hi: int
    main: Tensor
    """fp32, 1-D, a view of the unit's shard; so is `grad`."""
    grad: Tensor


class ShardedUnit:
    """One unit of one layer on one rank."""

    def __init__(
        self,
        kind: UnitKind,
        layer: int,
        weights: Sequence[Weight],
        layout: FlatLayout,
        weight: Tensor,
        sharding: UnitSharding,
    ) -> None:
        """`weight` are `layout.shard` zeros in the compute dtype, in memory that the gather group can communicate."""
        self.kind, self.layer, self.weights, self.sharding = kind, layer, tuple(weights), sharding
        self.rank = sharding.gather.rank
        self.layout = layout
        self.weight = weight
        self.main = weight if weight.dtype == torch.float32 else torch.zeros_like(weight, dtype=torch.float32)
        self.main_grad = torch.zeros_like(self.main)
        self.slot = -1
        """The weight slot that holds the gathered weights; -1 means that they are not gathered."""
        self.leases = 0
        """Claims on the gathered weights. The slot is free when the last one is given back."""
        self.version = 0
        """Grows with every optimizer step."""
        self.gathered_version = -1
        self.gathering = Pending()
        self.reducing: dict[int, Pending] = {}
        self._weight_views: dict[int, tuple[Tensor, tuple[Tensor, ...]]] = {}
        self._grad_views: dict[int, dict[Weight, Tensor]] = {}
        if self.whole:
            for w, view in zip(self.weights, self._views(self.weight), strict=True):
                w.value = view

    def __str__(self) -> str:
        return self.kind if self.layer < 0 else f"{self.kind} of layer {self.layer}"

    @property
    def whole(self) -> bool:
        """Whether this rank holds the unit whole: its group has one member, and its values lie in `weight` for good."""
        return self.layout.world == 1

    def _views(self, flat: Tensor) -> tuple[Tensor, ...]:
        return tuple(flat[e.offset : e.end].view(e.shape) for e in self.layout.entries)

    # Weights

    def load(self, source: Callable[[str], Tensor]) -> None:
        """Take the initial weights: `source(name)` has the parameter's local shape, or that of the whole model."""
        for weight in self.weights:
            value = source(weight.name)
            kept = self.layout.local(weight.name, self.rank)
            if value.shape != weight.shape:
                position, size = self.sharding.expert_parallel
                assert value.shape == (weight.shape[0] * size, *weight.shape[1:]), (
                    f"{weight.name} has shape {tuple(weight.shape)}, its initial value {tuple(value.shape)}"
                )
                value = value.chunk(size)[position]
            self.main[kept.offset : kept.offset + len(kept)].copy_(value.reshape(-1)[kept.lo : kept.hi])
        self.refresh()

    def refresh(self) -> None:
        """Cast the optimizer's weights to the compute dtype. What is gathered from now on has a new version."""
        if self.weight is not self.main:
            self.weight.copy_(self.main)
        self.version += 1

    def gather(self, slot: int) -> Pending:
        """Gather the weights into a slot and take the first lease. The values may be read after the wait."""
        slots = self.sharding.weight_slots
        assert slots is not None, f"{self} is held whole and never gathered"
        assert self.slot < 0, f"{self} is gathered into slot {slot} while it is still in slot {self.slot}"
        slots.claim(slot, self)
        if slot not in self._weight_views:
            flat = slots.buffers[slot][: self.layout.total]
            self._weight_views[slot] = flat, self._views(flat)
        flat, views = self._weight_views[slot]
        self.gathering = self.sharding.gather.all_gather(flat, self.weight)
        for weight, view in zip(self.weights, views, strict=True):
            weight.value = view
        self.slot, self.leases, self.gathered_version = slot, 1, self.version
        return self.gathering

    def acquire(self) -> None:
        """Take one more lease on weights that are already gathered: they stay until it is given back too."""
        self.assert_readable()
        self.leases += 1

    def assert_readable(self) -> None:
        """Assert that the weights are here, and not those of before the last optimizer step."""
        if self.whole:
            return
        assert self.leases > 0, f"{self} is read while it is not gathered"
        assert self.gathered_version == self.version, (
            f"{self} is read at version {self.gathered_version}, but the weights are at version {self.version}"
        )

    def release(self) -> None:
        """Give a lease back. With the last one the slot is free and the values are gone."""
        assert self.leases > 0, f"{self} is released but not gathered"
        self.leases -= 1
        if self.leases:
            return
        assert self.sharding.weight_slots is not None
        self.sharding.weight_slots.free(self.slot)
        self.slot = -1
        for weight in self.weights:
            weight.value = None

    # Gradients

    def grad_views(self, slot: int) -> dict[Weight, Tensor]:
        """Where to write the gradient of each weight. The slot is taken until its reduce is done."""
        self.sharding.grad_slots.claim(slot, self)
        if slot not in self._grad_views:
            flat = self.sharding.grad_slots.buffers[slot][: self.layout.total]
            self._grad_views[slot] = dict(zip(self.weights, self._views(flat), strict=True))
        return self._grad_views[slot]

    def zero_missing(self, slot: int, written: Collection[Weight]) -> None:
        """Zero what nobody wrote: gradients of weights that are not in `written`, and padding. Call before `reduce`."""
        flat = self.sharding.grad_slots.buffers[slot]
        for lo, hi in self.layout.gaps:
            flat[lo:hi].zero_()
        for weight, view in self.grad_views(slot).items():
            if weight not in written:
                view.zero_()

    def reduce(self, slot: int) -> Pending:
        """Add the sum of all ranks' gradients in a slot, divided, to `main_grad`. The slot is free after the wait."""
        slots = self.sharding.grad_slots
        assert slots.holders[slot] is self, f"{self} reduces gradient slot {slot}, which it does not hold"
        assert slot not in self.reducing, f"{self} reduces gradient slot {slot} twice"
        full = slots.buffers[slot][: self.layout.total]

        def finish() -> None:
            slots.free(slot)
            self.reducing.pop(slot, None)

        pending = self.sharding.reduce.reduce_sum(full, self.main_grad, 1.0 / self.sharding.divide)
        if not pending.done:
            self.reducing[slot] = pending
        return pending.then(finish)

    # The whole

    def pieces(self) -> list[Piece]:
        """What this rank keeps, parameter by parameter; parameters of which it keeps nothing are left out."""
        position, size = self.sharding.expert_parallel
        found = []
        for entry in self.layout.entries:
            kept = self.layout.local(entry.name, self.rank)
            if not len(kept):
                continue
            here = slice(kept.offset, kept.offset + len(kept))
            shape = (entry.shape[0] * size, *entry.shape[1:]) if size > 1 else entry.shape
            before = position * math.prod(entry.shape)
            piece = Piece(entry.name, shape, before + kept.lo, before + kept.hi, self.main[here], self.main_grad[here])
            found.append(piece)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the shards that this rank keeps for good."""
        shared = self.weight is self.main
        return self.main.nbytes + self.main_grad.nbytes + (0 if shared else self.weight.nbytes)

    def assert_idle(self) -> None:
        """Assert that no slot and no collective of this unit is left."""
        assert self.slot < 0, f"{self} was never released from slot {self.slot}"
        assert self.gathering.done, f"the gather of {self} was never waited for"
        assert not self.reducing, f"reduces of {self} in slots {sorted(self.reducing)} were never waited for"
        held = [i for i, holder in enumerate(self.sharding.grad_slots.holders) if holder is self]
        assert not held, f"{self} wrote gradients into slots {held} that were never reduced"

    def abort(self) -> None:
        """Forget gathered weights and gradients of an interrupted step."""
        self.gathering = Pending()
        self.reducing.clear()
        if self.leases:
            self.leases = 1
            self.release()
        self.main_grad.zero_()
