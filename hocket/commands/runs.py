"""`hocket runs`: the runs in folders, with their progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hocket.commands.options import Parser, some, write
from hocket.config.rule import show
from hocket.train.runs import METRICS, Run, json_of, run_of, runs
from hocket_trace.picture import COLORS, STYLE, tick

PARSER = Parser("runs", "Lists the runs in folders of runs, the latest last.")
PARSER.add_argument("folders", nargs="*", metavar="DIR", type=Path, default=[Path("runs")])
PARSER.add_argument("--html", type=some, metavar="FILE", help="writes a page with their curves")
COLUMNS = ("name", "recipe", "step", "loss", "when", "state")
CURVES = {
    "loss, nats per token; held-out text: dashed": ("loss", "validation_loss"),
    "norm of the gradient": ("grad_norm",),
    "rows of the busiest expert over the mean": ("load",),
    "tokens per second": ("tokens_per_second",),
    "learning rate": ("lr",),
}
"""Titles of the page's charts -> names in metrics.jsonl: of the solid curve, and of the dashed one."""
PALETTE = ("fwd", "bwd", "wgrad", "a2a", "exposed", "pp", "gather", "reduce")
"""Names of distinguishable colours."""
_WIDTH, _HEIGHT = 560, 240
_LEFT, _RIGHT, _UPPER, _LOWER = 64, 22, 30, 22


class Curve(NamedTuple):
    """Finite values and their ascending steps."""

    steps: Sequence[float]
    values: Sequence[float]
    color: str = "fwd"
    dashed: bool = False


def run(words: list[str]) -> int:
    """List runs, the latest last, or write a page with their curves."""
    options = PARSER.read(words)
    found: list[tuple[Path, Run]] = []
    for folder in options.folders:
        try:
            alone = (folder / METRICS).exists()
            found += [(folder, run_of(folder))] if alone else [(folder / one.name, one) for one in runs(folder)]
        except OSError as error:
            reason, fix = error.strerror, "name a folder that has folders of runs, or a run"
            raise ValueError(f"{folder} (command line): cannot be read ({reason}); fix: {fix}") from None
    if options.html:
        started = [folder for folder, _ in found if (folder / METRICS).exists()]
        write(options.html, page(started))
        return 0
    rows = [COLUMNS, *(_row(one) for _, one in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows if found else ():
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    if not found:
        print(f"no runs in {', '.join(map(str, options.folders))}")
    return 0


def _row(found: Run) -> tuple[str, ...]:
    of = f" of {found.steps}" if found.steps else ""
    loss = "-" if found.loss is None else f"{found.loss:.4f}"
    when = f"{found.when:%Y-%m-%d %H:%M}" if found.when else "-"
    return show(found.name), show(found.recipe or "-"), f"{found.step}{of}", loss, when, found.state or "-"


def page(folders: Sequence[Path]) -> str:
    """A self-contained page with the curves of runs. Raises ValueError for more runs than colours, and OSError."""
    if len(folders) > len(PALETTE):
        reason = f"{len(folders)} runs: colours tell {len(PALETTE)} apart"
        raise ValueError(f"{reason}; fix: name the folders of at most {len(PALETTE)} runs")
    found = [(run_of(folder), _metrics(folder), color) for folder, color in zip(folders, PALETTE, strict=False)]
    charts = []
    for title, names in CURVES.items():
        curves = [_curve(lines, name, color, name != names[0]) for name in names for _, lines, color in found]
        if any(any(curve.values) for curve in curves):  # a model without experts has no load
            charts.append(f"<figure>{chart(title, curves)}</figure>")
    heads = "".join(f"<th>{head}</th>" for head in ("run", "recipe", "step", "loss", "held-out", "tokens/s", "state"))
    rows = "".join(_page_row(*each) for each in found)
    style = (files("hocket_trace") / "assets" / "page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Runs</title>'
        f"<style>{style}</style></head>\n<body><main><h1>Runs</h1>\n"
        f'<div class="wide"><section><table><tr>{heads}</tr>{rows}</table></section></div>\n'
        f'<div class="charts">{"".join(charts)}</div>\n</main></body></html>\n'
    )


def chart(title: str, curves: Sequence[Curve]) -> str:
    """A chart whose curves share axes.

    Of the steps that fall in one column of pixels, a faint line spans the smallest to the largest value, behind a line
    through the means. Thus no spike is lost, however long a run is.
    """
    drawn = [(np.array(curve.steps, float), np.array(curve.values, float), curve) for curve in curves if curve.values]
    (left, right), (low, high) = _range([x for x, _, _ in drawn]), _range([y for _, y, _ in drawn])
    across, up = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _UPPER - _LOWER

    def line(x: np.ndarray, y: np.ndarray, look: str) -> str:
        height = _UPPER + up - (y - low) / (high - low) * up
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x + _LEFT, height, strict=True))
        return f'<polyline fill="none" {look} points="{points}"/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="t" width="{_WIDTH}" viewBox="0 0 {_WIDTH} {_HEIGHT}">',
        f'<style>{STYLE}</style><rect class="bg" width="100%" height="100%" rx="6"/>',
        f'<text x="8" y="18" font-weight="600">{escape(title)}</text>',
    ]
    for value in _ticks(low, high, up / 40):
        y = _UPPER + up - (value - low) / (high - low) * up
        parts.append(line(np.array([0.0, across]), np.array([value, value]), 'class="line"'))
        parts.append(f'<text class="dim" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{shown(value)}</text>')
    for value in _ticks(left, right, across / 90):
        x = _LEFT + (value - left) / (right - left) * across
        parts.append(f'<text class="dim" x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{shown(value)}</text>')
    for x, y, curve in drawn:
        column, first, count = np.unique(
            np.floor((x - left) / (right - left) * across), return_index=True, return_counts=True
        )
        look = f'stroke="{COLORS[curve.color]}" stroke-width="1.5"'
        if len(x) > len(column):
            extremes = np.stack([np.minimum.reduceat(y, first), np.maximum.reduceat(y, first)], axis=1).ravel()
            parts.append(line(np.repeat(column, 2), extremes, f'{look} stroke-opacity="0.3"'))
        dashes = ' stroke-dasharray="5 4"' if curve.dashed else ""
        parts.append(line(column, np.add.reduceat(y, first) / count, look + dashes))
    return "".join([*parts, "</svg>\n"])


