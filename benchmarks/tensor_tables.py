"""Tables of tensor-parallel layers, from benchmarks/results/tensor_parallel*.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.markdown import Result, table
from benchmarks.tensor_parallel import model_of, settings
from hocket.layers.tensor import ways_of

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
    """What the rule chose, against plain and products alone, and what it chooses now; `noise` is plain against itself.

    What was chosen at the time was measured as a contender; what is chosen now is one of those that were tried.
    """
    rows = []
    for result in results:
        ranks = result.get("as_of") or result["tp"]
        of = f"of {ranks} ranks, on {result['tp']}" if ranks != result["tp"] else f"on {ranks} ranks"
        for model, found in result["models"].items():
            now = ways_of(settings(model_of(model, result), result["tp"], result["tokens"]))
            for role, directions in found["roles"].items():
                for direction, ways in directions.items():
                    backward = direction == "backward"
                    then = _name(found["auto"][role][backward], found["auto"][role][2][backward])
                    today = _name((now[role].forward, now[role].backward)[backward], now[role].splits[backward])
                    gain = f"{ways[today]['speedup']:.2f}x"
                    rows.append([f"{model} {role}, {direction}, {of}", then, *_against(ways), today, gain])
            rows.append([f"{model}, whole layer, {of}", "these", *_against(found["layer"]), "", ""])
    heads = ["layer", "auto, measured", "plain", "takes", "speed-up", "at most", "noise", "auto, now", "its speed-up"]
    return table(heads, rows)


def whole(*results: Result) -> str:
    """Whole layers as `auto` set them in the run, against plain and products alone."""
    rows = []
    for result in results:
        ranks = f"{result['tp']} ranks"
        ranks += f", as narrow as on {result['as_of']}" if result.get("as_of") else ""
        rows += [[f"{model}, {ranks}", *_against(found["layer"])] for model, found in result["models"].items()]
    return table(["layer", "plain", "auto", "speed-up", "at most", "noise"], rows)


def _name(method: str, splits: int) -> str:
    return f"{method}/{splits}" if method in ("ring", "pipeline") else method


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
