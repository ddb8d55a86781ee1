r"""All figures of a report as JSON values. The table and the page print these.

Names end in their unit: `_seconds`, `_bytes`, `_bytes_per_second`; a `_share` or `_fraction` is between 0 and 1.
Unknown values are null. Means are over steps and ranks unless a name says otherwise.

- `version`: 2. `sources`, `device`, `transport` (empty outside hocket), `world`, the `ranks` and `steps` measured,
  `emulated`: the network was emulated, `null_transport`: there was no communication, `notes` for the reader.
- `step`: `step_seconds` (median over steps of the slowest rank), and means: `rank_seconds` (S), `compute_seconds`
  (|K|), `communication_seconds` (|C|), `exposed_seconds` (|C \ K|), `absent_seconds` (S - |K|), `idle_seconds` (nothing
  ran), `host_bound_seconds` (of idle: the next kernel was not launched yet), `waiting_seconds` (of communication:
  everything that ran waited for late peers, as far as known), `exposed_waiting_seconds` (the same of exposed),
  `beside_seconds` (|C n K|) and `alone_seconds` (|K \ C|), each with a `_share` of `rank_seconds`; and
  `hidden_fraction` = |C n K| / |C|. `alone + beside + exposed + idle = rank_seconds`.
- `by_rank`: the same per rank. `by_rank_and_step`: the same of one step of one rank, not averaged.
- `kinds`: `count`, `seconds` (union), `waiting_seconds`, `exposed_seconds` (of `seconds`, without concurrent compute),
  `counted_seconds` (exposed time, each moment counted once, for the kind that ends last: they sum to the exposed time)
  and `counted_share` (of a step), `hidden_fraction`, `bytes` (bus bytes over one rank's link),
  `bandwidth_bytes_per_second` (while data moved; without waits for late peers).
- `layers`: the same sums per layer and, in `kinds`, per kind within it; most exposed first.
- `classes`: `class` of compute kernels, `seconds` (summed) and `step_share`; costliest first.
- `imbalance`: `compute_spread` and `step_spread` ((largest - smallest) / largest of the ranks' means), `slowest_rank`
  (most compute), `fastest_rank`, and `awaited_rank` (waits least for the others). Null for one rank.
- `tax`: null without a null trace, else `step_seconds` and `null_step_seconds`, `tax_share` (step / null step - 1),
  `parts` of the difference (`compute`, `exposed`, `host_bound`, `idle`: `seconds`), `contention` (all compute kernels),
  `classes` and `ops`: `seconds`, `null_seconds` (without communication) and `slowdown_share`, and `notes`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from hocket_trace.data import COMMUNICATION, Report, Share, Slowdown, StepReport, Tax

VERSION = 2


def to_json(report: Report, tax: Tax | None = None) -> dict[str, Any]:
    """All figures of a report; see the module's docstring for the names."""
    step = _mean_of(report.steps)
    return {
        "version": VERSION,
        "sources": list(report.sources),
        "device": report.device,
        "transport": report.transport,
        "emulated": report.emulated,
        "null_transport": report.transport == "null",
        "world": report.world,
        "ranks": list(report.ranks),
        "steps": sorted({one.step for one in report.steps}),
        "step": {"step_seconds": known(report.step_seconds), **step},
        "by_rank": [
            {"rank": rank, **_mean_of([one for one in report.steps if one.rank == rank])} for rank in report.ranks
        ],
        "by_rank_and_step": [{"rank": one.rank, "step": one.step, **_mean_of([one])} for one in report.steps],
        "kinds": _kinds(report.steps, step["rank_seconds"]),
        "layers": _layers(report.steps),
        "classes": _classes(report.steps, step["rank_seconds"]),
        "imbalance": _imbalance(report),
        "tax": _tax(tax) if tax else None,
        "notes": list(report.notes),
    }


def known(number: float) -> float | None:
    """A number in JSON: None for nan and infinities."""
    return float(number) if math.isfinite(number) else None


def _mean_of(steps: Sequence[StepReport]) -> dict[str, Any]:
    """Means over some steps of some ranks."""
    if not steps:
        return {"rank_seconds": 0.0, "hidden_fraction": 1.0}
    whole = fmean(one.seconds for one in steps)
    compute, both = fmean(one.compute for one in steps), fmean(one.communication - one.exposed for one in steps)
    communication = fmean(one.communication for one in steps)
    seconds = {
        "compute": compute,
        "communication": communication,
        "exposed": fmean(one.exposed for one in steps),
        "absent": fmean(one.absent for one in steps),
        "idle": fmean(one.idle for one in steps),
        "host_bound": fmean(one.host_bound for one in steps),
        "waiting": _known_mean(one.waiting for one in steps),
        "exposed_waiting": _known_mean(one.exposed_waiting for one in steps),
        "beside": both,
        "alone": compute - both,
    }
    numbers: dict[str, Any] = {"rank_seconds": whole}
    for name, value in seconds.items():
        numbers[f"{name}_seconds"] = value
        numbers[f"{name}_share"] = None if value is None else _ratio(value, whole)
    numbers["hidden_fraction"] = 1 - seconds["exposed"] / communication if communication else 1.0
    return numbers


