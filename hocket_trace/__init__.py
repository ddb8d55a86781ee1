"""Reads traces of the PyTorch profiler: which activities overlapped, which communication was exposed, and why.

    from hocket_trace import load, report

    found = report(load(["rank0.json.gz", "rank1.json.gz"]))
    print(found.steps[0].exposed, "of", found.steps[0].seconds, "seconds")

It reads traces of any PyTorch program, and its only dependency is numpy. `load` returns a `RankTrace` per file,
`report` a `Report` on them, and `compare` a `Tax`: the cost of communication against the same run without it.
"""

from __future__ import annotations

from hocket_trace.align import load
from hocket_trace.compare import compare
from hocket_trace.data import Plan, PlanOp, RankTrace, Report, Share, Slowdown, Step, StepReport, Tax
from hocket_trace.exposure import report
from hocket_trace.parse import TraceError

__all__ = [
    "Plan",
    "PlanOp",
    "RankTrace",
    "Report",
    "Share",
    "Slowdown",
    "Step",
    "StepReport",
    "Tax",
    "TraceError",
    "compare",
    "load",
    "report",
]
