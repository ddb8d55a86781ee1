"""A unit of a sharded module: parameters that are gathered and reduced together.

A unit has no phases. Its state is the number of claims on its gathered weights, their version, and the staged
gradients. So several microbatches may be inside, in forward and backward at once, and stale weights can't be read.

Note: [The five calls]
A driver, hooks or a schedule, makes five calls. `acquire` claims the weights and starts their gather if needed; it
never waits. `Claim.wait` precedes the first read. `Claim.release` follows the last read: of forward, or of the *input*
gradient, since weight gradients need no weights. `grad_ready` takes over a parameter's gradient, and `reduce` sends
what was taken over, possibly much later. All only issue work, in the same order on all ranks.

Note: [Lazy eviction]
Unclaimed weights stay gathered until their room is needed. So the last units of forward are still there when backward
begins, and a prefetch is a gather without a claim. Units that contain others are claimed while these run, and are never
evicted; neither are units of a strategy that does not shard weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn

from hocket.fsdp.buffers import FullBuffer, Staged
from hocket.fsdp.options import UnitOptions
from hocket.fsdp.param_group import ParamGroup
from hocket.runtime.queue import Ticket
from hocket.runtime.transports import Pending

Around = tuple[Callable[..., tuple[Any, Any]], Callable[..., Any]]


class Claim:
    __slots__ = ("_aborts", "_held", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit, self._aborts = unit, unit.aborts
        self._held = True

    def wait(self) -> None:
        """Order the caller's following work after the gather: before the first read, on every stream that reads.

        Raises: ValueError for a claim from before an `abort`.
        """
        assert self._held, f"{self.unit} is read through a claim that was given back"
        if self._aborts != self.unit.aborts:
            raise ValueError(f"a claim of {self.unit} is from before abort(), which ended it: acquire() another one")
        self.unit.wait_gathered()

    def release(self) -> None:
        """Release the claim: the caller's work so far has the last reads."""
        if not self._held:
            raise ValueError(f"a claim of {self.unit} is released twice: each acquire() is released once")
        self._held = False
        if self._aborts == self.unit.aborts:  # else an abort has dropped it
            self.unit.give_back()


