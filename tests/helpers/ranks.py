"""Run a function as several ranks: real processes with a real process group, started in a tenth of a second.

Ranks are forked from a server process that has imported torch and hocket but has run nothing, so every call
gets fresh processes without paying for imports. See Note: [Why not a pool of ranks].

Note: [Why not a pool of ranks]
Processes kept between tests would save another few hundredths of a second per test, and would let one test
leave something behind for the next: a seed, a default dtype, a queue of weight gradients. Tests of what is left
behind are the point of many callers.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hocket.environment import MULTICAST_OFF

ROOT = Path(__file__).resolve().parents[2]

ECHO_SECONDS = 0.5
"""How much later than the errors of its peers the death of a rank may be noticed."""

DUMP_SECONDS = 10.0
"""How long ranks that hang get at most to write down where they are."""


class RanksTimeout(Exception):
    """Some ranks did not finish in time. The message holds what each of them was doing."""


class RankDied(Exception):
    """A rank ended without returning or raising anything: killed, or crashed in native code."""


_LOST = (b"by peer", b"Broken pipe", b"gloo/transport")
"""In what gloo raises when a peer has died."""


@dataclass
class _Rank:
    number: int
    process: ForkServerProcess
    pipe: Connection
    log: Path

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def run_ranks(
    fn: Callable[..., Any], world: int, *args: Any, timeout: float = 200.0, backend: str = "gloo"
) -> list[Any]:
    """Call `fn(rank, *args)` on `world` ranks with a process group of all of them, and return their results in order.

    `fn` must be a function of a module, and `args` and the results must be picklable; results travel by value. Each
    rank has one thread and the seed 0; with `nccl`, also GPU number `rank`. What ranks print appears in the
    caller's standard output when the call ends. `timeout` is in seconds and covers the whole call; the default
    lies below the limit of a test, so that a hang is reported by this function.

    Raises: the first exception of any rank, with that rank's traceback as a note; `RankDied`; `RanksTimeout`, with
    the traceback and the last line of output of every rank. No process outlives the call.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = [_start(fn, rank, world, args, timeout, backend, Path(folder)) for rank in range(world)]
        try:
            return _collect(ranks, time.monotonic() + timeout, timeout)
        finally:
            for rank in ranks:
                rank.process.kill()
            for rank in ranks:
                rank.process.join()
                sys.stdout.write("".join(f"[rank {rank.number}] {line}\n" for line in rank.output().splitlines()))


def _start(
    fn: Callable[..., Any], rank: int, world: int, args: Sequence[Any], timeout: float, backend: str, folder: Path
) -> _Rank:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.preload"])
    ours, theirs = context.Pipe(duplex=False)
    log = folder / f"rank{rank}.txt"
    # The call is pickled by value here: multiprocessing's own pickler would put tensors into shared memory.
    call = pickle.dumps((fn, args))
    setup = (rank, world, timeout, backend, str(folder / "store"), str(log))
    with server_environment():
        process = context.Process(target=_main, args=(call, setup, theirs), daemon=True)
        process.start()
    theirs.close()
    return _Rank(rank, process, ours, log)


