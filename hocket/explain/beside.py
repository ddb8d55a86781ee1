"""What was measured, beside what is predicted: of a whole step, from traces, and of single transfers and products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import isnan
from statistics import fmean
from typing import TYPE_CHECKING

from hocket.doctor.measure import Measured, Product, Request
from hocket.explain.explanation import Predicted, Probed, Times
from hocket.gpus import GPUS, gpu_named
from hocket.program.hardware import HARDWARE, LAPTOP, Hardware, on_one_host
from hocket.program.ops import Layout
from hocket.program.part_sizes import into_heads
from hocket.program.simulate import KINDS, CostKey, Kind
from hocket.program.stages import costs_of, layout_of
from hocket.resolve import Settings
from hocket.sizes import duration, listed, several

if TYPE_CHECKING:
    from hocket_trace.data import Report

CPU_FLOPS, CPU_BYTES = 2e8, 1 << 20
"""Most work of one product, and most bytes of one transfer, that are measured on a CPU: it should take seconds."""
FEWEST_RANKS = 2


def in_traces(report: Report, predicted: Predicted) -> Predicted:
    """The step of the slowest rank; compute and times by kind as means over ranks and steps of the traces.

    Raises ValueError if they hold no whole step.
    """
    if not report.steps:
        raise ValueError(f"{several(report.sources)}: no whole step was recorded; fix: record at least one")
    numbers = sorted({step.step for step in report.steps})
    kinds: dict[str, Times] = {}
    for kind in KINDS:
        shares = [step.kinds[kind] for step in report.steps if kind in step.kinds]
        if shares:
            exposed = [step.exposed_for.get(kind, 0.0) for step in report.steps]
            seconds = sum(share.seconds for share in shares) / len(report.steps)
            kinds[kind] = Times(seconds=seconds, exposed=fmean(exposed))
    return replace(
        predicted,
        hardware=report.device,
        step=report.step_seconds,
        compute=fmean(step.compute for step in report.steps),
        idle=fmean(step.idle for step in report.steps),
        kinds=kinds,
        note=f"{listed('step', numbers)} of {several(report.sources)}{_waits(report)}",
    )


def _waits(report: Report) -> str:
    """What of the exposed time a prediction has elsewhere; empty if none is known."""
    waits = [step.exposed_waiting for step in report.steps if not isnan(step.exposed_waiting)]
    if not any(waits):
        return ""
    return f"; of what is exposed, {duration(fmean(waits))} only waits for late peers: predicted as nothing at all"


def request(settings: Settings, gpus: int) -> Request:
    """What to measure here for a run: its products and transfers, smaller on a CPU, on as many ranks as there are."""
    s = replace(settings, train=replace(settings.train, transport="nccl" if gpus else "gloo"))
    if gpus and settings.train.transport in ("copy_engine", "copy_engine_gathers"):
        s = settings
    transport = s.train.transport
    assert transport not in ("auto", "null", "slow")
    ranks = min(max(settings.world, FEWEST_RANKS), gpus or FEWEST_RANKS)
    return Request(
        world=ranks,
        device="cuda" if gpus else "cpu",
        transport=transport if ranks > 1 else "nccl" if gpus else "gloo",
        dtype="bf16" if gpus else "fp32",
        products=tuple(_smaller(product, gpus) for product in _products(settings)),
        transfers=tuple((kind, size if gpus else min(size, CPU_BYTES)) for kind, size in _transfers(settings)),
    )


def beside(measured: Measured, hardware: Hardware) -> tuple[Probed, ...]:
    """Everything that was measured, with what the cost model says of it."""
    rows = [
        Probed(
            what=f"product {m} x {k} x {n}",
            predicted=2.0 * m * k * n / hardware.gemm_flops,
            measured=seconds,
        )
        for (m, k, n), seconds in measured.products.items()
    ]
    rows += [
        Probed(what=f"{kind} {size / 2**20:.2f} MiB", predicted=hardware.links[kind].seconds(size), measured=seconds)
        for (kind, size), seconds in measured.transfers.items()
    ]
    return tuple(rows)


def hardware_for(request: Request, settings: Settings, gpu: str) -> Hardware:
    """What the cost model takes the ranks of a measurement for. `gpu` is the device's name."""
    if request.device == "cpu":
        return LAPTOP
    priced = on_one_host(settings)
    return priced if priced.name in GPUS else HARDWARE[gpu_named(gpu) or "h200"]


def _products(s: Settings) -> tuple[Product, ...]:
    """The products with a layer's widest and narrowest weights, of one microbatch."""
    tokens, model = s.train.sequences * s.data.sequence_length, s.model
    found = [(tokens, *into_heads(model))]
    if "dense" in model.kinds():
        found += [(tokens, model.hidden, 2 * model.ffn), (tokens, model.ffn, model.hidden)]
    return tuple(found)


def _smaller(product: Product, gpus: int) -> Product:
    """The product with as many rows as a CPU does in a moment."""
    m, k, n = product
    return product if gpus else (max(1, min(m, int(CPU_FLOPS / (2 * k * n)))), k, n)


def asked(layout: Layout) -> Iterator[tuple[Kind, CostKey]]:
    """The transfers of a layer of each kind: of its dense unit, and of rows to its experts; those of a pipeline."""
    kinds = layout.layer_types
    yield from (("gather", ("gather", "dense", kind.name)) for kind in kinds)
    yield from (("reduce", ("reduce", "dense", kind.name)) for kind in kinds)
    yield from (("a2a", ("fwd", part.name, kind.name)) for kind in kinds for part in kind.parts if part.way == "out")
    yield "pp", ("recv", "act", "")


def _transfers(s: Settings) -> tuple[tuple[Kind, int], ...]:
    """Bytes that a rank receives in the transfers of one layer."""
    table, layout = costs_of(s, HARDWARE["h200"]).table, layout_of(s)
    shared = s.mesh.members("gather_dense")
    axes = {"gather": shared, "reduce": shared, "a2a": s.mesh.ep, "pp": layout.pp}
    sizes = [(kind, table[key].wire_bytes) for kind, key in asked(layout) if axes[kind] > 1 and key in table]
    return tuple(dict.fromkeys((kind, size) for kind, size in sizes if size))
