"""Which call of a collective started a transfer of gloo: the trace links the two neither by an id nor by a group.

Sends and receives start on the caller's thread, so the k-th belongs to the k-th call there. Everything else runs on
threads of the process group, two each, that take its calls in order. A group's idle thread starts a call within
microseconds; so a thread serves the purpose (the group that the plan op tells) whose calls its transfers follow most
closely, and within one purpose the k-th transfer of a name belongs to the k-th call of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.trace import label
from hocket.trace.data import Ints
from hocket.trace.launch import opened_at
from hocket.trace.parse import Events, Rows


def gloo_threads(events: Events, transfers: Rows) -> set[int]:
    """Threads that only move data: those torch names so, and those of transfers other than sends and receives."""
    named = {thread for thread, title in events.threads.items() if "gloo_runloop" in title}
    point_to_point = np.array(
        [events.names[name].startswith(("gloo:send", "gloo:recv")) for name in transfers.name], bool
    )
    own = set(transfers.where[point_to_point].tolist()) if len(transfers) else set()
    return (named | set(transfers.where[~point_to_point].tolist() if len(transfers) else [])) - own


def group_of(op: str) -> str:
    """The description of the process group that a plan op uses; see `runtime/comm.py`."""
    if not op:
        return ""
    verb, part = op.split()[:2]
    if verb in ("gather", "reduce"):
        return f"{verb}_{'experts' if part == 'experts' else 'dense'}"
    if verb in ("send", "recv"):
        return "pp_fwd" if part == "act" else "pp_bwd"
    return "control" if verb == "step" else "a2a"


def calls_of(transfers: Rows, host: Rows, words: tuple[str, ...]) -> Ints:
    """For each transfer, the host row of the call that started it, -1 if it is not in the trace."""
    collective = [label.collective_of(word) if word.startswith(("c10d::", "gloo:")) else "" for word in words]
    calls = [
        i for i in np.flatnonzero(np.array([w.startswith("c10d::") for w in words], bool)[host.name] & (host.link == 0))
    ]
    calls.sort(key=lambda i: host.start[i])
    op = opened_at(host, words, host.start[calls], host.where[calls]).op if calls else np.empty(0, np.int64)
    pending: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, name in zip(calls, op.tolist(), strict=True):
        pending[collective[host.name[i]], group_of(words[name])].append(int(i))
    what = [collective[name] for name in transfers.name]
    serves = _served(transfers, what, host, pending)
    queues: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row in np.argsort(transfers.start, kind="stable").tolist():
        queues[what[row], serves[row]].append(row)
    found = np.full(len(transfers), -1, np.int64)
    for key, rows in queues.items():
        found[rows[: len(pending[key])]] = pending[key][: len(rows)]
    return found


def _served(transfers: Rows, what: list[str], host: Rows, pending: Mapping[tuple[str, str], list[int]]) -> list[str]:
    """For each transfer, the group whose calls its thread serves."""
    ahead: dict[tuple[int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    starts = {key: host.start[rows] for key, rows in pending.items()}
    direct = {"send", "recv"}
    for row, (collective, thread) in enumerate(zip(what, transfers.where.tolist(), strict=True)):
        at = transfers.start[row]
        place = row if collective in direct else thread
        for (name, group), begun in starts.items():
            if name == collective:
                i = np.searchsorted(begun, at, side="right") - 1
                ahead[place, collective][group].append(at - begun[i] if i >= 0 else np.inf)
    best = {key: min(groups, key=lambda group, of=groups: float(np.median(of[group]))) for key, groups in ahead.items()}
    return [
        best.get((row if w in direct else t, w), "")
        for row, (w, t) in enumerate(zip(what, transfers.where.tolist(), strict=True))
    ]


def told_of(
    events: Events, words: tuple[str, ...], op: Ints, transfer: NDArray[np.bool_]
) -> Mapping[int, Mapping[str, Any]]:
    """What can be said about each transfer's group, in the words of a kernel's args."""
    about = events.about.get("distributedInfo") or {}
    numbers: dict[str, str] = {}
    for group in about.get("pg_config") or []:
        numbers.setdefault(str(group.get("pg_desc")), str(group.get("pg_name")))
    told = {}
    for row in np.flatnonzero(transfer).tolist():
        if (group := group_of(words[op[row]])) in numbers:
            told[row] = {"Process Group Name": numbers[group]}
    return told
