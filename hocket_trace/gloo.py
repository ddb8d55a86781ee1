"""Which call of a collective started a transfer of gloo: the trace links the two neither by an id nor by a group.

Sends and receives start on the caller's thread, so the k-th belongs to the k-th call there. Everything else runs on
threads of the process group, two each, that take its calls in order. A group's idle thread starts a call within
microseconds; so a thread serves the purpose (the group that the plan op tells) whose calls its transfers follow most
closely, and within one purpose the k-th transfer of a name belongs to the k-th call of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket_trace import label
from hocket_trace.data import Floats, Ints, Plan
from hocket_trace.launch import opened_at
from hocket_trace.parse import Events, Rows

_Queue = tuple[str, str]
"""Collective and group."""


def gloo_threads(events: Events) -> set[int]:
    """Threads that only move data: those that torch names so, and those of transfers other than sends and receives."""
    host = events.host
    transfer = np.array([name.startswith("gloo:") for name in events.names], bool)[host.name]
    direct = np.array([name.startswith(("gloo:send", "gloo:recv")) for name in events.names], bool)[host.name]
    named = {thread for thread, title in events.threads.items() if "gloo_runloop" in title}
    return (named | set(host.where[transfer & ~direct].tolist())) - set(host.where[direct].tolist())


def group_of(op: str, plan: Plan) -> str:
    """The description of the process group of a named op; empty if it uses several or none."""
    found = plan.ops.get(op)
    return found.group if found is not None else ""


def calls_of(events: Events, transfers: Rows, host: Rows, words: tuple[str, ...]) -> Ints:
    """For each transfer, the host row of the call that started it, -1 if it is not in the trace."""
    collective = [label.collective_of(word) if word.startswith(("c10d::", "gloo:")) else "" for word in words]
    collective = [name.replace("reducescatter", "allreduce") for name in collective]  # gloo runs the one as the other
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
        # A transfer that starts before the next call is of a call from before the trace.
        if i < len(pending[queue]) and host.start[pending[queue][i]] <= transfers.start[row]:
            found[row] = pending[queue][i]
            taken[queue] += 1
    return found


def _served(transfers: Rows, what: list[str], called: Mapping[_Queue, Floats]) -> list[str]:
    """For each transfer, the group whose calls its thread serves: by the median time since the group's last call.

    Sends and receives run on the caller's thread, so each is looked at alone.
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


def told_of(
    events: Events, words: tuple[str, ...], op: Ints, transfer: NDArray[np.bool_]
) -> Mapping[int, Mapping[str, Any]]:
    """What can be said about each transfer's group, in the words of a kernel's args.

    That is the group of its plan op, or the only one there is.
    """
    about = events.about.get("distributedInfo") or {}
    numbers: dict[str, str] = {}
    for group in about.get("pg_config") or []:
        numbers.setdefault(str(group.get("pg_desc")), str(group.get("pg_name")))
    only = "" if len(numbers) != 1 else next(iter(numbers))
    groups = {row: group_of(words[op[row]], events.plan) or only for row in np.flatnonzero(transfer).tolist()}
    return {row: {"Process Group Name": numbers[group]} for row, group in groups.items() if group in numbers}
