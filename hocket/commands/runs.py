"""`hocket runs`: what was trained here, and how far it came."""

from __future__ import annotations

from pathlib import Path

from hocket.commands.options import write
from hocket.settings.schema import show
from hocket.train.curves import page
from hocket.train.runs import METRICS, Run, run_of, runs

USAGE = """usage: hocket runs [DIR ...] [--html FILE]

Lists the runs in folders of runs, or in `runs`, the latest last. --html writes a page with their curves."""
COLUMNS = ("name", "recipe", "step", "loss", "when", "state")


def run(words: list[str]) -> int:
    """List runs, the latest last, or write a page with their curves."""
    if {"-h", "--help"} & set(words):
        print(USAGE)
        return 0
    folders, target = asked(words)
    found: list[tuple[Path, Run]] = []
    for folder in folders:
        try:
            alone = (folder / METRICS).exists()
            found += [(folder, run_of(folder))] if alone else [(folder / one.name, one) for one in runs(folder)]
        except OSError as error:
            reason, fix = error.strerror, "name a folder that has folders of runs, or a run"
            raise ValueError(f"{folder} (command line): cannot be read ({reason}); fix: {fix}") from None
    if target:
        started = [folder for folder, _ in found if (folder / METRICS).exists()]
        write(target, page(started))
        return 0
    rows = [COLUMNS, *(_row(one) for _, one in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows if found else ():
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    if not found:
        print(f"no runs in {', '.join(map(str, folders))}")
    return 0


def asked(words: list[str]) -> tuple[list[Path], str]:
    """The folders and the page that the words name."""
    folders, target, rest = list[Path](), "", iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name == "--html" and not target and (target := value if equals else next(rest, "")):
            continue
        if word.startswith("-"):
            fix = "hocket runs, hocket runs DIR..., or with --html FILE"
            raise ValueError(f"runs {' '.join(words)} (command line): takes folders, and --html FILE once; fix: {fix}")
        folders.append(Path(word))
    return folders or [Path("runs")], target


def _row(found: Run) -> tuple[str, ...]:
    of = f" of {found.steps}" if found.steps else ""
    loss = "-" if found.loss is None else f"{found.loss:.4f}"
    when = f"{found.when:%Y-%m-%d %H:%M}" if found.when else "-"
    return show(found.name), show(found.recipe or "-"), f"{found.step}{of}", loss, when, found.state or "-"
