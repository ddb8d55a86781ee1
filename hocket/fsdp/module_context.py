"""State shared by the units of one sharded model: queues, passes over the units, and the protocol of a step."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from hocket.fsdp.buffers import StagingMemory
from hocket.fsdp.checks import refuse_late_extensions, refuse_valueless
from hocket.fsdp.dtensors import mesh_of, over
from hocket.fsdp.lookahead import Lookahead
from hocket.fsdp.module_unit import Budget, Claim, Unit
from hocket.fsdp.options import ShardOptions
from hocket.fsdp.param_group import ParamGroup
from hocket.fsdp.same_order import SameOrder
from hocket.fsdp.shard_groups import ShardGroups
from hocket.fsdp.unused import UnusedGradients
from hocket.runtime.queue import Ticket, queue_of


@dataclass(frozen=True)
class ShardStats:
    """Counters since the start, and sizes in bytes."""

    gathers: int
    reduces: int
    surprises: int
    """How often a unit was not the predicted one; its gather is then exposed."""
    exceeded: int
    """How often more units were in use at once than prefetch allows for."""
    shard_bytes: int
    """Weights and gradients that this rank keeps."""
    full_bytes: int
    """Gathered weights at this moment."""
    staging_bytes: int
    """Peak bytes of gradients on their way."""


class HeldClaims:
    """Claims on units that outlast their forwards.

    Reads by other modules inside of a forward of the model: until all current backwards are over. `unshard()`: until
    `reshard()`, the end of the module's next forward, or an update.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._held: list[Claim] = []
        self._unsharded: dict[Unit, Claim] = {}

    def hold(self, claim: Claim) -> None:
        """Keep a claim until all current backwards are over."""
        self._held.append(claim)

    def unshard(self, unit: Unit) -> Claim:
        """Keep a unit's weights gathered and shown."""
        if unit not in self._unsharded:
            self._unsharded[unit] = unit.acquire()
        return self._unsharded[unit]

    def reshard(self, unit: Unit) -> None:
        if unit in self._unsharded:
            self._unsharded.pop(unit).release()

    def drop(self) -> None:
        """Release claims of reads inside of a forward, unless a backward is still to come.

        Not at the end of a backward: its graph may run again before a step or another forward. Which forward reads
        can't be told: while one holds the unit, others read its weights without a claim.
        """
        if any(unit.open for unit in self._units):
            return
        claims, self._held = self._held, []
        for claim in claims:
            claim.release()

    def weights_changed(self) -> None:
        """After an update: no backward follows for forwards with the old weights."""
        for unit in list(self._unsharded):
            self.reshard(unit)
        self.drop()

    def clear(self) -> None:
        self._held.clear()
        self._unsharded.clear()


def current_backward() -> int:
    """The number of the backward that runs on this thread, which grows; -1: none."""
    return torch._C._current_graph_task_id()


_CALLS = {nn.Module._call_impl.__code__}


