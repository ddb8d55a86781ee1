"""A predicted step as text, as a picture and as numbers.

All pictures have the same rows: for each pipeline rank its lanes, compute first, and one row that marks the exposed
time, in which communication runs and compute rests.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise
from math import floor, log10
from typing import Any, NamedTuple

from hocket.program.ops import COMPUTING, LANES, Lane, Layout, Op, Program
from hocket.program.parts import Part
from hocket.program.schedule import kind_of
from hocket.program.simulate import Span, Timeline
from hocket.program.transformer import EMBED, HEAD
from hocket.typed import is_a

_LEGEND = (
    "w weight gradient  > activation received  < gradient received  g gather  r reduce  S step  · nothing\n"
    "compute shows what fills half of a character's time, communication what fills a tenth, ' what fills less of it\n"
    "! exposed for half of a character's time, : for a tenth"
)
_WIDEST = 10_000
"""Characters of the longest line."""
_MUCH, _SOME = 0.5, 0.1
"""Shares of a character's time. Communication ops are short and stand apart: of a lane that is busy for a third of
every character one would see nothing, if half were asked for."""


def letter(op: Op, layout: Layout) -> str:
    """The letter of an op in a text timeline."""
    if op.verb in ("fwd", "bwd"):
        name = _mark(layout.part(op.part, op.layer))
        return name if op.verb == "fwd" else name.lower()
    if op.verb == "recompute":
        return "+"
    if op.verb == "recv":
        return ">" if op.part == "act" else "<"
    return {"wgrad": "w", "add": "w", "gather": "g", "reduce": "r", "step": "S", "update": "S"}.get(op.verb, " ")


def _mark(part: Part) -> str:
    return part.mark or part.letter.upper()


def _legend_of(layout: Layout) -> str:
    """What the letters of parts mean."""
    parts = {part.name: part for kind in layout.layer_types for part in kind.parts}
    named = (f"{_mark(part)} {part.name}" for part in (EMBED, *parts.values(), HEAD))
    return "\n".join(["  ".join(named) + ": forward; small letters: backward", _LEGEND])


def duration(seconds: float) -> str:
    """Seconds with a unit that fits: `1.25 s`, `12.5 ms`, `3.0 µs`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= 0.9995 * scale:  # less is below 1,000 of the smaller unit, also rounded
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def exposed_spans(ops: Sequence[Op], spans: Sequence[Span]) -> list[tuple[float, float]]:
    """(start, end) of the stretches in which communication runs on a rank and no compute op does."""
    moments: list[tuple[float, bool, bool]] = []
    for op, span in zip(ops, spans, strict=True):
        if span.end > span.start:
            computes = op.lane in COMPUTING
            moments += [(float(span.start), True, computes), (float(span.end), False, computes)]
    moments.sort()
    running = {True: 0, False: 0}
    out: list[tuple[float, float]] = []
    for (moment, starts, compute), following in pairwise(moments):
        running[compute] += 1 if starts else -1
        if running[False] and not running[True] and following[0] > moment:
            if out and out[-1][1] == moment:
                out[-1] = (out[-1][0], following[0])
            else:
                out.append((moment, following[0]))
    return out


# --------------------------------------------------------------------------------------------------------------- text


