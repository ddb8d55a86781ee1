"""Reading profiler traces: what ran beside what, what communication cost, and what a run without it would take.

    traces = load(["rank0.json.gz", "rank1.json.gz"])
    print(report(traces).steps[0].exposed)

Works on traces of any PyTorch program. Imports numpy, never torch.
"""

from __future__ import annotations

from hocket.trace.align import load
from hocket.trace.compare import compare
from hocket.trace.exposure import report
from hocket.trace.parse import TraceError

__all__ = ["TraceError", "compare", "load", "report"]
