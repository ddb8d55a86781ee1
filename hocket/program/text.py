"""A Program as text and as JSON, both ways.

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
values it drops. Blank lines and lines that start with `#` mean nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from itertools import groupby
from typing import Any, cast, get_args

from hocket.program.diff import diff
from hocket.program.ops import Layout, Op, Program, Verb
from hocket.program.parts import UNITS, LayerKind, Part
from hocket.program.transformer import EMBED, HEAD, STANDARD, standard_types
from hocket.typed import read

__all__ = ["diff", "from_json", "from_text", "to_json", "to_text"]

FORMAT = "hocket program 1"

_VERBS = frozenset(get_args(Verb))
_HEADER = ("layout", "kinds", "bounds", "microbatches", "weight_slots", "grad_slots", "in_flight", "note")
_REQUIRED = _HEADER[:4]
_OP = re.compile(
    r"(\d+)\s+(\S.*?)\s+@(\S+)(?:\s+<-((?:\s+-?\d+)+))?(?:\s+free((?:\s+-?\d+)+))?(?:\s+trim((?:\s+-?\d+)+))?"
)
_APART = ("kinds", "bounds", "types")
"""Fields of a layout that have lines of their own."""
_SIZES = {f.name: type(f.default) for f in fields(Layout) if f.name not in _APART}
"""Fields of the line `layout`, with their types: numbers, flags, and names joined by commas. Flags and names that say
nothing are left out, but for `tied`."""
_FIELDS = {"m": "microbatch", "t": "microbatch", "c": "chunk", "l": "layer", "s": "slot"}


def to_text(program: Program) -> str:
    """The program as text that `from_text` reads back. Raises ValueError for a number below -1 in an op."""
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
        if kind is int:
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


def from_text(text: str) -> Program:
    """The program that `to_text` printed. Raises ValueError with the line's number for anything else."""
    header: dict[str, str] = {}
    line_of: dict[str, int] = {}
    notes: list[str] = []
    types: list[LayerKind] = []
    ranks: list[list[tuple[int, Op]]] = []
    started = False
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if not started:
            _require(line == FORMAT, number, f"a program starts with {FORMAT!r}, got {line!r}")
            started = True
            continue
        word, _, rest = line.partition(" ")
        if word == "note":
            notes.append(_at(number, _string, rest))
        elif word == "type":
            types.append(_at(number, lambda rest=rest: read(LayerKind, json.loads(rest), "type")))
        elif word in _HEADER:
            _require(word not in header, number, f"{word!r} is given twice, first in line {line_of.get(word)}")
            header[word], line_of[word] = rest, number
        elif word == "rank":
            _require(rest == str(len(ranks)), number, f"expected 'rank {len(ranks)}', got {line!r}")
            ranks.append([])
        else:
            _require(bool(ranks), number, f"expected one of {', '.join(_HEADER)} or 'rank 0', got {line!r}")
            ranks[-1].append((number, _at(number, _parse_op, line, len(ranks[-1]))))
    last = text.count("\n") + 1
    _require(started, last, f"the text is empty; a program starts with {FORMAT!r}")
    missing = [word for word in _REQUIRED if word not in header]
    _require(not missing, last, f"the header has no line {', '.join(map(repr, missing))}")
    return _assemble(header, line_of, notes, tuple(types), ranks)


def _assemble(
    header: dict[str, str],
    line_of: dict[str, int],
    notes: list[str],
    types: tuple[LayerKind, ...],
    ranks: list[list[tuple[int, Op]]],
) -> Program:
    def parsed(word: str, parse: Callable[[str], Any]) -> Any:
        return _at(line_of.get(word, 0), parse, header.get(word, ""))

    sizes = parsed("layout", _parse_sizes)
    kinds, bounds = parsed("kinds", _parse_kinds), parsed("bounds", _integers)
    layout = _at(line_of["layout"], lambda: Layout(kinds=kinds, bounds=bounds, types=types, **sizes))
    _require(
        len(ranks) == layout.pp, line_of["layout"], f"pp={layout.pp}, but the text holds the ops of {len(ranks)} ranks"
    )
    for number, op in ((number, op) for ops in ranks for number, op in ops):
        problem = _unknown(op, layout)
        _require(not problem, number, problem)
    return Program(
        layout=layout,
        microbatches=parsed("microbatches", int),
        ranks=tuple(tuple(op for _, op in ops) for ops in ranks),
        weight_slots=parsed("weight_slots", _parse_counts),
        grad_slots=parsed("grad_slots", _parse_counts),
        in_flight=parsed("in_flight", _integers),
        notes=tuple(notes),
    )


def _require(condition: bool, number: int, message: str) -> None:
    if not condition:
        raise ValueError(f"line {number}: {message}")


