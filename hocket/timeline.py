"""A predicted step as text, as a picture and as numbers.

The text has the rows of the picture: for each pipeline rank its lanes, compute first, and a row that marks exposed
time, in which communication runs and compute is idle. The picture and the page are those of measured steps
(`hocket_trace`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import floor
from typing import Any

import numpy as np

from hocket.predict.simulate import Timeline, kind_of
from hocket.program.ops import COMPUTING, LANES, Lane, Layout, Op, Program
from hocket.program.parts import Part
from hocket.program.transformer import EMBED, HEAD
from hocket.sizes import duration
from hocket.typed import is_a
from hocket_trace.data import KINDS, Plan, RankTrace, Step
from hocket_trace.exposure import exposed, report
from hocket_trace.page import html
from hocket_trace.picture import svg

_LEGEND = (
    "w weight gradient  > activation received  < gradient received  g gather  r reduce  S step  · nothing\n"
    "compute shows what fills half of a character's time, communication what fills a tenth, ' what fills less of it\n"
    "! exposed for half of a character's time, : for a tenth"
)
_LETTERS = {
    "wgrad": "w", "add": "w", "gather": "g", "collect": "g", "reduce": "r", "scatter": "r",
    "offload": "o", "reload": "l", "step": "S", "orthogonalise": "S", "update": "S",
}  # fmt: skip
"""Letters of verbs that do not depend on the part."""
_WIDEST = 10_000
"""Most characters of a line."""
_SEEN = 600
"""Ops of a rank that a page can show at once: about one every two pixels."""
_MUCH, _SOME = 0.5, 0.1
"""Shares of a character's time above which it is marked. Communication ops are short and scattered: with a threshold of
one half, a lane that is busy for a third of every character would look idle."""


def letter(op: Op, layout: Layout) -> str:
    """The letter of an op in a text timeline."""
    if op.verb in ("fwd", "bwd"):
        name = _mark(layout.part(op.part, op.layer))
        return name if op.verb == "fwd" else name.lower()
    if op.verb == "recompute":
        return "+"
    if op.verb == "recv":
        return ">" if op.part == "act" else "<"
    return _LETTERS.get(op.verb, " ")


def _mark(part: Part) -> str:
    return part.mark or part.letter.upper()


def _legend_of(layout: Layout) -> str:
    """The meaning of the letters of parts."""
    parts = {part.name: part for kind in layout.layer_types for part in kind.parts}
    named = (f"{_mark(part)} {part.name}" for part in (EMBED, *parts.values(), HEAD))
    return "\n".join(["  ".join(named) + ": forward; small letters: backward", _LEGEND])


# --------------------------------------------------------------------------------------------------------------- text


def text_timeline(timeline: Timeline, program: Program, width: int = 120) -> str:
    """One row per rank and lane, `width` characters wide, and a legend.

    A character covers an interval and shows the op that runs longest in it, or `·` if the lane is idle for more than
    half of it. On a communication lane a tenth is enough, and `'` stands for less. Raises ValueError for an impossible
    width.
    """
    if not is_a(width, int) or not 1 <= width <= _WIDEST:
        raise ValueError(f"width = {width}: not the characters of a line; fix: a whole number from 1 to {_WIDEST}")
    left = len(f"rank {len(program.ranks) - 1} ")
    gutter = left + 10
    columns = max(width - gutter, 10)
    step = float(timeline.makespan) / columns or 1.0
    lines = [f"{'':{gutter}}0{duration(float(timeline.makespan)):>{columns - 1}}"]
    traces = as_traces(timeline, program)
    for rank, (ops, spans) in enumerate(zip(program.ranks, timeline.spans, strict=True)):
        for n, lane in enumerate(_lanes(ops)):
            marks = [
                (letter(op, program.layout), s.start, s.end)
                for op, s in zip(ops, spans, strict=True)
                if op.lane == lane
            ]
            name = f"rank {rank}" if n == 0 else ""
            busy = _text_row(marks, columns, step)
            enough, little = (_MUCH, "·") if lane == "compute" else (_SOME, "'")
            row = "".join(mark if share > enough else little if share else "·" for mark, share in busy)
            lines.append(f"{name:{left}}{lane:10}{row}")
            if lane == "compute":
                alone = exposed(traces[rank], 0.0, float(timeline.makespan))
                marked = _text_row([("!", *span) for span in alone.tolist()], columns, step)
                row = "".join("!" if share > _MUCH else ":" if share > _SOME else " " for _, share in marked)
                lines.append(f"{'':{left}}{'exposed':10}{row}")
    again = ["+ forward once more"] if program.layout.recompute else []
    again += ["o to the host's memory  l back from there"] if program.layout.offload else []
    return "\n".join([*lines, f"one character is {duration(step)}", _legend_of(program.layout), *again])


def _lanes(ops: Iterable[Op]) -> list[Lane]:
    """The lanes of a rank that take time. A send takes none."""
    used = {op.lane for op in ops if op.verb != "send"}
    return sorted(used, key=lambda lane: (LANES.index(lane) if lane in LANES else len(LANES), lane))


def _text_row(marks: Iterable[tuple[str, Any, Any]], columns: int, step: float) -> list[tuple[str, float]]:
    """For each character of a row: the mark with the longest time, and the share of time of all marks."""
    time_of: list[dict[str, float]] = [defaultdict(float) for _ in range(columns)]
    for mark, start, end in marks:
        first, last = float(start) / step, float(end) / step
        for column in range(min(floor(first), columns - 1), min(floor(last), columns - 1) + 1):
            time_of[column][mark] += max(0.0, min(last, column + 1) - max(first, column))
    return [(max(t, key=t.__getitem__) if t else "", sum(t.values())) for t in time_of]


# ------------------------------------------------------------------------------------------------------------ picture


def as_traces(timeline: Timeline, program: Program) -> tuple[RankTrace, ...]:
    """The step as traces of its pipeline ranks, to draw it like a measured one. Hosts are never late in it."""
    found, end = [], float(timeline.makespan)
    for rank, (ops, spans) in enumerate(zip(program.ranks, timeline.spans, strict=True)):
        timed = [(op, span) for op, span in zip(ops, spans, strict=True) if span.end > span.start]
        timed.sort(key=lambda pair: pair[1].start)
        number: dict[str, int] = {"": 0}

        def column(words: Iterable[str], number: dict[str, int] = number) -> Any:
            return np.array([number.setdefault(word, len(number)) for word in words], dtype=np.int64)

        kinds = [kind_of(op.lane) or "compute" for op, _ in timed]
        nothing, unknown = np.zeros(len(timed), dtype=np.int64), np.full(len(timed), -1, dtype=np.int64)
        use = timeline.ranks[rank]
        about = f"rank {rank}: {use.peak_bytes / 2**30:.2f} GiB at its peak, {merged_share(ops):.0%} of forwards merged"
        if inside := use.exposed.get("tp"):
            about += f", {duration(float(inside))} of its compute waits for tensor-parallel ranks"
        found.append(
            RankTrace(
                source="prediction",
                rank=rank,
                world=len(program.ranks),
                device="predicted",
                start=np.array([float(span.start) for _, span in timed]),
                end=np.array([float(span.end) for _, span in timed]),
                lane=column(op.lane for op, _ in timed),
                kind=column(kind if kind in KINDS else "other" for kind in kinds),
                name=nothing,
                launcher=column(" ".join(str(op).split()[:2]) for op, _ in timed),
                op=column(str(op) for op, _ in timed),
                words=tuple(number),
                group=nothing,
                kernel_class=nothing,
                layer=np.array([op.layer for op, _ in timed], dtype=np.int64),
                step=nothing,
                bytes=np.zeros(len(timed)),
                calls=unknown,
                match=unknown,
                launched=np.full(len(timed), np.nan),
                steps=(Step(0, 0.0, end),),
                plan=Plan(program.layout.lanes, frozenset(COMPUTING)),
                notes=(*program.notes, about, "nothing is slower beside something else, unless measured costs say so"),
            )
        )
    return tuple(found)


def svg_timeline(timeline: Timeline, program: Program, width: int = 1200) -> str:
    """Draw the step as an SVG document, `width` pixels wide; ops show their names as tooltips."""
    traces = as_traces(timeline, program)
    labels = {
        str(op): f"{letter(op, program.layout)}{op.microbatch if op.microbatch >= 0 else ''}"
        for _, _, op in program
        if op.lane == "compute"
    }
    return svg(report(traces), traces, width=width, labels=labels)


def html_timeline(
    timeline: Timeline, program: Program, title: str = "Predicted step", about: Sequence[str] = ()
) -> str:
    """A self-contained page: a timeline to zoom into, and numbers per rank.

    If a step has too many ops to see at once, the page opens on one merged period: the key 0 shows all of it.
    """
    traces = as_traces(timeline, program)
    first = merged_period(timeline, program) if max(map(len, program.ranks)) > _SEEN else None
    return html(report(traces), traces, title=title, about=about, first=first)


def merged_period(timeline: Timeline, program: Program) -> tuple[float, float] | None:
    """Time of the middle merged pass on the first rank that has any, until its next pass; None without any."""
    for ops, spans in zip(program.ranks, timeline.spans, strict=True):
        begins: dict[tuple[int, int], float] = {}
        for op, span in zip(ops, spans, strict=True):
            if op.verb == "fwd" and op.layer >= 0 and op.lane == "compute":
                begins.setdefault((op.microbatch, op.chunk), float(span.start))
        merged = sorted(begins[item] for item, both in _merged(ops).items() if both)
        if len(merged) > 1:
            middle = (len(merged) - 1) // 2
            return merged[middle], merged[middle + 1]
    return None


# ------------------------------------------------------------------------------------------------------------ numbers


def summary(timeline: Timeline, program: Program) -> dict[str, Any]:
    """The step in numbers, ready for JSON: seconds, bytes, counts of ops by verb, shares between 0 and 1."""
    ranks: list[dict[str, Any]] = []
    for rank, use in enumerate(timeline.ranks):
        ranks.append(
            {
                "busy": float(use.busy),
                "exposed": {kind: float(seconds) for kind, seconds in use.exposed.items()},
                "exposed_total": float(use.exposed_total),
                "idle": float(use.idle),
                "peak_bytes": use.peak_bytes,
                **({"host_bytes": use.host_bytes} if use.host_bytes else {}),
                "in_flight": program.in_flight[rank] if program.in_flight else None,
                "merged": merged_share(program.ranks[rank]),
            }
        )
    return {
        "step_seconds": float(timeline.makespan),
        "ops": dict(Counter(op.verb for _, _, op in program)),
        "merged": sum(row["merged"] for row in ranks) / max(1, len(ranks)),
        "ranks": ranks,
        "notes": list(program.notes),
    }


def merged_share(ops: Sequence[Op]) -> float:
    """Share of a rank's chunk forwards that run merged: another pass has ops between their first and last one."""
    merged = _merged(ops)
    return sum(merged.values()) / max(1, len(merged))


def _merged(ops: Sequence[Op]) -> dict[tuple[int, int], bool]:
    """Whether each of a rank's forwards, by microbatch and chunk, runs merged."""
    seen = 0
    mine: Counter[tuple[int, int]] = Counter()
    first: dict[tuple[int, int], int] = {}
    merged: dict[tuple[int, int], bool] = {}
    for op in ops:
        if op.layer < 0 or op.lane != "compute" or op.verb not in ("fwd", "bwd"):
            continue
        if op.verb == "fwd":
            item = (op.microbatch, op.chunk)
            first.setdefault(item, seen)
            merged[item] = seen - first[item] > mine[item]
            mine[item] += 1
        seen += 1
    return merged
