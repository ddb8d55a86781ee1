"""Activities of a program that computes on the CPU: ops of torch, and transfers of gloo.

Compute is every op that is not communication, on any thread. A library's outermost ops (`aten::mm`) have rows of their
own, and so do the intervals in which only an enclosing op runs (`MulBackward0`, autograd's engine). Ops on gloo's own
threads belong to its transfers. A host thread that blocks inside an op does not compute: a program marks that with an
annotation, `wait`, or between its named ops `wait <op>`. If a program starts transfers on threads that the profiler
does not trace (hocket's `slow` transport), the host's waits represent the ops without traced transfers.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket_trace import label
from hocket_trace.data import Floats, Ints, Plan
from hocket_trace.intervals import Spans, subtract, union
from hocket_trace.launch import Activities, Opened, layer_of, nest, opened_at
from hocket_trace.parse import COLLECTIVE, Events, Rows

# -- gloo --------------------------------------------------------------------------------------------------------------
# Which call of a collective started a transfer of gloo: the trace links them neither by an id nor by a group.
#
# Sends and receives start on the caller's thread, so the k-th belongs to the k-th call there. Everything else runs on a
# process group's two threads, which take its calls in order. A group's idle thread starts a call within microseconds.
# So a thread is assigned to the group (known from the plan op) whose calls its transfers follow most closely, and
# within one group the k-th transfer of a name belongs to the k-th call of it.

_Queue = tuple[str, str]
"""Collective and group."""


def gloo_threads(events: Events) -> set[int]:
    """Threads that only transfer data: those named so by torch, and those of gloo's transfers except sends/receives."""
    host = events.host
    transfer = np.array([name.startswith("gloo:") for name in events.names], bool)[host.name]
    direct = np.array([name.startswith(("gloo:send", "gloo:recv")) for name in events.names], bool)[host.name]
    named = {thread for thread, title in events.threads.items() if "gloo_runloop" in title}
    return (named | set(host.where[transfer & ~direct].tolist())) - set(host.where[direct].tolist())


def group_of(op: str, plan: Plan) -> str:
    """The description of a named op's process group; empty for several or none."""
    found = plan.ops.get(op)
    return found.group if found is not None else ""


def calls_of(events: Events, transfers: Rows, host: Rows, words: tuple[str, ...]) -> Ints:
    """For each transfer, the host row of the call that started it; -1 if that is not in the trace."""
    collective = [label.collective_of(word) if word.startswith(("c10d::", "gloo:")) else "" for word in words]
    collective = [name.replace("reducescatter", "allreduce") for name in collective]  # gloo has no reduce-scatter
    is_call = np.array([word.startswith("c10d::") for word in words], bool)
    calls = np.flatnonzero(is_call[host.name] & (host.link == 0))
    calls = calls[np.argsort(host.start[calls], kind="stable")]
    op = opened_at(events, host, words, host.start[calls], host.where[calls]).op
    pending: dict[_Queue, list[int]] = defaultdict(list)
    for call, name in zip(calls.tolist(), op.tolist(), strict=True):
        pending[collective[host.name[call]], group_of(words[name], events.plan)].append(call)
    what = [collective[name] for name in transfers.name]
    serves = _served(transfers, what, {queue: host.start[rows] for queue, rows in pending.items()})
    taken: Counter[_Queue] = Counter()
    found = np.full(len(transfers), -1, np.int64)
    for row in np.argsort(transfers.start, kind="stable").tolist():
        queue = what[row], serves[row]
        i = taken[queue]
        # A transfer that starts before the next pending call was called before the trace began.
        if i < len(pending[queue]) and host.start[pending[queue][i]] <= transfers.start[row]:
            found[row] = pending[queue][i]
            taken[queue] += 1
    return found


