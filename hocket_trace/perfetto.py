"""The activities of a run as a small trace for ui.perfetto.dev and chrome://tracing.

Only what ran on the devices is in it: a process per rank, a thread per lane, one colour per kind, and tracks of what
the report is about: steps, exposed stretches, and idle ones with those in which the host was late. A counter shows how
fast each rank's link is. Host events, which are most of a profile, are left out.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hocket_trace.data import RankTrace
from hocket_trace.exposure import exposed, idle, late
from hocket_trace.intervals import Spans, subtract
from hocket_trace.picture import colors, lanes

Event = dict[str, Any]

_CNAMES = {
    "compute": "thread_state_running", "fwd": "rail_load", "bwd": "rail_animation", "wgrad": "thread_state_running",
    "step": "grey", "a2a": "rail_idle", "pp": "cq_build_running", "gather": "yellow", "reduce": "olive",
    "tp": "rail_response", "control": "generic_work", "other": "white", "exposed": "terrible", "late": "bad",
    "idle": "grey", "steps": "black",
}  # fmt: skip
"""The nearest of the colours that trace viewers have names for."""

_TRACKS = ("steps", "exposed", "idle")
"""Tracks above the lanes, with thread numbers 1, 2 and 3; lanes follow from 10."""

_FIRST_LANE = 10


def filtered(traces: Sequence[RankTrace]) -> bytes:
    """The traces as one gzipped JSON file in the trace event format. Times count from the first activity."""
    zero = min((float(trace.start[0]) for trace in traces if len(trace)), default=0.0)
    events = [event for trace in traces for event in _events(trace, zero)]
    document = {"displayTimeUnit": "ms", "traceEvents": events}
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return gzip.compress(text.encode(), compresslevel=6, mtime=0)  # the same traces give the same bytes


def _events(trace: RankTrace, zero: float) -> Iterator[Event]:
    shown = lanes(trace)
    yield from _names(trace, [lane.name for lane in shown])
    names = colors(trace)
    for number, lane in enumerate(shown, start=_FIRST_LANE):
        for row in lane.rows.tolist():
            yield _activity(trace, row, names[row], number, zero)
    for step in trace.steps:
        yield _stretch(trace.rank, 1, f"step {step.number}", "steps", (step.start - zero, step.end - zero))
    if len(trace):
        start, end = float(trace.start[0]), float(trace.end.max())
        tardy = late(trace, start, end)
        tracks = [("exposed", 2, exposed(trace, start, end)), ("late", 3, tardy)]
        tracks.append(("idle", 3, subtract(idle(trace, start, end), tardy)))
        for name, thread, spans in tracks:
            yield from (_stretch(trace.rank, thread, name, name, (a - zero, b - zero)) for a, b in spans.tolist())
        yield from _bandwidth(trace, zero)


def _names(trace: RankTrace, shown: Sequence[str]) -> Iterator[Event]:
    """Names of a rank and its threads, and their order from top to bottom."""

    def meta(what: str, thread: int, key: str, value: str | int) -> Event:
        return {"ph": "M", "pid": trace.rank, "tid": thread, "name": what, "args": {key: value}}

    yield meta("process_name", 0, "name", f"rank {trace.rank}")
    about = {"slow": "EMULATED NETWORK", "null": "NULL TRANSPORT: no communication"}
    labels = [trace.device, about.get(str(trace.run.get("transport")), "")]
    yield meta("process_labels", 0, "labels", ", ".join(filter(None, labels)))
    yield meta("process_sort_index", 0, "sort_index", trace.rank)
    for thread, name in [*enumerate(_TRACKS, start=1), *enumerate(shown, start=_FIRST_LANE)]:
        yield meta("thread_name", thread, "name", name)
        yield meta("thread_sort_index", thread, "sort_index", thread)


def _activity(trace: RankTrace, row: int, color: str, thread: int, zero: float) -> Event:
    words = trace.words
    columns = {
        "op": trace.op, "launcher": trace.launcher, "kernel": trace.name, "group": trace.group,
        "class": trace.kernel_class,
    }  # fmt: skip
    args: dict[str, Any] = {name: words[column[row]] for name, column in columns.items() if words[column[row]]}
    seconds = float(trace.end[row] - trace.start[row])
    if trace.layer[row] >= 0:
        args["layer"] = int(trace.layer[row])
    if trace.bytes[row]:
        args["bytes"] = float(trace.bytes[row])
        if seconds > 0:
            args["bandwidth_gb_per_second"] = round(float(trace.bytes[row]) / seconds / 1e9, 3)
    if not np.isnan(trace.launched[row]):
        args["launched_before_us"] = round(float(trace.start[row] - trace.launched[row]) * 1e6, 3)
    name = next((args[key] for key in ("op", "launcher", "kernel") if key in args), "")
    event = _stretch(trace.rank, thread, name, color, (trace.start[row] - zero, trace.end[row] - zero))
    return {**event, "cat": words[trace.kind[row]], "args": args}


def _stretch(rank: int, thread: int, name: str, color: str, times: tuple[float, float]) -> Event:
    start, end = times
    return {
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "name": name,
        "cat": color,
        "cname": _CNAMES.get(color, "white"),
        "ts": round(float(start) * 1e6, 3),
        "dur": round(float(end - start) * 1e6, 3),
    }


def _bandwidth(trace: RankTrace, zero: float) -> Iterator[Event]:
    """A counter: bytes per second that all communication of a rank together moves, as if evenly over its time."""
    rows = np.flatnonzero((trace.bytes > 0) & (trace.end > trace.start))
    speed = trace.bytes[rows] / (trace.end[rows] - trace.start[rows]) / 1e9
    edges: Spans = np.stack([np.concatenate([trace.start[rows], trace.end[rows]]), np.concatenate([speed, -speed])], 1)
    edges = edges[np.argsort(edges[:, 0], kind="stable")]
    level = np.maximum(np.cumsum(edges[:, 1]), 0.0)
    for time, value in zip((edges[:, 0] - zero).tolist(), level.tolist(), strict=True):
        counted = {"GB/s": round(value, 3)}
        yield {"ph": "C", "pid": trace.rank, "name": "link GB/s", "ts": round(time * 1e6, 3), "args": counted}
