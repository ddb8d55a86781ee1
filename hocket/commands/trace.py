"""`hocket trace`: what communication cost a run, from its profiler traces."""

from __future__ import annotations

import json as json_module
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hocket.commands.options import write
from hocket.explain.record import FILE as EXPLANATION
from hocket.trace import load, report
from hocket.trace.as_json import to_json
from hocket.trace.compare import compare
from hocket.trace.data import Prediction, RankTrace, Report, Tax
from hocket.trace.page import html
from hocket.trace.perfetto import filtered
from hocket.trace.picture import png, svg
from hocket.trace.predict import predict
from hocket.trace.scene import numbers
from hocket.trace.table import table

USAGE = """usage: hocket trace FILE... [--null FILE...] [options]

Shows what communication cost a run: PyTorch profiler traces (.json, .json.gz) of hocket or any other program, one file
per rank. A folder stands for all traces in it: runs/tiny reads runs/tiny/traces.

  --null FILE...    traces of the same run without communication (--train.transport null): adds the tax
  --step N          look at this step only
  --json            print every figure as JSON
  --html FILE       write a page with a timeline to zoom into, and the tables
  --svg FILE        draw a step, the median one if --step names none
  --png FILE        the same picture (needs pillow: pip install 'hocket[picture]')
  --perfetto FILE   write a small trace for ui.perfetto.dev (.json.gz)"""

_FILES = ("html", "svg", "png", "perfetto")
_ENDINGS = (".json", ".json.gz")


@dataclass(frozen=True)
class Words:
    """What the command line asks for."""

    real: tuple[str, ...]
    null: tuple[str, ...]
    step: int | None
    json: bool
    files: dict[str, str]
    """html, svg, png, perfetto -> where to."""


def run(words: list[str]) -> int:
    """Print a report, or write its pages and pictures."""
    if not words or {"-h", "--help"} & set(words):
        print(USAGE)
        return 0 if words else 2
    asked = parse(words)
    paths, null_paths = trace_files(asked.real), trace_files(asked.null)
    if again := {path.resolve() for path in paths} & {path.resolve() for path in null_paths}:
        raise _problem(str(min(again)), "is given as the run and with --null", "traces of two runs")
    for name, target in asked.files.items():
        if Path(target).resolve() in {path.resolve() for path in (*paths, *null_paths)}:
            raise _problem(f"--{name} {target}", "would overwrite a trace that is read", "another name")
    traces = load(paths)
    if asked.step is not None:
        traces = tuple(only(trace, asked.step) for trace in traces)
    found = report(traces)
    tax = _tax(found, traces, null_paths)
    found, prediction = _prediction(found, traces, tax)
    makers: dict[str, Callable[[], str | bytes]] = {
        "html": lambda: html(found, traces, tax, prediction),
        "svg": lambda: svg(found, traces, asked.step),
        "png": lambda: png(found, traces, asked.step),
        "perfetto": lambda: filtered(traces),
    }
    for name, target in asked.files.items():
        write(target, makers[name]())
    if asked.json:
        print(json_module.dumps(to_json(found, tax, prediction), indent=1, allow_nan=False))
    elif not asked.files:
        _show(to_json(found, tax, prediction))
    return 0


def parse(words: Sequence[str]) -> Words:
    """What the words of the command line ask for. Raises ValueError for flags and values that make no sense."""
    names: dict[str, list[str]] = {"real": [], "null": []}
    values: dict[str, str] = {}
    where = "real"
    if worthless := next((word for word in words if word.startswith("--json=")), ""):
        raise _problem(worthless, "--json takes no value", "leave out the value")
    left = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while left:
        word = left.pop(0)
        if not word.startswith("-"):
            names[where].append(word)
            continue
        flag = word.lstrip("-")
        if flag not in ("null", "json", "step", *_FILES):
            raise _problem(word, "there is no such option", "hocket trace --help lists them")
        if flag in values:
            raise _problem(word, "is given twice", "leave one out")
        where = "null" if flag == "null" else "real"
        if flag not in ("null", "json") and (not left or not left[0] or left[0].startswith("--")):
            raise _problem(word, "says nothing", f"{word} {'12' if flag == 'step' else 'FILE'}")
        values[flag] = "" if flag in ("null", "json") else left.pop(0)
    if not names["real"]:
        raise _problem("hocket trace", "the traces are missing", "hocket trace runs/NAME, or name files")
    if "null" in values and not names["null"]:
        raise _problem("--null", "says nothing", "--null FILE...")
    files = {name: values[name] for name in _FILES if name in values}
    targets = [Path(target).resolve() for target in files.values()]
    for name, target in files.items():
        if targets.count(Path(target).resolve()) > 1:
            raise _problem(f"--{name} {target}", "another option names it too", "two names")
    step = values.get("step")
    if step is not None and not step.isdecimal():
        raise _problem(f"--step {step}", "not the number of a step", "a whole number")
    return Words(tuple(names["real"]), tuple(names["null"]), int(step) if step else None, "json" in values, files)


