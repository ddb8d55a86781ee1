"""`hocket runs`: what was trained here, and how far it came."""

from __future__ import annotations

from pathlib import Path

from hocket.settings.schema import show
from hocket.train.runs import Run, runs

COLUMNS = ("name", "recipe", "step", "loss", "when", "state")


def run(words: list[str]) -> int:
    """List the runs below a folder, the latest last."""
    if len(words) > 1 or (words and words[0].startswith("-")):
        raise ValueError(
            f"runs {' '.join(words)} (command line): takes one folder; fix: hocket runs, or hocket runs DIR"
        )
    folder = Path(words[0] if words else "runs")
    try:
        found = runs(folder)
    except OSError as error:
        reason, fix = error.strerror, "name a folder that has folders of runs"
        raise ValueError(f"{folder} (command line): cannot be read ({reason}); fix: {fix}") from None
    rows = [COLUMNS, *map(_row, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows if found else ():
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    if not found:
        print(f"no runs in {folder}")
    return 0


def _row(found: Run) -> tuple[str, ...]:
    of = f" of {found.steps}" if found.steps else ""
    loss = "-" if found.loss is None else f"{found.loss:.4f}"
    when = f"{found.when:%Y-%m-%d %H:%M}" if found.when else "-"
    return show(found.name), show(found.recipe or "-"), f"{found.step}{of}", loss, when, found.state or "-"
