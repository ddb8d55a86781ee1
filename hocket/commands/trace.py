"""`hocket trace`: what communication cost a run, from its profiler traces."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.measured.predict import predict
from hocket_trace import cli
from hocket_trace.data import Prediction, RankTrace, Report, Tax


def run(words: list[str]) -> int:
    """Print a report, or write its pages and pictures."""
    return cli.run(words, "hocket trace", _predicted)


def _predicted(traces: Sequence[RankTrace], measured: Report, tax: Tax | None) -> Prediction | None:
    return predict(traces, measured, tax=tax) if "version" in traces[0].run else None
