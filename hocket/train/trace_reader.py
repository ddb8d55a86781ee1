"""Reads the traces of a profiled window in a process of its own, so that the ranks need not wait for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Reading:
    """The results of the traces."""

    headline: str = ""
    exposed: float | None = None
    """Exposed share of the steps: communication beside which nothing was computed, over their length."""
    problem: str = ""
    """Why they cannot be read, in one line; empty if they can."""


class TraceReader:
    """A process that reads traces. Ask `poll` now and then; `close` ends it."""

    def __init__(self, paths: Sequence[Path]) -> None:
        # The new process must find the same hocket, wherever this one was started.
        code = f"import sys; sys.path[:] = {sys.path!r}; from hocket.train.trace_reader import main; main(sys.argv[1:])"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, paths)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def poll(self, timeout: float = 0.0) -> Reading | None:
        """The reading, or None if it is not there after `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        out, err = self._process.communicate()  # short, so a pipe has held it
        try:
            return Reading(**json.loads(out))
        except (ValueError, TypeError):
            last = err.decode(errors="replace").strip().splitlines()[-1:]
            return Reading(problem=last[0] if last else f"the reader ended with status {self._process.returncode}")

    def close(self) -> None:
        """End the process if it still reads."""
        self._process.kill()
        self._process.communicate()


def main(paths: Sequence[str]) -> None:
    """Print the reading of these traces as JSON."""
    os.nice(10)  # the ranks come first
    from hocket_trace import TraceError, load, report
    from hocket_trace.as_json import to_json
    from hocket_trace.cpu import UNSEEN
    from hocket_trace.table import headline, warnings

    try:
        figures = to_json(report(load([Path(path) for path in paths])))
        lines, exposed = [*warnings(figures), headline(figures)], figures["step"].get("exposed_share")
        lines += [UNSEEN] if UNSEEN in figures["notes"] else []
        reading = Reading("\n".join(lines), exposed)
    except TraceError as error:
        reading = Reading(problem=str(error))
    sys.stdout.write(json.dumps(asdict(reading)))