def text_timeline(timeline: Timeline, program: Program, width: int = 120) -> str:
    """One row per rank and lane, `width` characters wide, and a legend.

    A character stands for a stretch of time and shows the op that runs longest in it, `·` if the lane rests for more
    than half of it. On a communication lane a tenth is enough, and `'` stands for less. Raises ValueError for a width
    that no terminal has.
    """
    if not is_a(width, int) or not 1 <= width <= _WIDEST:
        raise ValueError(f"width = {width}: not the characters of a line; fix: a whole number from 1 to {_WIDEST}")
    left = len(f"rank {len(program.ranks) - 1} ")
    gutter = left + 10
    columns = max(width - gutter, 10)
    step = float(timeline.makespan) / columns or 1.0
    lines = [f"{'':{gutter}}0{duration(float(timeline.makespan)):>{columns - 1}}"]
    for rank, (ops, spans) in enumerate(zip(program.ranks, timeline.spans, strict=True)):
        for n, lane in enumerate(_lanes(ops)):
            marks = [
                (letter(op, program.layout), s.start, s.end)
                for op, s in zip(ops, spans, strict=True)
                if op.lane == lane
            ]
            name = f"rank {rank}" if n == 0 else ""
            busy = _text_row(marks, columns, step)
            enough, little = (_MUCH, "·") if lane == "compute" else (_SOME, "'")
            row = "".join(mark if share > enough else little if share else "·" for mark, share in busy)
            lines.append(f"{name:{left}}{lane:10}{row}")
            if lane == "compute":
                exposed = _text_row([("!", *span) for span in exposed_spans(ops, spans)], columns, step)
                row = "".join("!" if share > _MUCH else ":" if share > _SOME else " " for _, share in exposed)
                lines.append(f"{'':{left}}{'exposed':10}{row}")
    again = ["+ forward once more"] if program.layout.recompute else []
    return "\n".join([*lines, f"one character is {duration(step)}", _legend_of(program.layout), *again])


def _lanes(ops: Iterable[Op]) -> list[Lane]:
    """The lanes of a rank on which time passes. A send takes none."""
    used = {op.lane for op in ops if op.verb != "send"}
    return sorted(used, key=lambda lane: (LANES.index(lane) if lane in LANES else len(LANES), lane))


def _text_row(marks: Iterable[tuple[str, Any, Any]], columns: int, step: float) -> list[tuple[str, float]]:
    """For every character of a row: the mark that fills most of its time, and the share that all marks fill."""
    time_of: list[dict[str, float]] = [defaultdict(float) for _ in range(columns)]
    for mark, start, end in marks:
        first, last = float(start) / step, float(end) / step
        for column in range(min(floor(first), columns - 1), min(floor(last), columns - 1) + 1):
            time_of[column][mark] += max(0.0, min(last, column + 1) - max(first, column))
    return [(max(t, key=t.__getitem__) if t else "", sum(t.values())) for t in time_of]


# ------------------------------------------------------------------------------------------------------------ picture

COLORS = {
    "fwd": "#5b9bf3", "bwd": "#f2a03d", "wgrad": "#5fbf77", "step": "#9aa5b1",
    "a2a": "#c77ddb", "pp": "#2bb3c0", "gather": "#d9b62c", "reduce": "#b5835a", "exposed": "#e5484d",
}  # fmt: skip
"""Colours of compute by verb and of communication by kind; mid tones, readable on light and on dark."""

STYLE = """
.t{--bg:#ffffff;--fg:#1f2328;--dim:#656d76;--line:#d8dee4;--lane:#f3f5f8;
font:11px ui-sans-serif,system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
@media(prefers-color-scheme:dark){.t{--bg:#0d1117;--fg:#e6edf3;--dim:#8b949e;--line:#30363d;--lane:#161b22}}
.t .bg{fill:var(--bg)}.t .lane{fill:var(--lane)}.t .line{stroke:var(--line)}
.t text{fill:var(--fg)}.t .dim{fill:var(--dim)}.t .in{fill:#10151c;font-size:10px;pointer-events:none}
.t rect.op:hover{stroke:var(--fg)}
"""
_GUTTER, _TOP, _GAP = 116, 30, 12
_HEIGHT = {"compute": 24, "exposed": 5}  # the other lanes:
_LOW = 11


class _Row(NamedTuple):
    rank: int
    lane: str
    top: int
    height: int


def _rows(program: Program) -> tuple[list[_Row], int]:
    """The rows of a picture from top to bottom, and where the last one ends."""
    rows: list[_Row] = []
    top = _TOP
    for rank, ops in enumerate(program.ranks):
        for lane in (name for used in _lanes(ops) for name in ([used, "exposed"] if used == "compute" else [used])):
            height = _HEIGHT.get(lane, _LOW)
            rows.append(_Row(rank, lane, top, height))
            top += height + 2
        top += _GAP
    return rows, top - _GAP


