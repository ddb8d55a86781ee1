"""Several ranks of one run: one clock, and collectives matched across ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hocket.trace.data import RankTrace
from hocket.trace.read import read


def load(paths: Sequence[Path | str]) -> tuple[RankTrace, ...]:
    """Read the traces of one run, by rank."""
    return tuple(sorted((read(path) for path in paths), key=lambda trace: trace.rank))
