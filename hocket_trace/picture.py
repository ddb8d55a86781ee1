"""An SVG picture of a measured step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from math import floor, log10
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from hocket_trace.as_json import to_json
from hocket_trace.columns import duration, percent, several
from hocket_trace.data import Floats, Ints, RankTrace, Report
from hocket_trace.exposure import exposed, late
from hocket_trace.intervals import Spans
from hocket_trace.table import warnings

# -- scene -------------------------------------------------------------------------------------------------------------
# The contents of a step's picture, before it is drawn: boxes, words and lines, all in pixels.
#
# Each rank has its lanes, compute first. Below compute, a strip marks exposed time, and time in which the host was
# late. The page has the same lanes and colours.

COLORS = {
    "compute": "#4a7fc9", "fwd": "#5b9bf3", "bwd": "#f2a03d", "wgrad": "#5fbf77", "step": "#9aa5b1",
    "a2a": "#c77ddb", "pp": "#2bb3c0", "gather": "#d9b62c", "reduce": "#b5835a", "tp": "#e2799b", "cp": "#7fb069",
    "control": "#7f8ea3", "other": "#a39b8b", "exposed": "#e5484d", "late": "#7c3aed",
}  # fmt: skip
"""Colours by kind. Compute of a named op that begins with one of `_VERBS` has its verb's colour. `late` is for a host
that has not launched yet. The tones are readable on light and on dark."""

_VERBS = {name: name for name in ("fwd", "bwd", "wgrad", "step", "gather", "reduce")}
_VERBS |= {"recompute": "fwd", "update": "step"}

ABSENT = {"exposed": "communication is exposed", "late": "the host is late"}
"""Reasons for absent compute in the strip below compute. Where the strip is empty, the next kernel waits."""

GUTTER, _TOP, _GAP = 148, 56, 12
_MAIN, _STRIP, _LOW = 24, 5, 11
_NARROW = 1.0
"""Pixels of width below which boxes share their pixels."""
_SHADES = 8
_GOOD_PART = 0.1


class Box(NamedTuple):
    """A filled rectangle. `color` is a name in `COLORS`, or `bg` or `lane`."""

    x: float
    y: float
    width: float
    height: float
    color: str
    opacity: float = 1.0
    title: str = ""
    label: str = ""


@dataclass
class Scene:
    """A picture: boxes, and SVG of the lines below and of the words above them."""

    width: int
    height: int = 0
    boxes: list[Box] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def word(self, x: float, y: float, text: str, more: str = "") -> None:
        """Add a text with its baseline at `y` and further attributes."""
        self.words.append(f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(text)}</text>')


BOLD, DIM = ' font-weight="600"', ' class="dim"'


class Lane(NamedTuple):
    """A lane of a rank, and its rows in the trace."""

    name: str
    compute: bool
    """Whether compute is most of its busy time, and a good part of the rank's compute."""
    rows: Ints


def lanes(trace: RankTrace) -> list[Lane]:
    """The lanes of a rank in the order of the picture: those that compute, then the plan's, then the others."""
    seconds = trace.end - trace.start
    computes = np.where(trace.of_kind("compute"), seconds, 0.0)
    known: dict[str, int] = {name: n for n, name in enumerate(trace.plan.lanes)}
    found = []
    for index in np.unique(trace.lane):
        name, rows = trace.words[index], np.flatnonzero(trace.lane == index)
        busy = computes[rows].sum()
        much = busy > seconds[rows].sum() / 2 and busy > computes.sum() * _GOOD_PART
        found.append(Lane(name, name in trace.plan.computing if name in known else bool(much), rows))
    return sorted(found, key=lambda lane: (not lane.compute, known.get(lane.name, len(known)), _natural(lane.name)))


def _natural(name: str) -> tuple[str, int]:
    """`stream 7` before `stream 23`."""
    text, _, number = name.rpartition(" ")
    return (text, int(number)) if number.isdigit() else (name, -1)