def _at(number: int, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, with the line's number in front of its error."""
    try:
        return function(*args)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None


def _string(text: str) -> str:
    value = json.loads(text)
    if not isinstance(value, str):
        raise ValueError(f"a note is a string in double quotes, got {text!r}")
    return value


def _integers(text: str | None) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split()) if text else ()


def _pairs(text: str) -> dict[str, str]:
    pairs = [word.partition("=") for word in text.split()]
    bad = [name for name, sign, _ in pairs if not sign]
    if bad:
        raise ValueError(f"expected name=value, got {bad[0]!r}")
    return {name: value for name, _, value in pairs}


def _parse_sizes(text: str) -> dict[str, Any]:
    pairs = _pairs(text)
    unknown = sorted(set(pairs) - set(_SIZES))
    missing = [name for name in ("pp", "chunks", "ep", "tied") if name not in pairs]
    wrong = [name for name, word in pairs.items() if _SIZES.get(name) is bool and word not in ("yes", "no")]
    if unknown or missing or wrong:
        shape: dict[type, str] = {int: "N", bool: "yes|no", tuple: "NAME,..."}
        expected = " ".join(f"{name}={shape[kind]}" for name, kind in _SIZES.items())
        raise ValueError(f"expected '{expected}', got {text!r}")
    parse: dict[type, Callable[[str], Any]] = {int: int, bool: "yes".__eq__, tuple: lambda word: tuple(word.split(","))}
    return {name: parse[_SIZES[name]](word) for name, word in pairs.items()}


def _parse_kinds(text: str) -> tuple[str, ...]:
    kinds: list[str] = []
    for word in text.split():
        kind, _, count = word.partition("*")
        kinds += [kind] * int(count or 1)
    return tuple(kinds)


def _parse_counts(text: str) -> dict[str, int]:
    pairs = _pairs(text)
    unknown = [name for name in pairs if name not in UNITS]
    if unknown:
        raise ValueError(f"unknown class of units {unknown[0]!r}; there are {', '.join(UNITS)}")
    return {name: int(value) for name, value in pairs.items()}


def _parse_op(line: str, position: int) -> Op:
    match = _OP.fullmatch(line)
    if match is None:
        raise ValueError(
            f"expected 'position name @lane [<- positions] [free positions] [trim positions]', got {line!r}"
        )
    number, name, lane, deps, frees, trims = match.groups()
    if int(number) != position:
        raise ValueError(f"expected op {position}, got op {number}: the ops of a rank are numbered from 0 without gaps")
    verb, part, fields = _parse_name(name)
    return _op(verb, part, lane, **fields, deps=_integers(deps), frees=_integers(frees), trims=_integers(trims))


def _parse_name(name: str) -> tuple[str, str, dict[str, int]]:
    words = name.split()
    if len(words) < 2:
        raise ValueError(f"a name starts with verb and part, got {name!r}")
    count = "t" if words[0] in ("gather", "release") else "m"
    fields: dict[str, int] = {}
    for word in words[2:]:
        letter, digits = word[0], word[1:]
        if letter not in (count, "c", "l", "s") or not digits.isdecimal() or _FIELDS[letter] in fields:
            raise ValueError(f"expected each of {count}, c, l, s with a number at most once, got {word!r} in {name!r}")
        fields[_FIELDS[letter]] = int(digits)
    return words[0], words[1], fields


def _op(verb: str, part: str, lane: str, **fields: Any) -> Op:
    """An Op of words that may be wrong."""
    if verb not in _VERBS:
        raise ValueError(f"unknown verb {verb!r}; there are {', '.join(sorted(_VERBS))}")
    return Op(cast(Verb, verb), part, lane=lane, **fields)


def _unknown(op: Op, layout: Layout) -> str:
    """Why an op's words mean nothing in a layout; empty if they do."""
    parts = {EMBED.name, HEAD.name, "act", "grad", "all", "norm", *UNITS}
    parts |= {part.name for kind in (*layout.layer_types, *standard_types(STANDARD, ep=2)) for part in kind.parts}
    for kind, word, known in (("part", op.part, parts), ("lane", op.lane, layout.lanes)):
        if word not in known:
            return f"unknown {kind} {word!r}; there are {', '.join(sorted(known))}"
    return ""


def to_json(program: Program) -> dict[str, Any]:
    """The program as plain dicts, lists, strings and numbers. Fields of an op that hold their default are left out."""
    return {
        "format": FORMAT,
        "layout": _layout_dict(program.layout),
        "microbatches": program.microbatches,
        "weight_slots": dict(program.weight_slots),
        "grad_slots": dict(program.grad_slots),
        "in_flight": list(program.in_flight),
        "notes": list(program.notes),
        "ranks": [[_op_dict(op) for op in ops] for ops in program.ranks],
    }


def _layout_dict(layout: Layout) -> dict[str, Any]:
    named = {f.name: _list(getattr(layout, f.name)) for f in fields(Layout) if f.name != "types"}
    return named | ({"types": [_type(kind) for kind in layout.types]} if layout.types else {})


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
