"""Assertions about overlap for the tests of any PyTorch program.

    from hocket.testing import profile_overlap

    def test_gathers_are_hidden():                       # on every rank, with its process group
        model, x = sharded_model()                       # n layers, each sharded separately, large enough
        for _ in range(3):                               # warm up: kernels are loaded, connections made
            model(x).sum().backward()
        with profile_overlap() as overlap:
            with torch.profiler.record_function("forward"):
                loss = model(x).sum()
            loss.backward()
        gathers = overlap.of("gather").within("forward")
        assert len(gathers) == n
        assert gathers.overlapped >= n - 1, gathers      # nothing overlaps the first
        assert gathers[1:].hidden >= 0.9, gathers

A collective is identified by the torch op that launched it, not by the name of its kernel. Everything else that ran on
the device is compute: see `docs/explain.md`. To choose a threshold, consider:

- Sizes must be large enough to keep the device busy. If the host launches too slowly, collectives fall into gaps
  between kernels, and the test measures Python rather than overlap.
- A kernel that waits for a late peer is running, and counts. So each rank reads its own trace.
- On a CPU a send counts until its host waits for it, wherever the data is by then.
- Hidden is not free. Only a run without a hidden collective shows how much it slows the compute it overlaps.
"""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from hocket_trace.data import COMMUNICATION, Floats, Kind, RankTrace
from hocket_trace.intervals import Spans, covered, intersect, length, union
from hocket_trace.parse import parse
from hocket_trace.read import understood


@dataclass(frozen=True)
class Collective:
    """One collective, send or receive on this rank. Times are in seconds since the first activity of the trace."""

    kind: Kind
    launcher: str
    """The torch op that launched it, such as `nccl:_all_gather_base`; empty if unknown."""
    group: str
    """Description of its process group; empty if unknown."""
    op: str
    """Its op in the plan, such as `gather dense t0 c0 l3 s1`; empty without a `plan`."""
    layer: int
    """-1 if unknown."""
    launched: float
    """When the host launched it; nan if unknown."""
    spans: Spans = field(repr=False)
    """When its kernels and copies ran."""
    hidden: float
    """Share of its time in which compute also ran."""

    @property
    def start(self) -> float:
        return float(self.spans[0, 0])

    @property
    def seconds(self) -> float:
        return length(self.spans)

    def __str__(self) -> str:
        name = self.op or " ".join(filter(None, (self.kind, self.launcher, self.group)))
        return f"{name}: {1e3 * self.seconds:.3f} ms from {1e3 * self.start:.3f} ms on, {self.hidden:.1%} hidden"


@dataclass(frozen=True)
class Collectives(Sequence[Collective]):
    """Collectives, by start. A slice is `Collectives` too."""

    items: tuple[Collective, ...]
    compute: Spans = field(repr=False)
    annotations: Mapping[str, Spans] = field(repr=False)

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Collective: ...
    @overload
    def __getitem__(self, index: slice) -> Collectives: ...
    def __getitem__(self, index: int | slice) -> Collective | Collectives:
        return replace(self, items=self.items[index]) if isinstance(index, slice) else self.items[index]

    def __str__(self) -> str:
        """One line per collective: the message of a failing assertion."""
        return "\n".join(map(str, self.items)) or "no collectives"

    def of(self, *kinds: Kind, group: str = "", launcher: str = "", op: str = "") -> Collectives:
        """Those of the given kinds (default: any) whose group, launcher and plan op match the patterns."""

        def fits(one: Collective) -> bool:
            found = zip((group, launcher, op), (one.group, one.launcher, one.op), strict=True)
            return (not kinds or one.kind in kinds) and all(re.search(pattern, text) for pattern, text in found)

        return replace(self, items=tuple(filter(fits, self.items)))

    def within(self, annotation: str) -> Collectives:
        """Those launched, by any thread, while an annotation (`record_function`) of that name was open."""
        if annotation not in self.annotations:
            known = ", ".join(sorted(self.annotations)[:20]) or "none"
            raise ValueError(f"annotation = {annotation}: it is not in the trace; fix: one of those that are: {known}")
        spans = self.annotations[annotation]
        inside = [bool(((spans[:, 0] <= one.launched) & (one.launched <= spans[:, 1])).any()) for one in self.items]
        return replace(self, items=tuple(one for one, there in zip(self.items, inside, strict=True) if there))

    @property
    def kinds(self) -> list[Kind]:
        """The kind of each."""
        return [one.kind for one in self.items]

    @property
    def overlapped(self) -> int:
        """How many overlap any compute."""
        return sum(one.hidden > 0 for one in self.items)

    @property
    def seconds(self) -> float:
        """Time in which at least one of them ran."""
        return length(self._spans)

    @property
    def hidden(self) -> float:
        """Share of `seconds` in which compute also ran; 1 without collectives."""
        return min(length(intersect(self._spans, self.compute)) / self.seconds, 1.0) if self.seconds else 1.0

    @property
    def exposed(self) -> float:
        """Seconds in which at least one of them ran, and no compute."""
        return (1.0 - self.hidden) * self.seconds

    @property
    def _spans(self) -> Spans:
        both = np.concatenate([np.empty((0, 2)), *(one.spans for one in self.items)])
        return union(both[:, 0], both[:, 1])


