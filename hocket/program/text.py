"""A Program as text for readers, and as JSON both ways.

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

from hocket.program.ops import TIED, Layout, Op, Program
from hocket.program.parts import UNITS, LayerKind, Part
from hocket.program.transformer import EMBED, HEAD, STANDARD, standard_types
from hocket.typed import read

FORMAT = "hocket program 1"

_APART = ("kinds", "bounds", "types")
"""Fields of a layout that have lines of their own."""
_SIZES = {f.name: type(f.default) for f in fields(Layout) if f.name not in _APART}
"""Fields of the line `layout`, with their types: numbers, flags, and names joined by commas. Flags and names that say
nothing are left out, but for `tied`; so is a `cp` of 1."""

_LEFT_OUT = {
    "cp": 1,
}


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
        if kind is int and (name not in _LEFT_OUT or value != _LEFT_OUT[name]):
            yield f"{name}={value}"
        elif kind is bool and (value or name == "tied"):
            yield f"{name}={'yes' if value else 'no'}"
        elif kind is tuple and value:
            yield f"{name}={','.join(value)}"


def _type(kind: LayerKind) -> dict[str, Any]:
    """A description as plain values, without what is as it is by default, and without cost functions."""

    def plain(part: Part) -> dict[str, Any]:
        given = {
            f.name: getattr(part, f.name) for f in fields(Part) if f.compare and getattr(part, f.name) != f.default
        }
        return {name: _list(value) for name, value in given.items()}

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


def _unknown(op: Op, layout: Layout) -> str:
    """Why an op's words mean nothing in a layout; empty if they do."""
    parts = {EMBED.name, HEAD.name, "act", "grad", TIED, "all", "norm", *UNITS}
    parts |= {part.name for kind in (*layout.layer_types, *standard_types(STANDARD, ep=2)) for part in kind.parts}
    for kind, word, known in (("part", op.part, parts), ("lane", op.lane, layout.lanes)):
        if word not in known:
            return f"unknown {kind} {word!r}; there are {', '.join(sorted(known))}"
    return ""


def to_json(program: Program) -> dict[str, Any]:
    """The program as plain dicts, lists, strings and numbers. Fields of an op that hold their default are left out."""
    layout = program.layout
    named = {f.name: _list(getattr(layout, f.name)) for f in fields(Layout) if f.name != "types"}
    return {
        "format": FORMAT,
        "layout": named | ({"types": [_type(kind) for kind in layout.types]} if layout.types else {}),
        "microbatches": program.microbatches,
        "weight_slots": dict(program.weight_slots),
        "grad_slots": dict(program.grad_slots),
        "in_flight": list(program.in_flight),
        "notes": list(program.notes),
        "ranks": [[_op_dict(op) for op in ops] for ops in program.ranks],
    }


def _list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


_NUMBERS = ("microbatch", "chunk", "layer", "slot")
_POSITIONS = ("deps", "frees", "trims")


def _op_dict(op: Op) -> dict[str, Any]:
    fields: dict[str, Any] = {"verb": op.verb, "part": op.part, "lane": op.lane}
    fields |= {name: getattr(op, name) for name in _NUMBERS if getattr(op, name) != -1}
    return fields | {name: list(getattr(op, name)) for name in _POSITIONS if getattr(op, name)}


def from_json(data: Mapping[str, Any] | str) -> Program:
    """The program that `to_json` wrote, from its dict or from JSON text. Raises ValueError for anything else."""
    tree: Any = json.loads(data) if isinstance(data, str) else data
    if not isinstance(tree, Mapping) or tree.get("format") != FORMAT:
        raise ValueError(f"not a program: expected an object with format={FORMAT!r}")
    if missing := [f.name for f in fields(Program) if f.name not in tree]:
        raise ValueError(f"not a program: it has no {missing[0]}")
    try:
        program = read(Program, {name: value for name, value in tree.items() if name != "format"}, "")
    except ValueError as error:
        raise ValueError(f"not a program: {error}") from None
    for rank, position, op in program:
        if problem := _unknown(op, program.layout):
            raise ValueError(f"not a program: ranks.{rank}.{position}: {problem}")
    return program
