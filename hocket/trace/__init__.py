"""Reading profiler traces: what ran beside what, what communication cost, and what a run without it would take.

    traces = load(["rank0.json.gz", "rank1.json.gz"])
    print(report(traces).steps[0].exposed)

Works on traces of any PyTorch program. Imports numpy, never torch.
"""

from __future__ import annotations

from typing import Any

from hocket.trace.align import load
from hocket.trace.exposure import report
from hocket.trace.parse import TraceError

__all__ = ["TraceError", "compare", "load", "report"]


def __getattr__(name: str) -> Any:
    if name == "compare":
        from hocket.trace.compare import compare

        return compare
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
