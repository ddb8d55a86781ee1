"""A translation as text, as TOML that hocket reads, and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from hocket.foreign.entry import State
from hocket.foreign.translate import Row, Translation
from hocket.settings.tomlfile import written

WIDTH = 120
_TITLES: Mapping[State, str] = {
    "becomes": "BECOMES",
    "not needed": "NOT NEEDED",
    "not there": "NOT THERE",
    "not known": "NOT KNOWN",
}


def to_text(found: Translation) -> str:
    """What each setting becomes or why it does not, then the TOML."""
    lines = [f"{found.system} in hocket's words"]
    for state, title in _TITLES.items():
        rows = found.of(state)
        if rows:
            lines += ["", title, *_block(rows)]
    title = "AS TOML, without a model: --recipe NAME adds one" if found.lacking else "AS TOML"
    return "\n".join([*lines, "", title, *(f"  {line}".rstrip() for line in to_toml(found).splitlines())])


def _block(rows: list[Row]) -> Iterator[str]:
    width = min(max(len(row.written) for row in rows), 56)
    for row in rows:
        settings = ", ".join(f"{name} = {_word(value)}" for name, value in row.answer.settings.items())
        text = ": ".join(filter(None, [settings, row.answer.words]))
        indent = " " * (width + 4)
        wrapped = textwrap.wrap(text, WIDTH - len(indent)) or [""]
        yield f"  {row.written:{width}}  {wrapped[0]}".rstrip()
        yield from (indent + line for line in wrapped[1:])


def _word(value: Any) -> str:
    """A value as one would type it after a flag."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def to_toml(found: Translation) -> str:
    """A file of settings, each with what it was."""
    ordered = dict(sorted(found.settings.items(), key=lambda item: ("." in item[0], item[0])))
    return written(f"{found.system}, translated", ordered, found.sources)


def to_json(found: Translation) -> dict[str, Any]:
    """Everything, for machines."""
    rows = [
        {
            "name": row.name,
            "value": row.value,
            "state": row.answer.state,
            "settings": dict(row.answer.settings),
            "words": row.answer.words,
        }
        for row in found.rows
    ]
    return {
        "system": found.system,
        "complete": found.complete,
        "lacking": found.lacking,
        "rows": rows,
        "settings": dict(found.settings),
    }
