"""Tables of orders: their bubbles, pairs at their ends, and the controls of pipeline sends.

What is predicted in them is what the cost model says now, also beside steps that were measured long ago.
"""

from __future__ import annotations

import statistics
from functools import cache

from benchmarks.bubbles import SIZES, in_units, on_hardware
from benchmarks.markdown import Result, table
from benchmarks.merged_ends import cases
from benchmarks.merged_ends import row as compared
from benchmarks.orders import of_result as orders_predicted
from benchmarks.send_controls import of_result as sends_predicted


@cache
def bubbles() -> str:
    """The share of a step in which a rank rests, and the most layers it holds, by order and size."""
    rows = [row for size in SIZES for row in in_units(*size)]
    sizes = list(dict.fromkeys((row["pp"], row["microbatches"]) for row in rows))
    found = {(row["order"], row["pp"], row["microbatches"]): row for row in rows}
    lines = []
    for order in dict.fromkeys(row["order"] for row in rows):
        cells = [order]
        for size in sizes:
            row = found[order, *size]
            cells.append(f"{1 - row['work'] / row['step']:.1%}, {row['held_layers']}")
        lines.append(cells)
    return table(["order", *(f"{pp} ranks, {m} microbatches" for pp, m in sizes)], lines)


@cache
def bubbles_of_8b() -> str:
    """Predicted steps on 8 H200s."""
    lines = []
    for row in (row for microbatches in (8, 16) for row in on_hardware(microbatches)):
        cells = [f"{row['microbatches']} microbatches: {row['order']}", f"{1e3 * row['seconds']:,.0f} ms"]
        cells += [f"{statistics.fmean(row['busy']):.1%}", f"{max(row['exposed_sends']):.1%}"]
        lines.append([*cells, f"{max(row['peak_bytes']) / 2**30:.0f} GiB"])
    return table(["order", "predicted step", "ranks compute", "sends exposed, worst rank", "peak memory"], lines)


def send_controls(result: Result) -> str:
    """Every plan on every link: measured, predicted, and against a step without sends, with or without their waits.

    Nothing is predicted of what `auto` picked then, where the result does not say what that was.
    """
    rows, predicted = result["rows"], sends_predicted(result)
    (free,) = (row["seconds"] for row in rows if row["link"] in ("free", "signal"))
    over = "over no waits" if any(row["link"] == "free" for row in rows) else "over p2p transfers of an element"
    by_plan: dict[str, dict[str, Result]] = {}
    for row in rows:
        by_plan.setdefault(row["plan"], {})[row["link"]] = row
    lines = []
    for plan, found in by_plan.items():
        cells = [plan, str(max(result["in_flight"][plan]))]
        for link in ("real", "slow"):
            seconds, model = found[link]["seconds"], predicted.get((link, plan))
            cells += [f"{1e3 * seconds:,.1f} ms", f"{seconds / free - 1:+.1%}"]
            cells += ["" if model is None else f"{1e3 * model:,.1f} ms"]
        lines.append(cells)
    head = ["plan", "chunks in flight"]
    for link in ("NVLink", f"emulated {result['slow_link']['bandwidth'] / 1e9:g} GB/s"):
        head += [link, over, "predicted"]
    return table(head, lines)


@cache
def merged_ends() -> str:
    """Predicted steps without and with pairs at the ends, and what `auto` chooses."""
    lines = []
    for row in (compared(*case) for case in cases()):
        off, on = row["off"], row["on"]
        cells = [
            row["name"],
            str(row["microbatches"]),
            f"{1e3 * off['seconds']:,.1f} ms",
            f"{1e3 * on['seconds']:,.1f} ms",
        ]
        cells += [f"{1 - on['seconds'] / off['seconds']:.1%}"]
        cells += [f"{1e3 * off['exposed_a2a']:,.1f} → {1e3 * on['exposed_a2a']:,.1f} ms"]
        lines.append([*cells, f"{off['peak_bytes'] / 2**30:.0f} → {on['peak_bytes'] / 2**30:.0f} GiB", row["auto"]])
    head = ["step", "microbatches", "without", "with", "gain", "exposed all-to-all", "peak memory", "`auto`"]
    return table(head, lines)


def orders(result: Result) -> str:
    """Measured and predicted steps, and what of them is no microbatch's."""
    lines, predicted = [], orders_predicted(result)
    for row in result["rows"]:
        cells = [row["order"], str(row["in_flight"]), f"{1e3 * row['seconds'][1]:,.1f} ms"]
        for few, many in (row["seconds"], predicted[row["order"]]):
            cells += [f"{1e3 * few:,.1f} ms", f"{(2 * few - many) / few:.1%}"]
        cells += [f"{row['seconds'][0] / row['signal_seconds'] - 1:+.1%}"] if "signal_seconds" in row else []
        lines.append(cells)
    count = result["microbatches"]
    head = ["order", "chunks in flight", f"measured step of {2 * count} microbatches", f"of {count}", "of which bubble"]
    head += ["predicted step", "of which bubble"]
    head += ["measured, over p2p transfers of an element"] if "signal_seconds" in result["rows"][0] else []
    return table(head, lines)
