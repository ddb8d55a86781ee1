"""What a program of the zoo is given: a way of sharding, data, and a place for what it finds."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import hocket

Form = Literal["plain", "fsdp2", "hocket"]
Units = type[nn.Module] | tuple[type[nn.Module], ...] | Sequence[nn.Module]

STEPS = 3


@dataclass
class Run:
    """One run of a program in one form. Plain runs compute the data of all ranks, one rank after the other."""

    form: Form
    rank: int
    world: int
    losses: list[Tensor] = field(default_factory=list)
    """Of this rank's data."""
    noted: dict[str, Tensor] = field(default_factory=dict)
    """Weights and other values that must be those of the plain run."""
    contexts: dict[nn.Module, Any] = field(default_factory=dict)
    """What `hocket.fully_shard` returned, by model."""
    turn: int = field(init=False)
    """Whose data is computed now."""
    shares: int = 1
    """How many ranks have the same data, and parts of weights."""

    def __post_init__(self) -> None:
        self.turn = self.rank
        self._plain: list[nn.Module] = []
        self._buffers: dict[tuple[nn.Module, int], dict[str, Tensor]] = {}
        self._random: dict[int, Tensor] = {}

    def shard(self, model: nn.Module, units: Units = (), **options: Any) -> nn.Module:
        """Shard a model, with the modules of these classes, or these modules, as units."""
        kinds = (units,) if isinstance(units, type) else tuple(units)
        chosen = [
            one
            for one in model.modules()
            if one is not model
            and any(one is kind if isinstance(kind, nn.Module) else isinstance(one, kind) for kind in kinds)
        ]
        assert chosen or not kinds, f"no module is a {kinds}"
        if self.form == "plain":
            self._plain.append(model)
            self._buffers[model, -1] = {name: buffer.clone() for name, buffer in model.named_buffers()}
        if self.form == "fsdp2":
            for one in reversed(chosen):
                fsdp.fully_shard(one, **options)
            fsdp.fully_shard(model, **options)
        if self.form == "hocket":
            hocket.fully_shard(model, units=chosen or None, **options)
            self.contexts[model] = hocket.sharding.context_of(model)
        return model

    def one_unit(self, module: nn.Module, **options: Any) -> nn.Module:
        """Make one unit of what a module holds outside of others, blocks first and the model last, as FSDP2 does."""
        if self.form != "plain":
            (fsdp.fully_shard if self.form == "fsdp2" else hocket.fully_shard)(module, **options)
        return module

    def share_data(self, ranks: int) -> None:
        """Neighbouring ranks, as many, compute the same data."""
        self.rank, self.world, self.shares = self.rank // ranks, self.world // ranks, ranks
        self.turn = self.rank

    def seeds(self, step: int) -> Iterator[int]:
        """A seed of data for this rank, or for all ranks one after the other."""
        if self.form != "plain":
            yield 1000 * step + self.rank
            return
        for rank in range(self.world):
            self.turn = rank
            with self._own_state(rank):
                yield 1000 * step + rank
        self.turn = self.rank
        self._load(self.rank)  # what is evaluated between steps has this rank's buffers

    @contextlib.contextmanager
    def _own_state(self, rank: int) -> Iterator[None]:
        """Inside, buffers and random numbers are those that a rank would have."""
        before = torch.get_rng_state()
        self._load(rank)
        torch.set_rng_state(self._random.get(rank, before))
        yield
        self._random[rank] = torch.get_rng_state()
        torch.set_rng_state(before)
        for model in self._plain:
            self._buffers[model, rank] = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def _load(self, rank: int) -> None:
        for model in self._plain:
            mine = self._buffers.get((model, rank)) or self._buffers[model, -1]
            for name, buffer in model.named_buffers():
                buffer.copy_(mine[name])

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Note the loss and run its backward, whose gradients all ranks together average."""
        if self.turn == self.rank:
            self.losses.append(loss.detach().clone())
        (loss / self.world if self.form == "plain" else loss).backward(**options)

    def note(self, name: str, value: Any) -> None:
        """Note a value that must be that of the plain run."""
        value = value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)
        self.noted[name] = value.detach().clone()

    def note_weights(self, model: nn.Module, name: str = "") -> None:
        """Note the whole weights of a model."""
        for key, value in self.weights(model).items():
            self.note(name + key, value)

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """The whole weights of a model by name, on every rank."""
        names = [name for name, _ in model.named_parameters()]
        if model not in self.contexts or self.shares > 1:
            found: dict[str, Any] = {name: model.get_parameter(name) for name in names}
            return {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in found.items()}
        with self.contexts[model].gathered():
            found = {name: model.get_parameter(name).detach() for name in names}
            return {name: p.full_tensor() if isinstance(p, DTensor) else p.clone() for name, p in found.items()}


def _types(kinds: Sequence[Any]) -> tuple[type[nn.Module], ...]:
    return tuple(kind for kind in kinds if isinstance(kind, type))


@dataclass(frozen=True)
class Program:
    """A program of the zoo."""

    name: str
    train: Callable[[Run], None]
    heavy: bool = False
    """Whether only the command runs it."""
    needs: tuple[str, ...] = ()
    """Packages that it imports."""
    no: str = ""
    """Why hocket refuses it; one of `REASONS`."""
    off: float = 2e-5
    """By how much values may differ, besides 2e-4 of each."""
    world: int = 2
    """Ranks that run it."""


REASONS = (
    "autograd through sharded parameters",
    "derivatives by torch.func",
    "parameters replaced or moved later",
    "an optimizer of whole matrices",
)
"""Why hocket refuses a program."""

PROGRAMS: dict[str, Program] = {}


def program(
    name: str, *, heavy: bool = False, needs: tuple[str, ...] = (), no: str = "", off: float = 2e-5, world: int = 2
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Register a function as a program."""
    assert not no or no in REASONS

    def register(train: Callable[[Run], None]) -> Callable[[Run], None]:
        assert name not in PROGRAMS, name
        PROGRAMS[name] = Program(name, train, heavy, needs, no, off, world)
        return train

    return register


