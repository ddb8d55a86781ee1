"""Sizes as users write them: a number and a unit."""

from __future__ import annotations

import re

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_bytes(text: str, setting: str) -> int:
    """Bytes of a size such as "512MiB" or "1.5 GB". `setting` is named in errors.

    Raises: ValueError for anything else, a number without a unit too.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in UNITS:
        known = ", ".join(UNITS)
        why = "has no unit" if match is not None and not match[2] else "is no size"
        raise ValueError(f"{setting}={text!r} {why}: write a number and one of {known}, such as '512MiB'")
    return int(float(match[1]) * UNITS[match[2]])
