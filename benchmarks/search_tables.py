"""How far predicted gains of one plan over another have been off: what `hocket plan --search` may claim."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from statistics import median
from typing import Any

from benchmarks.markdown import Result, table

_COSTS = ("predicted", "modelled")
"""Predictions with measured costs, and by the cost model alone."""


def errors_of_gains(result: Result) -> Iterator[tuple[str, tuple[list[float], ...]]]:
    """For each shape: by how much the ratio of two steps was off, for every pair, with measured and modelled costs.

    Steps of other numbers of microbatches are left out, since no search chooses between them; so is a plan that was
    measured twice.
    """
    for shape, found in result["shapes"].items():
        rows = [row for plan, row in found["plans"].items() if "microbatches" not in plan]
        pairs = [(a, b) for a, b in combinations(rows, 2) if a["predicted"] != b["predicted"]]
        yield shape, tuple([_off(a, b, costs) for a, b in pairs] for costs in _COSTS)


def _off(a: dict[str, Any], b: dict[str, Any], costs: str) -> float:
    ratio = (a[costs] / b[costs]) / (a["measured"] / b["measured"])
    return max(ratio, 1 / ratio) - 1


def gains(*results: Result) -> str:
    rows = []
    for result in results:
        for shape, kinds in errors_of_gains(result):
            figures = [f"{figure(errors):.1%}" for errors in kinds for figure in (median, max)]
            rows.append([shape, str(len(kinds[0])), *figures])
    return table(
        ["plans of", "pairs", "measured costs: half of them", "worst", "costs of the model: half of them", "worst"],
        rows,
    )
