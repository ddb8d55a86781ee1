"""What a run has measured so far, by step: from its metrics.jsonl, which it writes on while it runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from hocket.settings.schema import show
from hocket.train.runs import METRICS, Run, run_of
from hocket_trace.chart import PALETTE, Curve, chart, shown
from hocket_trace.picture import svg_of
from hocket_trace.scene import COLORS


class Panel(NamedTuple):
    """One picture of curves."""

    title: str
    name: str
    """Of the values in metrics.jsonl."""
    also: str = ""
    """Of values of a few steps that belong beside them."""


PANELS = (
    Panel("loss, nats per token; held-out text: ●", "loss", "validation_loss"),
    Panel("norm of the gradient", "grad_norm"),
    Panel("rows of the busiest expert over the mean", "load"),
    Panel("tokens per second", "tokens_per_second"),
    Panel("learning rate", "lr"),
)


class History:
    """The values of a run by name, each with its step."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._file, self._read = folder, (0, 0), 0
        self._values: dict[str, tuple[list[int], list[float]]] = {}
        self._back: list[tuple[int, int]] = []

    def update(self) -> None:
        """Read what has come since the last call, or all of a file that was written anew. Raises OSError."""
        path = self.folder / METRICS
        stat = path.stat()
        if (stat.st_dev, stat.st_ino) != self._file or stat.st_size < self._read:
            self._file, self._read, self._values, self._back = (stat.st_dev, stat.st_ino), 0, {}, []
        with path.open("rb") as stream:
            stream.seek(self._read)
            text = stream.read()
        whole = text[: text.rfind(b"\n") + 1]  # the last line may be half written
        self._read += len(whole)
        for line in whole.splitlines():
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            found = json.loads(line)
        except ValueError:
            return
        step = found.get("step") if isinstance(found, dict) else None
        if not isinstance(step, int):
            return
        if isinstance(left := found.get("rewound_from"), int):
            self._back.append((left, step))
        for name in {name for panel in PANELS for name in (panel.name, panel.also)} & found.keys():
            value = found[name]
            if isinstance(value, (int, float)) and isfinite(value):
                steps, values = self._values.setdefault(name, ([], []))
                steps.append(step)
                values.append(float(value))

    @property
    def rewound(self) -> str:
        """How often the run went back to a checkpoint (`optimizer.rewinds`), and how far the last time."""
        if not self._back:
            return ""
        (left, step), count = self._back[-1], len(self._back)
        return f"went back from step {left} to {step}" + (f", {count} times in all" if count > 1 else "")

    def curve(self, name: str, color: str = "fwd", dashed: bool = False) -> Curve:
        """The values of a name."""
        steps, values = self._values.get(name, ([], []))
        return Curve(steps, values, color, dashed)

    def last(self, name: str) -> float | None:
        """The last value of a name; None if there is none."""
        values = self._values.get(name, ([], []))[1]
        return values[-1] if values else None

    def panels(self) -> list[Panel]:
        """Those that have something to show: a model without experts has no load."""
        return [panel for panel in PANELS if any(self.curve(panel.name).values) or self.last(panel.also)]


def page(folders: Sequence[Path]) -> str:
    """A page with the curves of runs that needs no other file.

    Raises ValueError for more runs than there are colours, and OSError.
    """
    if len(folders) > len(PALETTE):
        reason = f"{len(folders)} runs: colours tell {len(PALETTE)} apart"
        raise ValueError(f"{reason}; fix: name the folders of at most {len(PALETTE)} runs")
    histories = [History(folder) for folder in folders]
    for one in histories:
        one.update()
    colored = list(zip(histories, PALETTE, strict=False))
    wanted = [panel for panel in PANELS if any(panel in one.panels() for one in histories)]
    charts = []
    for panel in wanted:
        curves = [one.curve(panel.name, color) for one, color in colored]
        curves += [one.curve(panel.also, color, dashed=True) for one, color in colored if panel.also]
        charts.append(f"<figure>{svg_of(chart(panel.title.replace('●', 'dashed'), curves))}</figure>")
    lines = [_row(one, run_of(one.folder), color) for one, color in colored]
    heads = "".join(f"<th>{head}</th>" for head in ("run", "recipe", "step", "loss", "held-out", "tokens/s", "state"))
    table = f"<section><table><tr>{heads}</tr>{''.join(lines)}</table></section>"
    style = (files("hocket_trace") / "assets" / "page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Runs</title>'
        f"<style>{style}</style></head>\n<body><main><h1>Runs</h1>\n"
        f'<div class="wide">{table}</div>\n<div class="charts">{"".join(charts)}</div>\n</main></body></html>\n'
    )


def _row(history: History, run: Run, color: str) -> str:
    numbers = (history.last("loss"), history.last("validation_loss"), history.last("tokens_per_second"))
    values = ["-" if value is None else shown(value) for value in numbers]
    swatch = f'<i class="swatch" style="background:{COLORS[color]}"></i>'
    step = f"{run.step} of {run.steps}" if run.steps else str(run.step)
    state = "; ".join(filter(None, (run.state, history.rewound))) or "-"
    name, *cells = (escape(show(text)) for text in (run.name, run.recipe or "-", step, *values, state))
    return f"<tr><td>{swatch}{name}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