def shown(value: float) -> str:
    """The label of a value on an axis."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _range(values: Sequence[np.ndarray]) -> tuple[float, float]:
    """Smallest and largest value, or a range around them if they are equal."""
    low, high = min(float(one.min()) for one in values), max(float(one.max()) for one in values)
    room = (abs(low) or 1.0) * 0.05
    return (low, high) if high > low else (low - room, high + room)


def _ticks(low: float, high: float, count: float) -> list[float]:
    """About `count` round numbers in a range."""
    step = tick(high - low, max(count, 1.0) * 100)
    return [n * step for n in range(int(np.ceil(low / step)), int(np.floor(high / step)) + 1)]


def _metrics(folder: Path) -> list[dict[str, Any]]:
    """The valid lines of a run's metrics; the last one may be half written."""
    lines = map(json_of, (folder / METRICS).read_bytes().splitlines())
    return [line for line in lines if isinstance(line.get("step"), int)]


def _curve(lines: Sequence[Mapping[str, Any]], name: str, color: str = "fwd", dashed: bool = False) -> Curve:
    """The finite values of a metric by step."""
    points = [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]
    points = [(step, float(value)) for step, value in points if isfinite(value)]
    return Curve([step for step, _ in points], [value for _, value in points], color, dashed)


def _page_row(run: Run, lines: Sequence[Mapping[str, Any]], color: str) -> str:
    last = (_curve(lines, name).values[-1:] for name in ("loss", "validation_loss", "tokens_per_second"))
    step = f"{run.step} of {run.steps}" if run.steps else str(run.step)
    cells = (run.name, run.recipe or "-", step, *(shown(*value) if value else "-" for value in last), run.state or "-")
    name, *rest = (escape(show(text)) for text in cells)
    swatch = f'<i class="swatch" style="background:{COLORS[color]}"></i>'
    return f"<tr><td>{swatch}{name}</td>{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>"