def color(op: Op) -> str:
    """Name of an op's colour. A forward once more has that of a forward, a part's own lane that of exchanges."""
    kind = kind_of(op.lane)
    if kind is not None:
        return kind if kind in COLORS else "a2a"
    return {"recompute": "fwd", "update": "step"}.get(op.verb, op.verb)


class _Mark(NamedTuple):
    """An op of a row, in pixels."""

    op: Op
    start: float
    end: float


def _bars(timeline: Timeline, program: Program, row: _Row, scale: float, stretch: float) -> Iterator[str]:
    """The bars of one row. Neighbours too narrow to be seen, even stretched, are one bar, as opaque as dense."""
    ops, spans = program.ranks[row.rank], timeline.spans[row.rank]
    if row.lane == "exposed":
        for start, end in exposed_spans(ops, spans):
            yield _bar(row, start * scale, end * scale, "exposed", f"exposed for {duration(end - start)}")
        return
    marks = [
        _Mark(op, float(span.start) * scale, float(span.end) * scale)
        for op, span in zip(ops, spans, strict=True)
        if op.lane == row.lane and span.end > span.start
    ]
    for group in _together(marks, 0.75 / stretch):
        op, start, end = group[0]
        if len(group) > 1:
            time_of: dict[str, float] = defaultdict(float)
            for mark in group:
                time_of[color(mark.op)] += mark.end - mark.start
            name, end = max(time_of, key=time_of.__getitem__), group[-1].end
            yield _bar(row, start, end, name, f"{len(group)} short ops", sum(time_of.values()) / (end - start))
            continue
        first, last = start / scale, end / scale
        yield _bar(row, start, end, color(op), f"{op}: {duration(last - first)}, {duration(first)} to {duration(last)}")
        if row.lane == "compute":
            name = letter(op, program.layout)
            label = f"{name}{op.microbatch}" if op.microbatch >= 0 else name
            yield _label(row, label, (start + end) / 2, end - start, stretch)


def _together(marks: Iterable[_Mark], narrow: float) -> Iterator[list[_Mark]]:
    """Group neighbours that are narrow together."""
    group: list[_Mark] = []
    for mark in marks:
        if group and mark.end - group[0].start >= narrow:
            yield group
            group = []
        group.append(mark)
    if group:
        yield group


def _bar(row: _Row, start: float, end: float, name: str, title: str, opacity: float = 1.0) -> str:
    seen = "" if opacity > 0.99 else f' fill-opacity="{opacity:.2f}"'
    width = max(end - start - (0.5 if end - start > 3 else 0), 0.3)
    return (
        f'<rect class="op" x="{start:.2f}" y="{row.top}" width="{width:.2f}" height="{row.height}" '
        f'fill="{COLORS[name]}"{seen}><title>{escape(title)}</title></rect>'
    )


def _label(row: _Row, label: str, middle: float, width: float, stretch: float) -> str:
    """A label that fits into its bar; hidden if it fits only once stretched, nothing if not even then."""
    needed = 6.5 * len(label) + 2
    if width * stretch < needed:
        return ""
    hidden = "" if width >= needed else ' visibility="hidden"'
    place = f'x="{middle:.2f}" y="{row.top + 16}" text-anchor="middle"'
    return f'<text class="in" {place} data-fits="{needed / width:.2f}"{hidden}>{label}</text>'


def tick(length: float, width: float) -> float:
    """The distance of grid lines on an axis of this length, a round number about 100 pixels wide."""
    rough = length / max(1.0, width / 100)
    power = 10.0 ** floor(log10(rough))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= rough)


def _axis(makespan: float, width: float, bottom: int) -> Iterator[str]:
    """Grid lines and times, about one per 100 pixels at round numbers."""
    if makespan <= 0:
        return
    step = tick(makespan, width)
    for n in range(int(makespan / step) + 1):
        x = n * step / makespan * width
        yield f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{bottom}"/>'
        if x < width - 36 or n == 0:
            yield f'<text class="dim" x="{x:.1f}" y="{_TOP - 12}">{duration(n * step) if n else "0"}</text>'


