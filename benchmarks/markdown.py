"""Pieces of the documents' tables."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

WIDTH = 100
"""Characters of a terminal in a document."""

Result = Mapping[str, Any]
"""What a file in benchmarks/results/ holds."""


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"


def us(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f} µs"


def block(lines: list[str]) -> str:
    """A block of text, with long lines wrapped."""
    wrap = {"width": WIDTH, "subsequent_indent": " " * 9, "break_long_words": False, "break_on_hyphens": False}
    return "\n".join(["```", *(part for text in lines for part in textwrap.wrap(text, **wrap)), "```"])