def colors(trace: RankTrace) -> list[str]:
    """The name of each row's colour."""
    verbs = {n: word.partition(" ")[0] for n, word in enumerate(trace.words)}
    names = [trace.words[kind] for kind in trace.kind]
    return [
        _VERBS.get(verbs[op], kind) if kind == "compute" else kind for kind, op in zip(names, trace.op, strict=True)
    ]


def window(traces: Sequence[RankTrace], number: int) -> tuple[float, float]:
    """From the first start of a step on any rank to its last end."""
    steps = [step for trace in traces for step in trace.steps if step.number == number]
    return min(step.start for step in steps), max(step.end for step in steps)


def numbers(traces: Sequence[RankTrace]) -> list[int]:
    """The step numbers in the traces."""
    return sorted({step.number for trace in traces for step in trace.steps})


def draw(
    traces: Sequence[RankTrace],
    number: int,
    head: str,
    width: int = 1200,
    labels: Mapping[str, str] = MappingProxyType({}),
) -> Scene:
    """Draw a step, `width` pixels wide, under a line of text. `labels` are texts by op for wide bars."""
    start, end = window(traces, number)
    scene = Scene(width)
    chart = width - GUTTER - 12
    scale = chart / ((end - start) or 1.0)
    top, used = _TOP, {"exposed", "late"}
    for trace in traces:
        names = colors(trace)
        for n, lane in enumerate(_shown(trace, start, end)):
            height = _MAIN if lane.compute else _LOW
            if n == 0:
                scene.word(8, top + height / 2 + 4, f"rank {trace.rank}", BOLD)
            scene.word(GUTTER - 8, top + height / 2 + 4, lane.name, f'{DIM} text-anchor="end"')
            scene.boxes.append(Box(GUTTER, top, chart, height, "lane"))
            for box in _bars(trace, lane, names, (start, end, scale), labels):
                used.add(box.color)
                scene.boxes.append(box._replace(x=box.x + GUTTER, y=top, height=height))
                if box.label and box.width >= 6.5 * len(box.label) + 2:
                    middle = GUTTER + box.x + box.width / 2
                    scene.word(middle, top + 16, box.label, ' class="in" text-anchor="middle"')
            top += height + 2
            if n == 0:
                scene.boxes.append(Box(GUTTER, top, chart, _STRIP, "lane"))
                for color, spans in (("exposed", exposed(trace, start, end)), ("late", late(trace, start, end))):
                    for box in _strip(spans, color, start, scale):
                        scene.boxes.append(box._replace(x=box.x + GUTTER, y=top, height=_STRIP))
                top += _STRIP + 2
        top += _GAP
    _frame(scene, head, (end - start, chart, top - _GAP), used)
    return scene


def _shown(trace: RankTrace, start: float, end: float) -> Iterator[Lane]:
    """The lanes of a rank with activities between two times, and only the rows of these."""
    for lane in lanes(trace):
        inside = (trace.end[lane.rows] > start) & (trace.start[lane.rows] < end)
        if inside.any():
            yield lane._replace(rows=lane.rows[inside])


def _bars(
    trace: RankTrace,
    lane: Lane,
    names: Sequence[str],
    view: tuple[float, float, float],
    labels: Mapping[str, str],
) -> Iterator[Box]:
    """The bars of a lane, the combined short ones first. Only their x and width are set."""
    start, end, scale = view
    left = (np.clip(trace.start[lane.rows], start, end) - start) * scale
    right = (np.clip(trace.end[lane.rows], start, end) - start) * scale
    narrow = right - left < _NARROW
    here = np.array([names[row] for row in lane.rows])
    masks = {name: (here == name) & narrow for name in dict.fromkeys(here[narrow].tolist())}
    yield from columns({name: (left[mask], right[mask]) for name, mask in masks.items()}, "short activities")
    for n in np.flatnonzero(~narrow):
        width = right[n] - left[n]
        row = int(lane.rows[n])
        text = _title(trace, row, start) if width >= 2 else ""  # narrower ones can't be hovered
        label = labels.get(trace.words[trace.op[row]], "")
        yield Box(float(left[n]), 0, width - (0.5 if width > 3 else 0.0), 0, names[row], 1.0, text, label)


