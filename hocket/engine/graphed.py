"""Steps whose calls to the GPU are recorded once and replayed: the host issues one graph, not thousands of kernels.

Note: [What a recording holds]
A replay makes the same calls on the same memory, and runs no Python. So nothing in a step may wait for the device to
tell the host something, and whatever Python keeps from one step to the next must be the same before each:

- microbatches are copied to where the recorded ones lay;
- gradients are not forgotten: each step overwrites them where the recorded one left them (`PlannedModel.held`);
- what the end of a step reads, losses and experts' loads, are the recorded tensors, with new values;
- the end of a step itself, the plan's `step` op, is not recorded: norm, optimizer and balance run after each replay;
  updates that it leaves to the next step are recorded with that one (`fsdp/planned/optimizer.py`);
- packed documents have room for others: empty ones, up to twice as many as there were on any rank when it was made;
- bytes move as they did: a group that has another transport since makes the recording void.

Every step that runs op by op makes it void too, for it leaves gradients elsewhere: steps whose ops are shown under
their names, and one that is made again since rows found no room. The next one is recorded anew.

Note: [Ranks record and replay apart]
Each rank has a graph of its own, and nothing in one knows of the others: what ranks exchange, they exchange while their
graphs run, as they would without, and a replay may begin before a peer begins its own. But all ranks replay a step, or
none: copy engines say that they are there by a number that counts on, which in a recording is always the same. Within a
graph the driver keeps the order that the lanes' events had and no other, so what is said in
`Note: [All lanes' kernels fit on the chip together]` of lanes holds for the branches of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from hocket.engine.executor import Executor
from hocket.fsdp.planned.model import PlannedModel
from hocket.fsdp.planned.optimizer import PlannedAdamW
from hocket.model.documents import Documents, Microbatch
from hocket.runtime.lanes import CudaLanes
from hocket.runtime.tokens import CopiedTokens
from hocket.runtime.world import everyone

WARM_UP = 3
"""Steps before the recorded one: the rehearsal, and some in which libraries allocate what they keep."""

Way = Literal["issued", "recorded", "replayed"]
"""How the host made a step: op by op, op by op into a graph that then ran, or by one call."""

Record = Callable[[Callable[[], list[Tensor]]], tuple[list[Tensor], Callable[[], None]]]
"""Records the calls of a function: (what it returned, how to make them again). It need not make them itself."""


def recorder_of(lanes: CudaLanes) -> Record:
    """Records what a function issues on lanes. What goes wrong in it is raised, not what that does to the recording."""

    def record(run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        graph, first = torch.cuda.CUDAGraph(), list[BaseException]()
        try:
            with lanes.left_alone(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                try:
                    result = run()
                except BaseException as error:
                    first.append(error)
                    lanes.abort()  # a recording ends on the stream on which it began
                    raise
                lanes.join()
        except BaseException as last:
            if first and first[0] is not last:
                raise first[0] from last
            raise
        return result, graph.replay

    return record


def from_turn_one(record: Record, tokens: CopiedTokens, meet: Callable[[], object]) -> Record:
    """Records with turns of `tokens` that begin at one, and makes them so before each replay.

    `meet` orders the current queues of all ranks. See Note: [Recorded turns begin at one].
    """

    def recorded(run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        before, tokens.turns = tokens.turns, 0
        try:
            result, replay = record(run)
            last = tokens.turns
        finally:
            tokens.turns = before

        def again() -> None:
            tokens.rewind()
            meet()
            replay()
            tokens.turns = last

        return result, again

    return recorded


class GraphedSteps:
    """Runs the steps of an executor, from some step on by replays. See Note: [What a recording holds]."""

    def __init__(
        self,
        executor: Executor,
        model: PlannedModel,
        record: Record,
        transports: Callable[[], Sequence[object]],
        updates: PlannedAdamW | None,
    ) -> None:
        """`transports` are those of all groups now; `updates` makes what a step leaves to the next one, if any."""
        self._updates = updates
        self._executor, self._model, self._record, self._transports = executor, model, record, transports
        self._moved_by: Sequence[object] = transports()
        self.way: Way = "issued"
        """How the last step was made."""
        self._issued = 0
        self._replay: Callable[[], None] | None = None
        self._inputs: list[Microbatch] = []
        self._weights_M = torch.empty(0)
        self._documents = _Documents(0, False)
        self._losses: list[Tensor] = []
        self._loads: dict[int, Tensor] = {}

    def run(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """A whole step, like `Executor.run`. The losses are overwritten by the next one."""
        executor, actions = self._executor, self._executor.actions
        self._notice(self._transports())
        if self._issued < WARM_UP or executor.annotated:
            self.drop()
            self._issued += 1
            self.way = "issued"
            return executor.run(microbatches)
        self._have_room(microbatches)
        self.way = "recorded" if self._replay is None else "replayed"
        if self._replay is None:
            self._replay = self._recorded(microbatches)
        for mine, given in zip(self._inputs, microbatches, strict=True):
            _fill(mine, given)
        self._weights_M.copy_(actions.weights_M)
        executor.recorder.begin(replayed=True)
        self._replay()
        if self._updates is not None:
            self._updates.replayed()
        actions.losses = self._losses
        actions.loads.update(self._loads)
        assert actions.on_step is not None
        actions.on_step()
        return self._losses

    def _recorded(self, microbatches: Sequence[Microbatch]) -> Callable[[], None]:
        actions = self._executor.actions
        self._inputs = [_copy(microbatch, self._documents) for microbatch in microbatches]
        on_step, weights_M = actions.on_step, actions.weights_M
        self._weights_M = weights_M.clone()
        actions.on_step, actions.weights_M = (lambda: None), self._weights_M
        if self._updates is not None:
            self._updates.begin_recording()
        try:
            losses, replay = self._record(lambda: self._executor.run(self._inputs))
        except BaseException:
            if self._updates is not None:
                self._updates.not_recorded()
            raise
        finally:
            actions.on_step, actions.weights_M = on_step, weights_M
        self._losses, self._loads = list(losses), dict(actions.loads)
        self._model.held = True
        return replay

    def _have_room(self, microbatches: Sequence[Microbatch]) -> None:
        """If some rank has more documents than were recorded, record anew: on all ranks, which wait for each other."""
        mine = [each.documents for each in microbatches if isinstance(each.documents, Documents)]
        if not mine:
            return
        ranks = everyone((max(d.count for d in mine), any(d.real_T is not None for d in mine)))
        most, padded = max(count for count, _ in ranks), any(padded for _, padded in ranks)
        if most > self._documents.room or padded > self._documents.padded:
            self.drop()
            self._documents = _Documents(2 * most, padded or self._documents.padded)

    def _notice(self, moved_by: Sequence[object]) -> None:
        """Where bytes move in another way since, begin again with a step op by op, in which that makes its memory."""
        if any(now is not before for now, before in zip(moved_by, self._moved_by, strict=True)):
            self.drop()
            self._moved_by, self._issued = moved_by, min(self._issued, WARM_UP - 1)

    def drop(self) -> None:
        """Forget the recording and the gradients it writes, so that a step can run op by op."""
        if self._replay is None:
            return
        self._replay = None
        self._inputs, self._losses, self._loads = [], [], {}
        self._model.let_grads_go()


@dataclass(frozen=True)
class _Documents:
    """What recorded microbatches have room for."""

    room: int
    """Documents of one."""
    padded: bool
    """Whether there may be padding."""


def _copy(microbatch: Microbatch, room: _Documents) -> Microbatch:
    documents = microbatch.documents
    if isinstance(documents, Documents):
        documents = documents.roomy(room.room, room.padded)
    return replace(microbatch, ids=microbatch.ids.clone(), targets=microbatch.targets.clone(), documents=documents)


def _fill(into: Microbatch, microbatch: Microbatch) -> None:
    """Give a recorded microbatch the values of another of the same shapes, but for the number of documents."""
    into.ids.copy_(microbatch.ids)
    into.targets.copy_(microbatch.targets)
    if isinstance(into.documents, Documents):
        assert isinstance(microbatch.documents, Documents)
        into.documents.become(microbatch.documents)
