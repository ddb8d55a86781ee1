"""Text and columns of the terminal table: numbers with units, rows that fit a width."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

UNKNOWN = "–"
_NAME = 8
"""Minimum width of the first column."""
_FIRST = 8
"""Most numbers that a sentence lists."""
_BLOCKS = " ▏▎▍▌▋▊▉█"


def printable(text: str) -> str:
    """Replace control characters, which a terminal would interpret; line ends stay."""
    return "".join(c if c == "\n" or c.isprintable() else "\ufffd" for c in text)


def wrapped(text: str, width: int, hang: str = "") -> list[str]:
    """Wrap a paragraph; lines after the first begin with `hang`. A number stays with its unit."""
    text = re.sub(r"(?<=\d) (?=(s|ms|µs|%)(\W|$))", "\N{NO-BREAK SPACE}", text)
    parts = textwrap.wrap(text, width, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False)
    return [part.replace("\N{NO-BREAK SPACE}", " ") for part in parts]


def grid(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """A head and rows: the first column left-aligned and shrunk to fit `width`, the others right-aligned.

    If that is not enough, the last columns are dropped.
    """
    widths = [max(len(row[n]) for row in [heads, *rows]) for n in range(len(heads))]
    while len(widths) > 2 and min(widths[0], _NAME) + sum(widths[1:]) + 2 * len(widths) > width:
        widths.pop()
    widths[0] = max(min(widths[0], width - sum(widths[1:]) - 2 * len(widths)), min(widths[0], _NAME))
    lines = []
    for row in [heads, *rows]:
        rest = (f"{cell:>{wide}}" for cell, wide in zip(row[1 : len(widths)], widths[1:], strict=True))
        lines.append("  " + "  ".join([f"{shortened(row[0], widths[0]):{widths[0]}}", *rest]).rstrip())
    return lines


def shortened(text: str, width: int) -> str:
    """Shorten a text to `width` characters, with an ellipsis for its middle."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 3
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def bar(share: float, width: int) -> str:
    """A bar of `width` characters at share 1, to an eighth of a character; a positive share is always visible."""
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    return "█" * (eighths // 8) + (_BLOCKS[eighths % 8] if eighths % 8 else "")


def duration(seconds: float) -> str:
    """Seconds with a unit that fits: `1.25 s`, `12.5 ms`, `3.0 µs`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= 0.9995 * scale:  # less would round to below 1,000 of the smaller unit
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def milliseconds(seconds: float | None, digits: int = 2) -> str:
    """Milliseconds without their unit. A small positive value shows as `<0.01`, not as 0."""
    if seconds is None:
        return UNKNOWN
    shown = f"{seconds * 1e3:,.{digits}f}"
    return f"<{0.1**digits:.{digits}f}" if seconds > 0 and float(shown.replace(",", "")) == 0 else shown


def percent(share: float | None) -> str:
    """A share, in percent."""
    return UNKNOWN if share is None else f"{share * 100:.1f} %"


def size(count: float) -> str:
    """Bytes with a unit that fits, in powers of ten as bandwidths are."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}" if count < 1000 * scale else f"{count / scale:,.0f} {unit}"
    return f"{count:.0f} B" if count else UNKNOWN


def rate(bandwidth: float | None) -> str:
    """Bytes per second as GB/s, without the unit."""
    if bandwidth is None:
        return UNKNOWN
    value = bandwidth / 1e9
    return "<0.1" if value < 0.1 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def number(count: float) -> str:
    """A count; a fractional mean keeps a digit."""
    return f"{count:,.0f}" if abs(count - round(count)) < 0.05 else f"{count:,.1f}"


def counted(count: int, noun: str) -> str:
    """`1 step`, or `2 steps`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def listed(noun: str, numbers: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 1`; of a long list the first ones."""
    shown = ", ".join(map(str, numbers[:_FIRST])) + (", ..." if len(numbers) > _FIRST else "")
    return f"{noun}{'s' if len(numbers) > 1 else ''} {shown}"


def several(sources: Sequence[str]) -> str:
    """The first of some files, and the number of the others."""
    return f"{sources[0]} and {len(sources) - 1} more" if len(sources) > 1 else sources[0]