def _strip(spans: Spans, color: str, start: float, scale: float) -> Iterator[Box]:
    """The bars of the strip below compute."""
    left, right = (spans[:, 0] - start) * scale, (spans[:, 1] - start) * scale
    narrow = right - left < _NARROW
    if narrow.any():
        yield from columns({color: (left[narrow], right[narrow])}, f"short stretches: {ABSENT[color]}")
    for x, end in zip(left[~narrow].tolist(), right[~narrow].tolist(), strict=True):
        yield Box(x, 0, end - x, 0, color, 1.0, f"{ABSENT[color]} for {duration((end - x) / scale)}")


def columns(narrow: Mapping[str, tuple[Floats, Floats]], noun: str) -> Iterator[Box]:
    """Boxes for intervals too narrow to be seen, colour -> (left, right).

    Each pixel has the colour that fills most of it, with the opacity of their sum; equal neighbours are one box.
    """
    if not narrow:
        return
    width = int(max(right.max() for _, right in narrow.values())) + 2
    filled = np.zeros((len(narrow), width))
    count = np.zeros(width)
    for n, (left, right) in enumerate(narrow.values()):
        first, last = left.astype(int), right.astype(int)
        cut = np.minimum(right, first + 1)
        np.add.at(filled[n], first, cut - left)
        np.add.at(filled[n], last, np.where(last > first, right - last, 0.0))
        np.add.at(count, first, 1)
    shade = np.ceil(np.clip(filled.sum(axis=0), 0.0, 1.0) * _SHADES).astype(int)
    look = np.where(shade > 0, shade + (_SHADES + 1) * filled.argmax(axis=0), 0)
    edges = np.flatnonzero(np.diff(look, prepend=0, append=0))
    for first, last in pairwise(edges.tolist()):
        if look[first]:
            name = list(narrow)[look[first] // (_SHADES + 1)]
            title = f"{int(count[first:last].sum())} {noun}"
            yield Box(first, 0, last - first, 0, name, shade[first] / _SHADES, title)


def tick(length: float, width: float) -> float:
    """The distance of an axis's grid lines, a round number about 100 pixels wide."""
    rough = length / max(1.0, width / 100)
    power = 10.0 ** floor(log10(rough))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= rough)


def _title(trace: RankTrace, row: int, zero: float) -> str:
    """One line with an activity's names, and its times since `zero`."""
    words = trace.words
    names = [words[column[row]] for column in (trace.op, trace.launcher, trace.name)]
    first = next(filter(None, names), "")
    text = ", ".join([first, *dict.fromkeys(name for name in names if not first.startswith(name))])
    start, end = trace.start[row], trace.end[row]
    when = f"{duration(end - start)}, {duration(start - zero)} to {duration(end - zero)}"
    return f"{text if len(text) <= 160 else text[:159] + '…'}: {when}"


def _frame(scene: Scene, head: str, size: tuple[float, float, float], used: set[str]) -> None:
    """Add head, axis and legend. `size` is the length in seconds and in pixels, and the bottom of the lanes."""
    length, chart, bottom = size
    scene.word(8, 18, head, BOLD)
    step = tick(length, chart) if length > 0 else 1.0
    for n in range(int(length / step) + 1 if length > 0 else 0):
        x = n * step / length * chart
        at = f'x1="{GUTTER + x:.1f}" x2="{GUTTER + x:.1f}" y1="{_TOP - 6}" y2="{bottom}"'
        scene.rules.append(f'<line class="line" {at}/>')
        if x < chart - 36 or n == 0:
            scene.word(GUTTER + x, _TOP - 12, duration(n * step) if n else "0", DIM)
    x, y = float(GUTTER), bottom + 14
    for name in (name for name in COLORS if name in used):
        if x + 30 + 7 * len(name) > scene.width:
            x, y = float(GUTTER), y + 18
        scene.boxes.append(Box(x, y, 10, 10, name))
        scene.word(x + 14, y + 9, name)
        x += 30 + 7 * len(name)
    scene.height = round(y + 24)


