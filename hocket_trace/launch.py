"""GPU activities and their launches: kernel -> correlation id -> launch on a host thread -> enclosing ops."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket_trace import label
from hocket_trace.data import Floats, Ints, Plan
from hocket_trace.parse import COLLECTIVE, Events, Rows

# -- The host op during which a kernel was launched: ops of one thread are nested --------------------------------------


@dataclass(frozen=True)
class Nesting:
    """The host's ops by thread and start, each with the op that encloses it."""

    order: Ints
    """Positions in the columns that this was built from."""
    start: Floats
    end: Floats
    parent: Ints
    """Index into these columns, -1 for an outermost op."""
    threads: dict[int, tuple[int, int]]
    """Thread -> its first row and the row after its last one."""

    def innermost(self, at: Floats, thread: Ints) -> Ints:
        """The innermost op that is running at each time on each thread, -1 if there is none."""
        found = np.full(len(at), -1, np.int64)
        for number in np.unique(thread):
            first, last = self.threads.get(int(number), (0, 0))
            here = np.flatnonzero(thread == number)
            index = first + np.searchsorted(self.start[first:last], at[here], side="right") - 1
            index[index < first] = -1
            found[here] = self._up_while(index, lambda i, here=here: self.end[i] < at[here])
        return found

    def climb(self, index: Ints, wanted: NDArray[np.bool_]) -> Ints:
        """The op itself or its nearest enclosing op that is wanted (a mask over these columns), -1 if there is none."""
        return self._up_while(index.copy(), lambda i: ~wanted[i])

    def _up_while(self, index: Ints, going: Callable[[Ints], NDArray[np.bool_]]) -> Ints:
        """Replace each index by its parent while `going(index)` holds for it."""
        if not len(self.parent):
            return index
        while len(moving := np.flatnonzero((index >= 0) & going(index))):
            index[moving] = self.parent[index[moving]]
        return index


def nest(start: Floats, end: Floats, thread: Ints) -> Nesting:
    """Sort the ops, and find the op that encloses each."""
    order = np.lexsort((-end, start, thread))
    start, end, thread = start[order], end[order], thread[order]
    numbers, firsts = np.unique(thread, return_index=True)
    lasts = [*firsts[1:].tolist(), len(thread)][: len(firsts)]  # empty without ops
    spans = {int(n): (int(a), b) for n, a, b in zip(numbers, firsts, lasts, strict=True)}
    parent: list[int] = []
    starts, ends = start.tolist(), end.tolist()
    for first, last in spans.values():
        around: list[int] = []
        for i in range(first, last):
            while around and ends[around[-1]] <= starts[i]:
                around.pop()
            parent.append(around[-1] if around else -1)
            around.append(i)
    return Nesting(order, start, end, np.array(parent, np.int64), spans)


# -- launch ------------------------------------------------------------------------------------------------------------

TRANSPORTS = ("nccl:", "gloo:")
"""Prefixes of torch's annotations around calls of a communication library."""
COPIES = "hocket:"
"""Prefix of annotations around a gather or reduction by copies."""


@dataclass(frozen=True)
class Opened:
    """The ops and annotations that enclosed launches, one entry per launch; words as indices."""

    launcher: Ints
    """The innermost op of torch, or the annotation of a collective such as `nccl:_all_gather_base`."""
    op: Ints
    """The program's named op (`plan.py`)."""
    around: Ints
    """An annotation with the purpose of a communication, such as `FSDP::all_gather (layers.5)`."""
    layer: Ints
    optimizer: NDArray[np.bool_]
    """Launched by an optimizer's step."""
    call: Ints
    """The host row of the collective's op, -1 if there is none."""


@dataclass(frozen=True)
class Activities:
    """Activities of one rank by start, with their launches; words as indices into `words`."""

    words: tuple[str, ...]
    start: Floats
    end: Floats
    launched: Floats
    name: Ints
    lane: Ints
    opened: Opened
    transfer: NDArray[np.bool_]
    """Communication, whatever its name."""
    args: Mapping[int, Mapping[str, Any]]
    """Row -> torch's args of its collective or copy."""
    notes: tuple[str, ...] = ()


_PURPOSES = ("gather", "reduce", "all_to_all", "matmul", "dispatch", "combine")
_SPIN = "spin_kernel"
"""The kernel with which hocket's `slow` transport occupies a stream before a collective, to emulate a slower link."""


