"""Reads traces of the PyTorch profiler: what ran beside what, which communication was exposed, and why.

    from hocket_trace import load, report

    found = report(load(["rank0.json.gz", "rank1.json.gz"]))
    print(found.steps[0].exposed, "of", found.steps[0].seconds, "seconds")

It reads traces of any PyTorch program, and imports numpy alone. `load` gives a `RankTrace` for each file, `report` a
`Report` on them, `compare` a `Tax`: what communication costs against the same run without it.
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
