"""Starts the workers of a run on this host, watches them, and ends them all: Note: [No worker outlives its run].

Note: [Workers are forked]
Importing torch takes a second or more, so the parent imports it once and forks. A fork breaks CUDA contexts and
threads, so the parent touches no CUDA and starts no threads before it forks.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hocket.config.rule import problem
from hocket.environment import HERE, Worker
from hocket.launching.worker import Job, child_main, free_port
from hocket.resolve import Settings
from hocket.runtime.hangs import ALONE, ANSWER, HANG_EXIT_CODE, HANG_HEADLINE, STATE, RankState, culprit
from hocket.train.signals import hang_up, stop_signals

# -- A worker as its parent sees it, and one message about why a run failed --------------------------------------------

TAIL = 15
"""Last lines of a failed worker's log to print."""


@dataclass
class Child:
    """A worker as its parent sees it."""

    rank: int
    pid: int
    pipe: int
    """Read end of the pipe through which the worker reports why it failed."""
    log: Path
    again: str
    """What the user can do after a failure."""
    status: int | None = None
    """The status from `os.waitpid`; None while it runs."""

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
        """What the worker reported through the pipe: {kind, text, time}, or an empty dict."""
        text = b""
        while select.select([self.pipe], [], [], 0)[0] and (block := os.read(self.pipe, 65536)):
            text += block
        return json.loads(text) if text else {}


def explain_hang(children: list[Child], silent: list[Child]) -> int:
    """Print which rank the others waited for, what each waited for, and which were silent. Returns the exit code."""
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
    """The signal or the exit code."""
    return (
        f"was ended by {signal.Signals(-child.code).name}" if child.code < 0 else f"ended with exit code {child.code}"
    )


def report_of_hang(child: Child) -> list[str]:
    """The lines of a watchdog's report, headline first."""
    lines = child.log.read_text(errors="replace").splitlines()
    start = max((i for i, line in enumerate(lines) if line.startswith(HANG_HEADLINE)), default=None)
    return [HANG_HEADLINE, f"rank {child.rank}: its report is missing"] if start is None else lines[start:]


def state_in(report: list[str]) -> RankState | None:
    """The machine-readable state of a report; None if it is missing or cut off, as on a full disk."""
    lines = [line for line in report if line.startswith(STATE)]
    with contextlib.suppress(ValueError):  # the readable report is printed anyway
        return RankState.from_line(lines[-1]) if lines else None
    return None


def explain(children: list[Child]) -> int:
    """Print one message about why the run failed. Returns the exit code."""
    failed = [child for child in children if child.status]
    words = {child.rank: child.last_words() for child in failed}
    for child in failed:
        if words[child.rank].get("kind") == "user":
            sys.stderr.write(f"hocket: {words[child.rank]['text']}\n")
            return 2
    # A signal takes precedence over exceptions, which may only report that another rank has ended. Among exceptions the
    # earliest counts.
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


# -- parent ------------------------------------------------------------------------------------------------------------

GRACE = 2.5
"""Seconds to wait for further failures after the first, to distinguish the cause from its consequences."""

KILL_TIMEOUT = 30.0
"""Seconds to wait until killed workers have exited."""


def start_workers(settings: Settings, job: Job) -> int:
    """Fork one worker per rank, watch them until the last has exited, and return the exit code."""
    port = free_port()
    logs = Path(settings.run.folder) / "logs"
    # See Note: [Workers are forked]
    import hocket.train.trainer  # noqa: F401

    children: list[Child] = []
    with forwarded_signals(children, job.ending) as asked:
        try:
            for rank in range(settings.world):
                worker = Worker(rank, settings.world, rank, settings.world, HERE[0], port, HERE[1], "")
                with stop_signals_blocked():
                    children.append(fork_worker(settings, worker, job, logs / f"rank{rank}.log"))
            return watch(children, asked, job.ended)
        finally:
            kill(children)


def fork_worker(settings: Settings, worker: Worker, job: Job, log: Path) -> Child:
    """Start one rank. Rank 0 prints to the terminal; all other output goes to logs.

    Raises ValueError if its log cannot be written.
    """
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    except OSError as error:
        reason, fix = f"{log} cannot be written ({error.strerror})", "name a folder you can write to"
        raise ValueError(problem("run.folder", settings.run.folder, settings.origins, reason, fix)) from None
    read, write = os.pipe()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        child_main(settings, worker, job, file, write, parent)
    os.close(write)
    os.close(file)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)
    return Child(worker.rank, pid, read, log, job.again)


@contextlib.contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Defer stop signals to the end of the block: one before the new worker is known would not be forwarded."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


@contextlib.contextmanager
def forwarded_signals(children: list[Child], ending: str) -> Iterator[list[int]]:
    """Forward stop signals to all workers, which save and exit. Yields the list of received signals."""
    words = f"\nhocket: {ending}; once more ends at once\n".encode()
    asked: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if number == signal.SIGHUP:
            hang_up()
        if len(asked) == 1:
            os.write(2, words)
        for child in children:
            if child.status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, number)

    former = {number: signal.signal(number, forward) for number in stop_signals()}
    try:
        yield asked
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def watch(children: list[Child], asked: list[int], ended: str) -> int:
    """Wait for all workers, or for the first failure. Returns the exit code."""
    while True:
        for child in children:
            child.poll()
        if any(child.status for child in children):
            break
        if all(child.status == 0 for child in children):
            return 0
        if len(asked) > 1:  # workers inside a collective cannot react to a signal
            kill(children)
            sys.stderr.write(f"hocket: {ended}\n")
            return 128 + asked[0]
        time.sleep(0.02)
    if asked and any(child.status and child.code in exit_codes_of(asked) for child in children):
        sys.stderr.write(f"hocket: {ended}\n")
        return 128 + asked[0]
    first = time.monotonic()
    while any(child.status is None for child in children):
        hang = any(child.status and child.code == HANG_EXIT_CODE for child in children)
        if time.monotonic() > first + GRACE + (ANSWER if hang else 0.0):
            break
        if any(child.status and child.code < 0 for child in children):
            break  # a killed worker is the cause, whatever the others report
        for child in children:
            child.poll()
        time.sleep(0.02)
    silent = [child for child in children if child.status is None]
    kill(children)
    if any(child.code == HANG_EXIT_CODE for child in children):
        return explain_hang(children, silent)
    return explain(children)


def exit_codes_of(asked: list[int]) -> set[int]:
    """Exit codes of workers that a signal ended at once: by its default action, or as the second signal."""
    return {-number for number in asked} | {128 + number for number in asked}


def kill(children: list[Child]) -> None:
    """Kill all running workers, with all processes that they started."""
    for child in children:
        child.poll()
    running = [child for child in children if child.status is None]
    for child in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_TIMEOUT
    while any(child.status is None for child in running) and time.monotonic() < deadline:
        time.sleep(0.005)
        for child in running:
            child.poll()
    for child in running:
        if child.status is None:  # the driver still holds its GPU resources
            sys.stderr.write(f"hocket: rank {child.rank} (process {child.pid}) was killed, and is still there\n")
        child.status = 0  # not a failure of its own
