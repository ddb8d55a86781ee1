"""`hocket doctor --measure`: what this host's GPUs and the links between them reach, to be kept in a file."""

from __future__ import annotations

import datetime
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from hocket.environment import Gpus, Worker, find_port, prepare, torch_build
from hocket.gpus import gpu_named, is_slice, nearest
from hocket.program.hardware import HARDWARE, MeasuredHardware
from hocket.program.simulate import Kind

# -- What is measured, and what came out -------------------------------------------------------------------------------

Product = tuple[int, int, int]
"""Sizes of a matrix product: [m, k] times [k, n]."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What every rank measures."""

    world: int
    device: Literal["cpu", "cuda"] = "cpu"
    transport: Literal["gloo", "nccl", "copy_engine", "copy_engine_gathers"] = "gloo"
    dtype: Literal["fp32", "bf16"] = "fp32"
    products: tuple[Product, ...] = ()
    transfers: tuple[tuple[Kind, int], ...] = ()
    """Kind of communication and bytes that one rank receives in it."""
    names: bool = False
    """Whether to record what a gather is made of on the device."""
    rates: bool = False
    """Whether to load each device for seconds, and time products, attention, kernels and copies."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured; times are seconds on the slowest rank."""

    products: Mapping[Product, float] = field(default_factory=dict)
    transfers: Mapping[tuple[Kind, int], float] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    """Of everything that a gather ran on the device of rank 0."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Work per second on the slowest rank, all ranks at once."""


# -- Start the ranks of a measurement on this host and wait for the answer. Imports no torch ---------------------------

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
        answer, ranks = Path(folder) / "answer", []
        try:
            for rank in range(request.world):
                worker = Worker(rank, request.world, rank, request.world, "127.0.0.1", port)
                log = (Path(folder) / f"rank{rank}.log").open("w")
                command = [sys.executable, "-m", "hocket.doctor.rank", pickle.dumps(request).hex(), str(answer)]
                place = {**variables, **worker.variables()}
                with log:
                    ranks.append(subprocess.Popen(command, env=place, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
            _wait(ranks, Path(folder), limit)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return pickle.loads(answer.read_bytes())


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


# -- measure -----------------------------------------------------------------------------------------------------------

LONGEST = 300.0
"""Seconds in which it has ended: about 20 of load, and the start of the ranks."""
LINKED: tuple[Kind, ...] = ("gather", "reduce", "a2a", "pp")
SMALL, LARGE = 4 << 20, 256 << 20
"""Bytes that one rank receives in the two transfers between which a line is drawn."""


def asked(gpus: int) -> Request:
    """The measurements on a host with this many GPUs."""
    transfers = tuple((kind, size) for kind in LINKED for size in (SMALL, LARGE)) if gpus > 1 else ()
    return Request(world=gpus, device="cuda", transport="nccl", dtype="bf16", transfers=transfers, rates=True)


def measure(gpus: Gpus, env: Mapping[str, str]) -> MeasuredHardware:
    """Load all GPUs for some seconds. Raises ValueError if there are none, of several kinds, or if a rank fails."""
    why, fix = "", "measure on a host of the GPUs that plans are for"
    if not gpus.count:
        why = "torch finds no usable GPU here"
    elif len(gpus.kinds) > 1:
        why, fix = f"GPUs of several kinds: {', '.join(gpus.kinds)}", "CUDA_VISIBLE_DEVICES with those of one kind"
    elif gpus.count > 1 and is_slice(gpus.name):
        why, fix = f"{gpus.name}: slices of GPUs have no links", "CUDA_VISIBLE_DEVICES with one of them"
    if why:
        raise ValueError(f"doctor --measure (command line): {why}; fix: {fix}")
    return as_hardware(gpus, run(asked(gpus.count), env, LONGEST), f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}")


def as_hardware(gpus: Gpus, measured: Measured, date: str) -> MeasuredHardware:
    """What was measured, over the figures of the table's GPU of that name or of the nearest one."""
    version, cuda = torch_build()
    sized = gpus.name, gpus.memory, gpus.processors, gpus.capability
    return MeasuredHardware(
        device=gpus.name,
        gpu=gpu_named(gpus.name) or nearest(*sized),
        gpus=gpus.count,
        date=date,
        versions={"torch": version, "cuda": cuda},
        rates=measured.rates,
        links={kind: _line(measured, kind) for kind in LINKED if (kind, LARGE) in measured.transfers},
    )


def _line(measured: Measured, kind: Kind) -> tuple[float, float]:
    """Latency and bandwidth of the line through both transfers."""
    small, large = (measured.transfers[kind, size] for size in (SMALL, LARGE))
    bandwidth = (LARGE - SMALL) / max(large - small, 0.5 * large)
    return max(0.0, small - SMALL / bandwidth), bandwidth


def report(found: MeasuredHardware) -> Iterator[str]:
    """Measured figures beside those of the table, one on each line."""
    table = HARDWARE[found.gpu]
    for name, rate in found.rates.items():
        yield f"  {name:<20} {rate / 1e12:8.4g} T/s    table {getattr(table, name) / 1e12:8.4g}"
    for kind, (latency, bandwidth) in found.links.items():
        was = table.links[cast(Kind, kind)]
        yield (
            f"  {kind:<20} {bandwidth / 1e9:8.4g} GB/s   table {was.bandwidth / 1e9:8.4g}, "
            f"after {latency * 1e6:.0f} us, table {was.latency * 1e6:.0f}"
        )
