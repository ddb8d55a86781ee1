"""Steps recorded once as a CUDA graph and replayed: the host issues one graph instead of thousands of kernels.

Note: [What a recording holds]
A replay makes the same GPU calls on the same memory and runs no Python. So no op of a recorded step may copy a value to
the host, and all Python state kept between steps must be the same before each step:

- microbatches are copied into the recorded ones' memory;
- gradients are not freed: each step overwrites them where the recorded one left them (`PlannedModel.held`);
- losses and experts' loads, read at the end of a step, are the recorded tensors with new values;
- the plan's `step` op is not recorded: norm, optimizer and balance run after each replay. Updates that it defers are
  recorded with the next step (`fsdp/planned/optimizer.py`);
- packed documents have spare capacity, filled by empty documents: twice the largest number on any rank when recorded;
- transports are fixed: if a group's transport changes, the recording is dropped.

Every step issued op by op drops the recording too, because it allocates gradients elsewhere: annotated steps, and
steps that run again because rows exceeded the capacity. The next one is recorded anew.

Note: [Each rank replays its own graph]
Each rank has its own graph, independent of the others. Ranks communicate inside their graphs as they would without, and
a replay may begin before a peer's. But all ranks replay a step or none does: copy engines signal by a counter that
rises with each step, and a recording would repeat its values. Within a graph the driver keeps only the order that the
lanes' events gave, so `Note: [All lanes' kernels fit on the chip together]` applies to a graph's branches too.
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
"""Steps before the recorded one: the rehearsal, and some in which libraries allocate persistent memory."""

Way = Literal["issued", "recorded", "replayed"]
"""How the host issued a step: op by op, op by op into a graph which then ran, or as one graph."""

Record = Callable[[Callable[[], list[Tensor]]], tuple[list[Tensor], Callable[[], None]]]
"""Records the calls of a function: (its result, a function that replays them). Recording need not run them."""


def recorder_of(lanes: CudaLanes) -> Record:
    """Records what a function issues on lanes. Raises the function's own error, not the failed capture that follows."""

    def record(run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        graph, first = torch.cuda.CUDAGraph(), list[BaseException]()
        try:
            with lanes.left_alone(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                try:
                    result = run()
                except BaseException as error:
                    first.append(error)
                    lanes.abort()  # a capture must end on the stream on which it began
                    raise
                lanes.join()
        except BaseException as last:
            if first and first[0] is not last:
                raise first[0] from last
            raise
        return result, graph.replay

    return record


def from_turn_one(record: Record, tokens: CopiedTokens, meet: Callable[[], object]) -> Record:
    """Records with turns of `tokens` from one, and resets them before each replay.

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
    """Runs an executor's steps, by replays after the first few. See Note: [What a recording holds]."""

    def __init__(
        self,
        executor: Executor,
        model: PlannedModel,
        record: Record,
        transports: Callable[[], Sequence[object]],
        updates: PlannedAdamW | None,
    ) -> None:
        """`transports` returns those of all groups; `updates` applies deferred updates, if the plan has them."""
        self._updates = updates
        self._executor, self._model, self._record, self._transports = executor, model, record, transports
        self._moved_by: Sequence[object] = transports()
        self.way: Way = "issued"
        """How the last step was issued."""
        self._issued = 0
        self._replay: Callable[[], None] | None = None
        self._inputs: list[Microbatch] = []
        self._weights_M = torch.empty(0)
        self._documents = _Documents(0, False)
        self._losses: list[Tensor] = []
        self._loads: dict[int, Tensor] = {}

    def run(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """A whole step, like `Executor.run`. The next step overwrites the losses."""
        executor, actions = self._executor, self._executor.actions
        self._follow_transports(self._transports())
        if self._issued < WARM_UP or executor.annotated:
            self.drop()
            self._issued += 1
            self.way = "issued"
            return executor.run(microbatches)
        self._ensure_capacity(microbatches)
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

    def _ensure_capacity(self, microbatches: Sequence[Microbatch]) -> None:
        """If any rank has more documents than the recording's capacity, drop it. All ranks agree, so this waits."""
        mine = [each.documents for each in microbatches if isinstance(each.documents, Documents)]
        if not mine:
            return
        ranks = everyone((max(d.count for d in mine), any(d.real_T is not None for d in mine)))
        most, padded = max(count for count, _ in ranks), any(padded for _, padded in ranks)
        if most > self._documents.room or padded > self._documents.padded:
            self.drop()
            self._documents = _Documents(2 * most, padded or self._documents.padded)

    def _follow_transports(self, moved_by: Sequence[object]) -> None:
        """If a transport has changed, issue the next step op by op, in which the new one allocates its memory."""
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
    """Capacity of recorded microbatches."""

    room: int
    """Documents per microbatch."""
    padded: bool
    """Whether there may be padding."""


def _copy(microbatch: Microbatch, room: _Documents) -> Microbatch:
    documents = microbatch.documents
    if isinstance(documents, Documents):
        documents = documents.with_capacity(room.room, room.padded)
    return replace(microbatch, ids=microbatch.ids.clone(), targets=microbatch.targets.clone(), documents=documents)


def _fill(into: Microbatch, microbatch: Microbatch) -> None:
    """Copy a microbatch into a recorded one of the same shapes; only the number of documents may differ."""
    into.ids.copy_(microbatch.ids)
    into.targets.copy_(microbatch.targets)
    if isinstance(into.documents, Documents):
        assert isinstance(microbatch.documents, Documents)
        into.documents.copy_from(microbatch.documents)
