"""The bytes of a unit: parameters of one dtype and placement, their shards, and how these are gathered and reduced.

Note: [Two levels of groups]
Weights are sharded over `W` ranks (the gather and reduce groups) and replicated `R` times (the outer group). This rank
keeps for good

    main       [S]    what the optimizer updates, in the main dtype
    main_grad  [S]    its gradient, where reductions within the shard group add up, in the accumulate dtype

and once a step main_grad is all-reduced over the outer group. There is no copy of main in the compute dtype: a gather
casts main straight to this rank's place among the gathered weights, and the collective completes them in place. And
main_grad is there only while there is a gradient (`ShardGrads`).

With an outer group that shards too, main and main_grad have S/R elements: part r of

    weight     [S]    what is gathered, in the compute dtype
    partial    [S]    where the reduction within a shard group adds up, in the accumulate dtype

Then weight is gathered from main over the outer group after an update, and partial is reduce-scattered into main_grad.
Without sharding W is 1, and parameters are bound to weight. Without replicas R is 1. Ranks that are all alike may also
reduce over a group that is larger than the one they gather over: then each gets the whole sum, and nothing is left for
an outer group. There are no other cases.

Note: [What the outer all-reduce adds up]
After it all replicas hold the same gradients. If more microbatches follow in the same step, only the first replica
keeps them, the others start from zero: so every contribution is in exactly one copy, and the next all-reduce is exact.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hocket.fsdp.dtensors import over
from hocket.fsdp.layout import FlatLayout
from hocket.fsdp.members import Member
from hocket.fsdp.options import Offload, Precision
from hocket.fsdp.part import Ask, How, Part, Place
from hocket.fsdp.shard_grads import LocalSum, ShardGrads, ShardMemory, Usage, zero_others
from hocket.fsdp.shard_groups import ShardGroups
from hocket.fsdp.sharded_parameter import ShardedParameter
from hocket.layers.slices import Span
from hocket.runtime.transports import Pending


class ParamGroup:
    """Parameters that are alike in dtype, placement and `requires_grad`. See Note: [Two levels of groups].

    Takes over the values of the parameters, all ranks the same ones; those on the meta device are zero until `load`.
    """

    changed_by: Callable[[int, bool], None] | None = None  # where a unit has more to do

    def __init__(
        self,
        members: Sequence[Member],
        groups: ShardGroups,
        precision: Precision,
        device: torch.device,
        offload: Offload = "none",
    ) -> None:
        assert members
        param = members[0].param
        self.members, self.groups, self.device = tuple(members), groups, device
        self.memory = ShardMemory(device, offload)
        self.trainable = param.requires_grad
        self.formats = precision.of(param.dtype)
        self.divide = groups.divide
        """Summed gradients are divided by this."""
        inner, outer = groups.gather, groups.outer
        parts = outer.size if groups.outer_shards else 1
        shapes = [(one.name, tuple(one.param.shape)) for one in members]
        shared = FlatLayout.build(shapes, inner.size * parts * groups.alike)
        self.shard_layout = shared.joined(groups.alike)
        """Which elements are this rank's to update: shard number `position`."""
        self.position = inner.rank * parts + (outer.rank if groups.outer_shards else 0)
        self.layout = self.shard_layout.joined(parts)
        """Which elements are in this rank's `weight`."""

        self.main = self.memory.zeros(self.shard_layout.shard, self.formats.main)
        apart = groups.outer_shards or self.memory.on_host or (self.whole and self.formats.main != self.formats.compute)
        self.weight = (
            self.memory.zeros(self.layout.shard, self.formats.compute, groups.outer_shards) if apart else self.main
        )
        """What is gathered, or what parameters are bound to: `main`, or a copy of it where one is needed."""
        ranges = self.shard_layout.slices(self.position)
        self.grads = ShardGrads(
            self.shard_layout.shard, self.formats.accumulate, self.formats.main, ranges, self.memory
        )
        self._partial = self._new_partial() if self.trainable else None
        self.settle: Callable[[], None] = lambda: None
        """Has the caller's work come behind all reductions of this group."""
        self.make_grads: Callable[[], None] = self.grads.make
        """Gets the memory of the gradients, if it is not there: called before they are reduced or set."""
        self.let_grads_go: Callable[[], None] = self.grads.let_go
        """Called when all gradients have been forgotten: gives their memory back if that is safe."""
        self._ask: Ask | None = None
        self._parts: dict[int, tuple[Tensor, Part]] = {}  # what readers of gradients see, beside their memory
        self.shards = self._make_shards()
        for i in (i for i, member in enumerate(members) if not member.param.is_meta):
            self.load(i, members[i].param)
        self.late = self.valueless = False
        """Whether parameters came from the meta device, to get values after they are sharded; whether none came yet."""
        self._said = 0  # how often somebody said that main has changed
        self._seen = -1, -1  # the edition of main at the last refresh
        self._learns = [self.trainable] * len(members)  # what is trained now
        self.usage = Usage(self._learns)
        self._has = [False] * len(members)  # whether main_grad holds a gradient of the member
        self._partial_has = [True] * len(members)  # False: partial holds something that was forgotten
        self._summed = True  # whether partial is the same on all replicas
        self.local = LocalSum(self.layout, self.formats.accumulate, device)
        """Gradients that are added up whole, and that no reduction has included yet."""
        self._reducing = self._outer = self._refreshing = Pending()

    def __repr__(self) -> str:
        return f"ParamGroup({self.members[0].name} and {len(self.members) - 1} more)"

    def _make_shards(self) -> list[ShardedParameter]:
        shards = []
        for i, (member, here) in enumerate(zip(self.members, self.shard_layout.slices(self.position), strict=True)):
            shard = ShardedParameter(self.main[here], self.trainable)
            local = self.shard_layout.local(member.name, self.position)
            shard.full_name, shard.full_shape, shard.position = member.name, member.shape, i
            shard.span = member.span(local.lo, local.hi)
            shard.join(self)
            shards.append(shard)
        return shards

    def rename(self, index: int, name: str, *owners: tuple[nn.Module, str]) -> None:
        """Give a member the name that it has in a larger model, and further places that hold it."""
        old = self.members[index]
        new = replace(old, name=name, owners=(*old.owners, *owners))
        self.members = (*self.members[:index], new, *self.members[index + 1 :])
        self.shards[index].full_name = name
        self.shards[index].place = self._place_of(self.shards[index])
        self._parts.clear()

    def know_wholes(self, ask: Ask) -> None:
        """Have shards know of what they are parts. `ask` is of all ranks. See Note: [A part knows its whole]."""
        self._ask = ask
        self._parts.clear()
        for shard in self.shards:
            shard.place = self._place_of(shard)

    def _place_of(self, shard: ShardedParameter) -> Place | None:
        if self._ask is None or self.keeps_all:
            return None
        group, dtensor = weakref.ref(self), self.members[shard.position].dtensor

        def ask(value: Tensor, how: How) -> None:
            mine = group()
            if mine is not None and mine._ask is not None:
                mine._ask(value, how)
            if dtensor is not None and dtensor.part is not None:
                over(dtensor.mesh, value, how)

        return Place(shard.full_name, shard.span, ask)

    @property
    def learning(self) -> int:
        """How many members are trained now."""
        return sum(self._learns)

    def change(self, index: int, trains: bool) -> None:
        """What `shards[index].requires_grad_(trains)` does."""
        (self.changed_by or self.train)(index, trains)

    def train(self, index: int, trains: bool) -> None:
        self._learns[index] = trains
        self.members[index].param.requires_grad_(trains)
        if trains and self._partial is None:
            self._partial = self._new_partial()

    def _new_partial(self) -> Tensor | None:
        if not self.groups.outer_shards:
            return None
        return torch.zeros(self.layout.shard, dtype=self.formats.accumulate, device=self.device)

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.formats.compute

    @property
    def total_bytes(self) -> int:
        """Bytes of the full weights."""
        return self.layout.total * self.formats.compute.itemsize

    @property
    def whole(self) -> bool:
        """Whether the weights lie whole in `weight`, on the device, and there is nothing to gather."""
        return self.layout.world == 1 and not self.memory.on_host

    @functools.cached_property
    def is_divided(self) -> bool:
        """Whether tensor-parallel ranks have other parts of its parameters."""
        return any(member.dtensor is not None for member in self.members)

    @property
    def keeps_all(self) -> bool:
        """Whether this rank updates whole parameters, not a part of them."""
        return self.shard_layout.world == 1 and not self.is_divided

    @property
    def nbytes(self) -> int:
        """Bytes that this rank keeps: its shards, gradients while there are any, and those added up locally."""
        kept = {id(tensor): tensor.nbytes for tensor in (self.main, self.weight, self._partial) if tensor is not None}
        return sum(kept.values()) + self.grads.nbytes + self.local.nbytes

    def span_of(self, shard: ShardedParameter) -> Span:
        """Which elements of a parameter of the whole model a shard has."""
        position, parts = self.groups.part
        shape, before = shard.span.shape, position * math.prod(shard.span.shape)
        if parts == 1:
            return shard.span
        whole = (shape[0] * parts, *shape[1:]) if shape else (parts,)
        return Span(whole, before + shard.lo, before + shard.hi)

    # Weights

    @torch.no_grad()
    def load(self, index: int, value: Tensor) -> None:
        """Take the whole value of a member."""
        shard = self.shards[index]
        shard.to_local().copy_(value.detach().reshape(-1)[shard.lo : shard.hi])

    def bind(self, flat: Tensor) -> None:
        """Make the data of the full parameters views of `flat[:total]`, or of `weight` if the group is held whole.

        `flat` must have its memory now. Nothing may use the parameters meanwhile, and autograd may hold none of them.
        """
        flat = self.weight if self.whole else flat[: self.layout.total]
        for member, view in zip(self.members, self.layout.views(flat), strict=True):
            member.param.data = view  # with versions of its own: a gather changes nothing that autograd has saved

    @property
    def edition(self) -> tuple[int, int]:
        """Of `main`: a new one after every change. See Note: [Changes of weights are noticed]."""
        return self.main._version, self._said

    def stale(self) -> bool:
        """Whether `main` has changed since the last refresh."""
        return self.edition != self._seen

    def invalidate(self) -> None:
        """Say that `main` has changed, for those who changed it behind autograd's back."""
        self._said += 1

    @torch.no_grad()
    def refresh(self, written: bool = False) -> Pending | None:
        """Bring what the optimizer wrote to where it is gathered from, unless it has. Gathered weights are old now."""
        self._seen = self.edition
        if not self.groups.outer_shards:
            if self.weight is not self.main and not written:
                self.memory.wait_for_copies_out()
                self.weight.copy_(self.main)
            return None
        mine = self.memory.on_device(self.main, self.formats.compute)
        self._refreshing = self.groups.outer_gather.all_gather(self.weight, mine)
        return self._refreshing.then(lambda: mine.numel())

    def gather(self, flat: Tensor) -> Pending:
        """Fill `flat[:total]` with the weights of all ranks."""
        self._refreshing.wait()
        mine = flat[self.layout.shard * self.groups.gather.rank :][: self.layout.shard]
        self.memory.copy_to_device(self.weight, mine)
        return self.groups.gather.all_gather(flat[: self.layout.total], mine)

    # Gradients on their way

    @property
    def main_grad(self) -> Tensor:
        """The gradients of this rank's shards, which are there."""
        assert self.grads.flat is not None
        return self.grads.flat

    @property
    def partial(self) -> Tensor:
        """See Note: [Two levels of groups]."""
        return self.main_grad if self._partial is None else self._partial

    def fill_gaps(self, flat: Tensor, views: Sequence[Tensor], written: Sequence[bool]) -> None:
        """Zero what nobody wrote to the `views` of a buffer that is about to be reduced, and its padding."""
        for view, has in zip(views, written, strict=True):
            if not has:
                view.zero_()
        for lo, hi in self.layout.gaps:
            flat[lo:hi].zero_()

    def reduce(self, flat: Tensor) -> Pending:
        """Add the scaled sum of all ranks' `flat[:total]` to `partial`; members that were forgotten are overwritten.

        The caller has called `fill_gaps` and `make_grads`. `flat` may be written again after the wait.
        """
        assert self.grads.flat is not None, f"{self} is frozen, or has no memory for its gradients"
        self._reducing.wait()  # in order, where a collective is under way until somebody waits
        self._outer.wait()
        flat = flat[: self.layout.total]
        add = True
        if self.groups.outer_shards:
            self._make_room_in_partial()
        else:
            # Nothing to add to: all was forgotten, or only the first replica keeps it; see
            # Note: [What the outer all-reduce adds up].
            add = self.has_grad and not (self._summed and self.groups.outer.rank > 0)
            if add:
                self.tidy()
            self.grads.drop()
            self._has = self._have_now()
        self._summed = False
        call = self.groups.reduce.all_sum if self.groups.alike > 1 else self.groups.reduce.reduce_sum
        self._reducing = self.memory.reduced(self.partial, add, lambda to, add: call(flat, to, 1.0 / self.divide, add))
        return self._reducing

    def begin_sum(self) -> None:
        """Say that gradients are written to `main_grad` from now on, whole, by the caller: there is nobody to ask."""
        assert self.keeps_all
        assert self.groups.reduce.size == 1
        for lo, hi in self.layout.gaps:
            self.main_grad[lo:hi].zero_()
        self.grads.drop()
        self._has = [True] * len(self.members)
        self._summed = False

    def reduce_outer(self) -> Pending:
        """Add up what the replicas have reduced, once a step. Nothing to add up is nothing to do."""
        self._reducing.wait()
        self._outer.wait()
        if self._summed or self.groups.outer.size == 1:
            return Pending()
        self._summed = True
        if not self.groups.outer_shards:
            self._outer = self.memory.reduced(self.partial, True, lambda into, _: self.groups.outer.all_reduce(into))
            return self._outer
        add = self.has_grad
        if add:
            self.tidy()
        self.grads.drop()
        new = [learns and has for learns, has in zip(self._learns, self._partial_has, strict=True)]
        self._has = [before or new for before, new in zip(self._has, new, strict=True)]
        self._make_room_in_partial()
        outer, partial = self.groups.outer, self.partial
        adding = self.memory.reduced(self.main_grad, add, lambda to, add: outer.reduce_sum(partial, to, 1.0, add))
        self._outer = adding.then(partial.zero_)
        return self._outer

    def _have_now(self) -> list[bool]:
        """Whether there is a gradient of each member once all that are trained were reduced."""
        return [has or learns for has, learns in zip(self._has, self._learns, strict=True)]

    def tidy(self) -> None:
        """Have `main_grad` hold what readers see, and zeros for the gradients that were forgotten."""
        self.grads.take_back()
        if not all(self._has):
            self.memory.wait_for_copies_in()
        zero_others(self.main_grad, self.shard_layout.slices(self.position), self._has)

    def _make_room_in_partial(self) -> None:
        """Where partial is not the gradient itself: zero what was forgotten between two reductions of one step."""
        zero_others(self.partial, self.layout.slices(self.groups.gather.rank), self._partial_has)
        self._partial_has = [True] * len(self.members)

    # Gradients of the shards

    @property
    def has_grad(self) -> bool:
        """Whether any shard has a gradient."""
        return any(self._has)

    def grad_of(self, index: int) -> Tensor | None:
        """What `shards[index].grad` is."""
        self.settle()
        if not self.trainable or not self._has[index] or self.usage.unused_by_all(index):
            return None
        view, place = self.grads.views()[index], self.shards[index].place
        if place is None:
            return view
        if index not in self._parts or self._parts[index][0] is not view:
            self._parts[index] = view, Part.of(view, place)
        return self._parts[index][1]

    def forget(self, index: int) -> None:
        """What setting `shards[index].grad` to None does: the next reduction overwrites it."""
        self._has[index] = self._partial_has[index] = False
        self.local.forget(index)
        self.usage.forget(index)
        if not self.has_grad:
            self._let_go()

    def set_grad(self, index: int, value: Tensor) -> None:
        """What setting `shards[index].grad` to a tensor does: its values are copied."""
        if not self.trainable:
            raise ValueError(f"{self.members[index].name} is frozen and has no gradient: set it to None only")
        value = (shard := self.shards[index]).elements("grad", value)
        if value.shape != (shard.hi - shard.lo,):
            raise ValueError(
                f"a gradient of shape {tuple(value.shape)} does not fit the shard of {shard.full_name} on this rank, "
                f"which has {(shard.hi - shard.lo,)}"
            )
        self.settle()
        self.make_grads()
        with torch.no_grad():
            if not self.has_grad:
                self.main_grad.zero_()  # padding too, which no reduction has written
            view = self.grads.views()[index]
            if view.data_ptr() != value.data_ptr() or view.dtype != value.dtype:
                view.copy_(value)
        self._has[index] = True
        self.usage.add(index)

    def forget_gradients(self) -> None:
        """Forget all gradients, also those that are not reduced yet."""
        for index in range(len(self.members)):
            self.usage.forget(index)
        self._reducing = self._outer = Pending()
        self._has = [False] * len(self.members)
        self._partial_has = [True] * len(self.members)
        self._summed = True
        self.local.clear()
        if self._partial is not None:
            self._partial.zero_()
        self._let_go()

    def _let_go(self) -> None:
        """Nobody has a gradient any more: give their memory back, if that is safe."""
        if self.grads.flat is not None:
            self.let_grads_go()
        if self.grads.flat is None:
            self._parts.clear()  # which hold the memory too
