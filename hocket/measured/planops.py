"""How long every op of a plan really took: the kernels of an op put together, waiting and the host's lateness apart.

    seconds of an op = from its first kernel to its last, without waiting for peers, without gaps due to the host

Waiting is the time of a collective before the last rank of its group had started it; it is known only if the traces of
the whole group are given. A gap is due to the host as far as the next kernel had not been launched. A dispatch stops
the host in its midst by design (it needs the counts), so there such a gap counts as the op's own time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from hocket.measured.stored import ops_by_name, pipeline_rank
from hocket.program.ops import Layout, Op, Program
from hocket.program.simulate import stops_host
from hocket_trace.data import COMMUNICATION, Floats, Ints, RankTrace
from hocket_trace.exposure import last_starts, waits
from hocket_trace.intervals import covered


@dataclass(frozen=True)
class PlanOps:
    """What ran of a plan on one rank, one row per op and step, in the order in which the host issued them."""

    rank: int
    pp_rank: int
    ops: tuple[Op, ...]
    step: Ints
    """Index into the trace's steps."""
    start: Floats
    end: Floats
    waiting: Floats
    """Seconds in which all that ran of it waited for peers; nan if not known."""
    late: Floats
    """Seconds of gaps in it that are due to the host."""
    seconds: Floats
    """On its lane, without both; with the waiting if that is not known."""
    first_launch: Floats
    """When its first kernel was launched; nan on a CPU."""
    earlier_launch: Floats
    """When the last but one was; of an op with one kernel, when that was."""

    def __len__(self) -> int:
        return len(self.ops)

    def take(self, index: Ints) -> PlanOps:
        """These rows, in this order."""
        columns = {f.name: getattr(self, f.name)[index] for f in fields(self) if f.name not in _NO_COLUMNS}
        return replace(self, ops=tuple(self.ops[n] for n in index.tolist()), **columns)


_NO_COLUMNS = ("rank", "pp_rank", "ops")


def all_plan_ops(traces: Sequence[RankTrace], program: Program) -> tuple[PlanOps, ...]:
    """The plan's ops in every trace of a run. Raises ValueError if there are none in one of them."""
    found = []
    for trace, waiting in zip(traces, _waiting_of(traces), strict=True):
        pp_rank = pipeline_rank(trace)
        rows = _plan_ops(trace, waiting, ops_by_name(program, pp_rank), program.layout)
        if not rows:
            raise ValueError(
                f"{trace.source}: none of the ops of its plan is in a step of it; fix: a trace written by hocket train "
                "--train.profile --plan.graphs off, which names ops and steps"
            )
        found.append(rows)
    return tuple(found)


def _waiting_of(traces: Sequence[RankTrace]) -> list[Floats]:
    """For every row of every trace: seconds until the last rank of its group had started.

    0 for what is no communication, nan where the rows of other ranks are missing.
    """
    found = []
    for trace, last in zip(traces, last_starts(traces), strict=True):
        waiting = np.minimum(np.maximum(last - trace.start, 0.0), trace.end - trace.start)
        found.append(np.where(trace.of_kind(*COMMUNICATION), waiting, 0.0))
    return found


def _plan_ops(trace: RankTrace, waiting: Floats, known: dict[str, Op], layout: Layout) -> PlanOps:
    """The ops of a plan in a trace. `known` are those of its pipeline rank by name; other rows are left out."""
    of_word = [known.get(word) for word in trace.words]
    is_op = np.array([op is not None for op in of_word], dtype=bool)
    rows = np.flatnonzero(is_op[trace.op] & (trace.step >= 0))
    rows = rows[np.lexsort((trace.start[rows], trace.op[rows], trace.step[rows]))]
    key = trace.step[rows] * len(trace.words) + trace.op[rows]
    first = np.flatnonzero(np.diff(key, prepend=-1))
    group = np.repeat(np.arange(len(first)), np.diff([*first, len(rows)]))
    start, end, launched = trace.start[rows], trace.end[rows], trace.launched[rows]
    ops = tuple(op for op in (of_word[word] for word in trace.op[rows[first]].tolist()) if op is not None)
    begin, stop = start[first], _by_group(np.maximum, end, first)
    awaited = _waiting(start, end, waiting[rows], first)
    late = _by_group(np.add, _late(start, end, launched, group), first)
    own = np.array([stops_host(op, layout) for op in ops], dtype=bool)
    late = np.where(own, 0.0, late)
    found = PlanOps(
        rank=trace.rank,
        pp_rank=pipeline_rank(trace),
        ops=ops,
        step=trace.step[rows[first]],
        start=begin,
        end=stop,
        waiting=awaited,
        late=late,
        seconds=np.maximum(stop - begin - np.nan_to_num(awaited) - late, 0.0),
        first_launch=_by_group(np.fmin, launched, first),
        earlier_launch=_earlier(launched, group, first),
    )
    return found.take(np.lexsort((found.start, found.first_launch, found.step)))


def _by_group(join: np.ufunc, values: Floats, first: Ints) -> Floats:
    return join.reduceat(values, first) if len(values) else values


def _waiting(start: Floats, end: Floats, waiting: Floats, first: Ints) -> Floats:
    """For every op: seconds in which nothing of it ran but what waited; nan if that is not known of all of it."""
    if not len(start):
        return start
    count = np.diff([*first, len(start)])
    apart = np.repeat((end.max() - start.min() + 1.0) * np.arange(len(first)), count)  # ops one after the other
    start, end = start + apart, end + apart
    seconds = covered(start[first], _by_group(np.maximum, end, first), waits(start, end, start + waiting))
    return np.where(_by_group(np.maximum, np.isnan(waiting), first), np.nan, seconds)


def _late(start: Floats, end: Floats, launched: Floats, group: Ints) -> Floats:
    """For every kernel: seconds in which nothing of its op ran before it because it had not been launched yet."""
    if not len(start):
        return start
    apart = (end.max() - start.min() + 1.0) * group  # keeps the groups apart in one running maximum
    done = np.maximum.accumulate(end + apart) - apart
    before = np.concatenate([start[:1], done[:-1]])
    same = np.concatenate([[False], group[1:] == group[:-1]])
    gap = np.where(same, np.minimum(start, np.nan_to_num(launched, nan=-np.inf)) - before, 0.0)
    return np.maximum(gap, 0.0)


def _earlier(launched: Floats, group: Ints, first: Ints) -> Floats:
    """The launch before the last of every group; the only one if there is no other."""
    order = np.lexsort((launched, group))
    last = np.append(first[1:], len(launched)) - 1
    return launched[order][np.maximum(last - 1, first)] if len(launched) else launched
