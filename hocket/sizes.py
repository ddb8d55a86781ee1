"""Sizes, rates and times as users write and read them: a number and a unit."""
# hocket_trace/columns.py repeats `counted`, `listed` and `several`: it runs without hocket, and loads numpy.

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
RATES = {
    **{f"{unit}/s": float(factor) for unit, factor in UNITS.items()},
    "Mb/s": 1e6 / 8,
    "Gb/s": 1e9 / 8,
}
"""Bytes per second. Units with a lower-case b are bits, as network adapters are sold."""
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
"""Seconds."""
_LONGEST = 3600.0
_FIRST = 8
"""Most numbers that a sentence lists."""


def parse_bytes(text: str, setting: str) -> int:
    """Bytes of a size such as "512MiB" or "1.5 GB". `setting` is named in errors.

    Raises: ValueError for anything else, including a number without a unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in UNITS:
        known = ", ".join(UNITS)
        why = "has no unit" if match is not None and not match[2] else "is no size"
        raise ValueError(f"{setting}={text!r} {why}: write a number and one of {known}, such as '512MiB'")
    return int(float(match[1]) * UNITS[match[2]])


def parse_rate(text: str) -> float:
    """Bytes per second of a rate such as "50GB/s" or "400 Gb/s". Raises ValueError with a reason for anything else."""
    rate = _in_units(text, RATES, "rate")
    if rate < 1:
        raise ValueError("nothing would ever arrive")
    return rate


def parse_time(text: str) -> float:
    """Seconds of a time such as "10us". Raises ValueError with a reason for anything else."""
    seconds = _in_units(text, TIMES, "time")
    if seconds > _LONGEST:
        raise ValueError("is longer than an hour")
    return seconds


def _in_units(text: str, units: Mapping[str, float], what: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z/]*)\s*", text)
    if match is None or match[2] not in units:
        bare = match is not None and not match[2]
        raise ValueError(f"{'has no unit' if bare else f'is no {what}'}: there are {', '.join(units)}")
    value = float(match[1]) * units[match[2]]
    if not math.isfinite(value):
        raise ValueError("has too many digits")
    return value


def duration(seconds: float) -> str:
    """Seconds with a unit that fits: `1.25 s`, `12.5 ms`, `3.0 µs`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= 0.9995 * scale:  # else it rounds to below 1,000 of the smaller unit
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def counted(count: int, noun: str) -> str:
    """`1 step`, or `2 steps`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def listed(noun: str, numbers: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 1`; only the first of many."""
    shown = ", ".join(map(str, numbers[:_FIRST])) + (", ..." if len(numbers) > _FIRST else "")
    return f"{noun}{'s' if len(numbers) > 1 else ''} {shown}"


def several(sources: Sequence[str]) -> str:
    """The first of some files, and the number of further ones."""
    return f"{sources[0]} and {len(sources) - 1} more" if len(sources) > 1 else sources[0]