Loss = Callable[[nn.Module, torch.Generator], Tensor]
"""The loss of a model for data from a generator."""


def loop(
    name: str,
    build: Callable[[], nn.Module],
    loss: Loss,
    units: Any = (),
    *,
    heavy: bool = False,
    needs: tuple[str, ...] = (),
) -> None:
    """Register the plain loop over steps with a model. `units` may be a function of the model."""

    def train(run: Run) -> None:
        model = build()
        chosen = units(model) if callable(units) and not isinstance(units, type) else units
        model = run.shard(model, chosen)
        updates = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, foreach=True)
        for step in range(STEPS):
            for seed in run.seeds(step):
                run.backward(loss(model, torch.Generator().manual_seed(seed)))
            updates.step()
            updates.zero_grad()
        run.note_weights(model)

    train.__module__ = sys._getframe(1).f_globals["__name__"]
    program(name, heavy=heavy, needs=needs)(train)


WIDTH = 16


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def stack(blocks: int = 3) -> nn.Sequential:
    """A small model of blocks."""
    return nn.Sequential(nn.Linear(8, WIDTH), *(Block() for _ in range(blocks)), nn.Linear(WIDTH, 4))


def floats(*shape: int) -> Callable[[torch.Generator], Tensor]:
    """Draws normal numbers."""
    return lambda generator: torch.randn(shape, generator=generator)


def fit(*shape: int) -> Loss:
    """The square of what a model makes of normal numbers, against targets of another draw."""

    def loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        x = torch.randn(shape, generator=generator)
        return distance(model(x), generator)

    return loss


def distance(out: Tensor, generator: torch.Generator) -> Tensor:
    """The mean square between an output and normal numbers."""
    return F.mse_loss(out, torch.randn(out.shape, generator=generator))
