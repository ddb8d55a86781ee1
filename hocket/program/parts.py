"""A layer as data: the one description that plans, checks, predictions and the executor read.

A kind of layer is a sequence of parts. A part is a piece of a layer that runs forward once and backward once for every
microbatch. Its description gives its lane, the unit of its weights, its inputs, and what its backward keeps.
`hocket/program/transformer.py` describes hocket's own layers; other models may bring their own descriptions
(`Layout.types`). Nothing here imports torch.

    Part("attn", letter="a", reads=("input",), outputs=("rows", "residual"), unit="dense")
    Part("dispatch", letter="d", reads=("attn.rows",), lane="a2a", purpose="a2a", ranks=8)
    Part("experts", letter="e", reads=("dispatch",), unit="experts")
    Part("combine", letter="c", reads=("experts",), lane="a2a", purpose="a2a", ranks=8)
    Part("merge", letter="m", reads=("combine", "attn.residual"))

Note: [One reader for each output]
Each output of a part has one reader. So the gradient of an output is one value, and no op sums gradients of several
readers. A part whose result two parts need returns it as two outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from hocket.config import Purpose

Unit = Literal["embed", "dense", "experts", "head"]
"""A class of units. A unit is gathered and reduced as one, such as `dense` of layer 3."""

UNITS: tuple[Unit, ...] = ("embed", "dense", "experts", "head")
END_UNITS: tuple[Unit, ...] = ("embed", "head")
"""Units outside of layers; a rank has at most one of each."""

Mixer = Literal["full", "window", "delta"]
"""How a layer mixes tokens: attention, attention over a window, or a gated delta net."""

INPUT = "input"
"""The name of the layer's input in `Part.reads`."""
OUTPUT_GRADIENT = "output gradient"
"""The name of the gradient of the layer's output in `Part.kept` and `Part.wgrad_kept`."""


@dataclass(frozen=True)
class Part:
    """One part of a kind of layer.

    Raises ValueError for an inconsistent description.
    """

    name: str
    letter: str
    """Its letter in templates such as `cB aF eB`. Parts of different kinds may share one."""
    reads: tuple[str, ...] = (INPUT,)
    """Its inputs, in the order of its function's arguments: `input`, an earlier part, or one output, as `attn.rows`."""
    outputs: tuple[str, ...] = ()
    """Names of its outputs, if several. `_` is an output that is always None and has no reader."""
    takes: tuple[str, ...] = ()
    """State of the layer and microbatch that its function takes after its inputs: `documents`, `routing`, `splits`."""
    makes: tuple[str, ...] = ()
    """State that its function returns after its outputs. It has no gradient."""
    lane: str = "compute"
    purpose: Purpose | None = None
    """Purpose of the groups that it communicates on; None for a compute part."""
    ranks: int = 1
    """Size of these groups. With one member the part is left out, and its reader reads the part's own input."""
    way: Literal["", "out", "back"] = ""
    """For an exchange of experts' rows: to the experts, or back."""
    unit: Unit | None = None
    """The class of units that holds its weights."""
    backward_reads_weights: bool = True
    deferrable: bool = True
    """Whether its weight gradient may be deferred past its input gradient."""
    recomputable: bool = False
    """Whether its forward may run again for its backward; it keeps more than it reads."""
    lends: bool = False
    """Whether readers may drop this part's output and get it when the part runs again, which its own backward does
    not need. True for a recomputable part that communicates."""
    kept: tuple[str, ...] = ()
    """Values that its saved state refers to from forward until its backward ends: `fwd dispatch`, `input`, ... Only
    those allocated by another lane matter: see Note: [Values of communication lanes live longer]."""
    wgrad_kept: tuple[str, ...] = ()
    """The same, until its weight gradient ends."""
    shares_input: bool = False
    """Whether it reads the layer's input under another name, as an output that an earlier part has passed on."""
    early: bool = False
    """Whether its backward runs at the end of the previous layer step: see Note: [uB' belongs to the next layer]."""
    counted: bool = False
    """Whether the host waits for row counts while it issues the forward."""
    products: tuple[str, ...] = ()
    """Roles (`layers/linears.py`) of its products that tensor-parallel ranks share; `embed`: it looks up rows of a
    table that they share."""
    mark: str = ""
    """Its letter in text timelines; by default `letter` in upper case."""
    mixer: Mixer = field(default="full", compare=False)
    size: str | Callable[..., Any] = field(default="", compare=False, repr=False)
    """Its cost function, `Shapes -> PartSize` of `predict/part_sizes.py`, or the name of one there."""

    def __post_init__(self) -> None:
        def refuse(problem: str) -> None:
            raise ValueError(f"part {self.name!r}: {problem}")

        if not self.name.isidentifier():
            refuse("a name is a Python identifier, since the layer's method is called forward_<name>")
        if len(self.letter) != 1 or not self.letter.isalpha() or not self.letter.islower():
            refuse(f"letter must be one lower-case letter, got {self.letter!r}")
        if self.communicates != bool(self.purpose):
            refuse(
                f"lane={self.lane!r} and purpose={self.purpose!r}: a part communicates with both or computes with none"
            )
        if self.communicates and (self.unit or len(self.reads) != 1 or self.outputs):
            refuse("a part that communicates moves one value: it has one input, one output and no weights")
        if self.communicates and self.makes:
            refuse("a part that communicates makes no state")
        if self.communicates and self.recomputable:
            object.__setattr__(self, "lends", True)
        if self.way and not self.communicates:
            refuse(f"way={self.way!r}: a part that computes exchanges no rows")
        if self.unit not in (None, *UNITS):
            refuse(f"unit must be one of {', '.join(UNITS)}, got {self.unit!r}")
        if len(set(self.outputs)) != len(self.outputs) or len(set(self.reads)) != len(self.reads):
            refuse("the names of its inputs, and those of its outputs, must differ")

    @property
    def communicates(self) -> bool:
        return self.lane not in ("compute", "update")

    @property
    def offloadable(self) -> bool:
        """Whether its saved tensors may be offloaded: it computes, and keeps more than it reads."""
        return self.recomputable and not self.lends

    @property
    def sources(self) -> tuple[str, ...]:
        """The parts that it reads, without repeats, in order; `input` for the layer's input."""
        return tuple(dict.fromkeys(read.partition(".")[0] for read in self.reads))


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer: its parts in forward order.

    The first part reads the layer's input, and no other part does; the last part's output is the layer's. Raises
    ValueError for inconsistent parts.
    """

    name: str
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        for problem in _misfits(self.parts):
            raise ValueError(f"layer kind {self.name!r}: {problem}")

    def __hash__(self) -> int:
        return hash((self.name, tuple(part.name for part in self.parts)))

    @cached_property
    def by_name(self) -> Mapping[str, Part]:
        return {part.name: part for part in self.parts}

    @property
    def entry(self) -> Part:
        """The part that reads the layer's input. Its backward makes the gradient of the input."""
        return self.parts[0]

    @property
    def exit(self) -> Part:
        """The part whose output is the layer's."""
        return self.parts[-1]

    @cached_property
    def readers(self) -> Mapping[str, tuple[str, ...]]:
        """Part -> the parts that read its outputs, in forward order. Their backwards make its output gradients."""
        return {part.name: tuple(p.name for p in self.parts if part.name in p.sources) for part in self.parts}

    @cached_property
    def weighted(self) -> tuple[Part, ...]:
        """The parts that own weights, in forward order."""
        return tuple(part for part in self.parts if part.unit is not None)

    def keeping_input(self) -> LayerKind:
        """The same kind, where weight gradients of the first part and of parts that share its input read that input."""

        def keeping(part: Part) -> Part:
            mine = part is self.entry or (part.shares_input and part.unit is not None)
            return replace(part, wgrad_kept=tuple(dict.fromkeys((INPUT, *part.wgrad_kept)))) if mine else part

        return replace(self, parts=tuple(map(keeping, self.parts)))

    def with_letter(self, letter: str) -> Part | None:
        """The part with a letter; None if this kind has none."""
        return next((part for part in self.parts if part.letter == letter), None)

    def gradient_of(self, part: Part, output: str) -> tuple[str, int]:
        """(reader, index among its inputs) of the part that reads an output; `output` is empty for a sole output.

        The reader is empty for `_`.
        """
        wanted = f"{part.name}.{output}" if output else part.name
        if output == "_":
            return "", 0
        return next((p.name, p.reads.index(wanted)) for p in self.parts if wanted in p.reads)


