"""Reports and traces made by hand, for the tests of what is shown."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from hocket_trace.data import (
    Kind,
    RankTrace,
    Report,
    Share,
    Slowdown,
    Step,
    StepReport,
    Tax,
)

NAN = float("nan")


def share(count: int, seconds: float, exposed: float, bytes_: float = 0.0, waiting: float = 0.0) -> Share:
    return Share(count=count, seconds=seconds, waiting=waiting, exposed=exposed, bytes=bytes_)


def step_of(rank: int, step: int, late: float = 0.0) -> StepReport:
    """A step of 100 ms and `late` more: compute 80, communication 50 of which 6 + late are exposed."""
    kinds: Mapping[Kind, Share] = {
        "gather": share(64, 0.030, 0.004, 9.0e9, waiting=0.001),
        "reduce": share(32, 0.015, 0.001, 4.2e9, waiting=0.0005 * rank),
        "a2a": share(16, 0.008 + late, 0.002 + late, 1.1e9, waiting=late),
    }
    layers: Mapping[int, Mapping[Kind, Share]] = {
        layer: {
            "gather": share(8, 0.0037, 0.0005 + 1e-5 * layer, 1.1e9, waiting=0.0001),
            "a2a": share(2, 0.001, 0.0003 if layer % 3 else 0.0, 1.4e8),
        }
        for layer in range(10)
    }
    return StepReport(
        rank=rank,
        step=step,
        seconds=0.100 + late,
        compute=0.080,
        communication=0.050 + late,
        exposed=0.006 + late,
        idle=0.014,
        host_bound=0.009,
        kinds=kinds,
        exposed_for={"gather": 0.004, "reduce": 0.0005, "a2a": 0.0015 + late},
        layers=layers,
        classes={"gemm": 0.055, "attention": 0.015, "elementwise": 0.008, "norm": 0.002},
        waiting=0.001 + 0.0005 * rank + late,
        exposed_waiting=late,
    )


def report(**changes: Any) -> Report:
    """Four ranks of eight, steps 10 to 12; rank 3 is late in step 12."""
    steps = tuple(step_of(r, n, late=0.010 if (r, n) == (3, 12) else 0.0) for n in (10, 11, 12) for r in range(4))
    values: dict[str, Any] = {
        "sources": tuple(f"run/traces/rank{r}.json.gz" for r in range(4)),
        "device": "NVIDIA H200",
        "transport": "nccl",
        "world": 8,
        "steps": steps,
        "notes": ("Traces of ranks 4 to 7 are missing: waiting for them counts as transfer.",),
    }
    return Report(**(values | changes))


def tax() -> Tax:
    return Tax(
        seconds=0.100,
        null=0.085,
        parts={"compute": 0.008, "exposed": 0.006, "host_bound": 0.0015, "idle": -0.0005},
        classes=(
            Slowdown(name="gemm", seconds=0.055, null=0.050),
            Slowdown(name="attention", seconds=0.015, null=0.0145),
            Slowdown(name="copy", seconds=0.001, null=0.0),
        ),
        ops=(Slowdown(name="fwd attn", seconds=0.03, null=0.028),),
        notes=("Routing differs between the two runs.",),
    )


Row = tuple[float, float, str, str, str, str]
"""start and end in milliseconds, lane, kind, kernel, plan op"""


def trace(rows: list[Row], steps: tuple[Step, ...], rank: int = 0, world: int = 1) -> RankTrace:
    """A trace of these rows; launched 1 ms before they start, the copies of a link 100 bytes per microsecond."""
    rows = sorted(rows)
    words: dict[str, int] = {"": 0}

    def indices(texts: list[str]) -> np.ndarray:
        return np.array([words.setdefault(text, len(words)) for text in texts], dtype=np.int64)

    start, end = (np.array([row[n] for row in rows], dtype=np.float64) * 1e-3 for n in (0, 1))
    columns = {
        "lane": indices([row[2] for row in rows]),
        "kind": indices([row[3] for row in rows]),
        "name": indices([row[4] for row in rows]),
        "launcher": indices([f"aten::{row[4]}" if row[3] == "compute" else f"nccl:{row[4]}" for row in rows]),
        "op": indices([row[5] for row in rows]),
        "group": indices(["" if row[3] == "compute" else f"group of {row[3]}" for row in rows]),
        "kernel_class": indices(["gemm" if row[3] == "compute" else "" for row in rows]),
    }
    inside = [next((n for n, s in enumerate(steps) if s.start <= x < s.end), -1) for x in start]
    talks = np.array([row[3] != "compute" for row in rows], dtype=bool)
    return RankTrace(
        source=f"rank{rank}.json", rank=rank, world=world, device="NVIDIA H200", words=tuple(words), start=start,
        end=end, layer=np.array([int(row[5].split(" l")[1]) if " l" in row[5] else -1 for row in rows], dtype=np.int64),
        step=np.array(inside, dtype=np.int64), bytes=np.where(talks, (end - start) * 1e8, 0.0),
        match=np.full(len(rows), -1), calls=np.full(len(rows), -1), launched=start - 1e-3, steps=steps, **columns,
    )  # fmt: skip


def busy(kernels: int, layers: int = 8, rank: int = 0, world: int = 1) -> RankTrace:
    """Two steps of 100 ms with about this many compute kernels, gathers and reduces beside them, and all-to-alls."""
    rng = np.random.default_rng(rank)
    rows: list[Row] = []
    for begin in (0.0, 100.0):
        each = max(kernels // (2 * layers * 2), 1)
        for n, verb in enumerate(["fwd"] * layers + ["bwd"] * layers):
            layer = n if verb == "fwd" else 2 * layers - 1 - n
            start = begin + 2 + n * 96 / (2 * layers)
            cuts = np.sort(rng.uniform(start, start + 70 / (2 * layers), each + 1))
            for a, b in pairwise(cuts):
                rows.append((a, a + 0.97 * (b - a), "compute", "compute", "mm", f"{verb} attn m0 c0 l{layer}"))
            rows.append((start + 0.2, start + 2.0, "gather", "gather", "all_gather", f"gather dense t0 c0 l{layer}"))
            rows.append((start + 3.8, start + 5.6, "a2a", "a2a", "all_to_all", f"{verb} dispatch m0 c0 l{layer}"))
            if verb == "bwd":
                rows.append((start + 1, start + 3.1, "reduce", "reduce", "reduce", f"reduce dense t0 c0 l{layer}"))
    steps = (Step(1, 0.0, 0.1), Step(2, 0.1, 0.2))
    return trace(rows, steps, rank, world)
