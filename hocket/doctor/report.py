"""The doctor's judgements as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from hocket.doctor.checks import exit_code
from hocket.doctor.found import Check

_INDENT = 11
WIDTH = 120


def to_text(checks: tuple[Check, ...]) -> str:
    """A line for each judgement, by area. Its cost and its fix stand below the line."""
    return "\n".join(_lines(checks))


def _lines(checks: tuple[Check, ...]) -> Iterator[str]:
    area = ""
    width = max(len(check.name) for check in checks)
    for check in checks:
        if check.area != area:
            yield from ([] if not area else [""])
            area = check.area
            yield area.upper()
        yield f"  {check.state:7}  {check.name:{width}}  {check.found}"
        for text in (check.cost, f"fix: {check.fix}" if check.fix else ""):
            indent = " " * _INDENT
            yield from textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
    yield ""
    yield verdict(checks)


def verdict(checks: tuple[Check, ...]) -> str:
    """The last line."""
    stops, costs, unknown = (sum(check.state == state for check in checks) for state in ("stops", "costs", "unknown"))
    rest = f"; {unknown} could not be checked" if unknown else ""
    if not stops and not costs:
        return f"nothing to mend{rest}"
    parts = [f"{stops} that stop a run"] * bool(stops) + [f"{costs} that cost time"] * bool(costs)
    return f"to mend: {' and '.join(parts)}{rest}"


def to_json(checks: tuple[Check, ...]) -> dict[str, Any]:
    """The same as JSON."""
    return {"exit_code": exit_code(checks), "checks": [asdict(check) for check in checks]}
