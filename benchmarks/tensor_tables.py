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


def chosen(*results: Result) -> str:
    """What the rule chose, against plain and against products alone; the last column is plain against itself."""
    rows = []
    for result in results:
        ranks = result.get("as_of") or result["tp"]
        of = f"of {ranks} ranks, on {result['tp']}" if ranks != result["tp"] else f"on {ranks} ranks"
        for model, found in result["models"].items():
            if "auto" not in found:
                continue  # of a time when the rule was no contender
            for role, directions in found["roles"].items():
                for direction, ways in directions.items():
                    way = found["auto"][role][direction == "backward"]
                    rows.append([f"{model} {role}, {direction}, {of}", way, *_against(ways)])
            rows.append([f"{model}, whole layer, {of}", "these", *_against(found["layer"])])
    return table(["layer", "auto", "plain", "takes", "speed-up", "at most", "noise"], rows)


def _against(ways: Mapping[str, Any]) -> list[str]:
    plain, auto = ways["plain"], ways["auto"]
    most = plain["seconds"] / ways["products alone"]["seconds"]
    times = [_ms(plain["seconds"]), _ms(auto["seconds"]), f"{auto['speedup']:.2f}x"]
    return [*times, f"{most:.2f}x", f"{ways['plain again']['speedup']:.2f}x"]


def _cells(ways: Mapping[str, Any]) -> list[str]:
    others = {name: figures for name, figures in ways.items() if name.startswith(WAYS)}
    best = min(others, key=lambda name: others[name]["seconds"])
    return [_ms(ways["plain"]["seconds"]), best, _ms(ways[best]["seconds"]), f"{ways[best]['speedup']:.2f}x"]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"
