"""Start the ranks of a measurement on this host and wait for the answer. Imports no torch."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from hocket.environment import Worker, find_port, prepare
from hocket.probing.request import Measured, Request

LIMIT = 180.0
"""Seconds in which a measurement has ended."""


def run(request: Request, env: Mapping[str, str], limit: float = LIMIT) -> Measured:
    """Measure on `request.world` processes of this host.

    Raises ValueError with the last words of a rank that failed; no process outlives the call.
    """
    variables = dict(env)
    variables.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    prepare(variables, request.world)
    port = find_port()
    if not port:
        raise ValueError("probe: there is no free port; fix: leave --probe out, or end what listens on this host")
    with tempfile.TemporaryDirectory(prefix="hocket-probe-") as folder:
        answer, ranks = Path(folder) / "answer.json", []
        try:
            for rank in range(request.world):
                worker = Worker(rank, request.world, rank, request.world, "127.0.0.1", port)
                log = (Path(folder) / f"rank{rank}.log").open("w")
                command = [sys.executable, "-m", "hocket.probing.rank", request.to_json(), str(answer)]
                place = {**variables, **worker.variables()}
                with log:
                    ranks.append(subprocess.Popen(command, env=place, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
            _wait(ranks, Path(folder), limit)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return Measured.from_json(answer.read_text())


def _wait(ranks: list[subprocess.Popen[bytes]], folder: Path, limit: float) -> None:
    """Return when all ranks have ended. Raises ValueError at the first that fails, or at the limit."""
    deadline = time.monotonic() + limit
    while True:
        codes = [process.poll() for process in ranks]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            words = (folder / f"rank{failed}.log").read_text(errors="replace").strip().splitlines()
            raise ValueError(
                f"probe (rank {failed} of {len(ranks)}): {words[-1] if words else 'it ended without a word'}; fix: "
                "leave --probe out, or mend what it says"
            )
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise ValueError(f"probe: no end after {limit:g} s; fix: leave --probe out, or see why ranks wait")
        time.sleep(0.05)
