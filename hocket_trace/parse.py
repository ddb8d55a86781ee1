"""A trace file as columns of the profiler's data, not yet interpreted.

A trace of 100 MB has some 600,000 events. `json` makes dicts of them, of about a kilobyte each. They are converted to
columns at once and dropped one by one. The garbage collector is off meanwhile, as it would scan them repeatedly.
"""

from __future__ import annotations

import gc
import gzip
import json
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket_trace.data import KINDS, Floats, Ints, Plan, PlanOp

# -- plan --------------------------------------------------------------------------------------------------------------
# A program's description of the ops that it names in its traces.
#
# Any program can have one: it puts `torch.profiler.record_function("gather block 3")` around an op, and describes it:
#
#     profiler.add_metadata_json("hocket", json.dumps({"plan": {
#         "lanes": ["compute", "gather"],
#         "computing": ["compute"],
#         "ops": {"gather block 3": ["gather", "gather", "dp", 3], "fwd block 3": ["compute", "compute", "", 3]},
#     }}))
#
# `lanes` are in the order of reports, and those in `computing` compute. `ops` are this rank's, by their whole names:
# lane, kind (a word of `data.KINDS`), description of the process group, layer (-1: none). The kind of an op on a
# computing lane is `compute`, or that of the communication within it. The first two words of a name say what an op
# does: tables add up ops that agree in them.


def plan_of(metadata: Any) -> Plan:
    """The plan from a trace's metadata; an empty one for None. Raises ValueError for invalid metadata."""
    if metadata is None:
        return Plan()
    try:
        lanes, ops = tuple(metadata["lanes"]), {name: PlanOp(*row) for name, row in metadata["ops"].items()}
        plan = Plan(lanes, frozenset(metadata["computing"]), ops)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__} {error}") from None
    words = [*lanes, *plan.computing, *(word for op in ops.values() for word in (op.lane, op.group))]
    if not all(isinstance(word, str) for word in words) or not plan.computing <= set(lanes):
        raise ValueError("lanes and groups are words, and those that compute are lanes")
    for name, op in ops.items():
        if op.kind not in KINDS or op.lane not in lanes or not isinstance(op.layer, int):
            raise ValueError(f"{name}: {list(op)}")
    return plan


# -- parse -------------------------------------------------------------------------------------------------------------

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
HOST = ("cpu_op", "user_annotation")
LAUNCH = ("cuda_runtime", "cuda_driver")
COLLECTIVE = "record_param_comms"
"""The op that torch puts around every collective, whose args describe it."""
MOST_RANKS = 10**6
"""Ranks beyond which a number is taken for corrupt."""
LONGEST = 1e7
"""Seconds beyond which times are taken for corrupt."""
_FIX = "fix: a trace of the PyTorch profiler"


class TraceError(ValueError):
    """An unreadable trace: one line with the file, the error and a fix."""


@dataclass(frozen=True)
class Rows:
    """Events of one category: name (index into names), times in seconds, where (thread or stream), and more."""

    name: Ints
    start: Floats
    end: Floats
    where: Ints
    link: Ints
    """Correlation id of device rows and launches, -1 if there is none; of host rows, 1 for annotations, else 0."""
    args: Mapping[int, Mapping[str, Any]]
    """Row -> args, for rows of collectives or copies."""

    def __len__(self) -> int:
        return len(self.name)

    def take(self, rows: NDArray[Any]) -> Rows:
        """Some of the rows, by mask or index, without their args."""
        return Rows(self.name[rows], self.start[rows], self.end[rows], self.where[rows], self.link[rows], {})


@dataclass(frozen=True)
class Events:
    """The contents of a trace file."""

    source: str
    about: Mapping[str, Any]
    """The top level of the JSON without its events."""
    names: tuple[str, ...]
    origin: int
    """Nanoseconds since the epoch at time 0."""
    device: Rows
    host: Rows
    launches: Rows
    threads: Mapping[int, str]
    """Thread -> its name."""
    plan: Plan
    """The program's description of its named ops."""


class _Column:
    """Rows during their collection."""

    def __init__(self) -> None:
        self.name: list[int] = []
        self.ts: list[float] = []
        self.dur: list[float] = []
        self.where: list[int] = []
        self.link: list[int] = []
        self.args: dict[int, Mapping[str, Any]] = {}

    def rows(self, zero: float) -> Rows:
        """The rows, with times in seconds after `zero` (µs). Raises ValueError for impossible times."""
        start = (np.array(self.ts, np.float64) - zero) * 1e-6
        end = start + np.maximum(np.array(self.dur, np.float64), 0.0) * 1e-6  # negative if the end was not recorded
        if not np.all(end < LONGEST):  # fails for nan too
            raise ValueError(f"its times reach over {np.max(end):g} s")
        name, where, link = (np.array(column, np.int64) for column in (self.name, self.where, self.link))
        return Rows(name, start, end, where, link, self.args)


def parse(path: Path) -> Events:
    """Read a trace. Raises TraceError."""
    collects = gc.isenabled()
    gc.disable()
    try:
        document = _document(path, _text(path))
        events = document.pop("traceEvents")
        return _columns(path, document, events)
    finally:
        if collects:
            gc.enable()


