"""What a rank has issued, and a watchdog that says what it hangs on.

The recorder keeps the last ops that were issued. When no op has been issued for the time limit, the watchdog
reports the op that the rank waits for and the last ops that completed, and ends the process: a rank that
hangs would otherwise hang all others without a word.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from hocket.plan.ops import Op

HANG_EXIT_CODE = 75
"""Exit status of a rank that the watchdog ended."""

HANG_HEADLINE = "hocket: no progress"
"""How the report of a hang begins."""

WHOLE = "its ops were issued as one graph, so none is known to be reached; plan.graphs = off shows which one hangs"
"""What is known of a replayed step."""

LINGER = 2.0
"""Seconds between a rank's report and its end. Others hang with it and look once a second: an end would break their
connections, and they would tell of that instead."""

MARGIN = 10.0
"""Seconds by which collectives wait longer than the watchdog, which knows more about a hang than they do."""


class Recorder:
    """The ops that a rank issues, in order, with times from `time.monotonic`."""

    def __init__(self, ops: Sequence[Op], keep: int | None = 64) -> None:
        self._ops = ops
        self.issued: deque[tuple[int, float]] = deque(maxlen=keep)
        self.last_progress = time.monotonic()
        self.active = self.replayed = False
        self.waiting: int | None = None
        """The op that the one being issued waits for, if any."""
        self.inside = ""
        """What the host is at that is no op: a part of the step's end, or what comes behind all ops."""

    def begin(self, replayed: bool = False) -> None:
        """A step starts: from now on a standstill is a hang. A `replayed` one is issued as a whole."""
        self.issued.clear()
        self.waiting, self.inside = None, ""
        self.last_progress, self.active, self.replayed = time.monotonic(), True, replayed

    def end(self) -> None:
        """The step is over: nobody waits for what it issued."""
        self.active = False

    def issue(self, position: int) -> None:
        """Note that the op at `position` is being issued."""
        now = time.monotonic()
        self.issued.append((position, now))
        self.last_progress, self.waiting, self.inside = now, None, ""

    def enter(self, what: str) -> None:
        """Note that the host goes on to something that is no op of its own and may have to wait for other ranks."""
        self.last_progress, self.waiting, self.inside = time.monotonic(), None, what

    def report(self, rank: int, completed: Callable[[Op, int], bool], count: int = 5) -> str:
        """What the rank is doing, what it waits for and the last ops that completed."""
        if self.replayed:
            seconds = time.monotonic() - self.last_progress
            return (
                f"rank {rank}: stuck for {seconds:.0f} s inside a replayed step, or in the optimizer behind it: {WHOLE}"
            )
        if not self.issued:
            return f"rank {rank}: no op has been issued"
        position = self.issued[-1][0]
        seconds = time.monotonic() - self.last_progress
        op = f"op {position}: {self._ops[position]}"
        where = f"in {self.inside}; the last that was issued is {op}" if self.inside else f"at {op}"
        lines = [f"rank {rank}: stuck for {seconds:.0f} s {where}"]
        if self.waiting is not None:
            lines.append(f"  waits for op {self.waiting}: {self._ops[self.waiting]}")
        done = [p for p, _ in self.issued if p != position and completed(self._ops[p], p)][-count:]
        not_done = [p for p, _ in self.issued if p != position and not completed(self._ops[p], p)][:count]
        lines.append("  last completed: " + ("; ".join(f"{p} {self._ops[p]}" for p in done) or "nothing known"))
        if not_done:
            lines.append("  issued, not known to be complete: " + "; ".join(f"{p} {self._ops[p]}" for p in not_done))
        return "\n".join(lines)


class Watchdog:
    """Ends the process with a report when a step makes no progress for `limit` seconds."""

    def __init__(self, limit: float, report: Callable[[], str], recorder: Callable[[], Recorder | None]) -> None:
        self._limit = limit
        self._report = report
        self._recorder = recorder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hocket-watchdog", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self._limit / 4)):
            recorder = self._recorder()
            if recorder is not None and recorder.active and time.monotonic() - recorder.last_progress > self._limit:
                with contextlib.suppress(Exception):  # a full disk is no reason to go on
                    sys.stderr.write(f"{HANG_HEADLINE} for {self._limit:g} s\n{self._said()}\n")
                    sys.stderr.flush()
                time.sleep(LINGER)
                os._exit(HANG_EXIT_CODE)

    def _said(self) -> str:
        try:
            return self._report()
        except Exception as error:  # a GPU that has failed, or records a step, answers no questions
            return f"what this rank waits for cannot be told: {error}"

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2)
