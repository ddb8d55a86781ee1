"""Parameters of one dtype and placement: their shards, and how these are gathered and reduced.

Note: [Two levels of groups]
Weights are sharded over `W` ranks (the gather and reduce groups) and replicated `R` times (the outer group). A rank
keeps

    main       [S]    the optimizer's weights, in the main dtype
    main_grad  [S]    their gradient, the sum of reductions within the shard group, in the accumulate dtype

and once a step main_grad is all-reduced over the outer group. A gather casts main straight into this rank's places in
the buffer, and the collective completes it. main_grad exists only while there is a gradient (`ShardGrads`).
Without sharding W is 1 and parameters are bound to main, or to a copy in the compute dtype; without replicas R is 1.
Ranks that hold the same elements may also all-reduce over a larger group than they gather over; then nothing is left
for an outer group.

Note: [What the outer all-reduce adds up]
After it all replicas hold the same gradients. If more microbatches follow in the step, only the first replica keeps
them and the others start from zero, so that the next all-reduce counts every contribution once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hocket.fsdp.buffers import FullBuffer, LocalSum, ShardGrads, ShardMemory, zero_others
from hocket.fsdp.layout import FlatLayout
from hocket.fsdp.members import Member
from hocket.fsdp.options import Offload, Precision
from hocket.fsdp.shard_groups import ShardGroups
from hocket.fsdp.unused import Usage
from hocket.layers.slices import Span
from hocket.runtime.transports import Pending


class ParamGroup:
    """Parameters of equal dtype, placement and `requires_grad`. See Note: [Two levels of groups].

    Takes the values of the parameters, equal on all ranks; those on the meta device are zero until `load`.
    """

    changed_by: Callable[[int, bool], None] | None = None  # set by a unit
    extended = False
    """Whether its parameters say themselves what is gathered (`extensions.py`)."""

    def __init__(
        self,
        members: Sequence[Member],
        groups: ShardGroups,
        precision: Precision,
        device: torch.device,
        offload: Offload = "none",
        fine: bool = False,
    ) -> None:
        """`fine`: see `FlatLayout.build`."""
        assert members
        param = members[0].param
        self.members, self.groups, self.device = tuple(members), groups, device
        self.memory = ShardMemory(device, offload)
        self.formats = precision.of(param.dtype)
        self.divide = groups.divide
        """Divisor of summed gradients."""
        shapes = [(one.name, tuple(one.param.shape)) for one in members]
        self.layout = FlatLayout.build(shapes, groups.gather.size, alike=groups.alike, fine=fine)
        self.position = groups.gather.rank
        """Which of the layout's shards this rank keeps."""
        self.here = self.layout.slices(self.position)
        """What this rank keeps of each member, as ranges of its shard."""
        kept = [self.layout.local(member.name, self.position) for member in members]
        self.spans = [member.span(local.lo, local.hi) for member, local in zip(members, kept, strict=True)]
        """The same as elements of each whole parameter."""

        self.main = self.memory.zeros(self.layout.shard, self.formats.main)
        apart = self.memory.on_host or (self.whole and self.formats.main != self.formats.compute)
        self.weight = self.memory.zeros(self.layout.shard, self.formats.compute) if apart else self.main
        """What is gathered, or what parameters are bound to: `main`, or a copy where one is needed."""
        self.grads = ShardGrads(self.layout, self.formats.accumulate, self.formats.main, self.position, self.memory)
        self.settle: Callable[[], None] = lambda: None
        """Orders the caller's work after all reductions of this group."""
        self.make_grads: Callable[[], None] = self.grads.make
        """Allocates the gradients before they are reduced or set."""
        self.let_grads_go: Callable[[], None] = self.grads.let_go
        """Frees forgotten gradients, if that is safe."""
        self.locals = [self.main[here] for here in self.here]
        """The main weights here of each member, 1-D: live memory."""
        self.shards: list[Any] = []
        """`ShardedParameter`s of the members, if it belongs to a module."""
        self.shown_grads: dict[int, tuple[Tensor, Tensor]] = {}
        """By member: memory of a gradient, and the tensor that readers see."""
        for i in (i for i, member in enumerate(members) if not member.param.is_meta):
            self.load(i, members[i].param)
        self.late = self.valueless = False
        """`late`: parameters came from the meta device and get values after sharding; `valueless`: not yet."""
        self._said = 0  # explicit invalidations of main
        self._seen = -1, -1  # the edition of main at the last refresh
        self._learns = [param.requires_grad] * len(members)  # currently trained members
        self.usage = Usage(self._learns)
        self._has = [False] * len(members)  # members with a gradient in main_grad
        self._summed = True  # whether main_grad is the same on all replicas
        self.local = LocalSum(self.layout, self.formats.accumulate, device)
        """Whole gradients added up locally, not reduced yet."""
        self._reducing = self._outer = Pending()

    def __repr__(self) -> str:
        return f"ParamGroup({self.members[0].name} and {len(self.members) - 1} more)"

    def rename(self, index: int, name: str, *owners: tuple[nn.Module, str]) -> None:
        """Give a member its name in a larger model, and more places that hold it."""
        old = self.members[index]
        new = replace(old, name=name, owners=(*old.owners, *owners))
        self.members = (*self.members[:index], new, *self.members[index + 1 :])

    @property
    def learning(self) -> int:
        return sum(self._learns)

    def change(self, index: int, trains: bool) -> None:
        (self.changed_by or self.train)(index, trains)

    def train(self, index: int, trains: bool) -> None:
        self._learns[index] = trains
        self.members[index].param.requires_grad_(trains)

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.formats.compute

    @property
    def total_bytes(self) -> int:
        return self.layout.total * self.formats.compute.itemsize

    @property
    def whole(self) -> bool:
        """Whether `weight` is the whole weights, on the device, so that nothing is gathered."""
        return self.layout.world == 1 and not self.memory.on_host

    def holders(self, index: int) -> int:
        """How many ranks of the mesh hold the elements of a member that this one has."""
        alone = self.layout.world if self.layout.entries[index].is_kept_by_all else 1
        return self.groups.replicas * alone

    @functools.cached_property
    def is_divided(self) -> bool:
        """Whether tensor-parallel ranks have other parts of its parameters."""
        return any(member.dtensor is not None for member in self.members)

    @property
    def keeps_all(self) -> bool:
        """Whether this rank updates whole parameters."""
        return self.layout.world == 1 and not self.is_divided

    @property
    def nbytes(self) -> int:
        """Bytes of shards, current gradients, and locally added gradients."""
        copied = 0 if self.weight is self.main else self.weight.nbytes
        return self.main.nbytes + copied + self.grads.nbytes + self.local.nbytes

    def span_of(self, index: int) -> Span:
        """Which elements of the whole model's parameter this rank has of a member."""
        position, parts = self.groups.part
        span = self.spans[index]
        shape, before = span.shape, position * math.prod(span.shape)
        if parts == 1:
            return span
        whole = (shape[0] * parts, *shape[1:]) if shape else (parts,)
        return Span(whole, before + span.lo, before + span.hi)

    # Weights

    @torch.no_grad()
    def load(self, index: int, value: Tensor) -> None:
        span = self.spans[index]
        self.locals[index].copy_(value.detach().reshape(-1)[span.lo : span.hi])

    def new_buffer(self) -> FullBuffer:
        """For its gathered weights."""
        return FullBuffer(self.layout.total, self.compute_dtype, self.device)

    def bind(self, flat: Tensor) -> None:
        """Make the full parameters views of `flat[:total]`, or of `weight` if the group is held whole.

        `flat` must be allocated. The parameters must be unused, also by autograd.
        """
        flat = self.weight if self.whole else flat[: self.layout.total]
        for member, view in zip(self.members, self.layout.views(flat), strict=True):
            member.param.data = view  # has its own version counter: gathers don't count as changes

    @property
    def edition(self) -> tuple[int, int]:
        """Version of `main`. See Note: [Changes of weights are noticed]."""
        return self.main._version, self._said

    def stale(self) -> bool:
        return self.edition != self._seen

    def invalidate(self) -> None:
        """Declare that `main` has changed without autograd's version counter."""
        self._said += 1

    @torch.no_grad()
    def refresh(self, written: bool = False) -> None:
        """Update `weight` from `main`, unless `written` already. Gathered weights are stale now."""
        self._seen = self.edition
        if self.weight is not self.main and not written:
            self.memory.wait_for_copies_out()
            self.weight.copy_(self.main)

    def gather(self, flat: Tensor) -> Pending:
        mine = self.memory.on_device(self.weight)
        return self.groups.gather.all_gather(flat[: self.layout.total], mine, self.layout.pieces)

    # Gradients on their way

    @property
    def main_grad(self) -> Tensor:
        """The allocated gradients of this rank's shards."""
        assert self.grads.flat is not None
        return self.grads.flat

    def fill_gaps(self, flat: Tensor, views: Sequence[Tensor], written: Sequence[bool]) -> None:
        """Zero unwritten `views` and the padding of a buffer before its reduction."""
        for view, has in zip(views, written, strict=True):
            if not has:
                view.zero_()
        for lo, hi in self.layout.gaps:
            flat[lo:hi].zero_()

    def reduce(self, flat: Tensor) -> Pending:
        """Add the scaled sum of all ranks' `flat[:total]` to `main_grad`, overwriting forgotten members.

        Call `fill_gaps` and `make_grads` before. `flat` may be reused after the wait.
        """
        assert self.grads.flat is not None, f"{self} is frozen, or has no memory for its gradients"
        self._reducing.wait()  # in order, where collectives are pending
        self._outer.wait()
        flat = flat[: self.layout.total]
        for entry in (entry for entry in self.layout.entries if entry.is_kept_by_all):
            flat[entry.offset + 1 : entry.offset + self.layout.world] = flat[entry.offset]
        # Overwrite if all was forgotten, or only the first replica keeps it; see Note: [What the outer all-reduce
        # adds up].
        add = self.has_grad and not (self._summed and self.groups.outer.rank > 0)
        if add:
            self.tidy()
        self.grads.drop()
        self._has = [has or learns for has, learns in zip(self._has, self._learns, strict=True)]
        self._summed = False
        group, scale = self.groups.reduce, 1.0 / self.divide

        def reduce(to: Tensor, add: bool) -> Pending:
            if self.groups.alike > 1:
                return group.all_sum(flat, to, scale, add)
            return group.reduce_sum(flat, to, scale, add, self.layout.pieces)

        self._reducing = self.memory.reduced(self.main_grad, add, reduce)
        return self._reducing

    def begin_sum(self) -> None:
        """Declare that the caller writes whole gradients to `main_grad` from now on, in a group of one."""
        assert self.keeps_all
        assert self.groups.reduce.size == 1
        self.grads.drop()
        self._has = [True] * len(self.members)
        self._summed = False

    def reduce_outer(self) -> Pending:
        """All-reduce over replicas, once a step; no-op if already summed."""
        self._reducing.wait()
        self._outer.wait()
        if self._summed or self.groups.outer.size == 1:
            return Pending()
        self._summed = True
        self._outer = self.memory.reduced(self.main_grad, True, lambda into, _: self.groups.outer.all_reduce(into))
        return self._outer

    def tidy(self) -> None:
        """Make `main_grad` what readers see, with zeros for forgotten gradients."""
        self.grads.take_back()
        if not all(self._has):
            self.memory.wait_for_copies_in()
        zero_others(self.main_grad, self.here, self._has)

    # Gradients of the shards

    @property
    def has_grad(self) -> bool:
        return any(self._has)

    def grad_of(self, index: int) -> Tensor | None:
        """The gradient here of a member, 1-D, after all reductions; None without one."""
        self.settle()
        if not self._has[index] or self.usage.unused_by_all(index):
            return None
        return self.grads.views()[index]

    def forget(self, index: int) -> None:
        """Drop the gradient of a member: the next reduction overwrites it."""
        self._has[index] = False
        self.local.has[index] = False
        self.usage.forget(index)
        if not self.has_grad:
            self._let_go()

    def set_grad(self, index: int, value: Tensor) -> None:
        """Copy a 1-D tensor to the gradient here of a member."""
        if not self._learns[index]:
            raise ValueError(f"{self.members[index].name} is frozen and has no gradient: set it to None only")
        self.settle()
        self.make_grads()
        with torch.no_grad():
            if not self.has_grad:
                self.main_grad.zero_()  # padding too
            view = self.grads.views()[index]
            if view.data_ptr() != value.data_ptr() or view.dtype != value.dtype:
                view.copy_(value)
        self._has[index] = True
        self.usage.add(index)

    def forget_gradients(self) -> None:
        for index in range(len(self.members)):
            self.usage.forget(index)
        self._reducing = self._outer = Pending()
        self._has = [False] * len(self.members)
        self._summed = True
        self.local.clear()
        self._let_go()

    def _let_go(self) -> None:
        if self.grads.flat is not None:
            self.let_grads_go()
        if self.grads.flat is None:
            self.shown_grads.clear()  # they hold the memory too