class Unit:
    """Parameters gathered and reduced as one, in groups of the same dtype and placement: of one module, or of a
    bucket's modules (Note: [Buckets]).
    """

    context: Any
    """Its `ShardContext`."""

    def __init__(
        self, name: str, modules: Sequence[nn.Module], groups: Sequence[ParamGroup], options: UnitOptions | None = None
    ) -> None:
        self.name, self.modules, self.groups = name, tuple(modules), tuple(groups)
        self.options = options or UnitOptions()
        self.calls: dict[nn.Module, Around] = {}
        self.contains_units = False
        """Whether other units run inside its forward: then it stays gathered."""
        self.claims = self.aborts = 0
        self.open: Counter[tuple[int, int]] = Counter()
        """Invocations whose backward is still to come, by `Invocation.forward`; kept by the hooks."""
        self.repeated: set[tuple[int, int]] = set()
        """Keys of `open` in which a module was called more than once."""
        self.on_abort: list[Callable[[], None]] = []
        self.gathers = self.reduces = 0
        self.full: dict[ParamGroup, FullBuffer] = {}
        self._gathered = self._shows = False
        self._gathering: Ticket | None = None
        self._readers: list[Ticket] = []  # one per stream that released claims
        self._staged: dict[ParamGroup, Staged] = {}
        self._outer_left: dict[ParamGroup, Ticket] = {}  # reduced, not yet all-reduced over replicas
        self._outer_sent: dict[ParamGroup, tuple[Ticket]] = {}
        self._reduced: dict[ParamGroup, Ticket] = {}  # last reduction of a group
        self._grads_made: dict[ParamGroup, int] = {}  # the caller's stream
        for group in self.groups:
            group.make_grads = partial(self._make_grads, group)
            group.let_grads_go = partial(self._let_grads_go, group)
            group.changed_by = partial(self._train, group)
        self._place = {m.param: (g, i) for g in self.groups for i, m in enumerate(g.members)}

    def __str__(self) -> str:
        return f"unit {self.name!r}" if self.name else "the root unit"

    __repr__ = __str__

    @property
    def module(self) -> nn.Module:
        """Its module, or a bucket's first."""
        return self.modules[0]

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The full parameters, which `grad_ready` takes."""
        return tuple(self._place)

    def writes(self) -> list[tuple[int, int]]:
        """Versions and addresses of gathered weights whose writes would be lost."""
        lost = (group for group in self.groups if not (group.whole and group.weight is group.main))
        return [(member.param._version, member.param.data_ptr()) for group in lost for member in group.members]

    def lends(self, tensors: Iterable[Tensor]) -> bool:
        """Whether a returned tensor is a view of the gathered weights, such as an embedding table."""
        mine = {address for buffer in self.full.values() for address in buffer.addresses}
        if not mine or torch._C._are_functorch_transforms_active():  # functorch tensors have no storage
            return False
        tensors = (getattr(x, "_local_tensor", x) for x in tensors)  # of a DTensor
        plain = (x for x in tensors if type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided)
        return any(x.untyped_storage().data_ptr() in mine for x in plain)

    def rebind(self) -> None:
        """Bind parameters to the gather buffers again, after `.data` was reassigned."""
        for group in self.groups:
            group.bind(self.full[group].flat if group in self.full else group.weight)

    def use(self, group: ParamGroup, buffer: FullBuffer) -> None:
        """Gather a group's weights into `buffer` from now on. Nothing may be gathered or saved for backward."""
        assert not self.claims
        self.full[group] = buffer
        buffer.allocate()  # views need allocated storage
        group.bind(buffer.flat[: group.layout.total])
        buffer.free()

    # Weights

    @property
    def current(self) -> bool:
        """Whether the weights are gathered, or being gathered, at the latest version."""
        return self._gathered and not any(group.stale() for group in self.groups)

    def acquire(self) -> Claim:
        """Claim the weights; starts their gather if needed. Never waits. Every claim is released once."""
        self.prefetch(wanted=True)
        self.claims += 1
        return Claim(self)

    def prefetch(self, wanted: bool = False) -> bool:
        """Start the gather if needed. False if there is no room and the unit is not `wanted`.

        Raises: ValueError during CUDA graph capture: a replay would use memory that has been freed.
        """
        if self.groups and self.groups[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"{self} is called while a CUDA graph is recorded, and memory of its weights and gradients comes and "
                f"goes: run its steps without recording; plan.graphs replays planned steps"
            )
        if self.current:
            self.context.residency_of(self).touch(self)
            return True
        if self.claims and any(group.stale() for group in self.groups):
            self.context.forget_old_forwards()
            if self.claims:
                raise ValueError(
                    f"the weights of {self} changed while they were in use: update weights after backward, or abort()"
                )
        if self.claims:
            return True
        if not self.context.residency_of(self).admit(self, wanted):
            return False
        self._gather()
        return True

    def _gather(self) -> None:
        after = [*self._last_use()]
        stale = [group for group in self.groups if group.stale()]
        if self.full:
            self.context.about_to(f"gather {self}")
            if any(not ticket.done for ticket in after):
                self.context.before_waiting()
        if stale:
            after.append(self.context.weights_ready())

        def work() -> Pending | None:
            for group in stale:
                group.refresh()
            under_way = []
            for group, buffer in self.full.items():
                buffer.allocate()
                under_way.append(group.gather(buffer.flat[: group.layout.total]))
            return together(under_way)

        self._gathering = self.context.gathering.submit(f"gather {self.name}", work, after)
        self._gathered = True
        self.gathers += bool(self.full)

    def _last_use(self) -> tuple[Ticket, ...]:
        return (*self._readers, *([self._gathering] if self._gathering is not None else []))

    def wait_gathered(self) -> None:
        if self._gathering is not None:
            if not self._gathering.done:
                self.context.before_waiting()
            self._gathering.wait()
        if not self._shows:  # only now: an extension makes what it shows of what has arrived
            self._shows = True
            for member in (member for group in self.groups for member in group.members):
                shown = member.shown()
                for owner, key in member.owners:
                    owner.__dict__[key] = shown

    def give_back(self) -> None:
        """End one claim. After the last one the weights may be freed, once the callers' work so far is done."""
        assert self.claims > 0
        self.claims -= 1
        if not self.claims:
            self._hide()
        self._note_reader()

    def _hide(self) -> None:
        self._shows = False
        for member in (member for group in self.groups for member in group.members):
            for owner, key in member.owners:
                owner.__dict__.pop(key, None)

    def _note_reader(self) -> None:
        mark = self.context.gathering.mark(f"release {self.name}")
        self._readers = [*(one for one in self._readers if not mark.covers(one)), mark]

    def evict(self) -> None:
        """Free the gathered weights, which must be unclaimed."""
        assert not self.claims, f"{self} is thrown out while it is in use"
        if not self._gathered:
            return
        self._gathered = False
        if self.full:
            self.context.gathering.submit(f"free {self.name}", self._free, self._last_use())
        self.context.residency_of(self).gone(self)

    def _free(self) -> None:
        for buffer in self.full.values():
            buffer.free()

    def reshard(self) -> None:
        """Free the gathered weights if unclaimed."""
        if not self.claims and self.full:
            self.evict()

    # Gradients

    def staged(self, group: ParamGroup) -> Staged:
        found = self._staged.get(group)
        if found is None:
            self.context.before_waiting()  # for a free staging buffer
            found = self._staged[group] = Staged(group.layout, self.context.staging_of(group), group.learning)
        return found

    def grad_ready(self, param: nn.Parameter) -> None:
        """Take over the gradient that autograd left in a full parameter, if any."""
        grad, param.grad = param.grad, None
        if grad is None:
            return
        group, index = self._place[param]
        grad = grad.detach()  # it has a graph with create_graph=True
        if grad.layout is not torch.strided:  # nn.Embedding(sparse=True)
            grad = grad.to_dense()
        if self.context.adds_up_locally(self, group):
            group.local.add(index, grad)
            self.context.reductions_open = True
        else:
            self.staged(group).add(index, grad)

    def refuse_unexpected(self) -> None:
        """Refuse gradients computed with weights that were not claimed.

        After an invocation's end, gradients may come from nodes made before its identity; these read no weights.
        """
        if not self.claims and self not in self.context.begun and self.context.may_go(self):
            raise ValueError(
                f"a gradient reached {self} whose backward has not begun, so its weights may not have been there: its "
                f"forward has left a tensor where it can't be found, as in a list outside of the model. Return what "
                f"the loss is made of, append it to a list that the forward is called with, or keep it as an attribute "
                f"of the module"
            )

    @property
    def complete(self) -> bool:
        """Whether every trainable parameter has contributed since the last reduce."""
        staged = self._staged
        return len(staged) == sum(group.learning > 0 for group in self.groups) and not any(
            one.missing for one in staged.values()
        )

    def reduce(self) -> None:
        """Reduce-scatter staged gradients and add them to the shards' gradients.

        Linear, so an early call is correct, only slower. No-op if nothing is staged.
        """
        # All copies are issued before any collective, so compute never waits for one group's collective to fill the
        # next buffer. All groups send, since other ranks may have gradients where this one has none.
        now = [g for g in self.groups if g in self._staged or not self.context.adds_up_locally(self, g)]
        if not any(group in self._staged or group.local for group in now):
            return
        sending = [group for group in now if group.learning]
        for group in sending:
            self._send(group)
        self.reduces += 1

    def _send(self, group: ParamGroup) -> None:
        self.context.before_waiting()  # for the last reduction
        self.context.about_to(f"reduce {self}")
        staged = self.staged(group)  # empty if this rank has no gradient, or added it up locally
        context = self.context
        context.unused.about_to_send(group, list(map(or_, staged.has, group.local.has)))
        group.fill_gaps(staged.flat, staged.views, staged.has)
        group.local.merge(staged.views)
        group.make_grads()
        # The last all-reduce of replicas wrote where this reduction adds.
        after = [context.reducing.mark(f"staged {self.name}"), *self._outer_sent.pop(group, ())]
        ticket = context.reducing.submit(f"reduce {self.name}", lambda: group.reduce(staged.flat), after)
        self._staged.pop(group).give(ticket)  # only now: after an exception `abort` returns it
        self._reduced[group] = ticket
        if group.groups.outer.size > 1:
            self._outer_left[group] = ticket
        if not context.accumulates(self):
            self._send_outer()
        context.reductions_open = True

    def _send_outer(self) -> None:
        """Start the all-reduce over replicas, for groups reduced since the last one."""
        left, self._outer_left = self._outer_left, {}
        for group, ticket in left.items():
            self.context.about_to(f"sum over replicas {self}")
            sent = self.context.outer.submit(f"outer {self.name}", group.reduce_outer, [ticket])
            self._outer_sent[group] = (sent,)
            self._reduced[group] = sent

    def wait_reduced(self) -> None:
        """Order the caller's following work after the reductions issued for this unit."""
        for ticket in self._reduced.values():
            ticket.wait()
        for group in self.groups:
            group.memory.wait_for_copies_in()

    def _make_grads(self, group: ParamGroup) -> None:
        if group.grads.flat is None:
            group.grads.make()
            self._grads_made[group] = self.context.reducing.caller()

    def _let_grads_go(self, group: ParamGroup) -> None:
        """Free the memory of forgotten gradients, in the order of the caller's work.

        It is kept for the next reduction if the caller uses another stream than the allocating one, in whose order the
        allocator reuses memory, or if replicas still have to be summed.
        """
        if group in self._outer_left or self._grads_made[group] != self.context.reducing.caller():
            return
        if group in self._reduced and self.context.reductions_open:
            self._reduced[group].wait()  # forgotten before they were waited for
        group.grads.let_go()

    def _train(self, group: ParamGroup, index: int, trains: bool) -> None:
        """Freeze a member, or train it again.

        A frozen member of a larger group sends zeros; a group of frozen members sends nothing.

        Raises: ValueError between a forward and its backward.
        """
        self.context.forget_old_forwards()
        if self.claims or self.open:
            raise ValueError(
                f"requires_grad of {group.members[index].name} is set between a forward and its backward: set it "
                f"before the forward"
            )
        group.train(index, trains)

    def forget_graphs_since(self, backward: int) -> None:
        """At the end of a backward: drop invocations of graphs made inside of it, which have no backward.

        A checkpoint that recomputes saved tensors runs such forwards.
        """
        for forward in [one for one in self.open if one[1] >= backward]:
            del self.open[forward]
            self.repeated.discard(forward)

    def reduce_deferred(self) -> None:
        self.reduce()
        self._send_outer()

    def abort(self) -> None:
        if self.claims:
            self._hide()
            self._note_reader()
        self.claims = 0
        self.aborts += 1
        self.open.clear()
        self.repeated.clear()
        for staged in self._staged.values():
            staged.give(None)
        self._staged.clear()
        self._outer_left.clear()
        self._outer_sent.clear()
        self._reduced.clear()
        for forget in self.on_abort:
            forget()
        for group in self.groups:
            group.forget_gradients()
            for member in group.members:
                member.param.grad = None
        self.evict()
        self._gathering, self._readers = None, []


