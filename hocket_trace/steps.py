"""Which step an activity belongs to: the one in whose annotation the host launched it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from hocket_trace.data import Floats, Ints, Step

_NAME = re.compile(r"(?:hocket step |ProfilerStep#)(\d{1,18})")


def step_number(name: str) -> int:
    """The number in `hocket step 12` or `ProfilerStep#12`, -1 for other names."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else -1


def assign(
    marks: Sequence[tuple[int, float, float]], start: Floats, end: Floats, launched: Floats
) -> tuple[tuple[Step, ...], Ints]:
    """The steps that hold activities, and for every activity the index of its step, -1 outside all of them.

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