def called_by_hand() -> bool:
    """Whether the caller runs inside of a module's forward."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code in _CALLS or (code.co_name == "forward" and isinstance(frame.f_locals.get("self"), nn.Module)):
            return True
        frame = frame.f_back
    return False


class Invocation:
    """One forward of a unit, from its inputs to the end of its backward."""

    def __init__(self, unit: Unit, context: ShardContext) -> None:
        self.unit, self._context = unit, context
        self.forward = context.forwards, current_backward()
        """(forward pass, the backward that recomputes it or -1)."""
        self.has_inputs = False
        """Whether an input needs a gradient, so that an identity marks the end."""
        self._claim: Claim | None = None
        self._started = False
        self._weights = [group.edition for group in unit.groups]
        self._goes_on = False  # create_graph=True: its backward may be differentiated

    def open(self) -> None:
        """An output may get a gradient later."""
        if self.unit.open[self.forward]:
            self.unit.repeated.add(self.forward)
        self.unit.open[self.forward] += 1

    @property
    def ends_with_gradients(self) -> bool:
        """Whether it ends when every parameter has contributed: it has no identity, and is its forward's only
        invocation.
        """
        return not self.has_inputs and self.forward not in self.unit.repeated

    def start(self, _grad: object = None) -> None:
        """An output's gradient has arrived: claim the weights again.

        Raises: ValueError if the weights have changed since the forward.
        """
        if self._weights != [group.edition for group in self.unit.groups]:
            raise ValueError(
                f"the weights of {self.unit} changed between a forward and its backward, so its gradients would be "
                f"wrong: run every backward before optimizer.step(), or abort()"
            )
        context = self._context
        context.follow_backward()
        if not self._started:
            self._started = True
            if self.unit.options.unshard_in_backward:
                self._claim = context.need_backward(self.unit)
            context.started[self] = None
            context.begun.add(self.unit)
        if torch.is_grad_enabled() and not self._goes_on:  # create_graph=True
            self._goes_on = True
            context.held_claims.hold(self.unit.acquire())

    def finish(self) -> None:
        """All input gradients are done."""
        if self._claim is not None:
            self._claim.release()
            self._claim = None
        if self._started:
            self._started = False
            self._context.started.pop(self, None)
        if not self._goes_on:  # else a second backward follows, and its end sends the gradients
            self._close()
        if self._context.in_backward:
            self._context.ahead.go_on_backward()

    def _close(self) -> None:
        opened = self.unit.open
        if opened[self.forward] > 1:
            opened[self.forward] -= 1
            return
        # The last invocation of its forward, or a graph run again, of which any may be the last.
        del opened[self.forward]
        self.unit.repeated.discard(self.forward)
        if len(self.unit.modules) == 1 or self.unit.complete:
            self.unit.reduce()


class ShardContext:
    """The shared part of a sharded model's units. Made by `hocket.fully_shard`."""

    def __init__(
        self,
        units: Sequence[Unit],
        strategy: str,
        options: ShardOptions,
        groups: ShardGroups,
        device: torch.device,
        order: SameOrder | None = None,
        nests: bool = False,
    ) -> None:
        """With `nests`, the model may become part of a larger one before its first forward (`shard.py`)."""
        self.nests = nests
        self._order, self._model = order, ""  # suffix that tells apart models on the same ranks
        if order is not None:
            self._model = f" of model {order.models}" if order.models else ""
            order.models += 1
        self.options, self.groups, self.device = options, groups, device
        self._frees = strategy == "optim_grads_params"  # gathered weights, for others
        self._sends_each = strategy.startswith("optim_grads")  # gradients of each microbatch
        self.gathering = queue_of("gather", device)
        self.reducing = queue_of("reduce", device)
        self.outer = queue_of("outer", device)
        self.units = list(units)
        layouts = ((one.name, one.dtensor) for unit in units for group in unit.groups for one in group.members)
        self.tensor_mesh = mesh_of(layouts, (), {*groups.reduce.ranks, *groups.outer.ranks})
        """The tensor-parallel mesh, if other ranks shard the parameters; see `dtensors.py`."""
        self.forwards = 0
        self.in_backward = False
        self.started: dict[Invocation, None] = {}
        """Invocations during their backward, oldest first."""
        self.begun = set[Unit]()  # in this backward
        self.reductions_open = False
        """Whether gradients were staged and not waited for."""
        self.arriving = False
        """Whether only gradients of units that were waited for may be read; see `gradients_arrive`."""
        self._depth = self._gathered = self._shown = 0
        self._no_sync = self._accumulating = False
        self._sends_all = False  # sending deferred gradients
        self._weights: Ticket | None = None
        self.held_claims = HeldClaims(units)
        self._editions: list[tuple[int, int]] = []  # editions of the weights at the last update seen
        self.ahead = Lookahead(self.units, options.prefetch, self._frees)
        self._staging: dict[ParamGroup, StagingMemory] = {}
        self._unlimited = Budget(None)
        self._residency = self._unlimited
        self.unused = UnusedGradients(order, self._model, self.param_groups)
        for unit in self.units:
            unit.context = self
            for group in unit.groups:
                group.settle = self.finish_step
                group.usage.ask = partial(self._find_unused, group)

    def __repr__(self) -> str:
        kept = sum(group.nbytes for group in self.param_groups)
        mib = f"{kept / 2**20:,.1f} MiB of weights and gradients on this rank"
        return f"ShardContext({len(self.units)} units, {mib}, moved by {self.groups.moved_by})"

    @property
    def root(self) -> nn.Module:
        """The sharded model, or the first of several modules sharded as one unit."""
        return next(unit.module for unit in self.units if not unit.name)

    @property
    def param_groups(self) -> list[ParamGroup]:
        return [group for unit in self.units for group in unit.groups]

    @property
    def is_gathered(self) -> bool:
        """Whether inside of `gathered()`."""
        return self._gathered > 0

    @property
    def outermost(self) -> bool:
        """Whether the running unit is not inside another's forward."""
        return self._depth == 1

    def place(self, new: Sequence[Unit] | None = None) -> None:
        """Allocate buffers for gathered weights and staged gradients, once all units are known.

        Units that are not `new` keep their weight buffers from the models that they were before.
        """
        if self._frees:
            self._residency = Budget(self.options.prefetch + 1)
        for unit in self.units if new is None else new:
            for group in unit.groups:
                if group.whole:
                    group.bind(group.weight)
                else:
                    unit.use(group, group.new_buffer())
        # Staging memory is shared by all units that reduce over the same ranks. Units that contain others get their
        # own: they collect gradients while these run, and would block a buffer.
        users: dict[object, list[tuple[Unit, ParamGroup]]] = {}
        for unit in self.units:
            for group in unit.groups:
                key = unit if unit.contains_units else None, group.groups.reduce, group.formats.wire
                users.setdefault(key, []).append((unit, group))
        self._staging = {}
        for alike in users.values():
            unit, group = alike[0]
            number = len(alike) if unit.contains_units else self.options.staging
            memory = StagingMemory(number, group.formats.wire, group.device, self.reducing.caller)
            self._staging |= dict.fromkeys((one for _, one in alike), memory)

    # What units ask

    def about_to(self, what: str) -> None:
        """Note the next collective. See Note: [Detecting diverged ranks]."""
        if self._order is not None:
            self._order.note(what + self._model)

    def before_waiting(self) -> None:
        """Before waiting for a collective: raise ValueError if other ranks have issued different ones."""
        if self._order is not None:
            self._order.settle()

    def residency_of(self, unit: Unit) -> Budget:
        """The budget that limits whether a unit may be gathered."""
        stays = unit.contains_units or not unit.full or unit.options.reshard_after_forward is False
        return self._unlimited if stays else self._residency

    def may_go(self, unit: Unit) -> bool:
        """Whether a unit's gathered weights may be freed while unclaimed."""
        return self.residency_of(unit) is not self._unlimited

    def staging_of(self, group: ParamGroup) -> StagingMemory:
        return self._staging[group]

    def adds_up_locally(self, unit: Unit, group: ParamGroup) -> bool:
        """Whether gradients of this microbatch are only added up on this rank, at full size."""
        if group.groups.reduce.size == 1 or self._sends_all:
            return False  # nothing to send, or nothing is deferred any more
        if self._no_sync or not unit.options.sync:
            return True
        return self._accumulating and not self._sends_each

    def accumulates(self, unit: Unit) -> bool:
        """Whether more microbatches of this step follow before replicas all-reduce."""
        return not self._sends_all and (self._no_sync or self._accumulating or not unit.options.all_reduce)

    def weights_ready(self) -> Ticket:
        """A ticket of the last update of the weights."""
        if self._weights is None or not self._depth:
            self._weights = self.gathering.mark("weights")
        return self._weights

    def prefetch_of(self, unit: Unit, units: Sequence[Unit], backward: bool) -> None:
        """Gather `units` when a unit's forward, or backward, begins, and raise the budget for them."""
        self.ahead.explicit[unit, backward] = units
        if self._residency.units is not None:
            self._residency.units = max(self._residency.units, len(units) + 1)

    def staging_count(self, count: int) -> None:
        for staging in set(self._staging.values()):
            staging.count = count

    # The passes, as a driver announces them

    def begin_forward(self) -> None:
        if not self.forwards:
            refuse_valueless([group for group in self.param_groups if group.late])
            refuse_late_extensions(self.param_groups)
        self.forwards += 1
        if any(group.stale() for group in self.param_groups):
            self._weights = self.gathering.mark("weights")
        self.forget_old_forwards()
        self.held_claims.drop()

    def forget_old_forwards(self) -> None:
        """After an update, no backward follows for earlier forwards: drop their invocations.

        All groups' editions are compared, since a unit may not have been gathered for many steps.
        """
        editions = [group.edition for group in self.param_groups]
        if editions == self._editions or self._depth or self.in_backward:
            return
        self._editions = editions
        for unit in self.units:
            unit.open.clear()
            unit.repeated.clear()
        self.held_claims.weights_changed()

    def need_forward(self, unit: Unit) -> Claim:
        """A unit's forward begins: claim its weights, prefetch the next units, and wait for the claim."""
        recomputing = current_backward() != -1
        if self.in_backward and not recomputing:
            raise ValueError("the last backward ended with an exception: call abort() of the ShardContext on all ranks")
        if not self._depth and not recomputing:
            self.begin_forward()
        self._depth += 1
        try:
            claim = unit.acquire()
        except BaseException:
            self._depth -= 1  # this forward has not begun
            raise
        if not recomputing:
            self.ahead.reach_forward(unit)
        claim.wait()
        return claim

    def leave_forward(self, unit: Unit) -> None:
        self._depth -= 1
        if current_backward() != -1:
            return
        self.ahead.leave_forward(unit)
        if not self._depth:
            self.ahead.end_forward()
            self.held_claims.drop()

    def begin_backward(self) -> None:
        self.in_backward = True

    def follow_backward(self) -> None:
        """Inside of a backward: `begin_backward`, and `end_backward` when it is over."""
        if not self.in_backward:
            self.begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def need_backward(self, unit: Unit) -> Claim:
        """A unit's backward begins; like `need_forward`."""
        claim = unit.acquire()
        self.ahead.reach_backward(unit)
        claim.wait()
        return claim

    def end_backward(self) -> None:
        """A backward ends: reduce what is left, in the order of units. Does not wait."""
        for invocation in list(self.started):
            invocation.finish()
        this = current_backward()
        for unit in self.units:
            unit.forget_graphs_since(this)
            unit.reduce()
        self.unused.all_sent()
        self.ahead.end_backward()
        self._show_life()
        self.begun.clear()
        self.in_backward = False
        for unit in self.units:
            kept = unit.options.reshard_after_forward is unit.contains_units
            if kept and unit.options.reshard_after_backward:
                unit.reshard()

    def _show_life(self) -> None:
        """After the reductions of a backward on copy engines: a small NCCL all-reduce.

        Streams wait for copies without a timeout; NCCL's watchdog ends the process if this all-reduce does not
        complete.
        """
        reduce, sent = self.groups.reduce, sum(unit.reduces for unit in self.units)
        if reduce.copies and sent > self._shown:
            self._shown = sent
            self.reducing.submit("life", lambda: reduce.all_reduce(torch.zeros(1, device=self.device)))

    def finish_step(self) -> None:
        """Order the caller's following work after all reductions: the only barrier of a step.

        Reading a shard's `.grad` does this. It also sends what `no_sync` and `accumulating` have deferred.
        """
        if self.reductions_open and not self.in_backward:
            self._send_deferred()
            self._join_reductions()

    @contextlib.contextmanager
    def gradients_arrive(self) -> Iterator[bool]:
        """`finish_step` in two parts: inside, gradients of units that were waited for may be read. Yields whether any
        were open.
        """
        under_way = self.arriving = self.reductions_open
        if under_way:
            self._send_deferred()
        try:
            yield under_way
        finally:
            self.arriving = False
            if under_way:
                self._join_reductions()

    def _send_deferred(self) -> None:
        self.reductions_open = False
        self.held_claims.drop()
        self._sends_all = True
        with torch.inference_mode(False):  # buffers made now are written later, outside of that mode
            for unit in self.units:
                unit.reduce_deferred()
        self.unused.all_sent()
        self._sends_all = False
        self.reductions_open = False  # the caller waits for what was sent just now, too

    def _join_reductions(self) -> None:
        self.before_waiting()
        self.reducing.join()
        self.outer.join()
        for group in self.param_groups:
            group.memory.wait_for_copies_in()
        for staging in set(self._staging.values()):
            staging.settle()

    def _find_unused(self, group: ParamGroup) -> None:
        """See Note: [Gradients that no rank has]. Unknown inside of a backward."""
        if not self.in_backward:
            self.unused.find([group] if self.arriving else self.param_groups)

    def weights_updated(self) -> None:
        """Declare a change of weights that version counters miss, such as through `.data`."""
        for group in self.param_groups:
            group.invalidate()

    def over_ranks(self, value: Tensor, how: Literal["sum", "max"]) -> None:
        """The `sum` or `max` of a tensor over all ranks of the model, in place."""
        self.about_to(f"{how} over ranks")
        self.before_waiting()
        here = value.to(self.device)
        for group in (self.groups.reduce, self.groups.outer):
            group.all_reduce(here, how).wait()
        if self.tensor_mesh is not None:
            over(self.tensor_mesh, here, how)
        value.copy_(here)

    @contextlib.contextmanager
    def gathered(self, changed: bool = False) -> Iterator[None]:
        """Inside, all weights of the model can be read whole, in the compute dtype, as attributes of its modules.

        Writes are lost, unless `changed` says that all ranks have written the same.
        """
        extended = [group for group in self.param_groups if changed and group.extended]
        if extended:
            raise ValueError(
                f"gathered(changed=True), where {extended[0].members[0].name} is a tensor that fsdp_post_all_gather "
                f"has made: write to the parameter"
            )
        claims: list[Claim] = []
        try:
            for unit in self.units:
                claims.append(unit.acquire())  # noqa: PERF401 - those before one that fails are given back
            for claim in claims:
                claim.wait()
            before = [param.data_ptr() for unit in self.units for param in unit.parameters]
            self._gathered += 1
            try:
                yield
            finally:
                self._gathered -= 1
            for claim in claims:
                claim.wait()  # the weights are still there
            after = [param.data_ptr() for unit in self.units for param in unit.parameters]
            if changed:
                for group in self.param_groups:
                    for i, member in enumerate(group.members):
                        group.load(i, member.param)
            if after != before:
                for unit in self.units:
                    unit.rebind()
        finally:
            for claim in claims:
                claim.release()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are only added up on this rank, at full size; nothing is sent."""
        before, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = before

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """More microbatches follow: `no_shard` and `optim` defer reductions, others defer the all-reduce of
        replicas.
        """
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def abort(self) -> None:
        """After an exception in a step: forget its claims and gradients, so that a new step can begin.

        Weights and optimizer state stay. Peers must abort the same step.
        """
        for queue in {self.gathering, self.reducing, self.outer}:
            queue.abort()
        self.held_claims.clear()
        self._sends_all = False
        self.started, self.begun = {}, set()
        for staging in set(self._staging.values()):
            staging.settle()
        for unit in self.units:
            unit.abort()
        self.ahead.restart()
        self._depth = 0
        self.in_backward = self.reductions_open = False

    def read_on_demand(self, unit: Unit) -> bool:
        """Claim a unit whose weight is read while it is not in use. False outside of any forward; see `HeldClaims`.

        Raises: ValueError in a module called outside of a forward of the model: it would compute with a shard.
        """
        if self._depth:
            claim = unit.acquire()
            claim.wait()
            self.held_claims.hold(claim)
            return True
        if called_by_hand():
            raise ValueError(
                f"a module reads a weight of {unit} outside of a forward of that unit, which holds a part of it: call "
                f"the unit's module, or one of its methods after register_fsdp_forward_method; or call unshard() of "
                f"it before, and reshard() after the backward"
            )
        return False

    def stats(self) -> ShardStats:
        groups = self.param_groups
        return ShardStats(
            gathers=sum(unit.gathers for unit in self.units),
            reduces=sum(unit.reduces for unit in self.units),
            surprises=self.ahead.surprises,
            exceeded=self._residency.exceeded,
            shard_bytes=sum(group.nbytes for group in groups),
            full_bytes=sum(b.nbytes for unit in self.units for b in unit.full.values()),
            staging_bytes=sum(one.nbytes for one in set(self._staging.values())),
        )