class Budget:
    """Limits how many units are gathered at once; None: no limit.

    A unit that is needed while all others are claimed is gathered all the same, as for parallel branches or several
    microbatches. `exceeded` counts that.
    """

    def __init__(self, units: int | None) -> None:
        """Room for the unit in use and those prefetched."""
        self.units = units
        self.exceeded = 0
        self._gathered: list[Unit] = []  # least recently used first

    def admit(self, unit: Unit, wanted: bool) -> bool:
        """Make room for `unit` by evicting unclaimed units. False if there is no room and `unit` is not `wanted`
        yet.
        """
        if self.units is None:
            return True
        if unit in self._gathered:  # gathered again, with newer weights
            self.touch(unit)
            return True
        idle = [other for other in self._gathered if not other.claims]
        while len(self._gathered) >= self.units and idle:
            idle.pop(0).evict()
        if len(self._gathered) >= self.units:
            if not wanted:
                return False
            self.exceeded += 1
        self._gathered.append(unit)
        return True

    def touch(self, unit: Unit) -> None:
        if unit in self._gathered:
            self._gathered.remove(unit)
            self._gathered.append(unit)

    def gone(self, unit: Unit) -> None:
        if unit in self._gathered:
            self._gathered.remove(unit)


def together(pending: Sequence[Pending]) -> Pending | None:
    under_way = [one for one in pending if not one.done]
    for one in under_way[1:]:
        under_way[0].then(one.wait)
    return under_way[0] if under_way else None
