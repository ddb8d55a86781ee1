"""A Program as text for readers.

    hocket program 1
    layout pp=2 chunks=1 ep=1 tied=no
    kinds dense moe
    bounds 0 1 2
    microbatches 2
    weight_slots dense=2 experts=2
    grad_slots dense=2 embed=1 experts=2 head=1
    in_flight 2 1
    note "nothing is merged on pipeline rank 0"

    rank 0
        0  gather dense t0 c0 l0 s0        @gather
        1  fwd embed m0 c0                 @compute
        2  fwd attn m0 c0 l0               @compute   <- 0
        3  release dense t0 c0 l0 s0       @compute   free 1

One line per op: its position, its short name, its lane, the positions it waits for, the positions whose
values it drops.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import groupby
from typing import Any

from hocket.program.ops import Layout, Op, Program
from hocket.program.parts import LayerKind, Part

FORMAT = "hocket program 1"

_APART = ("kinds", "bounds", "types")
"""Fields of a layout that have lines of their own."""
_SIZES = {f.name: type(f.default) for f in fields(Layout) if f.name not in _APART}
"""Fields of the line `layout`, with their types: numbers, flags, and names joined by commas. Empty names, false flags
other than `tied`, and a `cp` of 1 are left out."""


def to_text(program: Program) -> str:
    """The program as text. Raises ValueError for a number below -1 in an op."""
    layout = program.layout
    lines = [
        FORMAT,
        " ".join(["layout", *_sizes(layout)]),
        *(f"type {json.dumps(_type(kind))}" for kind in layout.types),
        " ".join(["kinds", *_repeats(layout.kinds)]),
        " ".join(["bounds", *map(str, layout.bounds)]),
        f"microbatches {program.microbatches}",
        " ".join(["weight_slots", *_counts(program.weight_slots)]),
        " ".join(["grad_slots", *_counts(program.grad_slots)]),
        " ".join(["in_flight", *map(str, program.in_flight)]),
        *(f"note {json.dumps(note)}" for note in program.notes),
    ]
    for rank, ops in enumerate(program.ranks):
        lines += ["", f"rank {rank}", *(_op_line(position, op) for position, op in enumerate(ops))]
    return "\n".join(lines) + "\n"


def _sizes(layout: Layout) -> Iterator[str]:
    for name, kind in _SIZES.items():
        value = getattr(layout, name)
        if kind is int and (name, value) != ("cp", 1):
            yield f"{name}={value}"
        elif kind is bool and (value or name == "tied"):
            yield f"{name}={'yes' if value else 'no'}"
        elif kind is tuple and value:
            yield f"{name}={','.join(value)}"


def _type(kind: LayerKind) -> dict[str, Any]:
    """A description as plain values, without fields that have their default, and without cost functions."""

    def plain(part: Part) -> dict[str, Any]:
        return {f.name: getattr(part, f.name) for f in fields(Part) if f.compare and getattr(part, f.name) != f.default}

    return {"name": kind.name, "parts": [plain(part) for part in kind.parts]}


def _repeats(words: tuple[str, ...]) -> Iterator[str]:
    for word, run in groupby(words):
        count = len(list(run))
        yield word if count == 1 else f"{word}*{count}"


def _counts(slots: Mapping[str, int]) -> Iterator[str]:
    return (f"{unit}={slots[unit]}" for unit in sorted(slots))


def _op_line(position: int, op: Op) -> str:
    if min(op.microbatch, op.chunk, op.layer, op.slot) < -1:
        raise ValueError(f"op {position} ({op!r}) has a number below -1, which means none: it can't be printed")
    line = f"{position:>5}  {op!s:<30} @{op.lane:<8}"
    if op.deps:
        line += " <- " + " ".join(map(str, op.deps))
    if op.frees:
        line += "  free " + " ".join(map(str, op.frees))
    if op.trims:
        line += "  trim " + " ".join(map(str, op.trims))
    return line.rstrip()
