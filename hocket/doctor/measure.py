"""`hocket doctor --measure`: what this host's GPUs and the links between them reach, to be kept in a file."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from typing import cast

from hocket.environment import Gpus, torch_build
from hocket.gpus import gpu_named, is_slice, nearest
from hocket.probing.request import Measured, Request
from hocket.probing.start import run
from hocket.program.hardware import HARDWARE, MeasuredHardware
from hocket.program.simulate import Kind

LIMIT = 300.0
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
    return as_hardware(gpus, run(asked(gpus.count), env, LIMIT), f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}")


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
