"""A group's gradients at rest: those added up without communication, and those that were reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from hocket.fsdp.home import Home
from hocket.fsdp.layout import FlatLayout
from hocket.runtime.weights import put


class LocalSum:
    """Gradients of microbatches that send nothing, added up at full size. The memory is made on first use, and kept."""

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, device: torch.device) -> None:
        self._layout, self._dtype, self._device = layout, dtype, device
        self._views: list[Tensor] = []
        self.has = [False] * len(layout.entries)
        """Which entries something was added to since the last `merge`."""

    def __bool__(self) -> bool:
        """Whether something was added since the last `merge`."""
        return any(self.has)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory, if it is there."""
        return self._layout.total * self._dtype.itemsize if self._views else 0

    def target(self, index: int) -> tuple[Tensor, bool]:
        """Where the gradient of an entry goes, shaped like it; True if it must be added to what is there."""
        if not self._views:
            flat = torch.zeros(self._layout.total, dtype=self._dtype, device=self._device)
            self._views = self._layout.views(flat)
        already, self.has[index] = self.has[index], True
        return self._views[index], already

    def add(self, index: int, grad: Tensor) -> None:
        """Add a whole gradient of an entry."""
        put(grad, *self.target(index))

    def merge(self, into: Sequence[Tensor]) -> None:
        """Add everything to `into`, views like the entries, all of them written; rounded once. Nothing is left here.

        Part of the caller's work, as adding up is, so that both are in order.
        """
        for i, view in enumerate(into):
            if self.has[i]:
                view.copy_(self._views[i].add_(view))
        self.clear()

    def forget(self, index: int) -> None:
        """Forget what was added to an entry."""
        self.has[index] = False

    def clear(self) -> None:
        """Forget what was added."""
        self.has = [False] * len(self.has)


class ShardGrads:
    """The reduced gradients of a group's shards: where reductions add up, and what readers see.

    The memory is there from the first reduction until all gradients are forgotten, so that activations have it in
    between. It is the caller's: made and given back in the order of the caller's work (`Unit`), or of a plan's compute
    lane (`PlannedUnit`). Who still holds a view keeps it.

    Readers get views, or views of a copy in the dtype that optimizers expect. They may write: clipping does. What they
    wrote into a copy goes back before the gradients change.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, readable: torch.dtype, ranges: Sequence[slice], home: Home
    ) -> None:
        self._numel, self._dtype, self._readable, self._home = numel, dtype, readable, home
        self._ranges = ranges
        self.flat: Tensor | None = None
        """All of them, in the dtype in which they are added up."""
        self.stays = False
        """Whether the memory is kept, since a recorded step reads and writes it."""
        self._copy: Tensor | None = None
        self._views: list[Tensor] = []
        self._versions = (-1, -1)  # of flat and of the copy, when the copy was made

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """The memory that is there."""
        return tuple(tensor for tensor in (self.flat, self._copy) if tensor is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that is there."""
        return sum(tensor.nbytes for tensor in self.memory)

    def make(self) -> None:
        """Get the memory, if it is not there; its content is arbitrary."""
        if self.flat is None:
            self.flat = self._new(self._dtype)

    def _new(self, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # where gradients may be read, and must be writable afterwards
            return self._home.empty(self._numel, dtype)

    def let_go(self) -> None:
        """Give the memory back, unless it stays."""
        if not self.stays:
            self.flat, self._copy, self._views = None, None, []

    def views(self) -> list[Tensor]:
        """One tensor per range, the same objects for as long as the memory is there."""
        assert self.flat is not None
        if self._dtype == self._readable:
            self._views = self._views or [self.flat[here] for here in self._ranges]
            return self._views
        if self._copy is None:
            self._copy = self._new(self._readable)
            self._views = [self._copy[here] for here in self._ranges]
            self._versions = (-1, -1)
        if self._versions[0] != self.flat._version:
            self._copy.copy_(self.flat)
            self._versions = self.flat._version, self._copy._version
        return self._views

    def take_back(self) -> None:
        """Before the gradients change: take over what readers wrote."""
        if self.flat is not None and self._copy is not None and self._versions[0] == self.flat._version:
            if self._copy._version != self._versions[1]:
                self.flat.copy_(self._copy)
        self.drop()

    def drop(self) -> None:
        """Forget the copy; the next reader gets a new one."""
        self._versions = (-1, -1)


def zero_others(flat: Tensor, ranges: Sequence[slice], keep: Sequence[bool]) -> None:
    """Zero the ranges that are not to be kept; all of `flat` if none is."""
    if not any(keep):
        flat.zero_()
        return
    for here, kept in zip(ranges, keep, strict=True):
        if not kept:
            flat[here].zero_()


class Uses:
    """To which gradients of a group ranks have contributed since they were forgotten.

    Before the first `send`, and where nobody calls it, all count as used. See Note: [Gradients that nobody has].
    """

    def __init__(self, learns: Sequence[bool]) -> None:
        self._learns = learns
        self._mine = set[int]()
        self.sent = 0
        """How many reductions were issued."""
        self.left_out: list[int] = []
        """What this rank has left out of the gradients that were sent last."""
        self._nobody = set[int]()
        self._asked: tuple[int, list[int]] = 0, []  # when, and about what
        self.ask: Callable[[], None] = lambda: None
        """Has somebody call `answer`, if it is known by now."""

    def send(self, written: Sequence[bool]) -> list[int]:
        """A reduction is issued with gradients of these. Returns `left_out`."""
        self.sent += 1
        self._mine.update(i for i, has in enumerate(written) if has)
        self.left_out = [i for i, learns in enumerate(self._learns) if learns and i not in self._mine]
        return self.left_out

    @property
    def known(self) -> bool:
        """Whether there is nothing to ask."""
        return not self.left_out or self._asked[0] == self.sent

    def answer(self, nobody: Iterable[int]) -> None:
        """Nobody has used these."""
        self._nobody, self._asked = set(nobody), (self.sent, list(self.left_out))

    def answer_again(self) -> bool:
        """Take the last answer for this one, if the question is the same."""
        same = self._asked[1] == self.left_out
        self._asked = (self.sent if same else self._asked[0]), self._asked[1]
        return same

    def by_nobody(self, index: int) -> bool:
        """Whether it is known that no rank has used a member."""
        if index not in self.left_out:
            return False
        if not self.known:
            self.ask()
        return self.known and index in self._nobody

    def add(self, index: int) -> None:
        """The member has a gradient by hand."""
        self._mine.add(index)
        self.left_out = [i for i in self.left_out if i != index]

    def forget(self, index: int) -> None:
        """The gradient of a member is forgotten."""
        self._mine.discard(index)
        self.left_out = [i for i in self.left_out if i != index]
