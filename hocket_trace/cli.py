"""The command line, which reports the cost of communication in a run from its profiler traces."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np

from hocket_trace.align import load
from hocket_trace.as_json import to_json
from hocket_trace.columns import printable
from hocket_trace.compare import compare
from hocket_trace.data import RankTrace
from hocket_trace.exposure import report
from hocket_trace.page import html
from hocket_trace.picture import numbers, svg
from hocket_trace.table import table

_ABOUT = """Shows what communication cost a run: PyTorch profiler traces (.json, .json.gz) of any program, one file per
rank. A folder stands for all traces in it, or in its folder `traces`."""
_ENDINGS = (".json", ".json.gz")
_OF_RUN, _NO_TRACES = "explanation.json", ("explanation.json", "about.json")
"""Files that a run of hocket writes next to its traces: one that every run has, and all that end like traces."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (command line); fix: {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 on success, 2 for user errors."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # don't fail on a terminal that can't show a character
        sys.stdout.reconfigure(errors="replace")
    try:
        code = run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()  # detect a closed pipe here rather than at exit
    except ValueError as error:
        print(f"hocket-trace: {printable(str(error))}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader of the pipe, such as `head`, closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def run(words: Sequence[str], program: str = "hocket-trace") -> int:
    """Print a report, or write its pages and pictures. Returns the exit code. Raises ValueError for user errors.

    `program` is the command's name.
    """
    if not words or {"-h", "--help"} & set(words):
        parser(program).print_help()
        return 0 if words else 2
    asked = parser(program).parse_intermixed_args(words)
    paths, null_paths = trace_files(asked.traces), trace_files(asked.null)
    if again := {path.resolve() for path in paths} & {path.resolve() for path in null_paths}:
        raise _problem(str(min(again)), "is given as the run and with --null", "traces of two runs")
    taken = {path.resolve() for path in (*paths, *null_paths)}
    for name in ("html", "svg"):
        if (target := getattr(asked, name)) and Path(target).resolve() in taken:
            raise _problem(f"--{name} {target}", "would overwrite a file that is read or written", "another name")
        taken |= {Path(target).resolve()} if target else set()
    traces = load(paths)
    if asked.step is not None:
        traces = tuple(only(trace, asked.step) for trace in traces)
    found = report(traces)
    nulls = load(null_paths) if null_paths else ()
    tax = compare(found, report(nulls), traces, nulls) if nulls else None
    if asked.html:
        _write(asked.html, html(found, traces, tax))
    if asked.svg:
        _write(asked.svg, svg(found, traces, asked.step))
    if asked.json:
        print(json.dumps(to_json(found, tax), indent=1, allow_nan=False))
    elif not (asked.html or asked.svg):
        width = min(max(shutil.get_terminal_size((100, 40)).columns, 72), 140)
        print(table(to_json(found, tax), width), flush=True)
    return 0


def parser(program: str = "hocket-trace") -> ArgumentParser:
    """Parser of the command line, whose method `parse_intermixed_args` raises ValueError for user errors."""
    made = _Parser(program, description=_ABOUT, allow_abbrev=False)
    made.add_argument("traces", nargs="+", metavar="FILE")
    made.add_argument(
        "--null", nargs="+", action="extend", metavar="FILE", default=[], help="traces of the run without communication"
    )
    made.add_argument("--step", type=int, metavar="N", help="look at this step only")
    made.add_argument("--json", action="store_true", help="print every figure as JSON")
    made.add_argument("--html", metavar="FILE", default="", help="write a page with a timeline, and the tables")
    made.add_argument("--svg", metavar="FILE", default="", help="draw a step, by default the median one")
    return made


def trace_files(names: Sequence[str]) -> list[Path]:
    """The files with these names, or in the folders with these names. Raises ValueError for none or for duplicates."""
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
    """The file with this name, or the traces in the folder with this name. Raises ValueError or OSError."""
    path = Path(name)
    if not name:
        raise _problem("''", "names no trace", "the name of a trace or of a folder of traces")
    if path.is_dir():
        if inside := _inside(path / "traces") or _inside(path):
            return inside
        if (path / _OF_RUN).exists():
            reason = "no traces in this folder: it is of a run that was not profiled"
            raise _problem(name, reason, "hocket train ... --profile, which records two steps")
        fix = "a folder with the .json or .json.gz files of the PyTorch profiler (of hocket: hocket train --profile)"
        raise _problem(name, "no traces in this folder", fix)
    if not path.exists():
        raise _problem(name, "no such file", "the name of a trace or of a folder of traces")
    return [path]


def _inside(folder: Path) -> list[Path]:
    """The traces directly in a folder, sorted by name."""
    if not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if path.name.endswith(_ENDINGS) and path.is_file())
    return sorted(path for path in found if path.name not in _NO_TRACES)


def only(trace: RankTrace, number: int) -> RankTrace:
    """A trace cut to one of its steps. Raises ValueError if it has no such step."""
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


def _write(target: str, data: str) -> None:
    """Write a file that the user named, and print its name. Raises ValueError on failure."""
    try:
        Path(target).write_text(data, encoding="utf-8")
    except OSError as error:
        raise _problem(target, f"cannot be written ({error.strerror})", "name a file in an existing folder") from None
    print(f"wrote {target}", file=sys.stderr)  # the output proper may be JSON


def _problem(what: str, reason: str, fix: str) -> ValueError:
    return ValueError(f"{what} (command line): {reason}; fix: {fix}")
