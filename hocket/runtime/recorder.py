"""What a rank has issued, and a watchdog that says what it hangs on.

When no op has been issued for the time limit, the watchdog has the rank reported: what it does and waits for
(`engine/standstill.py`). Then it ends the process: a rank that hangs would otherwise hang all others without a word.

Note: [The watchdog waits for nobody]
What a rank waits for is asked of a device that may not answer, while other threads may hold what an answer needs. So
the report is made in a thread of its own, and if that is late the watchdog tells what it knows without the device. A
thread that is blocked while it holds the interpreter stops the watchdog too. For that there is a second one, which
needs no interpreter (`faulthandler`): it is put off while the first one lives, and else writes where all threads are,
and ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from hocket.program.ops import Op
from hocket.runtime.exchanges import Issued

HANG_EXIT_CODE = 75
"""Exit status of a rank that the watchdog ended."""

HANG_HEADLINE = "hocket: no progress"
"""How the report of a hang begins."""

ANSWER = 5.0
"""Seconds in which a report that asks the device must be there."""

LINGER = 2.0
"""Seconds between a rank's report and its end. Others hang with it and look once a second: an end would break their
connections, and they would tell of that instead."""

MARGIN = 20.0
"""Seconds by which collectives wait longer than the watchdog, which knows more about a hang than they do."""


class Recorder:
    """The ops that a rank issues in a step, in order, with times from `time.monotonic`."""

    def __init__(self, ops: Sequence[Op], begin_exchanges: Callable[[], Mapping[str, Issued]] = dict) -> None:
        """`begin_exchanges` has groups note what they are asked for from then on, by their names."""
        self.ops = ops
        self._begin_exchanges = begin_exchanges
        self.issued: list[int] = []
        self._times: list[float] = []
        self.exchanges: Mapping[str, Issued] = {}
        """What was issued together with the ops."""
        self.last_progress = time.monotonic()
        self.active = self.replayed = False
        self.inside = ""
        """What the host is at that is no op: a part of the step's end, or what comes behind all ops."""

    def begin(self, replayed: bool = False) -> None:
        """A step starts: from now on a standstill is a hang. A `replayed` one issues once more what was issued last."""
        begun = self._begin_exchanges()
        if not replayed:
            self.issued, self._times, self.exchanges = [], [], begun
        self.inside = "a replayed step, or the optimizer behind it" if replayed else ""
        self.last_progress, self.active, self.replayed = time.monotonic(), True, replayed

    def end(self) -> None:
        """The step is over: nobody waits for what it issued."""
        self.active = False

    def issue(self, position: int) -> None:
        """Note that the op at `position` is being issued."""
        now = time.monotonic()
        self.issued.append(position)
        self._times.append(now)
        self.last_progress, self.inside = now, ""

    def enter(self, what: str) -> None:
        """Note that the host goes on to something that is no op of its own and may have to wait for other ranks."""
        self.last_progress, self.inside = time.monotonic(), what

    def at(self, when: float) -> int | None:
        """The op that was being issued at some time of this step; None before the first."""
        count = bisect_right(self._times, when)
        return self.issued[count - 1] if count else None

    def where(self) -> str:
        """What the host is at."""
        seconds = time.monotonic() - self.last_progress
        last = f"op {self.issued[-1]}: {self.ops[self.issued[-1]]}" if self.issued and not self.replayed else ""
        if self.inside:
            return f"stuck for {seconds:.0f} s in {self.inside}" + (f"; the last issued is {last}" if last else "")
        return f"stuck for {seconds:.0f} s at {last}" if last else "no op has been issued"


class Watchdog:
    """Ends the process with a report when a step makes no progress for `limit` seconds.

    `report` is told whether it may ask the device. See Note: [The watchdog waits for nobody].
    """

    def __init__(self, limit: float, report: Callable[[bool], str], recorder: Callable[[], Recorder | None]) -> None:
        self._limit = limit
        self._report = report
        self._recorder = recorder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hocket-watchdog", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self._limit / 4)):
            recorder = self._recorder()
            if recorder is None or not recorder.active:
                faulthandler.cancel_dump_traceback_later()
                continue
            self._put_off()
            if time.monotonic() - recorder.last_progress > self._limit:
                with contextlib.suppress(Exception):  # a full disk is no reason to go on
                    sys.stderr.write(f"{HANG_HEADLINE} for {self._limit:g} s\n{self._said()}\n")
                    sys.stderr.flush()
                time.sleep(LINGER)
                os._exit(HANG_EXIT_CODE)
        faulthandler.cancel_dump_traceback_later()

    def _put_off(self) -> None:
        """Have the process ended if this thread does not come back in time."""
        with contextlib.suppress(Exception):  # a standard error that is no file
            faulthandler.dump_traceback_later(self._limit + ANSWER + LINGER, exit=True, file=sys.stderr)

    def _said(self) -> str:
        answers: list[str] = []
        asking = threading.Thread(target=lambda: answers.append(self._ask(True)), daemon=True)
        asking.start()
        asking.join(ANSWER)
        return answers[0] if answers else f"{self._ask(False)}\nthe device did not answer within {ANSWER:g} s"

    def _ask(self, device: bool) -> str:
        try:
            return self._report(device)
        except Exception as error:  # a GPU that has failed, or records a step, answers no questions
            return f"what this rank waits for cannot be told: {error}"

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2)
