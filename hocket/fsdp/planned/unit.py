"""A unit under a plan: which slots hold its full weights and gradients, and who still reads them.

Its bytes are a `ParamGroup`, as without a plan. What a plan adds is here: slots by number, `Weight`s that point
to where values lie at this moment, and views by slot for weight gradients to be written to. There are no phases: the
state of a unit is the slot that holds its gathered weights, at which version they were gathered, and which gradient
slots it writes. So any number of microbatches may be inside, and weights of before the last optimizer step
cannot be read by mistake.

Note: [Gradients at rest belong to the compute lane]
The memory of a unit's reduced gradients is made by the step's first wgrad op of the unit and goes with the step op.
Both are on the compute lane, and so are activations, which have that memory in between; nobody calls `record_stream`.
For the allocator hands memory on in the order of the stream that made it, as soon as the host has let go of it, and
what the reduce lane does to it lies in between in that order too:

- A reduce comes after the wgrads of its microbatch (invariant 5), so after the unit's first one of the step, and so
  after all that the compute lane did in that memory before it was the gradients'. What other lanes read there is over
  as well: a value is dropped by the lane that made it, behind all readers (invariant 6).
- The step comes after all reduces (invariant 5), and is on the compute lane. So what the compute lane does there next
  comes after the last reduce and after the optimizer.
- If updates are left to the next step, gradients are read on the update lane. So the unit's update op does not let the
  memory go, but hands it over as its value, and the compute lane drops that behind the op, as it drops all that it has
  made (invariant 6): with the unit's first forward at the latest. The next gradient has memory of its own, and comes
  behind that forward (invariant 7).

The sum of a unit whose gradients stay whole until the last microbatch is held in the same way: made by the unit's
first wgrad, or add, read by its reduce, gone with the step, wherever the update is.

After an exception no op says so. Then the caller's stream waits for all lanes, and the next step's lanes for that.

Note: [Gradients that are collected]
Where gradients of several microbatches are added up on this rank, the products that make them do it, on the compute
lane: nothing of them is written, read and rounded before the sum, but on CPUs, which have no such product. The order of
the sum is that of the microbatches, since a part's wgrad ops have it (invariant 9). There are two cases. In a group of
one, as that of experts where each rank has its own (ep = dp * tp), gradients are collected at rest, divided, so there
are no slots, and a reduce has nothing to do. Where a step's gradients stay whole until the last microbatch, they are
collected in their sum: adds have nothing to do, and the reduce sends the sum, rounded into its slot.

A rank that has a tied embedding and its head has two gradients of it in a microbatch, which are added up before they
are added to others. So they go through a slot all the same.

Note: [Slots]
All slots are allocated once, and nothing else of full size ever exists. So the memory of sharded training is
`count * length` per class of units, by construction: a plan that needs more slots says so before it runs, and an op
that would need a slot in use is a mistake in the plan, reported with both units' names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.fsdp.param_group import ParamGroup
from hocket.fsdp.planned.fp8_weights import Fp8Unit, Fp8Weights
from hocket.fsdp.sharded_parameter import ShardedParameter
from hocket.layers.slices import ALONE, Part, TensorRank, part_of, sharers_of, take, whole_shape
from hocket.program.ops import Unit as UnitKind
from hocket.runtime.comm import Pending
from hocket.runtime.weights import Weight, WgradQueue, manage


class Slots:
    """`count` flat buffers of `length` elements for one class of units. A unit uses the front of a slot."""

    def __init__(
        self, name: str, count: int, length: int, dtype: torch.dtype, device: torch.device, fp8: bool = False
    ) -> None:
        """With `fp8`, what is in them at first are numbers in fp8."""
        self.name = name
        # Normal numbers, so that a run without communication computes on something like weights.
        filled = torch.empty(count, length, dtype=dtype, device=device).normal_(std=0.02)
        if fp8:
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


@dataclass(frozen=True)
class Piece:
    """What this rank keeps of a parameter: elements `lo:hi` of the whole model's, or of a `part` of it, flattened."""

    name: str
    shape: tuple[int, ...]
    """Shape of the parameter in the whole model; for experts, with the experts of all ranks."""
    lo: int
    hi: int
    shard: ShardedParameter
    part: Part | None = None
    """The part that the tensor-parallel rank has."""
    shared: int = 1
    """Tensor-parallel ranks that have these elements, neighbours, each with a gradient of its own tokens or heads."""

    @property
    def main(self) -> Tensor:
        """What the optimizer updates: fp32, 1-D, the unit's own memory."""
        return self.shard.detach()

    @property
    def grad(self) -> Tensor:
        """Its reduced gradient, fp32, 1-D; there is one between a reduce and the step."""
        grad = self.shard.grad
        assert grad is not None, f"{self.name} has no gradient"
        return grad


