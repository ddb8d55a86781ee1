"""A report as one self-contained page: the timeline, and the tables beside it.

Most kernels run many times, so activities are columns of integer nanoseconds (gap to the previous one, length) and of
indices into a table of distinct activities: about 16 bytes each. `assets/` has the page's style and scripts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from hocket_trace import table
from hocket_trace.as_json import to_json
from hocket_trace.columns import UNKNOWN, milliseconds, percent
from hocket_trace.data import RankTrace, Report, Tax
from hocket_trace.exposure import late
from hocket_trace.picture import COLORS, colors, lanes, typical

_PART_COLORS = {
    "alone": "#8db9f7", "beside": "#2f5f9e", "exposed": COLORS["exposed"], "host_bound": COLORS["late"],
    "rest": "var(--line)",
}  # fmt: skip
"""Colours of a step's parts: in the summary, and in the strip below each rank's compute."""
_STRIPS = {"alone": "alone", "beside": "beside", "exposed": "exposed", "host_bound": "late"}
"""Parts of a step in the strip -> their names in `page.js`. The strip is empty where the rank is idle."""


def html(
    report: Report,
    traces: Sequence[RankTrace],
    tax: Tax | None = None,
    title: str = "",
    about: Sequence[str] = (),
    first: tuple[float, float] | None = None,
) -> str:
    """The page, by default with the report's title, and lines about what it shows.

    It opens at the step of median length, or at the interval `first`, in seconds.
    """
    figures, data = to_json(report, tax), _data(report, traces, first)
    headline, *said = table.title(figures).split(": ", 1)
    parts = {
        "title": escape(title or headline),
        "about": "<br>".join(escape(line) for line in about or said),
        "warnings": "".join(f'<p class="warning">{escape(text)}</p>' for text in table.warnings(figures)),
        "headline": re.sub(r"(?<=\d) (?=s\b|ms|µs|%)", "&nbsp;", escape(table.headline(figures))),
        "parts": _parts(figures),
        "tables": "\n".join(_tables(figures)),
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "style": _asset("page.css"),
        "script": _asset("page.js") + _asset("control.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found.group(1)], _asset("page.html"))


def _asset(name: str) -> str:
    return (files("hocket_trace") / "assets" / name).read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------------- activities


def _data(report: Report, traces: Sequence[RankTrace], first: tuple[float, float] | None) -> dict[str, Any]:
    """The data for the script: see `page.js`."""
    words: dict[str, int] = {"": 0}
    what: dict[tuple[int | float, ...], int] = {}
    steps = [step for trace in traces for step in trace.steps]
    start = min((step.start for step in steps), default=0.0)
    end = max((step.end for step in steps), default=0.0)
    ranks = [_rank(trace, (start, end), words, what) for trace in traces]
    names = ("lane", "kind", "name", "launcher", "op", "group", "class", "layer", "bytes", "color", "compute")
    columns = list(zip(*what, strict=True)) or [()] * len(names)
    return {
        "from": 0,
        "to": max(_ns(end - start), 1),
        "step": typical(report) if report.steps else None,
        "first": [_ns(time - start) for time in first] if first else None,
        "colors": COLORS | {name: _PART_COLORS[part] for part, name in _STRIPS.items()},
        "strips": {_STRIPS[part]: words for part, words, _ in table.PARTS if part in _STRIPS},
        "words": list(words),
        "what": {name: list(column) for name, column in zip(names, columns, strict=True)},
        "ranks": ranks,
    }


def _rank(
    trace: RankTrace, span: tuple[float, float], words: dict[str, int], what: dict[tuple[int | float, ...], int]
) -> dict[str, Any]:
    """A rank's activities between two times. Adds new words to `words`, and distinct activities to `what`."""
    start, end = span
    rows = np.flatnonzero((trace.end > start) & (trace.start < end))
    began = np.rint((trace.start[rows] - start) * 1e9).astype(np.int64)
    length = np.rint((trace.end[rows] - start) * 1e9).astype(np.int64) - began
    theirs = np.array([words.setdefault(word, len(words)) for word in trace.words], dtype=np.int64)
    shade = [list(COLORS).index(name) for name in colors(trace)]
    computes = trace.of_kind("compute")
    worded = trace.lane, trace.kind, trace.name, trace.launcher, trace.op, trace.group, trace.kernel_class
    columns = [
        *(theirs[column[rows]].tolist() for column in worded),
        trace.layer[rows].tolist(),
        [round(count) for count in trace.bytes[rows].tolist()],
        [shade[row] for row in rows],
        computes[rows].astype(int).tolist(),
    ]
    kinds = [what.setdefault(row, len(what)) for row in zip(*columns, strict=True)]
    absent = np.rint((late(trace, start, end) - start) * 1e9).astype(np.int64)
    shown = [lane for lane in lanes(trace) if np.isin(lane.rows, rows).any()]
    return {
        "rank": trace.rank,
        "lanes": [[words[lane.name], int(lane.compute)] for lane in shown],
        "steps": [[step.number, _ns(step.start - start), _ns(step.end - start)] for step in trace.steps],
        "gap": np.diff(began, prepend=0).tolist(),
        "length": length.tolist(),
        "what": kinds,
        "late": absent.tolist(),
    }


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


# ----------------------------------------------------------------------------------------------------------- tables


def _parts(figures: table.Figures) -> str:
    """The parts of a step, as one bar and its key."""
    if not figures["step"]["rank_seconds"]:
        return ""
    bar, keys = [], []
    for name, words, seconds, share, about in table.step_parts(figures["step"]):
        color = _PART_COLORS[name]
        if seconds:  # CSS makes a part at least a pixel wide
            bar.append(f'<i style="width:{share * 100:.3f}%;background:{color}" title="{escape(words)}"></i>')
        keys.append(
            f'<li title="{escape(about)}"><i class="swatch" style="background:{color}"></i>{escape(words)} '
            f"<b>{milliseconds(seconds)} ms</b> {percent(share)}</li>"
        )
    return f'<div class="parts">{"".join(bar)}</div><ul class="keys">{"".join(keys)}</ul>'


def _tables(figures: table.Figures) -> list[str]:
    found = [_section(one) for one in table.sections(figures)]
    notes = "".join(f"<li>{escape(note)}</li>" for note in figures["notes"])
    return [*found, f"<section><h2>Notes</h2><ul>{notes}</ul></section>"] if notes else found


def _section(one: table.Section) -> str:
    """A table without the columns that have no known value."""
    known = [at for at in range(len(one.heads)) if not at or any(row[at] not in ("", UNKNOWN) for row in one.rows)]
    before, after = ("".join(f"<p>{escape(text)}</p>" for text in texts) for texts in (one.before, one.after))
    heads = "".join(f"<th>{escape(one.heads[at])}</th>" for at in known)
    lines = "".join(_line([row[at] for at in known]) for row in one.rows)
    more = f"<p>{escape(one.more)}</p>" if one.more else ""
    head = f"<h2>{escape(one.head)} <small>{escape(one.about)}</small></h2>"
    return f"<section>{head}{before}<table><tr>{heads}</tr>{lines}</table>{more}{after}</section>"


def _line(cells: Sequence[str]) -> str:
    name, *rest = (escape(cell) for cell in cells)
    return f'<tr><td class="name">{name}</td>' + "".join(f"<td>{cell}</td>" for cell in rest) + "</tr>"