def _text(path: Path) -> str:
    try:
        if not stat.S_ISREG(mode := path.stat().st_mode) and not stat.S_ISDIR(mode):
            raise TraceError(f"{path}: a pipe or a device, which may have no end; fix: write the trace into a file")
        data = path.read_bytes()
    except FileNotFoundError:
        raise TraceError(f"{path}: there is no such file; fix: the path of a trace") from None
    except IsADirectoryError:
        raise TraceError(f"{path}: this is a directory; fix: the trace files in it, such as {path}/*.json.gz") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror}); fix: another path, or its permissions") from None
    if not data:
        raise TraceError(f"{path}: the file is empty; fix: record the trace again")
    packed = data[:2] == b"\x1f\x8b"
    if path.suffix == ".gz" and not packed:
        raise TraceError(f"{path}: named .gz, but it is not gzip; fix: rename it if it is JSON, else record it again")
    try:
        return (gzip.decompress(data) if packed else data).decode("utf-8-sig", errors="replace")
    except (EOFError, OSError, zlib.error) as error:
        raise TraceError(
            f"{path}: the gzip data is cut off or broken ({error}); fix: copy or record it again"
        ) from None


def _document(path: Path, text: str) -> dict[str, Any]:
    try:
        document = json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        in_a_text = error.msg.startswith("Unterminated string")  # kernel names are long
        if text.lstrip()[:1] == "{" and (in_a_text or error.pos > len(text.rstrip()) - 200):
            raise TraceError(f"{path}: the JSON ends in the middle of an event; fix: copy or record it again") from None
        raise TraceError(f"{path}: this is not JSON (line {error.lineno}: {error.msg}); {_FIX}") from None
    except RecursionError:
        raise TraceError(f"{path}: JSON nested too deeply for a trace; {_FIX}") from None
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise TraceError(f"{path}: JSON without traceEvents; {_FIX}")
    _check_about(path, document)
    return document


def _columns(path: Path, about: dict[str, Any], events: list[Any]) -> Events:
    names: dict[str, int] = {}
    device, host, launches = _Column(), _Column(), _Column()
    kinds = {**dict.fromkeys(DEVICE, device), **dict.fromkeys(HOST, host), **dict.fromkeys(LAUNCH, launches)}
    threads: dict[int, str] = {}
    try:
        while events:
            event = events.pop()
            column = kinds.get(event.get("cat"))
            if column is None or event["ph"] != "X":
                if event.get("name") == "thread_name" and isinstance(event["tid"], int):
                    threads[event["tid"]] = f"{threads.get(event['tid'], '')} {event['args']['name']}".strip()
                continue
            _take(column, event, column is host, names)
        zero = min((min(column.ts) for column in (device, host, launches) if column.ts), default=0.0)
        found = device.rows(zero), host.rows(zero), launches.rows(zero)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        said = _shown(str(error) or type(error).__name__)[:80]
        raise TraceError(f"{path}: an event is not as the PyTorch profiler writes it ({said}); {_FIX}") from None
    about, args = _clean(about), (device.args, host.args, launches.args)
    for kept in args:
        kept.update((row, _clean(said)) for row, said in kept.items())
    threads = {number: _shown(name) for number, name in threads.items()}
    origin = int(about.get("baseTimeNanoseconds", 0)) + round(zero * 1000)
    plan = _plan(path, about)
    return Events(str(path), about, tuple(map(_shown, names)), origin, *found, threads, plan)


def _plan(path: Path, about: Mapping[str, Any]) -> Plan:
    try:
        return plan_of((about.get("hocket") or {}).get("plan"))
    except ValueError as error:
        said = _shown(str(error))[:80]
        raise TraceError(f"{path}: hocket is not as a profiled run writes it (plan: {said}); {_FIX}") from None


def _shown(name: str) -> str:
    """A name without unprintable characters."""
    return name if name.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in name)


def _clean(value: Any) -> Any:
    """JSON with unprintable characters replaced."""
    if isinstance(value, dict):
        return {_shown(name): _clean(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_clean(one) for one in value]
    return _shown(value) if isinstance(value, str) else value


def _check_about(path: Path, about: Mapping[str, Any]) -> None:
    """Raise TraceError for metadata that the PyTorch profiler would not write; any of it may be missing."""

    def number(value: object, least: int) -> bool:
        return isinstance(value, int) and value >= least

    def all_of(kind: type, value: object) -> bool:
        return isinstance(value, list) and all(isinstance(item, kind) for item in value)

    info = about.get("distributedInfo") or {}
    groups = (info.get("pg_config") or []) if isinstance(info, dict) else []
    base, run = about.get("baseTimeNanoseconds", 0), about.get("hocket") or {}
    sound = {
        "baseTimeNanoseconds": isinstance(base, (int, float)) and abs(base) < 2**63,
        "deviceProperties": all_of(dict, about.get("deviceProperties") or []),
        "distributedInfo": isinstance(info, dict)
        and number(info.get("rank", 0), 0)
        and number(info.get("world_size", 1), 1)
        and info.get("rank", 0) < info.get("world_size", MOST_RANKS) <= MOST_RANKS
        and all_of(dict, groups)
        and all(all_of(int, group.get("ranks") or []) for group in groups),
        "hocket": isinstance(run, dict)
        and number(run.get("pp_rank", 0), 0)
        and isinstance(run.get("transport", ""), str),
    }
    for name, good in sound.items():
        if not good:
            said = _shown(str(about[name]))[:80]
            raise TraceError(f"{path}: {name} is not as a profiled run writes it ({said}); fix: the trace as it was")


def _take(column: _Column, event: dict[str, Any], is_host: bool, names: dict[str, int]) -> None:
    """Append one event to its column."""
    name, args = event["name"], event.get("args", {})
    if not isinstance(name, str):
        raise TypeError(f"name is {name}")
    if is_host:
        column.link.append(event["cat"] == "user_annotation")
        if name == COLLECTIVE:
            column.args[len(column.name)] = args
    else:
        column.link.append(int(args.get("correlation", -1)))
        if "bytes" in args or "Collective name" in args:
            column.args[len(column.name)] = args
    column.name.append(names.setdefault(name, len(names)))
    column.ts.append(float(event["ts"]))
    column.dur.append(float(event.get("dur", 0.0)))
    column.where.append(int(args.get("stream", event["tid"])))
