"""One rank of a run: a process that torchrun or Slurm started, or a fork of the parent.

Note: [No worker outlives its run]
Each worker leads a process group, and asks the kernel (Linux) to kill it when its parent dies for any reason. When one
worker fails, the parent kills the groups of all others, which would only wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hocket.config.rule import problem
from hocket.environment import Worker, die_with, find_port
from hocket.resolve import Settings
from hocket.train.signals import stop_signals

# -- The rendezvous of ranks, and messages about its failure -----------------------------------------------------------


def free_port() -> int:
    """A free port of this host. Raises ValueError if there is none."""
    port = find_port()
    if not port:
        raise ValueError("there is no free port on this host (20000 to 31999); fix: end what listens there")
    return port


def port_in_use(worker: Worker) -> str:
    """The message of rank 0 if it cannot listen on the rendezvous port."""
    fixes = {
        "MASTER_PORT": "name another: --master-port of torchrun, or the variable, on all hosts the same",
        "SLURM_JOB_ID": "name a free one with MASTER_PORT, on all hosts the same",
    }
    if worker.port_from not in fixes:
        return f"port {worker.port} was free, and another process has taken it since; fix: start again"
    return f"{_port(worker)}: another process listens on that port; fix: {fixes[worker.port_from]}"


def rendezvous_failed(settings: Settings, worker: Worker) -> str:
    """The message of a rank that did not find the others."""
    at = {"": "this host", "MASTER_ADDR": f"MASTER_ADDR = {worker.address} (environment)"}
    address = at.get(worker.address_from, f"{worker.address} (the first of {worker.address_from})")
    return (
        f"{address}, {_port(worker)}: rank {worker.rank} of {worker.world} did not meet the others within "
        f"{settings.train.hang_timeout:g} s; fix: start all of them, with an address that all can reach"
    )


def _port(worker: Worker) -> str:
    """The port, with the variable that set it."""
    if worker.port_from == "MASTER_PORT":
        return f"MASTER_PORT = {worker.port} (environment)"
    return f"port {worker.port} (from {worker.port_from})" if worker.port_from else f"port {worker.port}"


# -- The folder of a run, which one run at a time may lock -------------------------------------------------------------

LOCK_WAIT = 2.0
"""Seconds in which workers of a run that was just killed release the folder's lock."""


@contextlib.contextmanager
def run_folder(settings: Settings) -> Iterator[Path]:
    """Create the run's folder and lock it, so that no second run writes there. Forked workers inherit the lock.

    The system releases it when the last of them exits. Raises ValueError if it is locked or cannot be written.
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
        yield folder


def refuse_training(settings: Settings, folder: Path) -> None:
    """Raise ValueError if a run without communication would write into the folder of a training run."""
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


# -- worker ------------------------------------------------------------------------------------------------------------

FAILED = 1
"""Exit code of a run in which a rank crashed, hung or was killed. 2 is a mistake of the user."""


@dataclass(frozen=True)
class Job:
    """What the workers of a run do."""

    run: Callable[[Settings, int, Any], None]
    """Called by every worker after the rendezvous, with the settings, its rank and its device."""
    again: str
    """What the user can do after a failure."""
    ending: str = "ending now"
    """What the workers do on the first stop signal, in words."""
    ended: str = "ended"
    """What they did on the second, in words."""


def run_rank(settings: Settings, worker: Worker, job: Job) -> int:
    """Run one rank in this process. Returns the exit code; the caller ends the process with `end_now`."""
    os.environ.update(worker.variables())
    import torch
    import torch.distributed as dist

    from hocket.launching.agreement import copies_tested, require_same
    from hocket.runtime.world import join_world, leave_world

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    device = torch.device("cpu")
    if settings.train.device == "cuda":
        device = torch.device("cuda", worker.local_rank)
        torch.cuda.set_device(device)
    try:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        join_world(device.type == "cuda", settings.train.hang_timeout, attempt)
    except (dist.DistNetworkError, dist.DistStoreError, OSError) as error:
        taken = "address already in use" in str(error).lower() or "EADDRINUSE" in str(error)
        raise ValueError(port_in_use(worker) if taken else rendezvous_failed(settings, worker)) from None
    require_same(settings, worker.rank)
    job.run(copies_tested(settings, worker.rank, device), worker.rank, device)
    leave_world()
    return 0


def run_as_worker(settings: Settings, worker: Worker, job: Job) -> int:
    """Run one rank that torchrun or Slurm started, and print why it failed. Returns the exit code."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # else ranks would outlive a killed torchrun and keep the lock
        die_with(os.getppid())
    try:
        # Rank 0 locks the folder for all ranks.
        with run_folder(settings) if worker.rank == 0 else contextlib.nullcontext():
            return run_rank(settings, worker, job)
    except ValueError as error:
        sys.stderr.write(f"hocket: {error}\n")
        return 2
    except Exception as error:
        traceback.print_exc()
        first = next(iter(str(error).splitlines()), "")
        fix = f"see what is above, what other ranks say, and the network between hosts; {job.again}"
        sys.stderr.write(f"hocket: rank {worker.rank} failed with {type(error).__name__}: {first}; fix: {fix}\n")
        return 1


def child_main(settings: Settings, worker: Worker, job: Job, log: int, pipe: int, parent: int) -> NoReturn:
    """The main function of a forked worker; `log` and `pipe` are open file descriptors."""
    code = 1
    try:
        os.setpgid(0, 0)
        die_with(parent)
        for number in stop_signals():
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())  # the parent blocked them before the fork
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 2)
        if worker.rank:
            os.dup2(log, 1)
        code = run_rank(settings, worker, job)
    except ValueError as error:
        say(pipe, "user", traceback.format_exc() if os.environ.get("HOCKET_DEBUG") == "1" else str(error))
        code = 2
        log_error()
    except BaseException as error:
        say(pipe, "crash", "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]))
        log_error()
    end_now(code)


def log_error() -> None:
    """Print the current exception's traceback into the log, if the disk has room for it."""
    with contextlib.suppress(OSError):
        traceback.print_exc()


def end_now(code: int) -> NoReturn:
    """Exit without clean-up: a worker's groups still exist, and what it inherited by forking is its parent's."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def say(pipe: int, kind: str, text: str) -> None:
    """Report to the parent why this worker fails. Fits into a pipe that nothing reads yet, which holds 64 KiB."""
    os.write(pipe, json.dumps({"kind": kind, "text": text[:8000], "time": time.monotonic()}).encode())