def _served(transfers: Rows, what: list[str], called: Mapping[_Queue, Floats]) -> list[str]:
    """For each transfer, the group that its thread serves: the one with the least median time since its last call.

    Sends and receives run on the caller's thread, so each is assigned on its own.
    """
    alone = np.array([collective in ("send", "recv") for collective in what], bool)
    thread = np.where(alone, -1 - np.arange(len(what)), transfers.where).tolist()
    delays: dict[tuple[int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row, collective in enumerate(what):
        for (name, group), calls in called.items():
            if name == collective:
                last = int(np.searchsorted(calls, transfers.start[row], side="right")) - 1
                delay = transfers.start[row] - calls[last] if last >= 0 else np.inf
                delays[thread[row], collective][group].append(float(delay))
    best = {
        key: min(groups, key=lambda group, of=groups: float(np.median(of[group]))) for key, groups in delays.items()
    }
    return [best.get((where, collective), "") for where, collective in zip(thread, what, strict=True)]


def group_args(
    events: Events, words: tuple[str, ...], op: Ints, transfer: NDArray[np.bool_]
) -> Mapping[int, Mapping[str, Any]]:
    """Args like a kernel's for each transfer with a known group: that of its plan op, or the only group there is."""
    about = events.about.get("distributedInfo") or {}
    numbers: dict[str, str] = {}
    for group in about.get("pg_config") or []:
        numbers.setdefault(str(group.get("pg_desc")), str(group.get("pg_name")))
    only = "" if len(numbers) != 1 else next(iter(numbers))
    groups = {row: group_of(words[op[row]], events.plan) or only for row in np.flatnonzero(transfer).tolist()}
    return {row: {"Process Group Name": numbers[group]} for row, group in groups.items() if group in numbers}


# -- cpu ---------------------------------------------------------------------------------------------------------------

_COMMUNICATION = ("c10d::", "_c10d_functional::", "symm_mem::", COLLECTIVE)
_WRAPPERS = ("autograd::", "torch::autograd")
_WAIT = re.compile(r"wait( .*)?")
"""Annotations in which a host thread blocks."""


def cpu_activities(events: Events) -> Activities:
    """Compute and transfers of a CPU program, sorted by start."""
    awaited = {name: op for name, word in enumerate(events.names) if (op := _awaited(word, events.plan))}
    words = (*events.names, *awaited.values(), "")
    place = {name: len(events.names) + i for i, name in enumerate(awaited)}
    by_gloo = np.array([word.startswith("gloo:") for word in words], bool)[events.host.name]
    host, transfers = events.host.take(~by_gloo), events.host.take(by_gloo)
    at, sent = _calls(events, transfers, host, words)
    moved = {words[op] for op in sent.op.tolist()}
    unseen = {name: place[name] for name, op in awaited.items() if op not in moved}
    for_op = _awaited_op(events, host, words, unseen, moved)
    waits, for_op = host.take(for_op >= 0), for_op[for_op >= 0]
    rows = _compute(host, words, gloo_threads(events))
    inside = opened_at(events, host, words, (rows.start + rows.end) / 2, rows.where)
    name = np.where(rows.name >= 0, rows.name, inside.launcher)
    inside = replace(inside, launcher=name, call=np.full(len(rows), -1))
    order = np.argsort(np.concatenate([rows.start, transfers.start, waits.start]), kind="stable")

    def together(*parts: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate(parts)[order]

    sources = inside, sent, _waits(events, for_op, words)
    opened = Opened(**{f.name: together(*(getattr(source, f.name) for source in sources)) for f in fields(Opened)})
    of_gloo = together(np.zeros(len(rows), bool), np.ones(len(transfers), bool), np.zeros(len(waits), bool))
    transfer = of_gloo | together(np.zeros(len(rows) + len(transfers), bool), np.ones(len(waits), bool))
    lane, words = _lanes(together(rows.where, transfers.where, waits.where), opened.op, transfer, words, events.plan)
    return Activities(
        words=words,
        start=together(rows.start, transfers.start, waits.start),
        end=together(rows.end, transfers.end, waits.end),
        launched=together(rows.start, at, waits.start),
        name=together(name, transfers.name, waits.name),
        lane=lane,
        opened=opened,
        transfer=transfer,
        args=group_args(events, words, opened.op, of_gloo),
        notes=(UNSEEN,) if len(waits) else (),
    )


UNSEEN = "of some ops the transfers are not in the trace, only waits for them: what was hidden of these is not counted"


def _awaited(word: str, plan: Plan) -> str:
    """The communication op in a wait's annotation such as `wait gather dense t0 c0 l3 s1`, else empty."""
    op = word.removeprefix("wait ")
    return op if op != word and plan.communicates(op) else ""


def _calls(events: Events, transfers: Rows, host: Rows, words: tuple[str, ...]) -> tuple[Floats, Opened]:
    """When each transfer was called, and the enclosing ops and annotations then."""
    call = calls_of(events, transfers, host, words)
    at = np.append(host.start, np.nan)[call]
    opened = opened_at(events, host, words, at, np.append(host.where, -1)[call])
    return at, replace(opened, launcher=transfers.name, call=call)


def _awaited_op(events: Events, host: Rows, words: tuple[str, ...], unseen: Mapping[int, int], moved: set[str]) -> Ints:
    """For each host row, the named op (an index into `words`) for whose untraced transfer it waits; -1 for most.

    `unseen` has the names of waits that name their op. Other waits belong to ops that communicate internally.
    """
    found = np.full(len(host), -1, np.int64)
    for name, op in unseen.items():
        found[host.name == name] = op
    bare = np.flatnonzero(np.array([word == "wait" for word in words], bool)[host.name] & (host.link == 1))
    inside = opened_at(events, host, words, host.start[bare], host.where[bare]).op
    talks = [op.kind != "compute" and op.lane in events.plan.computing for op in events.plan.ops.values()]
    within = {name for name, yes in zip(events.plan.ops, talks, strict=True) if yes} - moved
    found[bare] = np.where(np.array([word in within for word in words], bool)[inside], inside, -1)
    return found


def _waits(events: Events, for_op: Ints, words: tuple[str, ...]) -> Opened:
    """The enclosing op for waits of the host.

    They have no group: ranks that block on one transfer at different times say nothing about late peers.
    """
    n, empty = len(for_op), len(words) - 1
    nothing = np.full(n, empty)
    layer = np.array([layer_of(words[i], events) for i in for_op.tolist()], np.int64)
    return Opened(nothing, for_op, nothing, layer, np.zeros(n, bool), np.full(n, -1))


def _compute(host: Rows, words: tuple[str, ...], foreign: set[int]) -> Rows:
    """Rows of compute; the name is -1 where only wrapping ops run."""

    def rows(test: Callable[[str], bool]) -> NDArray[np.bool_]:
        return np.array([test(word) for word in words], bool)[host.name]

    annotation = host.link == 1
    communication = rows(lambda word: word.startswith(_COMMUNICATION)) & ~annotation
    waits = rows(lambda word: _WAIT.fullmatch(word) is not None) & annotation
    ops = ~annotation & ~communication & ~np.isin(host.where, list(foreign))
    library = ops & rows(lambda word: "::" in word and not word.startswith(_WRAPPERS))
    found = [_outermost(host, library)]
    for thread in np.unique(host.where[ops]).tolist():
        here = host.where == thread
        rest = subtract(_spans(host, here & ops), _spans(host, here & (library | communication | waits)))
        n = len(rest)
        found.append(Rows(np.full(n, -1), rest[:, 0], rest[:, 1], np.full(n, thread), np.zeros(n, np.int64), {}))
    return Rows(
        name=np.concatenate([part.name for part in found]),
        start=np.concatenate([part.start for part in found]),
        end=np.concatenate([part.end for part in found]),
        where=np.concatenate([part.where for part in found]),
        link=np.concatenate([part.link for part in found]),
        args={},
    )


def _outermost(host: Rows, library: NDArray[np.bool_]) -> Rows:
    """A library's ops that no other of its ops encloses."""
    chosen = host.take(library)
    nesting = nest(chosen.start, chosen.end, chosen.where)
    return chosen.take(nesting.order[nesting.parent < 0])


def _spans(host: Rows, rows: NDArray[np.bool_]) -> Spans:
    return union(host.start[rows], host.end[rows])


def _lanes(
    thread: Ints, op: Ints, transfer: NDArray[np.bool_], words: tuple[str, ...], plan: Plan
) -> tuple[Ints, tuple[str, ...]]:
    """A transfer's lane is its plan op's. Compute is on the lane `compute`, or on one per further thread."""
    titles: dict[str, int] = {}
    busiest = np.bincount(np.unique(thread[~transfer], return_inverse=True)[1]) if (~transfer).any() else [0]
    main = int(np.unique(thread[~transfer])[int(np.argmax(busiest))]) if (~transfer).any() else -1
    lane = []
    for where, name, moves in zip(thread.tolist(), op.tolist(), transfer.tolist(), strict=True):
        if moves:
            title = plan.ops[words[name]].lane if words[name] else f"gloo thread {where}"
        else:
            title = "compute" if where == main else f"thread {where}"
        lane.append(titles.setdefault(title, len(words) + len(titles)))
    return np.array(lane, np.int64), (*words, *titles)