def _known_mean(numbers: Iterable[float]) -> float | None:
    """The mean of the known numbers; None if there are none."""
    found = [number for number in numbers if math.isfinite(number)]
    return fmean(found) if found else None


def _sums(shares: Sequence[Share], steps: int) -> dict[str, Any]:
    """Sums of shares of one kind or layer, per step of one rank."""
    seconds, exposed = sum(one.seconds for one in shares), sum(one.exposed for one in shares)
    moved = [one for one in shares if math.isfinite(one.bandwidth)]
    moving = sum(one.bytes / one.bandwidth for one in moved)
    return {
        "count": sum(one.count for one in shares) / steps,
        "seconds": seconds / steps,
        "waiting_seconds": known(sum(one.waiting for one in shares) / steps),
        "exposed_seconds": exposed / steps,
        "hidden_fraction": 1 - exposed / seconds if seconds else 1.0,
        "bytes": sum(one.bytes for one in shares) / steps,
        "bandwidth_bytes_per_second": sum(one.bytes for one in moved) / moving if moving else None,
    }


def _kinds(steps: Sequence[StepReport], whole: float) -> list[dict[str, Any]]:
    rows = []
    for kind in COMMUNICATION:
        shares = [one.kinds[kind] for one in steps if kind in one.kinds]
        if shares:
            counted = sum(one.exposed_for.get(kind, 0.0) for one in steps) / len(steps)
            once = {"counted_seconds": counted, "counted_share": _ratio(counted, whole)}
            rows.append({"kind": kind, **_sums(shares, len(steps)), **once})
    return rows


def _layers(steps: Sequence[StepReport]) -> list[dict[str, Any]]:
    """Figures per layer. Only one pipeline stage has a layer, so means are over the steps that know it."""
    rows = []
    for layer in sorted({layer for one in steps for layer in one.layers}):
        here = [one.layers[layer] for one in steps if layer in one.layers]
        kinds = [kind for kind in COMMUNICATION if any(kind in shares for shares in here)]
        row = _sums([share for shares in here for share in shares.values()], len(here))
        parts = [{"kind": k, **_sums([shares[k] for shares in here if k in shares], len(here))} for k in kinds]
        rows.append({"layer": layer, **row, "kinds": parts})
    return sorted(rows, key=lambda row: -row["exposed_seconds"])


def _classes(steps: Sequence[StepReport], whole: float) -> list[dict[str, Any]]:
    total: dict[str, float] = defaultdict(float)
    for one in steps:
        for name, seconds in one.classes.items():
            total[name] += seconds / len(steps)
    ordered = sorted(total.items(), key=lambda row: (-row[1], row[0]))
    return [{"class": name, "seconds": seconds, "step_share": _ratio(seconds, whole)} for name, seconds in ordered]


def _imbalance(report: Report) -> dict[str, Any]:
    of_rank = {rank: _mean_of([one for one in report.steps if one.rank == rank]) for rank in report.ranks}
    if len(of_rank) < 2:
        return dict.fromkeys(("compute_spread", "step_spread", "slowest_rank", "fastest_rank", "awaited_rank"))
    compute = {rank: row["compute_seconds"] for rank, row in of_rank.items()}
    waits = {rank: row["waiting_seconds"] for rank, row in of_rank.items()}
    named = all(wait is not None for wait in waits.values()) and any(waits.values())
    return {
        "compute_spread": _spread(compute.values()),
        "step_spread": _spread(row["rank_seconds"] for row in of_rank.values()),
        "slowest_rank": max(compute, key=compute.__getitem__),
        "fastest_rank": min(compute, key=compute.__getitem__),
        "awaited_rank": min(waits, key=waits.__getitem__) if named else None,
    }


def _tax(tax: Tax) -> dict[str, Any]:
    return {
        "step_seconds": tax.seconds,
        "null_step_seconds": tax.null,
        "tax_share": tax.share,
        "parts": [{"part": name, "seconds": seconds} for name, seconds in tax.parts.items()],
        "contention": _slowdown(tax.contention, "name"),
        "classes": [_slowdown(row, "class") for row in tax.classes],
        "ops": [_slowdown(row, "name") for row in tax.ops],
        "notes": list(tax.notes),
    }


def _slowdown(row: Slowdown, key: str) -> dict[str, Any]:
    return {key: row.name, "seconds": row.seconds, "null_seconds": row.null, "slowdown_share": known(row.share)}


def _spread(values: Iterable[float]) -> float:
    numbers = list(values)
    return _ratio(max(numbers) - min(numbers), max(numbers))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
