"""Where a part finds what it works on among the values that its op reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hocket.program.parts import INPUT, LayerKind, Part


@dataclass(frozen=True)
class Wiring:
    """Where a part finds its inputs, and the gradients of its outputs, among the values that its op reads."""

    part: Part
    sources: tuple[tuple[int, int], ...]
    """Of each input: which value, and which of its outputs; -1 for all of it."""
    readers: tuple[tuple[int, int], ...]
    """Of each output: in which value its gradient is, and where in that; -1 for all of it. (-1, -1) has none."""
    first: bool
    last: bool
    """Whether it is the layer's first part, or its last one."""

    @classmethod
    def of(cls, kind: LayerKind, part: Part) -> Wiring:
        def source(read: str) -> tuple[int, int]:
            name, _, output = read.partition(".")
            place = kind.by_name[name].outputs.index(output) if output else -1
            return part.sources.index(name), place

        def reader(output: str) -> tuple[int, int]:
            name, place = kind.gradient_of(part, output)
            if not name:
                return -1, -1
            return kind.readers[part.name].index(name), place if len(kind.by_name[name].reads) > 1 else -1

        last = part is kind.exit
        return cls(
            part,
            tuple((0, -1) if read == INPUT else source(read) for read in part.reads),
            ((0, -1),) if last else tuple(reader(output) for output in part.outputs or ("",)),
            part is kind.entry,
            last,
        )

    def inputs(self, values: Sequence[Any]) -> list[Any]:
        return [values[n] if place < 0 else values[n][place] for n, place in self.sources]

    def grads(self, values: Sequence[Any]) -> list[Any]:
        return [None if n < 0 else values[n] if place < 0 else values[n][place] for n, place in self.readers]
