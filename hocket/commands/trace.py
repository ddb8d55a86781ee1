"""`hocket trace`: what communication cost a run, from its profiler traces."""

from __future__ import annotations

from hocket_trace import cli


def run(words: list[str]) -> int:
    """Print a report, or write its pages and pictures."""
    return cli.run(words, "hocket trace")