class Overlap:
    """The result of `profile_overlap`, available after its block: see `of`."""

    def __init__(self) -> None:
        self.trace: RankTrace | None = None
        """All activities of the block."""
        self._all: Collectives | None = None

    @property
    def all(self) -> Collectives:
        """All collectives."""
        if self._all is None:
            raise ValueError("overlap: asked inside of the profiled block, or it raised; fix: ask after it")
        return self._all

    def of(self, *kinds: Kind, group: str = "", launcher: str = "", op: str = "") -> Collectives:
        """The collectives of these kinds: gather, reduce, a2a, pp, tp, control, other. See `Collectives.of`."""
        return self.all.of(*kinds, group=group, launcher=launcher, op=op)

    @property
    def compute(self) -> float:
        """Seconds in which compute ran."""
        return length(self.all.compute)

    def counts(self) -> dict[Kind, int]:
        """Number of collectives per kind that occurs."""
        found = {kind: len(self.of(kind)) for kind in COMMUNICATION}
        return {kind: count for kind, count in found.items() if count}

    def _take(self, path: Path) -> None:
        events = parse(path)
        trace = understood(events)
        marks = events.host.take(events.host.link == 1)
        order = np.argsort(marks.name, kind="stable")
        names, first = np.unique(marks.name[order], return_index=True)
        blocks = np.split(order, first[1:]) if len(names) else []
        compute = trace.of_kind("compute")
        spans = union(trace.start[compute], trace.end[compute])
        annotations = {
            events.names[name]: union(marks.start[rows], marks.end[rows])
            for name, rows in zip(names, blocks, strict=True)
        }
        self.trace = trace
        self._all = Collectives(tuple(_collectives(trace, spans)), spans, annotations)


def _collectives(trace: RankTrace, compute: Spans) -> Iterator[Collective]:
    """One per call: a call of a copy-engine collective, or a coalesced one, is several activities."""
    rows = np.flatnonzero(trace.of_kind(*COMMUNICATION) & (trace.end > trace.start))
    calls: dict[int, list[int]] = {}
    for row in rows.tolist():
        call = int(trace.calls[row])
        calls.setdefault(call if call >= 0 else -2 - row, []).append(row)
    for here in calls.values():
        first = here[0]
        spans = union(trace.start[here], trace.end[here])
        beside: Floats = covered(spans[:, 0], spans[:, 1], compute)
        yield Collective(
            kind=_kind(trace.words[trace.kind[first]]),
            launcher=trace.words[trace.launcher[first]],
            group=trace.words[trace.group[first]],
            op=trace.words[trace.op[first]],
            layer=int(trace.layer[first]),
            launched=float(trace.launched[first]),
            spans=spans,
            hidden=min(float(beside.sum()) / length(spans), 1.0),  # sums are rounded
        )


def _kind(word: str) -> Kind:
    return next(kind for kind in COMMUNICATION if kind == word)


@contextmanager
def profile_overlap(keep: Path | None = None, plan: Mapping[str, Any] | None = None) -> Iterator[Overlap]:
    """Profile the block on this rank's CPU and GPU, and report which of its collectives overlapped with compute.

    Waits for earlier work first, and for the block's own work at its end. Results are available after the block. The
    trace is written to `keep`, if given, for inspection when an assertion fails. `plan` describes the ops that the
    block names, if any (`hocket_trace/parse.py`). On a CPU, gloo's transfers are the collectives, and torch's ops the
    compute.

    Raises TraceError if the block neither computed nor communicated, and ValueError while another profiler records:
    torch has only one, and would abort the process.
    """
    if torch.autograd._profiler_enabled():
        raise ValueError("profile_overlap: another profiler, or profile_overlap, is recording; fix: end it first")
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    overlap = Overlap()
    if on_gpu:
        torch.cuda.synchronize()
    profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])
    with warnings.catch_warnings(action="ignore"):  # torch 2.11 warns that a second one would replace this
        profiler.start()
    try:
        if plan is not None:
            profiler.add_metadata_json("hocket", json.dumps({"plan": plan}))
        yield overlap
        if on_gpu:
            torch.cuda.synchronize()
    finally:
        profiler.stop()
    with tempfile.TemporaryDirectory(prefix="overlap-") as folder:
        path = keep or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        overlap._take(path)
