"""The loop that runs one rank's list of ops.

`_compile` decides everything that can be known before the first step: which action an op runs, which values it reads,
what it waits for. Per op the loop only waits, acts, records an event, and drops values.

Note: [The first step is a rehearsal]
A GPU loads a kernel at its first launch and may have to synchronize for that. If a receive kernel of another lane spins
at that moment, waiting for a rank that is blocked for the same reason, both deadlock. So on a GPU the first step runs
one op at a time, in an order that is legal for all ranks together, and synchronizes after each. Its result is the same;
kernels, connections and memory are loaded for the steps that overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hocket.engine.actions import Actions
from hocket.model.documents import Microbatch
from hocket.program.ops import COMPUTING, Key, Lane, Layout, Op, Program
from hocket.program.values import reads, shares
from hocket.runtime.hangs import Recorder
from hocket.runtime.lanes import Lanes


@dataclass(frozen=True, slots=True)
class Compiled:
    """An op and what the loop needs to know about it. Positions are indices into the rank's list."""

    position: int
    op: Op
    lane: Lane
    run: Callable[..., Any]
    inputs: tuple[int, ...]
    """Ops whose values it reads."""
    waits: tuple[tuple[Lane, int], ...]
    """Ops of other lanes that it waits for."""
    awaited: bool
    """Whether an op of another lane waits for it."""
    frees: tuple[int, ...]
    """Ops whose values are dropped after it."""
    trims: tuple[tuple[int, tuple[int, ...]], ...]
    """Ops of whose values some items are dropped after it, and the items' indices."""


class Executor:
    """Runs the ops of one rank.

    `order` is this rank's part of an order that is legal for all ranks together (`program/linearize.py`). On a CPU
    every step follows it, since ranks wait inside collectives there. On a GPU only the first step, the rehearsal,
    follows it; later steps follow the list.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        actions: Actions,
        lanes: Lanes,
        recorder: Recorder,
        order: Sequence[int],
    ) -> None:
        self._lanes, self.actions, self.recorder = lanes, actions, recorder
        self._plain = _compile(program.ranks[rank], program.layout, rank, actions)
        self._list = self._plain  # or annotated or watched copies
        self._order = order
        self._ops = [self._list[p] for p in order]  # in the issue order of the next step
        self._names: Sequence[str] | None = None
        self._rehearse = lanes.needs_rehearsal
        self._values: list[Any] = [None] * len(self._list)

    def follow(self, order: Sequence[int]) -> None:
        """Issue the ops in another legal order from the next step on. On a GPU only after the rehearsal."""
        self._ops = [self._list[p] for p in order]

    def rehearse(self) -> None:
        """Make the next step a rehearsal again, because it may launch new kernels."""
        self._rehearse = self._lanes.needs_rehearsal
        if self._rehearse:
            self.follow(self._order)

    @property
    def annotated(self) -> bool:
        """Whether ops are annotated in profiler traces."""
        return self._names is not None

    def annotate(self, on: bool = True) -> None:
        """Turn the annotation of ops in profiler traces on or off, from the next step.

        It costs a few microseconds per op. On a CPU the host's waits are annotated too, as `wait <op>`.
        """
        self._names = [str(c.op) for c in self._plain] if on else None
        self._list = [replace(c, run=_named(str(c.op), c.run)) for c in self._plain] if on else self._plain
        self._ops = [self._list[c.position] for c in self._ops]

    def watch(self, see: Callable[[Op, Any], None] | None) -> None:
        """Call `see` with each compute op and its result, on the op's lane; with None, stop."""
        self._names = None
        self._list = [_watched(c, see) if c.lane in COMPUTING else c for c in self._plain] if see else self._plain
        self._ops = [self._list[c.position] for c in self._ops]

    @torch.no_grad()
    def run(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Run all ops once. Returns the losses of the microbatches; empty on ranks without the head.

        On a GPU the ops may still be running on return. The recorder stays active until the caller has waited for them.
        """
        actions, lanes, values, recorder = self.actions, self._lanes, self._values, self.recorder
        actions.microbatches, actions.losses = microbatches, []
        recorder.begin()
        lanes.begin(self._names)
        try:
            for c in self._ops:
                recorder.issue(c.position)
                lanes.use(c.lane)
                for lane, position in c.waits:
                    lanes.wait(lane, position)
                result = c.run(c.op, *[values[p] for p in c.inputs])
                pending = None
                if c.lane not in COMPUTING:
                    result, pending = result
                values[c.position] = result
                lanes.issued(c.lane, c.position, pending, c.awaited)
                for p in c.frees:
                    values[p] = None
                for p, gone in c.trims:
                    values[p] = [None if n in gone else item for n, item in enumerate(values[p])]
                if self._rehearse:
                    lanes.settle()
            lanes.end()
        except BaseException as error:
            recorder.end()
            if recorder.issued:
                error.add_note(f"while op {recorder.issued[-1]} was issued: {recorder.ops[recorder.issued[-1]]}")
            raise
        if self._rehearse:  # from now on lanes overlap
            self._rehearse, self._ops = False, self._list
        return actions.losses

    def abort(self) -> None:
        """Forget the values of an interrupted step, so that a later step starts clean. Requires that no op waits."""
        self.recorder.end()
        self._values = [None] * len(self._values)
        self.actions.discard()

    def assert_clean(self) -> None:
        """Assert that no value, segment or routing is left after a step."""
        left = [str(c.op) for c in self._list if self._values[c.position] is not None]
        assert not left, f"values left after the step: {left[:5]}"
        self.actions.assert_clean()


def _named(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    def named(*args: Any) -> Any:
        with torch.profiler.record_function(name):
            return run(*args)

    return named


def _watched(c: Compiled, see: Callable[[Op, Any], None]) -> Compiled:
    def watched(*args: Any) -> Any:
        result = c.run(*args)
        see(c.op, result)
        return result

    return replace(c, run=watched)


def _compile(ops: Sequence[Op], layout: Layout, rank: int, actions: Actions) -> list[Compiled]:
    where: dict[Key, int] = {op.key: i for i, op in enumerate(ops)}
    awaited = {p for op in ops for p in op.deps}
    return [
        Compiled(
            position=i,
            op=op,
            lane=op.lane,
            run=actions.find(op),
            inputs=tuple(where[key] for key in reads(op, layout, rank)),
            waits=tuple((ops[p].lane, p) for p in op.deps),
            awaited=i in awaited,
            frees=op.frees,
            trims=tuple((p, shares(ops[p], layout)) for p in op.trims),
        )
        for i, op in enumerate(ops)
    ]