def layer_kind(name: str, parts: tuple[Part, ...]) -> LayerKind:
    """A kind of layer without the parts that communicate in groups of one rank.

    Readers of such a part read that part's input instead.
    """
    instead: dict[str, str] = {}
    left: list[Part] = []
    absent = {part.name for part in parts if part.communicates and part.ranks == 1}
    for part in parts:
        reads = tuple(instead.get(read, read) for read in part.reads)
        if part.name in absent:
            instead[part.name] = reads[0]
            continue
        kept, wgrad_kept = (
            tuple(value for value in values if value.partition(" ")[2] not in absent)
            for values in (part.kept, part.wgrad_kept)
        )
        left.append(replace(part, reads=reads, kept=kept, wgrad_kept=wgrad_kept))
    return LayerKind(name, tuple(left))


def _misfits(parts: tuple[Part, ...]) -> list[str]:
    """The inconsistencies of a description, as text."""
    if not parts:
        return ["it has no parts"]
    found: list[str] = []
    for what, names in (("name", [p.name for p in parts]), ("letter", [p.letter for p in parts])):
        twice = sorted({name for name in names if names.count(name) > 1})
        found += [f"two parts have the {what} {name!r}" for name in twice]
    if parts[0].reads != (INPUT,):
        found.append(f"its first part, {parts[0].name!r}, must read the layer's input alone, got {parts[0].reads}")
    there: dict[str, str] = {}  # output -> its reader so far
    for n, part in enumerate(parts):
        for read in part.reads:
            if read == INPUT:
                found += [f"{part.name!r} reads the layer's input, which only the first part may"] if n else []
            elif read not in there:
                known = ", ".join(there) or "nothing"
                found.append(f"{part.name!r} reads {read!r}, which no part before it makes; there are {known}")
            elif there[read]:
                found.append(f"{read!r} is read by {there[read]!r} and {part.name!r}; hand it on as two outputs")
            else:
                there[read] = part.name
        there |= {
            f"{part.name}.{output}" if output else part.name: "" for output in part.outputs or ("",) if output != "_"
        }
        if part.early and part is not parts[-1]:
            found.append(f"{part.name!r} is early, which only the last part may be")
        for value in (*part.kept, *part.wgrad_kept):
            verb, _, name = value.partition(" ")
            if value not in (INPUT, OUTPUT_GRADIENT) and (
                verb not in ("fwd", "bwd") or name not in {p.name for p in parts}
            ):
                found.append(f"{part.name!r} keeps {value!r}, which is no value of the layer")
    last = parts[-1]
    if last.outputs or last.communicates:
        found.append(f"its last part, {last.name!r}, must compute one output: the layer's")
    unread = [output for output, reader in there.items() if not reader and output != last.name]
    found += [f"nothing reads {output!r}" for output in unread]
    return found
