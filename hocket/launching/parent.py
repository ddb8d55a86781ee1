"""Start the workers of a run on this host, watch them, and leave none behind: Note: [No worker is left behind].

Note: [Workers are forked]
Importing torch takes a second or more, so the parent imports it once and forks. The parent never touches CUDA and
starts no threads before it forks: those are the two things that a fork would break.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from hocket.environment import HERE, Worker
from hocket.launching.children import Child, explain, explain_hang
from hocket.launching.ports import free_port
from hocket.launching.worker import Job, child_main
from hocket.resolve import Settings
from hocket.runtime.recorder import ANSWER, HANG_EXIT_CODE
from hocket.settings.schema import problem
from hocket.train.signals import asking, hang_up

GRACE = 2.5
"""Seconds in which other workers may fail too once one has, so that the cause can be told from its consequences."""

GONE = 30.0
"""Seconds in which killed workers must have gone."""


def start_workers(settings: Settings, job: Job) -> int:
    """Fork one worker per rank, watch them until the last has ended, and return the exit code."""
    port = free_port()
    logs = Path(settings.run.folder) / "logs"
    # See Note: [Workers are forked]
    import hocket.train.trainer  # noqa: F401

    children: list[Child] = []
    with forwarded_signals(children, job.ending) as asked:
        try:
            for rank in range(settings.world):
                worker = Worker(rank, settings.world, rank, settings.world, HERE[0], port, HERE[1], "")
                with signals_held_back():
                    children.append(fork_worker(settings, worker, job, logs / f"rank{rank}.log"))
            return watch(children, asked, job.ended)
        finally:
            kill(children)


def fork_worker(settings: Settings, worker: Worker, job: Job, log: Path) -> Child:
    """Start one rank. Rank 0 keeps the terminal for its output; everything else goes to logs.

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
def signals_held_back() -> Iterator[None]:
    """Let signals that ask come behind the block: one that came before a worker is known would not be passed on."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, asking())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


@contextlib.contextmanager
def forwarded_signals(children: list[Child], ending: str) -> Iterator[list[int]]:
    """Pass signals that ask on to all workers, which save and end. Yields the list of those that have come."""
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

    former = {number: signal.signal(number, forward) for number in asking()}
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
        if len(asked) > 1:  # workers that wait inside a collective cannot answer a signal
            kill(children)
            sys.stderr.write(f"hocket: {ended}\n")
            return 128 + asked[0]
        time.sleep(0.02)
    if asked and any(child.status and child.code in ended_by(asked) for child in children):
        sys.stderr.write(f"hocket: {ended}\n")
        return 128 + asked[0]
    first = time.monotonic()
    while any(child.status is None for child in children):
        hang = any(child.status and child.code == HANG_EXIT_CODE for child in children)
        if time.monotonic() > first + GRACE + (ANSWER if hang else 0.0):
            break
        if any(child.status and child.code < 0 for child in children):
            break  # a killed worker is the cause, whatever the others will say
        for child in children:
            child.poll()
        time.sleep(0.02)
    silent = [child for child in children if child.status is None]
    kill(children)
    if any(child.code == HANG_EXIT_CODE for child in children):
        return explain_hang(children, silent)
    return explain(children)


def ended_by(asked: list[int]) -> set[int]:
    """Exit codes of workers that end at once because of a signal: by default, or at the second one."""
    return {-number for number in asked} | {128 + number for number in asked}


def kill(children: list[Child]) -> None:
    """End all workers that still run, with everything that they have started."""
    for child in children:
        child.poll()
    running = [child for child in children if child.status is None]
    for child in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    deadline = time.monotonic() + GONE
    while any(child.status is None for child in running) and time.monotonic() < deadline:
        time.sleep(0.005)
        for child in running:
            child.poll()
    for child in running:
        if child.status is None:  # the system has not given back what it has of a GPU
            sys.stderr.write(f"hocket: rank {child.rank} (process {child.pid}) was killed, and is still there\n")
        child.status = 0  # not a failure of its own
