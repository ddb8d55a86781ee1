"""A started worker as its parent sees it, and one message about why a run failed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.runtime.hangs import ALONE, HANG_EXIT_CODE, HANG_HEADLINE, STATE, RankState, culprit

TAIL = 15
"""Lines of a failed worker's log that are shown."""


@dataclass
class Child:
    """A worker as its parent sees it."""

    rank: int
    pid: int
    pipe: int
    """Read end of the pipe through which the worker says why it failed."""
    log: Path
    again: str
    """What the user can do about a failure."""
    status: int | None = None
    """As from `os.waitpid`; None while it runs."""

    def poll(self) -> None:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None

    @property
    def code(self) -> int:
        """Exit code, negative for a signal."""
        assert self.status is not None
        return os.waitstatus_to_exitcode(self.status)

    def last_words(self) -> dict[str, Any]:
        """What the worker said through the pipe: {kind, text, time}, or nothing."""
        text = b""
        while select.select([self.pipe], [], [], 0)[0] and (block := os.read(self.pipe, 65536)):
            text += block
        return json.loads(text) if text else {}


def explain_hang(children: list[Child], silent: list[Child]) -> int:
    """Print the rank that the others waited for, what each waited for, and which were silent. Returns the exit code."""
    reports = {child.rank: report_of_hang(child) for child in children if child.code == HANG_EXIT_CODE}
    states = {rank: state for rank, lines in reports.items() if (state := state_in(lines)) is not None}
    cause = culprit(states, {child.rank for child in children} - states.keys())
    waited = f"{'ranks' if len(reports) > 1 else 'rank'} {', '.join(map(str, reports))} waited"
    rest = "".join(f"; rank {child.rank} (process {child.pid}) said nothing and was ended" for child in silent)
    for child in children:
        if child not in silent and child.code not in (0, HANG_EXIT_CODE):
            rest += f"; rank {child.rank} (process {child.pid}) {how_it_ended(child)}"
    sys.stderr.write(
        f"{reports[min(reports)][0]}: {cause}. {waited}{rest}. "
        f"fix: see {children[0].log.parent}, or raise train.hang_timeout; {children[0].again}\n"
    )
    for _, *lines in reports.values():
        sys.stderr.writelines(f"  | {line}\n" for line in lines if not line.startswith((ALONE, STATE)))
    return 1


def how_it_ended(child: Child) -> str:
    """By a signal, or with which code."""
    return (
        f"was ended by {signal.Signals(-child.code).name}" if child.code < 0 else f"ended with exit code {child.code}"
    )


def report_of_hang(child: Child) -> list[str]:
    """The lines of a watchdog's report, headline first."""
    lines = child.log.read_text(errors="replace").splitlines()
    start = max((i for i, line in enumerate(lines) if line.startswith(HANG_HEADLINE)), default=None)
    return [HANG_HEADLINE, f"rank {child.rank}: its report is missing"] if start is None else lines[start:]


def state_in(report: list[str]) -> RankState | None:
    """What a report says for programs; None if it says nothing, or not to the end, as on a full disk."""
    lines = [line for line in report if line.startswith(STATE)]
    with contextlib.suppress(ValueError):  # the report for persons is told all the same
        return RankState.from_line(lines[-1]) if lines else None
    return None


def explain(children: list[Child]) -> int:
    """Say in one message why the run failed, and return the exit code."""
    failed = [child for child in children if child.status]
    words = {child.rank: child.last_words() for child in failed}
    for child in failed:
        if words[child.rank].get("kind") == "user":
            sys.stderr.write(f"hocket: {words[child.rank]['text']}\n")
            return 2
    # A signal counts as the cause before an exception: an exception may only report that another rank has ended. Of
    # several exceptions the earliest counts.
    cause = min(failed, key=lambda child: (child.code >= 0, words[child.rank].get("time", math.inf)))
    if cause.code < 0:
        hint = " (out of memory?)" if cause.code == -signal.SIGKILL else ""
        what = f"{how_it_ended(cause)}{hint}"
    else:
        what = f"failed with {words[cause.rank].get('text') or f'exit code {cause.code}'}"
    sys.stderr.write(
        f"hocket: rank {cause.rank} (process {cause.pid}) {what}; the other ranks were ended. "
        f"fix: see {cause.log}; {cause.again}\n"
    )
    lines = cause.log.read_text(errors="replace").splitlines() if cause.log.exists() else []
    sys.stderr.writelines(f"  | {line}\n" for line in lines[-TAIL:])
    return 1
