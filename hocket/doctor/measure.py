"""`hocket doctor --measure`: measures this host's GPUs and the links between them, for a file."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import Any, Literal, cast

from hocket.environment import Gpus, prepare, processes, torch_build
from hocket.gpus import gpu_named, is_slice, nearest
from hocket.predict.hardware import HARDWARE, MeasuredHardware
from hocket.predict.simulate import Kind

LONGEST = 300.0
"""Timeout of a measurement in seconds: about 20 of load, and the start of the ranks."""
LINKED: tuple[Kind, ...] = ("gather", "reduce", "a2a", "pp")
SMALL, LARGE = 4 << 20, 256 << 20
"""Bytes that one rank receives in the two transfers that define the latency-bandwidth line."""


Transfers = Mapping[tuple[Kind, int], float]
"""Kind of communication and bytes that one rank receives -> seconds on the slowest rank."""
Rates = Mapping[str, float]
"""Work per second of products, attention, kernels and copies on the slowest rank, with all ranks at once."""


def run(
    world: int,
    transfers: Sequence[tuple[Kind, int]],
    env: Mapping[str, str],
    device: Literal["cpu", "cuda"] = "cuda",
    limit: float = LONGEST,
) -> tuple[Transfers, Rates]:
    """Measure on `world` processes of this host. Does not import torch in this process.

    Raises ValueError with the message of a failed rank; no process outlives the call.
    """
    variables = dict(env)
    prepare(variables, world)
    with tempfile.TemporaryDirectory(prefix="hocket-") as folder, processes(world, variables) as pool:
        rendezvous = f"{folder}/rendezvous"
        ranks = [pool.submit(_on_a_rank, transfers, device, rank, world, rendezvous) for rank in range(world)]
        _, late = wait(ranks, limit, FIRST_EXCEPTION)
        for rank, each in enumerate(ranks):
            if each.done() and (error := each.exception()):
                reason = " ".join(str(error).split()) or type(error).__name__
                raise ValueError(f"measuring (rank {rank} of {world}): {reason}; fix: mend what it says")
        if late:
            raise ValueError(f"measuring: no end after {limit:g} s; fix: see why ranks wait")
        return ranks[0].result()


def _on_a_rank(*asked: Any) -> tuple[Transfers, Rates]:
    from hocket.doctor.rank import meet_and_measure  # imports torch

    return meet_and_measure(*asked)


def measure(gpus: Gpus, env: Mapping[str, str]) -> MeasuredHardware:
    """Load all GPUs for some seconds. Raises ValueError without GPUs, for mixed kinds, or if a rank fails."""
    why, fix = "", "measure on a host of the GPUs that plans are for"
    if not gpus.count:
        why = "torch finds no usable GPU here"
    elif len(gpus.kinds) > 1:
        why, fix = f"GPUs of several kinds: {', '.join(gpus.kinds)}", "CUDA_VISIBLE_DEVICES with those of one kind"
    elif gpus.count > 1 and is_slice(gpus.name):
        why, fix = f"{gpus.name}: slices of GPUs have no links", "CUDA_VISIBLE_DEVICES with one of them"
    if why:
        raise ValueError(f"doctor --measure (command line): {why}; fix: {fix}")
    asked = [(kind, size) for kind in LINKED for size in (SMALL, LARGE)] if gpus.count > 1 else []
    transfers, rates = run(gpus.count, asked, env)
    return as_hardware(gpus, transfers, rates, f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}")


def as_hardware(gpus: Gpus, transfers: Transfers, rates: Rates, date: str) -> MeasuredHardware:
    """The measurements, on top of the figures of the table's GPU of that name or the nearest one."""
    version, cuda = torch_build()
    sized = gpus.name, gpus.memory, gpus.processors, gpus.capability
    return MeasuredHardware(
        device=gpus.name,
        gpu=gpu_named(gpus.name) or nearest(*sized),
        gpus=gpus.count,
        date=date,
        versions={"torch": version, "cuda": cuda},
        rates=rates,
        links={kind: _line(transfers, kind) for kind in LINKED if (kind, LARGE) in transfers},
    )


def _line(transfers: Transfers, kind: Kind) -> tuple[float, float]:
    """Latency and bandwidth of the line through both transfers."""
    small, large = (transfers[kind, size] for size in (SMALL, LARGE))
    bandwidth = (LARGE - SMALL) / max(large - small, 0.5 * large)
    return max(0.0, small - SMALL / bandwidth), bandwidth


def report(found: MeasuredHardware) -> Iterator[str]:
    """Measured figures next to those of the table, one per line."""
    table = HARDWARE[found.gpu]
    for name, rate in found.rates.items():
        yield f"  {name:<20} {rate / 1e12:8.4g} T/s    table {getattr(table, name) / 1e12:8.4g}"
    for kind, (latency, bandwidth) in found.links.items():
        was = table.links[cast(Kind, kind)]
        yield (
            f"  {kind:<20} {bandwidth / 1e9:8.4g} GB/s   table {was.bandwidth / 1e9:8.4g}, "
            f"after {latency * 1e6:.0f} us, table {was.latency * 1e6:.0f}"
        )
