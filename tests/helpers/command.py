"""Run `hocket`, mostly in a process of its own."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hocket import cli
from tests.helpers.forked import Forked

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "tiny", "--model.layers", "4", "--model.dense_layers", "0", "--model.hidden", "16", "--model.heads", "2",
    "--model.kv_heads", "1", "--model.head_dim", "8", "--model.ffn", "16", "--model.expert_ffn", "16",
    "--model.shared_ffn", "16", "--model.experts", "4", "--data.sequence_length", "8", "--train.sequences", "1",
    "--model.init", "gpt2", "--train.microbatches", "2", "--train.eval_every", "0", "--train.eval_batches", "1",
    "--train.save_every", "0",
]  # fmt: skip
"""The recipe tiny, shrunk until a step takes milliseconds."""
ALONE = ["--mesh.pp", "1", "--mesh.dp", "1", "--mesh.ep", "1"]
"""One rank."""


@dataclass
class Finished:
    """How a command ended."""

    code: int
    out: str
    err: str


Process = subprocess.Popen[str] | Forked
FORKED = ("hocket", "tests.helpers.stops")
"""Commands that are forked from the server of ranks. Others, such as torchrun, start anew."""
_started: list[Process] = []


def end_all() -> None:
    """End every command that a failed test has left running."""
    while _started:
        process = _started.pop()
        if process.poll() is None:
            process.kill()
            process.communicate(timeout=10)
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit code, output and errors of a command, run in this process."""
    with pytest.raises(SystemExit) as end:
        cli.main([*map(str, words)])
    captured = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, captured.out, captured.err


def environment(**more: str) -> dict[str, str]:
    """The variables of a command, without those by which a launcher would make it a worker."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HOCKET_DEBUG")
    kept = {k: v for k, v in os.environ.items() if k not in hidden and not k.startswith("SLURM_")}
    path = os.pathsep.join([str(ROOT), *([kept["PYTHONPATH"]] if "PYTHONPATH" in kept else [])])
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def start(folder: Path, *arguments: str, module: str = "hocket", fresh: bool = False, **variables: str) -> Process:
    """Start `hocket ...` in a folder; `fresh` as a user does, else see `Forked`. Tests that use this `end_all`."""
    env, arguments = environment(**variables), last_of_each(arguments)
    if module in FORKED and not fresh:
        process: Process = Forked(module, arguments, folder, env)
    else:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    _started.append(process)
    return process


def last_of_each(arguments: Sequence[str]) -> tuple[str, ...]:
    """Arguments without settings that later ones change, such as those of `SMALL`: a command takes each once."""
    groups: list[list[str]] = [[]]
    for word in arguments:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    later = {group[0]: i for i, group in enumerate(groups) if group}
    return tuple(
        word for i, group in enumerate(groups) for word in group if "." not in group[0] or later[group[0]] == i
    )


def in_a_terminal(folder: Path, *arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    """A command in a terminal of its own, and this end of it. It hears SIGHUP even if `nohup` started the tests."""
    ours, theirs = pty.openpty()
    command = "; ".join(
        [
            "import fcntl, os, signal, sys, termios",
            "fcntl.ioctl(0, termios.TIOCSCTTY, 0)",
            "signal.signal(signal.SIGHUP, signal.SIG_DFL)",
            "os.execv(sys.argv[1], sys.argv[1:])",
        ]
    )
    process = subprocess.Popen(
        [sys.executable, "-c", command, sys.executable, "-m", "hocket", *arguments],
        cwd=folder, env=environment(), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    return process, ours


def finish(process: Process, timeout: float = 200.0) -> Finished:
    """Wait for the end. On a timeout kill it, and fail with what it printed."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate(timeout=10)
        raise AssertionError(f"no end after {timeout:g} s\n--- stdout\n{out}\n--- stderr\n{err}") from None
    finally:
        _started.remove(process)
    return Finished(process.wait(timeout), out, err)


def hocket(folder: Path, *arguments: str, fresh: bool = False, **variables: str) -> Finished:
    """Run a command to its end."""
    return finish(start(folder, *arguments, fresh=fresh, **variables))


def wait_for(condition: Callable[[], bool], what: str, timeout: float = 40.0) -> None:
    """Wait until something is true. No longer than a command lives: one that has failed is the cause, and is shown."""
    deadline = time.monotonic() + timeout
    while not condition():
        failed = [process for process in _started if (process.poll() or 0) > 0]
        assert not failed, f"{what}: {finish(failed[0])}"
        assert time.monotonic() < deadline, f"{what}: not after {timeout:g} s"
        time.sleep(0.05)


def text_in(folder: Path) -> str:
    """A small corpus of files; returns its path."""
    path = folder / "text"
    path.mkdir(exist_ok=True)
    for i in range(20):
        (path / f"{i}.txt").write_text(f"this is document {i}. " * 100)
    return str(path)


def children_of(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