# -- picture -----------------------------------------------------------------------------------------------------------

STYLE = """
.t{--bg:#ffffff;--fg:#1f2328;--dim:#656d76;--line:#d8dee4;--lane:#f3f5f8;
font:11px ui-sans-serif,system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
@media(prefers-color-scheme:dark){.t{--bg:#0d1117;--fg:#e6edf3;--dim:#8b949e;--line:#30363d;--lane:#161b22}}
.t .bg{fill:var(--bg)}.t .lane{fill:var(--lane)}.t .line{stroke:var(--line)}
.t text{fill:var(--fg)}.t .dim{fill:var(--dim)}.t .in{fill:#10151c;font-size:10px;pointer-events:none}
.t rect.op:hover{stroke:var(--fg)}
"""


def svg(
    report: Report,
    traces: Sequence[RankTrace],
    step: int | None = None,
    width: int = 1200,
    labels: Mapping[str, str] | None = None,
) -> str:
    """One step as an SVG document, `width` pixels wide, in the reader's colour scheme, with tooltips on bars.

    The default step is that of median length. `labels` are texts by op, shown in bars that are wide enough.
    """
    if not numbers(traces):
        raise ValueError(f"{several(report.sources)}: no step to draw; fix: a trace of whole steps")
    number = typical(report) if step is None else step
    figures = to_json(report)
    rows = [row for row in figures["by_rank_and_step"] if row["step"] == number]
    longest = max(rows, key=lambda row: row["rank_seconds"])
    parts = [f"step {number}", duration(longest["rank_seconds"])]
    if longest["communication_seconds"]:
        exposed = sum(row["exposed_share"] for row in rows) / len(rows)
        parts.append(f"communication exposed for {percent(exposed)}")
    about = [text.partition(":")[0] for text in warnings(figures)]
    parts += [report.device, *about]
    return svg_of(draw(traces, number, ", ".join(filter(None, parts)), width, labels or {}))


def typical(report: Report) -> int:
    """The step whose slowest rank takes the median time; the faster of two."""
    slowest: dict[int, float] = {}
    for one in report.steps:
        slowest[one.step] = max(one.seconds, slowest.get(one.step, 0.0))
    order = sorted(slowest, key=lambda number: (slowest[number], number))
    return order[(len(order) - 1) // 2]


def svg_of(scene: Scene) -> str:
    """A scene as an SVG document."""
    size = f'width="{scene.width}" height="{scene.height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="t" {size} viewBox="0 0 {scene.width} {scene.height}">',
        f'<style>{STYLE}</style><rect class="bg" width="100%" height="100%" rx="6"/>',
    ]
    lanes = [box for box in scene.boxes if box.color == "lane"]
    parts += [f'<rect class="lane" x="{b.x:g}" y="{b.y:g}" width="{b.width:g}" height="{b.height:g}"/>' for b in lanes]
    parts += scene.rules
    for box in scene.boxes:
        if box.color == "lane":
            continue
        seen = "" if box.opacity > 0.99 else f' fill-opacity="{box.opacity:.2f}"'
        place = f'x="{box.x:.2f}" y="{box.y:g}" width="{box.width:.2f}" height="{box.height:g}"'
        title = f"<title>{escape(box.title)}</title></rect>" if box.title else "</rect>"
        parts.append(f'<rect class="op" {place} fill="{COLORS[box.color]}"{seen}>{title}')
    return "".join([*parts, *scene.words, "</svg>\n"])
