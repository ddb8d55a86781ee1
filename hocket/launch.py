"""Start the workers of a run, watch them, and leave none behind.

    hocket train  ──fork──►  rank 0 .. world - 1     this host, one command
    torchrun / srun  ──────► hocket train            each process is one worker already

Note: [Workers are forked]
Importing torch takes a second or more, so the parent imports it once and forks. The parent never touches CUDA and
starts no threads before it forks: those are the two things that a fork would break.

Note: [No worker is left behind]
Each worker is the leader of a process group and asks the kernel to be killed when its parent dies (Linux), however
that happens. When one worker fails, the parent kills the groups of all others: they would only wait for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from hocket.children import Child, explain, explain_hang
from hocket.config import Config
from hocket.environment import Worker, find_worker, prepare, probe
from hocket.explain.record import record
from hocket.ports import free_port, nobody_met, port_in_use
from hocket.resolve import Settings, resolve
from hocket.runtime.recorder import HANG_EXIT_CODE
from hocket.settings.leaves import problem
from hocket.train.signals import asking, hang_up
from hocket.variables import passed, survey

GRACE = 2.5
"""Seconds in which other workers may fail too once one has, so that the cause can be told from its consequences."""
LOCK_WAIT = 2.0
"""Seconds in which the workers of a run that was just killed are gone."""


@dataclass(frozen=True)
class Job:
    """What the workers of a run do."""

    run: Callable[[Settings, int, Any], None]
    """Called by every worker once all have met, with the settings, its rank and its device."""
    again: str
    """What the user can do about a failure."""
    ending: str = "ending now"
    """What the workers do when they are asked to end."""
    ended: str = "ended"
    """What they have done when they are asked again."""


def train(config: Config, origins: Mapping[str, str]) -> NoReturn:
    """Train as this process's place demands: as one worker, or as the parent of all. Ends the process.

    Raises ValueError for settings that cannot work, before any work starts.
    """
    settings, worker = arrive(config, origins)
    check_corpus(settings)
    if settings.train.transport == "null":
        job = Job(train_rank, "nothing is lost: the run was no training", "ending after this step")
    else:
        again = "the same command continues from the last checkpoint, if there is one"
        job = Job(train_rank, again, "saving and ending after this step", "ended without saving")
    work(settings, worker, job)


def arrive(config: Config, origins: Mapping[str, str]) -> tuple[Settings, Worker | None]:
    """Prepare this process, and resolve a configuration for where it runs. The place is None for a parent of workers.

    Raises ValueError for settings that cannot work.
    """
    worker = find_worker(os.environ, config.run.port)
    local_world = worker.local_world if worker else config.mesh.world
    policy, now = config.overlap.env, passed(sys.modules)
    variables = survey(os.environ, policy, now)
    notes = prepare(os.environ, local_world, policy, now)
    settings = resolve(config, probe(config, origins, worker, variables), origins)
    if worker is None or worker.rank == 0:
        sys.stderr.writelines(f"hocket: {note}\n" for note in [*notes, *too_few_gpus(settings)])
    return settings, worker


def too_few_gpus(settings: Settings) -> list[str]:
    """Why ranks that GPUs were meant for compute on CPUs: said before they make weights there, which may take long."""
    meant = settings.host.gpus > 0 or settings.precision.compute == "bf16"
    return [
        str(decision)
        for decision in settings.decisions
        if decision.setting == "train.device" and decision.value == "cpu" and meant
    ]


def work(settings: Settings, worker: Worker | None, job: Job) -> NoReturn:
    """Do a job as one worker, or start all workers and wait for them. Ends the process."""
    if worker:
        end_now(outcome(settings, worker, job))
    with run_folder(settings):
        code = start_workers(settings, job)
    end_now(code)  # torch's own shutdown has nothing to do here, and may hang in a process that has forked


def train_rank(settings: Settings, rank: int, device: Any) -> None:
    """The job of training."""
    from hocket.train.trainer import Trainer

    Trainer(settings, rank, device).run()


def check_corpus(settings: Settings) -> None:
    """Find missing paths and too little text now, not once all workers are up. Tokenises if nobody has yet."""
    from hocket.train.corpus import open_corpus

    corpus = open_corpus(settings.data, settings.origins, without=Path(settings.run.folder))
    from hocket.train.data import make_streams  # imports torch, which a missing file need not wait for

    make_streams(corpus, settings)


@contextlib.contextmanager
def run_folder(settings: Settings) -> Iterator[Path]:
    """Make the run's folder and hold it, so that no second run writes there. Forked workers hold it too.

    The system lets go of it when the last of them has ended. Raises ValueError if it cannot be written or is held.
    """
    folder = Path(settings.run.folder)
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a")
    except OSError as error:
        reason, fix = f"cannot be written ({error.strerror})", "name a folder you can write to"
        raise ValueError(problem("run.folder", settings.run.folder, settings.origins, reason, fix)) from None
    with lock:
        deadline = time.monotonic() + LOCK_WAIT
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    reason, fix = "another run is writing there", "another run.name, or end that run"
                    raise ValueError(
                        problem("run.folder", settings.run.folder, settings.origins, reason, fix)
                    ) from None
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        refuse_training(settings, folder)
        record(settings, folder)
        yield folder


def refuse_training(settings: Settings, folder: Path) -> None:
    """Raise ValueError if a run without communication would write where a training run has left something."""
    if settings.train.transport != "null":
        return
    metrics = folder / "metrics.jsonl"
    try:
        with metrics.open() as file:
            trained = '"transport": "null"' not in file.readline()
    except OSError:
        trained = False
    if trained or (folder / "checkpoints").exists():
        reason = "a training run has left its metrics or checkpoints there, and this run would be no training"
        fix = "leave run.folder out, which means another folder than the training run's, or name an empty one"
        raise ValueError(problem("run.folder", settings.run.folder, settings.origins, reason, fix))


# ------------------------------------------------------------------------------------------------------------- worker


def be_worker(settings: Settings, worker: Worker, job: Job) -> int:
    """Run one rank in this process. Returns the exit code; the caller ends the process with `end_now`."""
    os.environ.update(worker.variables())
    import torch
    import torch.distributed as dist

    from hocket.runtime.comm import join_world, leave_world

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    device = torch.device("cpu")
    if settings.train.device == "cuda":
        device = torch.device("cuda", worker.local_rank)
        torch.cuda.set_device(device)
    try:
        join_world(device.type == "cuda", settings.train.hang_timeout)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        taken = "address already in use" in str(error).lower() or "EADDRINUSE" in str(error)
        raise ValueError(port_in_use(settings, worker) if taken else nobody_met(settings, worker)) from None
    job.run(settings, worker.rank, device)
    leave_world()
    return 0


def outcome(settings: Settings, worker: Worker, job: Job) -> int:
    """Run one rank that torchrun or Slurm started, and say itself what went wrong. Returns the exit code."""
    try:
        # One of the ranks is enough to hold the folder.
        with run_folder(settings) if worker.rank == 0 else contextlib.nullcontext():
            return be_worker(settings, worker, job)
    except ValueError as error:
        sys.stderr.write(f"hocket: {error}\n")
        return 2
    except Exception:
        traceback.print_exc()
        return 1


# ------------------------------------------------------------------------------------------------------------- parent


def start_workers(settings: Settings, job: Job) -> int:
    """Fork one worker per rank, watch them until the last has ended, and return the exit code."""
    port = free_port(settings.run.port, settings.origins)
    logs = Path(settings.run.folder) / "logs"
    # See Note: [Workers are forked]
    import hocket.train.trainer  # noqa: F401

    children: list[Child] = []
    with forwarded_signals(children, job.ending) as asked:
        try:
            for rank in range(settings.world):
                worker = Worker(rank, settings.world, rank, settings.world, "127.0.0.1", port, "", "run.port")
                children.append(fork_worker(settings, worker, job, logs / f"rank{rank}.log"))
            return watch(children, asked, job.ended)
        finally:
            kill(children)


def fork_worker(settings: Settings, worker: Worker, job: Job, log: Path) -> Child:
    """Start one rank. Rank 0 keeps the terminal for its output; everything else goes to logs."""
    read, write = os.pipe()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        child_main(settings, worker, job, log, write, parent)
    os.close(write)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)
    return Child(worker.rank, pid, read, log, job.again)


def child_main(settings: Settings, worker: Worker, job: Job, log: Path, pipe: int, parent: int) -> NoReturn:
    """The life of a forked worker."""
    code = 1
    try:
        os.setpgid(0, 0)
        die_with(parent)
        for number in asking():
            signal.signal(number, signal.SIG_DFL)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(file, 2)
        if worker.rank:
            os.dup2(file, 1)
        code = be_worker(settings, worker, job)
    except ValueError as error:
        say(pipe, "user", traceback.format_exc() if os.environ.get("HOCKET_DEBUG") == "1" else str(error))
        code = 2
        log_error()
    except BaseException as error:
        say(pipe, "crash", f"{type(error).__name__}: {error}")
        log_error()
    end_now(code)


def log_error() -> None:
    """Print the traceback of the exception at hand into the log, if the disk has room for it."""
    with contextlib.suppress(OSError):
        traceback.print_exc()


def end_now(code: int) -> NoReturn:
    """End without clean-up. A worker's groups still exist, and what it inherited by forking is its parent's."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def say(pipe: int, kind: str, text: str) -> None:
    """Tell the parent why this worker fails. Short enough for a pipe without a reader, which holds 64 KiB."""
    os.write(pipe, json.dumps({"kind": kind, "text": text[:8000], "time": time.monotonic()}).encode())


def die_with(parent: int) -> None:
    """Be killed when the parent ends. See Note: [No worker is left behind]."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


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
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and any(child.status is None for child in children):
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
        if child.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
            child.status = 0  # not a failure of its own
