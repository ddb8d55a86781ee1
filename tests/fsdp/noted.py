"""A chain of units that note their compute in a context's history, and what can be read from such a history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import hocket
from benchmarks.history import CALLER, Entry, History, record

WIDTH, ROWS = 11, 3


class _NoteBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[], None]) -> Tensor:
        ctx.note = note
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        ctx.note()
        return grad, None


class Noted(nn.Module):
    """One layer: notes `F name` when it runs forward, and `B name` when it begins to run backward."""

    def __init__(self, name: str, log: list[History], two_dtypes: bool = False) -> None:
        super().__init__()
        self.name, self.log = name, log
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16)) if two_dtypes else None

    def note(self, what: str) -> None:
        if self.log:
            self.log[0].note(f"{what} {self.name}")

    def forward(self, x: Tensor) -> Tensor:
        self.note("F")
        y = torch.tanh(self.linear(x))
        if self.gain is not None:
            y = y * self.gain.float()
        return _NoteBackward.apply(y, lambda: self.note("B"))


class Model(nn.Module):
    """Layers in a row, in any order of registration, and maybe a last one that is the root's own."""

    def __init__(
        self, layers: int, order: Sequence[int] | None = None, two_dtypes: bool = False, head: bool = False
    ) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH) if head else nn.Identity()
        self.log: list[History] = []
        self.layers = nn.ModuleList(Noted(str(i), self.log, two_dtypes) for i in range(layers))
        self.order = list(order) if order is not None else list(range(layers))
        self.run: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x)

    def forward(self, x: Tensor) -> Tensor:
        for i in self.order:
            x = self.run(self.layers[i], x)
        return self.head(x)


class Run:
    """A sharded model and its optimizer; `step` does one step, of which the history is then kept."""

    def __init__(self, model: Model, microbatches: int = 1, **arguments: Any) -> None:
        self.model, self.microbatches = model, microbatches
        self.defer = False
        self.update: Callable[[], object] = lambda: self.optimizer.step()
        self.ctx = hocket.fully_shard(model, units=Noted, **arguments)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)

    def step(self) -> History:
        """One step, after one that is not recorded."""
        self._step()
        history = record(self.ctx)
        self.model.log[:] = [history]
        history.note("step")
        self._step()
        history.note("end")
        self.model.log.clear()
        return history

    def _step(self) -> None:
        for i in range(self.microbatches):
            x = torch.ones(ROWS, WIDTH, requires_grad=True)
            if self.defer and i < self.microbatches - 1:
                with self.ctx.accumulating():
                    self.model(x).square().sum().backward()
            else:
                self.model(x).square().sum().backward()
        self.update()
        self.optimizer.zero_grad()


def computes(history: History) -> list[Entry]:
    """Notes of compute, in order."""
    return [e for e in history.entries if e.queue == CALLER and e.name[:2] in ("F ", "B ")]


def named(history: History, prefix: str) -> list[Entry]:
    return [e for e in history.entries if e.queue != CALLER and e.name.startswith(prefix)]


def exposed(history: History, entry: Entry) -> bool:
    """Whether the caller comes behind `entry` before it has issued any compute beside it."""
    for later in history.entries[entry.index + 1 :]:
        if later.queue != CALLER:
            continue
        if history.before(entry, later):
            return True
        if later.name[:2] in ("F ", "B "):
            return False
    return False
