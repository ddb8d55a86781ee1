"""Commands without the seconds of importing torch: forked from the server that also starts ranks.

They differ from `python -m MODULE` in nothing that hocket does or sees, but torch has been imported before their
variables are set. Tests of the start itself begin anew: `tests.helpers.command.start(..., fresh=True)`.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from tests.helpers.ranks import server_environment


class Forked:
    """What `subprocess.Popen` would be for `python -m MODULE ARGUMENTS`, as far as tests use it."""

    def __init__(self, module: str, arguments: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.helpers.preload"])
        pipes = [os.pipe() for _ in range(2)]
        theirs = [Connection(write, readable=False) for _, write in pipes]
        self._process = context.Process(target=_main, args=(module, list(arguments), str(cwd), dict(env), *theirs))
        with server_environment():
            self._process.start()
        for connection in theirs:
            connection.close()
        self.stdout, self.stderr = (os.fdopen(read, encoding="utf-8") for read, _ in pipes)
        self._readers: list[_Reader] = []

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("hocket", timeout)
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What is left of both outputs. Raises TimeoutExpired; what was read until then is not lost."""
        self._readers = self._readers or [_Reader(self.stdout), _Reader(self.stderr)]
        for reader in self._readers:
            reader.join(timeout)
        if any(reader.is_alive() for reader in self._readers):
            raise subprocess.TimeoutExpired("hocket", timeout)
        self.wait(timeout)
        out, err = (reader.text for reader in self._readers)
        return out, err

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)


class _Reader(threading.Thread):
    """Reads a stream to its end, and closes it."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        super().__init__(daemon=True)
        self.stream, self.text = stream, ""
        self.start()

    def run(self) -> None:
        with self.stream:
            self.text = self.stream.read()


def _main(module: str, arguments: list[str], cwd: str, env: dict[str, str], out: Connection, err: Connection) -> None:
    """The life of a command, in its own session, with the environment, folder and outputs that it is given."""
    os.setsid()
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    out.close()
    err.close()
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), encoding="utf-8")
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, encoding="utf-8", closefd=False)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["hocket", *arguments]

    import torch

    torch.set_num_threads(1)
    try:
        runpy.run_module(module, run_name="__main__")
    finally:
        atexit._run_exitfuncs()
