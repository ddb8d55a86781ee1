"""A unit under a plan: the slots of its gathered weights and gradients.

Its shards are a `ParamGroup`. A plan adds numbered slots, `Weight`s that refer to current values, and per-slot views
for weight gradients. There are no phases: the state is the slot and version of the gathered weights, and the gradient
slots in use. So several microbatches may be inside, and stale weights can't be read.

Note: [Gradients at rest belong to the compute lane]
A unit's reduced gradients are allocated by the step's first wgrad op of the unit and freed by the step op, both on the
compute lane, whose activations use that memory in between. No `record_stream` is needed, since the reduce lane's
accesses are ordered between these two:

- A reduce comes after the wgrads of its microbatch (invariant 5), so after the unit's first one. Other lanes' earlier
  uses of the memory are over: the allocating lane drops a value after all its readers (invariant 6).
- The step op comes after all reduces (invariant 5), so the compute lane's later uses come after them too.
- Deferred updates read gradients on the update lane. The update op returns the memory as its value, which the compute
  lane drops after it (invariant 6), at the latest with the unit's first forward. The next gradient, in other memory,
  comes after that forward (invariant 7).

Sums of gradients that stay whole are held likewise. After an exception the caller's stream waits for all lanes, and the
next step's lanes for that.

Note: [Gradients that are collected]
Where gradients of several microbatches are added up on this rank, the matrix products do it on the compute lane,
without a rounded intermediate (except on CPUs), in the order of microbatches (invariant 9). In a group of one, such as
experts with ep = dp * tp, they add to the gradients at rest, divided: no slots, and the reduce does nothing. If a
step's gradients stay whole until the last microbatch, they add to the step's sum: adds do nothing, and the reduce sends
the sum, rounded into its slot. A tied embedding and head on one rank have two gradients per microbatch, which are added
to each other first, in a slot.

Note: [Slots]
All slots are allocated once; nothing else has full size: `count * length` elements per class of units. A plan with too
few slots is refused before it runs, and an op that needs a slot in use is an error that names both units.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import Tensor

from hocket.fsdp.param_group import ParamGroup
from hocket.fsdp.piece import Piece
from hocket.fsdp.planned.fp8_weights import Fp8Unit, Fp8Weights
from hocket.layers.slices import ALONE, TensorRank, part_of, sharers_of, take, whole_shape
from hocket.program.ops import Unit as UnitKind
from hocket.runtime.comm import Pending
from hocket.runtime.weights import Weight, WgradQueue, manage


class Slots:
    """`count` flat buffers of `length` elements for one class of units."""

    def __init__(
        self, name: str, count: int, length: int, dtype: torch.dtype, device: torch.device, fp8: bool = False
    ) -> None:
        """With `fp8`, the initial content is in fp8."""
        self.name = name
        # Normal numbers, so that a run without communication computes on realistic weights.
        filled = torch.empty(count, length, dtype=dtype, device=device).normal_(std=0.02)
        if fp8:
            numbers = torch.empty(length * dtype.itemsize, dtype=dtype, device=device).normal_()
            filled.view(torch.uint8).copy_(numbers.to(torch.float8_e4m3fn).view(torch.uint8))
        # Separate version counters: a gather into one slot, in a gloo thread, does not change the others.
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
        """Free a slot; its content stays until overwritten."""
        self.holders[slot] = None


class PlannedUnit:
    def __init__(
        self,
        kind: UnitKind,
        layer: int,
        group: ParamGroup,
        weight_slots: Slots | None,
        grad_slots: Slots | None,
        tensors: TensorRank = ALONE,
        adds: bool = False,
    ) -> None:
        """Slots are None if the gather group, or the reduce group, has one member.

        With `adds`, gradients stay whole until a step's last microbatch.
        """
        self.copies = 1
        """Pipeline ranks that have the unit."""
        self.kind, self.layer, self.group, self.tensors = kind, layer, group, tensors
        self.weights = tuple(manage(member.param, member.name) for member in group.members)
        self._weight_slots, self._slots_of_grads, self._adds = weight_slots, grad_slots, adds
        self._fp8: tuple[Fp8Weights, Fp8Unit] | None = None
        self.slot = -1
        """The slot of the gathered weights; -1: not gathered."""
        self.version = 0
        """Number of updates and loads."""
        self.gathered_version = -1
        self.gathering = Pending()
        self.reducing: dict[int, Pending] = {}
        self.awaits_update = False
        """Whether a whole step's gradients wait for the update at the beginning of the next step."""
        self._sum: Tensor | None = None  # whole gradients of this step so far; see `add`
        self._weight_views: dict[int, list[Tensor]] = {}
        self._grad_views: dict[int, dict[Weight, Tensor]] = {}
        self._sums: dict[Weight, Tensor] = {}  # views of the sum; see `collect`
        self._collected: set[Weight] = set()
        self._latest: dict[Weight, int] = {}  # last microbatch collected
        if self.whole:
            self._show(group.layout.views(group.weight))

    def __str__(self) -> str:
        return self.kind if self.layer < 0 else f"{self.kind} of layer {self.layer}"

    @property
    def whole(self) -> bool:
        """Whether the gather group has one member, so that values stay in place."""
        return self.group.whole

    @property
    def alone(self) -> bool:
        """Whether the reduce group has one member."""
        return self._slots_of_grads is None

    @property
    def collects(self) -> bool:
        """Whether products add up gradients. See Note: [Gradients that are collected]."""
        return self.alone or self._adds

    @property
    def _grad_slots(self) -> Slots:
        assert self._slots_of_grads is not None, f"gradients of {self} need no slot"
        return self._slots_of_grads

    def _show(self, values: list[Tensor]) -> None:
        for weight, value in zip(self.weights, values, strict=True):
            weight.value = value
        self.forget_casts()

    def forget_casts(self) -> None:
        """Drop casts of values that are gone, or whose memory may be reused."""
        for weight in self.weights:
            weight.cast = None

    # Weights

    def gather_in_fp8(self, fp8: Fp8Weights, mine: Fp8Unit) -> None:
        self._fp8 = fp8, mine
        fp8.scale(self.weights, mine)

    def load(self, source: Callable[[str], Tensor]) -> None:
        """Load initial weights: `source(name)` has the local shape, or that of the whole model."""
        for i, weight in enumerate(self.weights):
            value = source(weight.name)
            if value.shape != weight.shape:
                value = take(weight.name, value, self.tensors)
            if value.shape != weight.shape:
                position, size = self.group.groups.part
                assert value.shape == (weight.shape[0] * size, *weight.shape[1:]), (
                    f"{weight.name} has shape {tuple(weight.shape)}, its initial value {tuple(value.shape)}"
                )
                value = value.chunk(size)[position]
            self.group.load(i, value)
        self.refresh()

    def refresh(self, written: bool = False) -> None:
        """After the optimizer: a new version. Copies the weights held whole, unless `written` already."""
        self.group.refresh(written)
        self.forget_casts()
        self.version += 1

    def gather(self, slot: int) -> Pending:
        """Gather the weights into a slot. Readable after the wait, until `release`."""
        slots = self._weight_slots
        assert slots is not None, f"{self} is held whole and never gathered"
        assert self.slot < 0, f"{self} is gathered into slot {slot} while it is still in slot {self.slot}"
        slots.claim(slot, self)
        buffer = slots.buffers[slot]
        if self._fp8 is not None:
            fp8, mine = self._fp8
            self._weight_views.setdefault(slot, mine.views(buffer, fp8.kept))
            self.gathering = mine.gather(buffer)
        else:
            if slot not in self._weight_views:
                self._weight_views[slot] = self.group.layout.views(buffer)
            self.gathering = self.group.gather(buffer)
        self._show(self._weight_views[slot])
        self.slot, self.gathered_version = slot, self.version
        return self.gathering

    def assert_readable(self) -> None:
        """Assert that the weights are gathered, at the latest version."""
        if self.whole:
            return
        assert self.slot >= 0, f"{self} is read while it is not gathered"
        assert self.gathered_version == self.version, (
            f"{self} is read at version {self.gathered_version}, but the weights are at version {self.version}"
        )

    def release(self) -> None:
        assert self.slot >= 0, f"{self} is released but not gathered"
        assert self._weight_slots is not None
        self._weight_slots.free(self.slot)
        self.slot = -1
        for weight in self.weights:
            weight.value = None
        self.forget_casts()

    # Gradients

    def collect(self, queue: WgradQueue, microbatch: int) -> None:
        """Add the weight gradients of a queue to this step's. See Note: [Gradients that are collected]."""
        group = self.group
        if not self._sums:
            group.make_grads()
            if self.alone:
                group.begin_sum()
            else:
                self._sum = self._new_sum()
            flat = group.main_grad if self._sum is None else self._sum
            self._sums = dict(zip(self.weights, group.layout.views(flat), strict=True))

        def target(weight: Weight) -> Tensor:
            latest = self._latest.get(weight, -1)
            assert microbatch >= latest, f"{weight.name}: the gradient of microbatch {microbatch} comes after {latest}"
            self._latest[weight] = microbatch
            return self._sums[weight]

        scale = 1.0 / group.groups.divide if self.alone else 1.0
        queue.drain(target, self._collected, group.compute_dtype, scale)

    def complete(self) -> None:
        """After a step's wgrads: zero the gradients at rest that were not collected."""
        for weight, view in self._sums.items():
            if self.alone and weight not in self._collected:
                view.zero_()

    def sum_of_step(self) -> Tensor:
        """A step's gradients at rest, after the last reduce; other holders of the unit may add theirs."""
        self.complete()
        self._collected.update(self._sums)
        return self.group.main_grad

    def grad_views(self, slot: int) -> dict[Weight, Tensor]:
        """Where to write the gradient of each weight. The slot is taken until its reduce is done.

        The first call after `forget_grads` is on the compute lane: Note: [Gradients at rest belong to the compute
        lane].
        """
        self._grad_slots.claim(slot, self)
        self.group.make_grads()
        if slot not in self._grad_views:
            views = self.group.layout.views(self._grad_slots.buffers[slot])
            self._grad_views[slot] = dict(zip(self.weights, views, strict=True))
        return self._grad_views[slot]

    def zero_missing(self, slot: int, written: Collection[Weight]) -> None:
        """Zero gradients of weights not in `written`, and padding, before `reduce`."""
        views = self.grad_views(slot)
        has = [weight in written for weight in self.weights]
        self.group.fill_gaps(self._grad_slots.buffers[slot], list(views.values()), has)

    def add(self, slot: int) -> None:
        """Add the gradient in a slot to this step's sum, and free the slot. No-op if collected."""
        if self.collects:
            return
        flat = self._flat(slot)
        if self._sum is None:
            self._sum = self._new_sum()
            self._sum.copy_(flat)
        else:
            self._sum.add_(flat)
        self._grad_slots.free(slot)

    def _flat(self, slot: int) -> Tensor:
        return self._grad_slots.buffers[slot][: self.group.layout.total]

    def _new_sum(self) -> Tensor:
        """Whole, in the dtype of the gradients at rest; these themselves if they are whole."""
        kept = self.group.main_grad
        if self.group.groups.alike > 1:
            return kept
        return torch.empty(self.group.layout.total, dtype=kept.dtype, device=kept.device)

    def reduce(self, slot: int, last: bool = False) -> Pending:
        """Reduce-scatter the gradients in a slot, divided, and add them to this step's. Frees the slot after the wait.

        The `last` of a step also all-reduces over replicas.
        """
        if self.alone:
            return self._over_replicas(Pending()) if last else Pending()
        slots = self._grad_slots
        if self._adds:
            assert self._sum is not None, f"{self} reduces what it has not collected"
            slots.claim(slot, self)
            self._flat(slot).copy_(self._sum)  # rounded once
            self.zero_missing(slot, self._collected)
        assert slots.holders[slot] is self, f"{self} reduces gradient slot {slot}, which it does not hold"
        assert slot not in self.reducing, f"{self} reduces gradient slot {slot} twice"

        def finish() -> None:
            slots.free(slot)
            self.reducing.pop(slot, None)

        if self._sum is not None and not self._adds:
            flat = self._flat(slot)
            flat.copy_(self._sum.add_(flat))  # rounded once
        pending = self.group.reduce(slots.buffers[slot])
        if last:
            pending = self._over_replicas(pending)
        if not pending.done:
            self.reducing[slot] = pending
        return pending.then(finish)

    def _over_replicas(self, reduced: Pending) -> Pending:
        """All-reduce over replicas after the reduction: in its lane, or on its wait."""
        if self.group.groups.outer.size == 1:
            return reduced
        self.complete()
        if reduced.done:
            return self.group.reduce_outer()
        return reduced.then(lambda: self.group.reduce_outer().wait())

    def rest_grads(self, held: bool = False) -> None:
        """In the step op: keep reduced gradients for the next step's update, and free the sums, unless `held` for a
        replay.
        """
        self.awaits_update = True
        if not held:
            self._forget_sums()

    def take_grads(self, held: bool = False) -> tuple[Tensor, ...]:
        """Forget the gradients and return their memory, unless they are `held` for a replay.

        The caller keeps it while a lane still reads it.
        """
        self.awaits_update = False
        if held:
            return ()
        memory = self.group.grads.memory
        self.forget_grads()
        return memory

    def keep_grads(self) -> None:
        """Before recording a step with its update: keep the gradients' memory."""
        self.group.make_grads()
        self.group.grads.stays = True
        self.awaits_update = True

    def let_grads_go(self) -> None:
        """After a recording is dropped: free gradients that wait for no update."""
        self.group.grads.stays = False
        if self.awaits_update:
            self._forget_sums()
        else:
            self.forget_grads()

    def forget_grads(self) -> None:
        """After the update, on the compute lane: free the gradients."""
        self._forget_sums()
        self.group.forget_gradients()

    def _forget_sums(self) -> None:
        self._sum, self._sums = None, {}
        self._latest.clear()
        self._collected.clear()

    # The whole

    def pieces(self) -> list[Piece]:
        """The elements on this rank, parameter by parameter, without empty pieces."""
        found = []
        for i, member in enumerate(self.group.members):
            if span := self.group.span_of(i):
                name = member.name
                shape = whole_shape(name, span.shape, self.tensors)
                shared = 1 if self.kind == "experts" else sharers_of(name, self.tensors)
                span = replace(span, shape=shape, part=part_of(name, shape, self.tensors))
                found.append(Piece(name, self.group, i, span, shared=shared))
        return found

    def assert_idle(self) -> None:
        assert self.slot < 0, f"{self} was never released from slot {self.slot}"
        assert self.gathering.done, f"the gather of {self} was never waited for"
        assert not self.reducing, f"reduces of {self} in slots {sorted(self.reducing)} were never waited for"
        held = [] if self.alone else [i for i, holder in enumerate(self._grad_slots.holders) if holder is self]
        assert not held, f"{self} wrote gradients into slots {held} that were never reduced"
        assert self.awaits_update or not self.group.has_grad, f"{self} has gradients that no step has taken"

    def abort(self) -> None:
        self.gathering = Pending()
        self.reducing.clear()
        if self.slot >= 0:
            self.release()
        self.forget_grads()
