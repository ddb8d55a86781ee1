"""Tables of tensor-parallel layers, from benchmarks/results/tensor_parallel.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.markdown import Result, table

WAYS = ("ring", "pipeline", "bulk")
"""What layers can do; a result may have ways that were tried and given up."""


def layers(result: Result) -> str:
    """By model, role and direction: plain, and the ways that beat it or come closest."""
    rows = []
    for model, found in result["models"].items():
        for role, directions in found["roles"].items():
            for direction, ways in directions.items():
                rows.append([f"{model} {role}, {direction}", *_cells(ways)])
        for name, figures in found["layer"].items():
            if name == "overlapped":
                plain = found["layer"]["plain"]["seconds"]
                cells = [_ms(plain), "the fastest of each", _ms(figures["seconds"]), f"{figures['speedup']:.2f}x"]
                rows.append([f"{model}, whole layer", *cells])
    return table(["layer", "plain", "fastest other way", "takes", "speed-up"], rows)


def _cells(ways: Mapping[str, Any]) -> list[str]:
    others = {name: figures for name, figures in ways.items() if name.startswith(WAYS)}
    best = min(others, key=lambda name: others[name]["seconds"])
    return [_ms(ways["plain"]["seconds"]), best, _ms(ways[best]["seconds"]), f"{ways[best]['speedup']:.2f}x"]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"