class PlannedUnit:
    """One unit of one layer on one rank."""

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
        """Slots are None where the group has one member that gathers weights, or the one that reduces gradients.

        With `adds`, gradients stay whole until a step's last microbatch.
        """
        self.copies = 1
        """Pipeline ranks that have the unit."""
        self.kind, self.layer, self.group, self.tensors = kind, layer, group, tensors
        self.weights = tuple(manage(member.param, member.name) for member in group.members)
        self._weight_slots, self._slots_of_grads, self._adds = weight_slots, grad_slots, adds
        self._fp8: tuple[Fp8Weights, Fp8Unit] | None = None
        self.slot = -1
        """The weight slot that holds the gathered weights; -1 means that they are not gathered."""
        self.version = 0
        """Grows with every optimizer step."""
        self.gathered_version = -1
        self.gathering = Pending()
        self.reducing: dict[int, Pending] = {}
        self.awaits_update = False
        """Whether its gradients are a whole step's, and rest until the next step begins with the update."""
        self._sum: Tensor | None = None  # of this step's gradients so far, whole; see `add`
        self._weight_views: dict[int, list[Tensor]] = {}
        self._grad_views: dict[int, dict[Weight, Tensor]] = {}
        self._sums: dict[Weight, Tensor] = {}  # where they are added up; see `collect`
        self._collected: set[Weight] = set()
        self._latest: dict[Weight, int] = {}  # the microbatch that was collected last
        if self.whole:
            self._show(group.layout.views(group.weight))

    def __str__(self) -> str:
        return self.kind if self.layer < 0 else f"{self.kind} of layer {self.layer}"

    @property
    def whole(self) -> bool:
        """Whether this rank holds the unit whole: its group has one member, and its values stay where they are."""
        return self.group.whole

    @property
    def alone(self) -> bool:
        """Whether gradients are reduced over this rank alone."""
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
        """What was made of values that are no more, or that memory may be given back."""
        for weight in self.weights:
            weight.cast = None

    # Weights

    def gather_in_fp8(self, fp8: Fp8Weights, mine: Fp8Unit) -> None:
        """Gather what `mine` casts from now on."""
        self._fp8 = fp8, mine
        fp8.scale(self.weights, mine)

    def load(self, source: Callable[[str], Tensor]) -> None:
        """Take the initial weights: `source(name)` has the parameter's local shape, or that of the whole model."""
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
        """After the optimizer: what is gathered from now on has a new version, and what is held whole has one now.

        Unless it has `written` that.
        """
        self.group.refresh(written)
        self.forget_casts()
        self.version += 1

    def gather(self, slot: int) -> Pending:
        """Gather the weights into a slot. The values may be read after the wait, until `release`."""
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
        """Assert that the weights are here, and not those of before the last optimizer step."""
        if self.whole:
            return
        assert self.slot >= 0, f"{self} is read while it is not gathered"
        assert self.gathered_version == self.version, (
            f"{self} is read at version {self.gathered_version}, but the weights are at version {self.version}"
        )

    def release(self) -> None:
        """Nobody reads them any more: the slot is free and the values are gone."""
        assert self.slot >= 0, f"{self} is released but not gathered"
        assert self._weight_slots is not None
        self._weight_slots.free(self.slot)
        self.slot = -1
        for weight in self.weights:
            weight.value = None
        self.forget_casts()

    # Gradients

    def collect(self, queue: WgradQueue, microbatch: int) -> None:
        """Add the weight gradients that a queue computes to this step's. See Note: [Gradients that are collected]."""
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
            assert microbatch >= latest, f"{weight.name}: the gradient of microbatch {microbatch} comes behind {latest}"
            self._latest[weight] = microbatch
            return self._sums[weight]

        scale = 1.0 / group.groups.divide if self.alone else 1.0
        queue.drain(target, self._collected, group.compute_dtype, scale)

    def complete(self) -> None:
        """Behind all of a step: zero the gradients at rest that nobody has collected."""
        for weight, view in self._sums.items():
            if self.alone and weight not in self._collected:
                view.zero_()

    def sum_of_step(self) -> Tensor:
        """All of a step's gradients at rest, behind the last reduce; who has the unit too may add its own."""
        self.complete()
        self._collected.update(self._sums)
        return self.group.main_grad

    def grad_views(self, slot: int) -> dict[Weight, Tensor]:
        """Where to write the gradient of each weight. The slot is taken until its reduce is done.

        The first call after `forget_grads` is the compute lane's: Note: [Gradients at rest belong to the compute lane].
        """
        self._grad_slots.claim(slot, self)
        self.group.make_grads()
        if slot not in self._grad_views:
            views = self.group.layout.views(self._grad_slots.buffers[slot])
            self._grad_views[slot] = dict(zip(self.weights, views, strict=True))
        return self._grad_views[slot]

    def zero_missing(self, slot: int, written: Collection[Weight]) -> None:
        """Zero what nobody wrote: gradients of weights that are not in `written`, and padding. Call before `reduce`."""
        views = self.grad_views(slot)
        has = [weight in written for weight in self.weights]
        self.group.fill_gaps(self._grad_slots.buffers[slot], list(views.values()), has)

    def add(self, slot: int) -> None:
        """Add a gradient in a slot to the sum of this step's earlier ones, which the reduce takes in. Frees the slot.

        What is collected has been added.
        """
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
        """Whole, in the dtype in which gradients are kept; where those are whole themselves, in their place."""
        kept = self.group.main_grad
        if self.group.groups.alike > 1:
            return kept
        return torch.empty(self.group.layout.total, dtype=kept.dtype, device=kept.device)

    @property
    def sum_bytes(self) -> int:
        """Bytes of what adds have summed up, where that is not in the place of the gradients."""
        return 0 if self._sum is None or self._sum is self.group.grads.flat else self._sum.nbytes

    def reduce(self, slot: int, last: bool = False) -> Pending:
        """Add the sum of all ranks' gradients in a slot, divided, to this step's. The slot is free after the wait.

        Behind the `last` of a step, those of replicas of the weights are added up.
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
        """Sum this rank's gradients over replicas behind their reduction: in its lane, or when it is waited for."""
        if self.group.groups.outer.size == 1:
            return reduced
        self.complete()
        if reduced.done:
            return self.group.reduce_outer()
        return reduced.then(lambda: self.group.reduce_outer().wait())

    def rest_grads(self, held: bool = False) -> None:
        """In the step op: reduced gradients stay for the next step's update, and what they were added up in goes.

        Where they are `held`, a replay adds up in the same place.
        """
        self.awaits_update = True
        if not held:
            self._forget_sums()

    def take_grads(self, held: bool = False) -> tuple[Tensor, ...]:
        """The memory of gradients that no one needs any more, unless they are `held` for a replay to write them.

        The caller keeps it while a lane still reads it.
        """
        self.awaits_update = False
        if held:
            return ()
        memory = self.group.grads.memory
        self.forget_grads()
        return memory

    def keep_grads(self) -> None:
        """Before a step is recorded with its update: what the update reads is where the step writes gradients."""
        self.group.make_grads()
        self.group.grads.stays = True
        self.awaits_update = True

    def let_grads_go(self) -> None:
        """Once a recording is dropped: gradients that wait for their update stay, all others go."""
        self.group.grads.stays = False
        if self.awaits_update:
            self._forget_sums()
        else:
            self.forget_grads()

    def forget_grads(self) -> None:
        """After the optimizer has read them, on the compute lane: the next step's gradients begin anew."""
        self._forget_sums()
        self.group.forget_gradients()

    def _forget_sums(self) -> None:
        self._sum, self._sums = None, {}
        self._latest.clear()
        self._collected.clear()

    # The whole

    def pieces(self) -> list[Piece]:
        """What this rank keeps, parameter by parameter; parameters of which it keeps nothing are left out."""
        found = []
        for shard in self.group.shards:
            if span := self.group.span_of(shard):
                name = shard.full_name
                shape = whole_shape(name, span.shape, self.tensors)
                shared = 1 if self.kind == "experts" else sharers_of(name, self.tensors)
                part = part_of(name, shape, self.tensors)
                found.append(Piece(name, shape, span.lo, span.hi, shard, part, shared))
        return found

    def assert_idle(self) -> None:
        """Assert that no slot, no collective and no gradient of this unit is left."""
        assert self.slot < 0, f"{self} was never released from slot {self.slot}"
        assert self.gathering.done, f"the gather of {self} was never waited for"
        assert not self.reducing, f"reduces of {self} in slots {sorted(self.reducing)} were never waited for"
        held = [] if self.alone else [i for i, holder in enumerate(self._grad_slots.holders) if holder is self]
        assert not held, f"{self} wrote gradients into slots {held} that were never reduced"
        assert self.awaits_update or not self.group.has_grad, f"{self} has gradients that no step has taken"

    def abort(self) -> None:
        """Forget gathered weights and gradients of an interrupted step."""
        self.gathering = Pending()
        self.reducing.clear()
        if self.slot >= 0:
            self.release()
        self.forget_grads()