@contextlib.contextmanager
def server_environment() -> Iterator[None]:
    """What the fork server, and so every rank, finds in its environment: only the call that starts it matters."""
    path = os.environ.get("PYTHONPATH")
    wanted = {**MULTICAST_OFF, "PYTHONPATH": os.pathsep.join([str(ROOT), *([path] if path else [])])}
    # Libraries ask for GPUs while they are imported. With this torch asks NVML: a server that has asked CUDA can fork
    # no process that uses it.
    wanted["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _collect(ranks: list[_Rank], deadline: float, timeout: float) -> list[Any]:
    """Wait for all ranks. The first failure that arrives is the cause: a failed rank stays, so it fails no other."""
    results: dict[int, Any] = {}
    waiting = {rank.pipe: rank for rank in ranks}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RanksTimeout(f"no result after {timeout:g} s\n{_describe(ranks, list(waiting.values()))}")
        answers = [(rank, _read(rank)) for rank in ranks if rank.pipe in ready]
        # A rank that died does fail the others, so it is looked at first, also if that is noticed a moment later.
        if any(answer and any(words in answer for words in _LOST) for _, answer in answers):
            answers += _deaths([rank for pipe, rank in waiting.items() if pipe not in ready])
        for rank, answer in sorted(answers, key=lambda pair: pair[1] is not None):
            results[rank.number] = _result(rank, answer)
            del waiting[rank.pipe]
    return [results[rank.number] for rank in ranks]


def _deaths(ranks: Sequence[_Rank]) -> list[tuple[_Rank, None]]:
    """The first of these ranks that dies within a moment, if one does."""
    dead = wait([rank.process.sentinel for rank in ranks], ECHO_SECONDS)
    return [(rank, None) for rank in ranks if rank.process.sentinel in dead]


def _read(rank: _Rank) -> bytes | None:
    """The answer of a rank, None if it died without one."""
    try:
        return rank.pipe.recv_bytes()
    except (EOFError, ConnectionResetError):
        return None


def _result(rank: _Rank, answer: bytes | None) -> Any:
    if answer is None:
        rank.process.join(1.0)
        code = rank.process.exitcode
        raise RankDied(f"rank {rank.number} ended with exit code {code}; its output:\n{rank.output()}")
    ok, value, text = pickle.loads(answer)
    if ok:
        return value
    error = value if isinstance(value, BaseException) else RuntimeError(text.strip().splitlines()[-1])
    error.add_note(f"on rank {rank.number}:\n{text}")
    raise error


def _describe(ranks: list[_Rank], missing: list[_Rank]) -> str:
    """What every rank printed last and, for those still running, where they are."""
    last = {rank.number: (rank.output().splitlines() or ["(no output)"])[-1] for rank in ranks}
    for rank in missing:
        if rank.process.pid and rank.process.is_alive():
            os.kill(rank.process.pid, signal.SIGUSR1)
    _wait_for_stacks([rank for rank in missing if rank.process.is_alive()])
    lines = []
    for rank in ranks:
        state = "did not finish" if rank in missing else "finished"
        lines.append(f"rank {rank.number} {state}; last line: {last[rank.number]}")
        stack = rank.log.with_suffix(".stack")
        if stack.exists():
            lines.append(stack.read_text())
    return "\n".join(lines)


def _wait_for_stacks(ranks: list[_Rank]) -> None:
    """Until all of them are there and grow no longer."""
    deadline, before = time.monotonic() + DUMP_SECONDS, list[int]()
    while time.monotonic() < deadline:
        time.sleep(0.1)
        sizes = [rank.log.with_suffix(".stack").stat().st_size for rank in ranks]
        if all(sizes) and sizes == before:
            return
        before = sizes


def _main(call: bytes, setup: tuple[int, int, float, str, str, str], pipe: Connection) -> None:
    """The life of one rank. It ends by being killed: closing its groups itself could fail or block the others."""
    rank, world, timeout, backend, store, log = setup
    _redirect(log)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    faulthandler.enable(sys.stderr)  # a crash in native code says where, in what the rank has printed
    stack = Path(log).with_suffix(".stack").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    try:
        torch.set_num_threads(1)
        torch.backends.mkldnn.set_flags(False)  # as in tests/conftest.py
        torch.manual_seed(0)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        # Longer than the caller's patience: it is the caller that reports a hang, for all ranks at once.
        limit = timedelta(seconds=timeout + 60)
        dist.init_process_group(backend, store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=limit)
        fn, args = pickle.loads(call)
        answer = pickle.dumps((True, fn(rank, *args), ""))
    except BaseException as error:
        answer = _pack_error(error)
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(answer)
    threading.Event().wait()


def _pack_error(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    with contextlib.suppress(Exception):
        packed = pickle.dumps((False, error, text))
        pickle.loads(packed)
        return packed
    return pickle.dumps((False, None, text))


def _redirect(log: str) -> None:
    """Send both output streams, including those of native code, to one file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
