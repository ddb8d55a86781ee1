"""Interprets one trace file as a `RankTrace`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket_trace import label
from hocket_trace.cpu import cpu_activities
from hocket_trace.data import Floats, Ints, Plan, PlanOp, RankTrace, Step
from hocket_trace.launch import Activities, gpu_activities
from hocket_trace.parse import Events, TraceError, parse

# -- An activity's step is the one in whose annotation the host launched it --------------------------------------------

_NAME = re.compile(r"(?:hocket step |ProfilerStep#)(\d{1,18})")


def step_number(name: str) -> int:
    """The number in `hocket step 12` or `ProfilerStep#12`, -1 for other names."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else -1


def assign(
    marks: Sequence[tuple[int, float, float]], start: Floats, end: Floats, launched: Floats
) -> tuple[tuple[Step, ...], Ints]:
    """The steps with activities, and the index of each activity's step, -1 outside of steps.

    `marks` are (number, start, end) of the host's annotations; without any, the whole trace is step 0.
    """
    if not marks:
        return (Step(0, float(start.min()), float(end.max())),), np.zeros(len(start), np.int64)
    marks = sorted(marks, key=lambda mark: mark[1])
    at = np.where(np.isnan(launched), start, launched)
    begins, ends = np.array([mark[1] for mark in marks]), np.array([mark[2] for mark in marks])
    found = np.searchsorted(begins, at, side="right") - 1
    found = np.where((found >= 0) & (at <= ends[found]), found, -1)
    used = [i for i in range(len(marks)) if np.any(found == i)]
    index = np.full(len(marks) + 1, -1)
    index[used] = np.arange(len(used))
    firsts = [float(start[found == i].min()) for i in used]
    lasts = [float(end[found == i].max()) for i in used]
    steps = []
    for n, i in enumerate(used):
        number = marks[i][0]
        followed = n + 1 < len(used) and marks[used[n + 1]][0] == number + 1
        steps.append(Step(number, firsts[n], firsts[n + 1] if followed else lasts[n]))
    return tuple(steps), index[found]


# -- read --------------------------------------------------------------------------------------------------------------

EARLY = 50e-6
"""Seconds by which an activity may start before its launch, since clocks of device and host differ."""


@dataclass
class _Words:
    """Numbers words."""

    known: dict[str, int] = field(default_factory=dict)

    def __getitem__(self, word: str) -> int:
        return self.known.setdefault(word, len(self.known))

    def column(self, words: Sequence[str], index: Ints) -> Ints:
        """The numbers of `words[index]`."""
        return np.array([self[word] for word in words], np.int64)[index] if len(index) else np.empty(0, np.int64)


def read(path: Path | str) -> RankTrace:
    """Read the trace of one rank, from hocket or any other PyTorch program, with or without a GPU. Raises
    TraceError.
    """
    return understood(parse(Path(path)))


def understood(events: Events) -> RankTrace:
    """Interpret a trace file. Raises TraceError."""
    gpu = len(events.device) > 0
    if not gpu and _used_a_gpu(events):
        raise TraceError(
            f"{events.source}: no GPU activity, though it used a GPU; fix: record it with ProfilerActivity.CUDA"
        )
    found = gpu_activities(events) if gpu else cpu_activities(events)
    if not len(found.start):
        raise TraceError(f"{events.source}: no kernels and no torch ops; fix: record it while the program computes")
    return _labelled(events, found, gpu)


def _used_a_gpu(events: Events) -> bool:
    return len(events.launches) > 0 or any(name.startswith("nccl:") for name in events.names)


def _labelled(events: Events, found: Activities, gpu: bool) -> RankTrace:
    about = events.about.get("distributedInfo") or {}
    rank, world = _rank(events, about)
    words = _Words()
    groups = _Groups(about)
    marks = _step_marks(events)
    steps, step = assign(marks, found.start, found.end, found.launched)
    if turned := next((one.number for one in steps if one.end < one.start), None):
        raise TraceError(f"{events.source}: step {turned} ends before it starts: a clock jumped; fix: record it again")
    run = events.about.get("hocket") or {}
    labels = _labels(found, groups, words, events.plan, (rank, run.get("transport") == "null"))
    if run.get("transport") == "null":
        labels["kernel_class"] = _with_stand_ins(found, labels["kernel_class"], words, events.plan)
    notes = (
        [] if marks else ["no step is marked (`hocket step N`, `ProfilerStep#N`): the whole trace counts as one step"]
    )
    if missing := int(np.isnan(found.launched).sum()):
        notes.append(
            f"rank {rank}: the launches of {missing:,} of {len(found.start):,} activities are not in the trace"
        )
    early = found.launched - found.start
    if np.nanmax(early, initial=0.0) > EARLY:
        notes.append(
            f"rank {rank}: activities start up to {1e3 * np.nanmax(early):.3f} ms before they are launched: the clocks "
            "of device and host differ, so times of a late host are rough"
        )
    notes += found.notes
    devices = events.about.get("deviceProperties") or [{}]
    return RankTrace(
        source=events.source,
        rank=rank,
        world=world,
        device=str(devices[0].get("name") or "GPU") if gpu else "cpu",
        start=found.start,
        end=found.end,
        launched=found.launched,
        step=step,
        steps=steps,
        groups=groups.members,
        run=run,
        plan=events.plan,
        match=np.full(len(found.start), -1, np.int64),
        calls=found.opened.call,
        origin=events.origin,
        host=str(events.about.get("host_name") or run.get("hostname", "")),  # GPU traces do not name it
        notes=tuple(notes),
        **labels,
        words=tuple(words.known),
    )