def _chart(timeline: Timeline, program: Program, width: float, stretch: float = 1.0) -> str:
    """Lanes, grid and bars. `stretch` is how many times wider a reader may make it."""
    rows, bottom = _rows(program)
    scale = width / (float(timeline.makespan) or 1.0)
    parts = [f'<rect class="lane" x="0" y="{r.top}" width="{width}" height="{r.height}"/>' for r in rows]
    parts += _axis(float(timeline.makespan), width, bottom)
    parts += [bar for row in rows for bar in _bars(timeline, program, row, scale, stretch)]
    return "".join(parts)


def _names(program: Program) -> str:
    parts = []
    for row in _rows(program)[0]:
        if row.lane == "compute":
            parts.append(f'<text x="8" y="{row.top + 16}" font-weight="600">rank {row.rank}</text>')
        if row.lane != "exposed":
            y = row.top + row.height / 2 + 4
            parts.append(f'<text class="dim" x="{_GUTTER - 8}" y="{y}" text-anchor="end">{row.lane}</text>')
    return "".join(parts)


def _legend(y: int) -> str:
    parts, x = [], 0
    for name, value in COLORS.items():
        parts.append(f'<rect x="{x}" y="{y}" width="10" height="10" rx="2" fill="{value}"/>')
        parts.append(f'<text x="{x + 14}" y="{y + 9}">{name}</text>')
        x += 30 + 7 * len(name)
    return "".join(parts)


def svg_timeline(timeline: Timeline, program: Program, width: int = 1200) -> str:
    """A picture of the step as one SVG document, `width` pixels wide; ops tell their name when pointed at."""
    bottom = _rows(program)[1]
    height, chart = bottom + 34, width - _GUTTER - 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="t" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><style>{STYLE}</style><rect class="bg" width="100%" height="100%" rx="6"/>'
        f'{_names(program)}<g transform="translate({_GUTTER})">{_chart(timeline, program, chart)}'
        f"{_legend(bottom + 14)}</g></svg>\n"
    )


_PAGE_STYLE = """
body{margin:0;background:#fff;color:#1f2328;font:14px/1.5 ui-sans-serif,system-ui,"Segoe UI",Helvetica,Arial,sans-serif}
main{max-width:1400px;margin:0 auto;padding:24px}h1{font-size:20px;margin:0 0 4px}p{margin:4px 0 14px;color:#656d76}
table{border-collapse:collapse;margin:16px 0}
td,th{padding:4px 14px 4px 0;text-align:right;font-variant-numeric:tabular-nums}
th{font-weight:600;border-bottom:1px solid #d8dee4}td:first-child,th:first-child{text-align:left}
.view{display:flex;border:1px solid #d8dee4;border-radius:6px;overflow:hidden}.scroll{overflow-x:auto;flex:1}
svg{display:block}label{color:#656d76}input{vertical-align:middle;width:240px}
@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}p,label{color:#8b949e}
th,.view{border-color:#30363d}}
"""
_STRETCH = 5  # powers of two
_PAGE_SCRIPT = """
const chart=document.getElementById('chart'),base=+chart.getAttribute('width');
const items=[...chart.querySelectorAll('[x],[x1]')].map(e=>[e,['x','x1','x2','width'].filter(a=>e.hasAttribute(a)&&
!(a=='width'&&e.tagName!='rect')).map(a=>[a,+e.getAttribute(a)])]);
document.getElementById('zoom').oninput=event=>{const z=2**event.target.value,box=chart.parentNode;
const middle=(box.scrollLeft+box.clientWidth/2)/chart.getAttribute('width');chart.setAttribute('width',base*z);
for(const [e,attributes] of items)for(const [a,v] of attributes)e.setAttribute(a,v*z);
for(const e of chart.querySelectorAll('[data-fits]'))e.setAttribute('visibility',z<e.dataset.fits?'hidden':'visible');
box.scrollLeft=middle*base*z-box.clientWidth/2;};
"""