def opened_at(events: Events, host: Rows, words: Sequence[str], at: Floats, thread: Ints) -> Opened:
    """The ops and annotations that enclose each time on each thread; none for nan times.

    `host` has the ops of `events` to consider, and the last of `words` is empty.
    """

    def matching(test: Any) -> NDArray[np.bool_]:
        return np.array([test(word) for word in words], bool)

    nesting = nest(host.start, host.end, host.where)
    name, annotation = host.name[nesting.order], host.link[nesting.order] == 1
    inner = nesting.innermost(at, thread)
    empty = len(words) - 1

    def nearest(wanted: NDArray[np.bool_]) -> Ints:
        index = nesting.climb(inner, wanted)
        return np.append(name, empty)[index]

    plan, layer = matching(events.plan.ops.__contains__), np.array([layer_of(word, events) for word in words], np.int64)
    transport = matching(lambda word: word.startswith(TRANSPORTS))
    copies = matching(lambda word: word.startswith(COPIES))
    collective = matching(lambda word: word == COLLECTIVE) | copies
    purpose = matching(lambda word: any(part in word for part in _PURPOSES)) & ~plan
    optimizer = matching(lambda word: word.startswith("Optimizer.step#"))
    agrees = matching(lambda word: word in events.plan.ops and events.plan.ops[word].kind == "control")
    op = nearest(plan[name] & annotation)
    op = np.where(op == empty, _open_anywhere(host, plan, at, empty), op)
    call = nesting.climb(inner, collective[name])
    launcher, copied = nearest(np.where(annotation, transport[name], ~collective[name])), nearest(copies[name])
    return Opened(
        launcher=np.where(copied == empty, launcher, copied),
        op=op,
        around=nearest(purpose[name] & (annotation | ~collective[name])),
        layer=np.where(op == empty, layer[nearest(layer[name] >= 0)], layer[op]),
        optimizer=(nearest(optimizer[name]) != empty) | agrees[op],
        call=np.append(nesting.order, -1)[call],
    )


def layer_of(word: str, events: Events) -> int:
    """The layer of a named op, or the one in a module's name; -1 if there is none."""
    op = events.plan.ops.get(word)
    return label.layer_of(word) if op is None else op.layer


def _open_anywhere(host: Rows, plan: NDArray[np.bool_], at: Floats, empty: int) -> Ints:
    """The plan op open on any thread: autograd's threads launch backward kernels, with or without annotations."""
    rows = np.flatnonzero(plan[host.name] & (host.link == 1))
    if not len(rows):
        return np.full(len(at), empty)
    rows = rows[np.argsort(host.start[rows], kind="stable")]
    last = np.searchsorted(host.start[rows], at, side="right") - 1
    inside = (last >= 0) & (at <= host.end[rows][last])
    return np.where(inside, host.name[rows][last], empty)


def gpu_activities(events: Events) -> Activities:
    """Kernels, copies and memsets of the GPU."""
    order = np.argsort(events.device.start, kind="stable")
    device, launches = events.device, events.launches
    by_id = np.argsort(launches.link, kind="stable")
    known = np.append(launches.link[by_id], np.iinfo(np.int64).max)
    link = device.link[order]
    found = np.searchsorted(known, link)
    launched_by = np.where((known[found] == link) & (link >= 0), np.append(by_id, -1)[found], -1)
    at = np.append(launches.start, np.nan)[launched_by]
    words = (*events.names, "")
    opened = opened_at(events, events.host, words, at, np.append(launches.where, -1)[launched_by])
    args = {int(row): _args(events, int(original), int(opened.call[row])) for row, original in enumerate(order)
            if original in device.args or opened.call[row] >= 0}  # fmt: skip
    spin = np.array([_SPIN in word for word in words], bool)[device.name[order]]
    emulated = _emulated(spin, device.where[order], opened)
    args |= {row: {**args.get(after, {}), "bytes": 0} for row, after in emulated.items()}
    opened.call[list(emulated)] = opened.call[list(emulated.values())]
    lane, words = _lanes(device.where[order], opened.op, words, events.plan)
    return Activities(
        words=words,
        start=device.start[order],
        end=device.end[order],
        launched=at,
        name=device.name[order],
        lane=lane,
        opened=opened,
        transfer=np.isin(np.arange(len(order)), list(emulated)),
        args=args,
    )


def _emulated(spin: NDArray[np.bool_], stream: Ints, opened: Opened) -> dict[int, int]:
    """Row of a spin that emulates a slower link -> the row of the collective that it delays.

    That is the next one on its stream, if the same plan op launched both.
    """
    found: dict[int, int] = {}
    for where in np.unique(stream[spin]).tolist():
        after = -1
        for row in np.flatnonzero(stream == where)[::-1].tolist():
            if opened.call[row] >= 0:
                after = row
            elif spin[row] and after >= 0 and opened.op[row] == opened.op[after]:
                found[row] = after
    return found


def _args(events: Events, row: int, call: int) -> Mapping[str, Any]:
    """The args of a kernel, added to those of its collective's op on the host."""
    return {**events.host.args.get(call, {}), **events.device.args.get(row, {})}


def _lanes(stream: Ints, op: Ints, words: tuple[str, ...], plan: Plan) -> tuple[Ints, tuple[str, ...]]:
    """Each row's lane, and the words with the lanes' names.

    A stream's lane is that of the named ops that launched most of its kernels, or `stream 7` if none did.
    """
    votes: dict[int, Counter[str]] = defaultdict(Counter)
    for where, name in zip(stream.tolist(), op.tolist(), strict=True):
        if words[name]:
            votes[where][words[name]] += 1
    titles: dict[int, str] = {}
    for where in np.unique(stream).tolist():
        lanes: Counter[str] = Counter()
        for name, count in votes[where].items():
            lanes[plan.ops[name].lane] += count
        titles[where] = lanes.most_common(1)[0][0] if lanes else f"stream {where}"
    place = {where: len(words) + i for i, where in enumerate(titles)}
    return np.array([place[where] for where in stream.tolist()], np.int64), (*words, *titles.values())