def _rank(events: Events, about: Mapping[str, Any]) -> tuple[int, int]:
    """(rank, world) in the trace. Without them, the rank in a file name such as rank3.json.gz, and world 0."""
    if "rank" in about:
        return int(about["rank"]), int(about.get("world_size", 0))
    named = re.search(r"rank[-_]?(\d{1,6})(?!\d)", Path(events.source).name)
    return int(named[1]) if named else 0, 0


def _step_marks(events: Events) -> list[tuple[int, float, float]]:
    host = events.host
    numbers = np.array([step_number(name) for name in events.names], np.int64)
    rows = np.flatnonzero(numbers[host.name] >= 0)
    return [(int(numbers[host.name[i]]), float(host.start[i]), float(host.end[i])) for i in rows]


class _Groups:
    """Process groups by torch's numbers, with readable names."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        made = [group for group in about.get("pg_config") or [] if isinstance(group, dict)]
        self.members: dict[str, tuple[int, ...]] = {}
        self.title: dict[str, str] = {}
        self.description: dict[str, str] = {}
        for group in made:
            self._add(str(group.get("pg_name", "")), str(group.get("pg_desc", "")), tuple(group.get("ranks") or ()))

    def _add(self, number: str, description: str, ranks: tuple[int, ...]) -> None:
        """Add a group. Its title is the description, with the number if groups of different ranks share it."""
        plain = description if description not in ("", "undefined") else f"group {number}"
        title = plain if self.members.get(plain, ranks) == ranks else f"{plain} #{number}"
        self.members[title], self.title[number], self.description[number] = ranks, title, description

    def of(self, args: Mapping[str, Any]) -> tuple[str, str, tuple[int, ...]]:
        """(title, description, ranks) of a collective's group."""
        number = str(args.get("Process Group Name", ""))
        if not number:
            return "", "", ()
        if number not in self.title:
            ranks = tuple(int(rank) for rank in re.findall(r"\d+", str(args.get("Process Group Ranks", ""))))
            self._add(number, str(args.get("Process Group Description", "")), ranks)
        title = self.title[number]
        return title, self.description[number], self.members[title]


def _labels(found: Activities, groups: _Groups, words: _Words, plan: Plan, who: tuple[int, bool]) -> dict[str, Any]:
    """The columns of words, and those from a collective's args. Distinct combinations of words are classified once.

    `who` is the rank, and whether it uses the null transport.
    """
    rank, pretended = who
    n = len(found.start)
    communicates = _communicates(found, Plan() if pretended else plan)
    kind, group = np.full(n, words["compute"]), np.full(n, words[""])
    size = np.zeros(n)
    named = any(found.words[i] for i in np.unique(found.opened.op))  # a replay of a plan has no op names
    counted: set[int] = set()
    before: dict[int, int] = {}  # the kind of each lane's last communication
    for row in np.flatnonzero(communicates).tolist():
        args = found.args.get(row, {})
        title, description, ranks = groups.of(args)
        name, launcher, op, around = (
            found.words[column[row]]
            for column in (found.name, found.opened.launcher, found.opened.op, found.opened.around)
        )
        collective = label.collective_of(str(args.get("Collective name", "")), launcher, name, around)
        call = int(found.opened.call[row])
        moved = label.bus_bytes(args, collective, rank, ranks)
        if "bytes" in args:
            size[row] = 0.0 if name.startswith(("Memcpy D", "Memset")) else label.number(args, "bytes")
        elif call not in counted:  # count a call's bytes only once
            size[row] = moved
            counted |= {call} - {-1}
        texts = f"{around} {launcher} {name}"
        kind[row] = words[label.kind_of(plan.ops.get(op), description, collective, texts, moved)]
        if not op and (label.is_barrier(name) or label.is_copy(name)) and not launcher:
            kind[row] = before.get(int(found.lane[row]), kind[row])
        elif named and not op and not description:  # outside of ops, ranks only agree on something
            kind[row] = words["control"]
        before[int(found.lane[row])] = int(kind[row])
        group[row] = words[title]
    classes = _for_distinct(
        lambda name, launcher, optimizer: words[
            label.kernel_class(found.words[name], found.words[launcher], bool(optimizer))
        ],
        found.name,
        found.opened.launcher,
        found.opened.optimizer.astype(np.int64),
    )
    return {
        "kind": kind,
        "group": group,
        "bytes": size,
        "kernel_class": np.where(communicates, words[""], classes),
        "name": words.column(found.words, found.name),
        "launcher": words.column(found.words, found.opened.launcher),
        "op": words.column(found.words, found.opened.op),
        "lane": words.column(found.words, found.lane),
        "layer": found.opened.layer,
    }


def _communicates(found: Activities, plan: Plan) -> NDArray[np.bool_]:
    """A mask of the activities that are communication."""
    return _passing(label.is_communication, found, plan) | found.transfer


def _with_stand_ins(found: Activities, kernel_class: Ints, words: _Words, plan: Plan) -> Ints:
    """The kernel classes of a run with the null transport, with its stand-ins."""
    return np.where(_passing(label.is_stand_in, found, plan), words["stand-in"], kernel_class)


def _passing(test: Callable[[str, str, PlanOp | None], bool], found: Activities, plan: Plan) -> NDArray[np.bool_]:
    """A mask of the activities that pass a test of their name, launcher and plan op."""
    words, opened = found.words, found.opened
    return _for_distinct(
        lambda name, launcher, op: test(words[name], words[launcher], plan.ops.get(words[op])),
        found.name,
        opened.launcher,
        opened.op,
    ).astype(bool)


def _for_distinct(function: Any, *columns: Ints) -> NDArray[Any]:
    """`function` of each row of the columns, called once per distinct row."""
    rows, where = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    return np.array([function(*row) for row in rows.tolist()])[where.reshape(-1)]