def html_timeline(timeline: Timeline, program: Program, title: str = "Predicted step") -> str:
    """A page that needs no other file: numbers per rank, the picture, and a slider that stretches time."""
    bottom, chart = _rows(program)[1], 1240
    numbers = summary(timeline, program)
    svg = '<svg class="t" height="{}" width="{}"{}><rect class="bg" x="0" width="{}" height="100%"/>{}</svg>'
    names = svg.format(bottom + 10, _GUTTER, "", _GUTTER, _names(program))
    bars = svg.format(bottom + 10, chart, ' id="chart"', chart, _chart(timeline, program, chart, 2.0**_STRETCH))
    legend = svg.format(24, 1000, "", 1000, _legend(7))
    about = f"{duration(numbers['step_seconds'])} a step; {numbers['merged']:.0%} of the forwards run merged. "
    about += "Point at an op for its name. Where no traces say so, nothing is slower beside something else here."
    about += "".join(f"<br>{escape(note)}" for note in program.notes)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_PAGE_STYLE}{STYLE}</style></head><body><main><h1>{escape(title)}</h1><p>{about}</p>"
        f'<label>stretch <input id="zoom" type="range" min="0" max="{_STRETCH}" step="0.25" value="0"></label>{legend}'
        f'<div class="view">{names}<div class="scroll">{bars}</div></div>{_table(numbers)}</main>'
        f"<script>{_PAGE_SCRIPT}</script></body></html>\n"
    )


def _table(numbers: dict[str, Any]) -> str:
    kinds = list(numbers["ranks"][0]["exposed"])
    head = ["rank", "compute", *(f"exposed {kind}" for kind in kinds), "idle", "merged", "peak memory"]
    lines = ["".join(f"<th>{name}</th>" for name in head)]
    for rank, row in enumerate(numbers["ranks"]):
        times = [row["busy"], *(row["exposed"][kind] for kind in kinds), row["idle"]]
        cells = [str(rank), *(f"{duration(t)} ({t / (numbers['step_seconds'] or 1):.1%})" for t in times)]
        cells += [f"{row['merged']:.0%}", f"{row['peak_bytes'] / 2**30:.2f} GiB"]
        lines.append("".join(f"<td>{cell}</td>" for cell in cells))
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


# ------------------------------------------------------------------------------------------------------------ numbers


def summary(timeline: Timeline, program: Program) -> dict[str, Any]:
    """The step in numbers, ready for JSON: seconds, bytes, counts of ops by verb, shares between 0 and 1."""
    ranks: list[dict[str, Any]] = []
    for rank, use in enumerate(timeline.ranks):
        ranks.append(
            {
                "busy": float(use.busy),
                "exposed": {kind: float(seconds) for kind, seconds in use.exposed.items()},
                "exposed_total": float(use.exposed_total),
                "idle": float(use.idle),
                "peak_bytes": use.peak_bytes,
                "in_flight": program.in_flight[rank] if program.in_flight else None,
                "merged": merged_share(program.ranks[rank]),
            }
        )
    return {
        "step_seconds": float(timeline.makespan),
        "ops": dict(Counter(op.verb for _, _, op in program)),
        "merged": sum(row["merged"] for row in ranks) / max(1, len(ranks)),
        "ranks": ranks,
        "notes": list(program.notes),
    }


def merged_share(ops: Sequence[Op]) -> float:
    """Share of a rank's chunk forwards that run merged: another pass has ops between their first and last one."""
    seen = 0
    mine: Counter[tuple[int, int]] = Counter()
    first: dict[tuple[int, int], int] = {}
    merged: dict[tuple[int, int], bool] = {}
    for op in ops:
        if op.layer < 0 or op.lane != "compute" or op.verb not in ("fwd", "bwd"):
            continue
        if op.verb == "fwd":
            item = (op.microbatch, op.chunk)
            first.setdefault(item, seen)
            merged[item] = seen - first[item] > mine[item]
            mine[item] += 1
        seen += 1
    return sum(merged.values()) / max(1, len(merged))