def trace_files(names: Sequence[str]) -> list[Path]:
    """The files that names of files and folders stand for. Raises ValueError if there are none, or one twice."""
    found: list[Path] = []
    for name in names:
        try:
            found += _files(name)
        except OSError as error:
            raise _problem(name, f"cannot be read ({error.strerror})", "another name, or its permissions") from None
    seen: set[Path] = set()
    for path in found:
        if path.resolve() in seen:
            raise _problem(str(path), "is given twice", "name every trace once")
        seen.add(path.resolve())
    return found


def _files(name: str) -> list[Path]:
    """The file of this name, or the traces in the folder of this name. Raises OSError, too."""
    path = Path(name)
    if not name:
        raise _problem("''", "names no trace", "the name of a trace or of a folder of traces")
    if path.is_dir():
        if inside := _inside(path / "traces") or _inside(path):
            return inside
        fix = "a folder with .json or .json.gz files; of a run, hocket train --profile records them"
        raise _problem(name, "no traces in this folder", fix)
    if not path.exists():
        raise _problem(name, "no such file", "the name of a trace or of a folder of traces")
    return [path]


def _inside(folder: Path) -> list[Path]:
    """The traces right in a folder, by name."""
    if not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if path.name.endswith(_ENDINGS) and path.is_file())
    return sorted(path for path in found if path.name != EXPLANATION)


def only(trace: RankTrace, number: int) -> RankTrace:
    """A trace with one of its steps, and what ran then. Raises ValueError if it has no such step."""
    index = next((n for n, step in enumerate(trace.steps) if step.number == number), None)
    if index is None:
        known = ", ".join(str(n) for n in numbers([trace])) or "none"
        raise _problem(f"--step {number}", f"not in {trace.source}", f"one of its steps: {known}")
    step = trace.steps[index]
    mine = trace.step == index
    rows = np.flatnonzero(mine | ((trace.end > step.start) & (trace.start < step.end)))
    columns = ("start", "end", "lane", "kind", "name", "launcher", "op", "group", "kernel_class", "layer", "bytes")
    cut = {name: getattr(trace, name)[rows] for name in (*columns, "calls", "match", "launched")}
    return replace(trace, steps=(step,), step=np.where(mine[rows], 0, -1), **cut)


def _tax(found: Report, traces: Sequence[RankTrace], null_paths: Sequence[Path]) -> Tax | None:
    if not null_paths:
        return None
    nulls = load(null_paths)
    return compare(found, report(nulls), traces, nulls)


def _prediction(found: Report, traces: Sequence[RankTrace], tax: Tax | None) -> tuple[Report, Prediction | None]:
    """The prediction of a hocket run; another program has none. The report is noted why a run cannot be predicted."""
    if not traces[0].run or not found.steps:
        return found, None
    try:
        return found, predict(traces, found, tax=tax)
    except ValueError as error:  # the measured figures are good all the same
        return replace(found, notes=(*found.notes, f"no prediction: {error}")), None


def _show(figures: dict[str, object]) -> None:
    """Print the table: in colours on a terminal, elsewhere as plain text."""
    from rich.console import Console
    from rich.text import Text

    width = min(max(shutil.get_terminal_size((100, 40)).columns, 72), 140)
    console = Console(soft_wrap=True, highlight=False, width=width)
    with console.capture() as shown:  # printed at once: of its own, rich exits with 1 if a reader such as `head` goes
        for line in table(figures, width):
            text = Text.assemble(*line)
            text.rstrip()
            console.print(text, overflow="ignore", crop=False)
    print(shown.get(), end="", flush=True)


def _problem(what: str, reason: str, fix: str) -> ValueError:
    return ValueError(f"{what} (command line): {reason}; fix: {fix}")
