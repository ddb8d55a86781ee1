"""A picture of a measured step as SVG and as PNG. Both draw the same scene, so they show the same."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from hocket_trace.as_json import to_json
from hocket_trace.columns import duration, percent, several
from hocket_trace.data import RankTrace, Report
from hocket_trace.scene import COLORS, Line, Scene, Word, draw, numbers
from hocket_trace.table import warnings

_STYLE = """
.t{--bg:#ffffff;--fg:#1f2328;--dim:#656d76;--line:#d8dee4;--lane:#f3f5f8;
font:11px ui-sans-serif,system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
@media(prefers-color-scheme:dark){.t{--bg:#0d1117;--fg:#e6edf3;--dim:#8b949e;--line:#30363d;--lane:#161b22}}
.t .bg{fill:var(--bg)}.t .lane{fill:var(--lane)}.t .line{stroke:var(--line)}
.t text{fill:var(--fg)}.t .dim{fill:var(--dim)}.t .in{fill:#10151c;font-size:10px;pointer-events:none}
.t rect.op:hover{stroke:var(--fg)}
"""

_LIGHT = {"bg": "#ffffff", "lane": "#f3f5f8", "fg": "#1f2328", "dim": "#656d76", "line": "#d8dee4"}
_SHARP = 2
"""Pixels of a PNG for each pixel of the scene."""


def svg(
    report: Report,
    traces: Sequence[RankTrace],
    step: int | None = None,
    width: int = 1200,
    labels: Mapping[str, str] | None = None,
) -> str:
    """One step as an SVG document, `width` pixels wide, light or dark as its reader likes; bars tell what they are.

    Without a step it is the one whose length is the median. `labels` are texts by op for bars that they fit into.
    """
    return svg_of(_scene(report, traces, step, width, labels or {}))


def png(report: Report, traces: Sequence[RankTrace], step: int | None = None, width: int = 1200) -> bytes:
    """The same picture as a PNG. Raises ValueError if pillow is missing."""
    return png_of(_scene(report, traces, step, width, {}))


def typical(report: Report) -> int:
    """The step whose slowest rank takes the median time; of two, the faster."""
    slowest: dict[int, float] = {}
    for one in report.steps:
        slowest[one.step] = max(one.seconds, slowest.get(one.step, 0.0))
    order = sorted(slowest, key=lambda number: (slowest[number], number))
    return order[(len(order) - 1) // 2]


def _scene(
    report: Report, traces: Sequence[RankTrace], step: int | None, width: int, labels: Mapping[str, str]
) -> Scene:
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
    return draw(traces, number, ", ".join(filter(None, parts)), width, labels)


def svg_of(scene: Scene) -> str:
    """A scene as an SVG document."""
    size = f'width="{scene.width}" height="{scene.height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="t" {size} viewBox="0 0 {scene.width} {scene.height}">',
        f'<style>{_STYLE}</style><rect class="bg" width="100%" height="100%" rx="6"/>',
    ]
    lanes = [box for box in scene.boxes if box.color == "lane"]
    parts += [f'<rect class="lane" x="{b.x:g}" y="{b.y:g}" width="{b.width:g}" height="{b.height:g}"/>' for b in lanes]
    parts += [f'<line class="line" x1="{r.x:.1f}" x2="{r.x:.1f}" y1="{r.top}" y2="{r.bottom}"/>' for r in scene.rules]
    for box in scene.boxes:
        if box.color == "lane":
            continue
        seen = "" if box.opacity > 0.99 else f' fill-opacity="{box.opacity:.2f}"'
        place = f'x="{box.x:.2f}" y="{box.y:g}" width="{box.width:.2f}" height="{box.height:g}"'
        title = f"<title>{escape(box.title)}</title></rect>" if box.title else "</rect>"
        parts.append(f'<rect class="op" {place} fill="{COLORS[box.color]}"{seen}>{title}')
    parts += [_svg_line(line) for line in scene.lines]
    parts += [_svg_word(word) for word in scene.words]
    return "".join([*parts, "</svg>\n"])


def _svg_line(line: Line) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in line.points)
    if line.color == "line":
        return f'<polyline class="line" points="{points}"/>'
    seen = "" if line.opacity > 0.99 else f' stroke-opacity="{line.opacity:.2f}"'
    dashes = ' stroke-dasharray="5 4"' if line.dashed else ""
    look = f'fill="none" stroke="{COLORS[line.color]}" stroke-width="1.5" stroke-linejoin="round"{dashes}{seen}'
    return f'<polyline {look} points="{points}"/>'


def _svg_word(word: Word) -> str:
    tone = ' class="in"' if word.inside else ' class="dim"' if word.dim else ""
    weight = ' font-weight="600"' if word.bold else ""
    anchor = "" if word.anchor == "start" else f' text-anchor="{word.anchor}"'
    return f'<text x="{word.x:.1f}" y="{word.y:.1f}"{tone}{weight}{anchor}>{escape(word.text)}</text>'


def png_of(scene: Scene) -> bytes:
    """A scene as a PNG on a light ground, twice as sharp. Raises ValueError if pillow is missing."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        reason, fix = "drawing a PNG needs pillow", "pip install 'hocket-trace[picture]', or an SVG"
        raise ValueError(f"png (picture): {reason}; fix: {fix}") from None
    image = Image.new("RGB", (scene.width * _SHARP, scene.height * _SHARP), _LIGHT["bg"])
    pen = ImageDraw.Draw(image)
    font: Any = ImageFont.load_default(11 * _SHARP)
    lanes = [box for box in scene.boxes if box.color == "lane"]
    for box in lanes:
        pen.rectangle(_corners(box.x, box.y, box.width, box.height), fill=_LIGHT["lane"])
    for rule in scene.rules:
        pen.rectangle(_corners(rule.x, rule.top, 1 / _SHARP, rule.bottom - rule.top), fill=_LIGHT["line"])
    for line in scene.lines:
        color = _LIGHT["line"] if line.color == "line" else COLORS[line.color]
        fill = _mixed(color, _LIGHT["bg"], line.opacity)
        pen.line([(x * _SHARP, y * _SHARP) for x, y in line.points], fill=fill, width=_SHARP)
    for box in scene.boxes:
        if box.color != "lane":
            fill = _mixed(COLORS[box.color], _LIGHT["lane"], box.opacity)
            pen.rectangle(_corners(box.x, box.y, box.width, box.height), fill=fill)
    for word in scene.words:
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[word.anchor]
        place = (word.x * _SHARP, word.y * _SHARP)
        fill = _LIGHT["dim" if word.dim else "fg"]
        pen.text(place, word.text, fill=fill, font=font, anchor=anchor, stroke_width=0.4 if word.bold else 0)
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


def _corners(x: float, y: float, width: float, height: float) -> tuple[int, int, int, int]:
    """First and last pixels of a rectangle; at least one."""
    left, top = round(x * _SHARP), round(y * _SHARP)
    right, bottom = round((x + width) * _SHARP), round((y + height) * _SHARP)
    return left, top, max(right - 1, left), max(bottom - 1, top)


def _mixed(over: str, under: str, opacity: float) -> tuple[int, ...]:
    """A colour that is not opaque, above another."""
    pairs = ((int(over[n : n + 2], 16), int(under[n : n + 2], 16)) for n in (1, 3, 5))
    return tuple(round(a * opacity + b * (1 - opacity)) for a, b in pairs)
