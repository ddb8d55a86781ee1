"""Random module graphs: nesting, ties, frozen parts, reuse, steps that skip, branches, recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fsdp.kinds import Kind
from tests.fsdp.models import WIDTH, Block, OddBlock, ViewBlock
from tests.fsdp.twin import Case

Op = Literal["block", "linear", "odd", "views", "nest", "tied", "again", "read"]
Recompute = Literal["no", "reentrant", "plain"]
RECOMPUTE: tuple[Recompute, ...] = ("no", "no", "no", "no", "reentrant", "plain")
LEAVES: tuple[Op, ...] = ("block", "linear", "odd", "views")
SHARING: tuple[Op, ...] = ("tied", "again", "read")


@dataclass(frozen=True)
class Node:
    """One module of a graph, or another use of one."""

    op: Op
    source: int
    """Which of the values so far it takes, counted back from the newest."""
    unit: bool = True
    frozen: bool = False
    skip: int = 0
    """Skipped in every third step, from step `skip` - 1 on; 0 never."""
    recompute: Recompute = "no"
    target: int = 0
    """Whose weight is shared."""
    inside: tuple[Node, ...] = ()

    def __str__(self) -> str:
        plain = Node(self.op, 0)
        told = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(plain, name)]
        return f"{self.op}({', '.join(one for one in told if not one.startswith('inside'))})" + (
            "[" + ", ".join(map(str, self.inside)) + "]" if self.inside else ""
        )

    @property
    def is_unit(self) -> bool:
        return self.unit and self.op not in ("again", "read")


@dataclass(frozen=True)
class Graph:
    """A model."""

    nodes: tuple[Node, ...]

    def __str__(self) -> str:
        return "[" + ", ".join(map(str, self.nodes)) + "]"

    @property
    def kind(self) -> Kind:
        units = _is_unit if any(one.is_unit for one in _all(self.nodes)) else None
        return Kind(lambda: Root(self.nodes), units, skips=True)

    exact = False
    """Where three branches meet, autograd adds their gradients up in an order that units inside of them change."""


def _all(nodes: tuple[Node, ...]) -> Iterator[Node]:
    for one in nodes:
        yield one
        yield from _all(one.inside)


def _is_unit(name: str, module: nn.Module) -> bool:
    return bool(getattr(module, "is_unit", False))


class Values(nn.Module):
    """Runs nodes; every one takes an earlier value."""

    def __init__(self, nodes: tuple[Node, ...], squares: list[nn.Linear], around: tuple[nn.Module, ...] = ()) -> None:
        """`around` are modules of the values that this one is nested in: they may run in here again."""
        super().__init__()
        self.nodes = nodes
        parts = list[nn.Module]()
        for one in nodes:
            before = tuple(part for part in parts if not isinstance(part, Values))
            parts.append(self._part(one, squares, around + before))
        self.parts, self._around = nn.ModuleList(parts), [part for part in around]  # noqa: C416 - registers nothing
        self.squares = [square for square in squares]  # noqa: C416 - a list of its own, that registers nothing
        for node, part in zip(nodes, self.parts, strict=True):
            if node.frozen:
                part.requires_grad_(False)
            part.__dict__["is_unit"] = node.is_unit

    def _part(self, node: Node, squares: list[nn.Linear], around: tuple[nn.Module, ...]) -> nn.Module:
        if node.op == "nest":
            return Values(node.inside, squares, around)
        if node.op == "block":
            return Block(hidden=13, bias=node.target % 2 == 0)
        if node.op == "odd":
            return OddBlock()
        if node.op == "views":
            return ViewBlock()
        if node.op in ("again", "read"):
            return nn.Identity()
        linear = nn.Linear(WIDTH, WIDTH)
        if node.op == "tied" and squares:
            linear.weight = squares[node.target % len(squares)].weight
        squares.append(linear)
        return linear

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        values = [x]
        for i, node in enumerate(self.nodes):
            source = values[-1 - node.source % len(values)]
            skipped = node.skip and step % 3 == node.skip - 1
            values.append(source if skipped else self._run(i, node, source, step))
        return values[-1] if len(values) < 3 else values[-1] + 0.5 * values[-2]

    def _run(self, i: int, node: Node, x: Tensor, step: int) -> Tensor:
        if node.op == "read":
            return x + 0.5 * F.linear(x, self.squares[node.target % len(self.squares)].weight) if self.squares else x
        part = self.parts[i]
        if node.op == "again" and (earlier := [*self._around, *self.parts[:i]]):
            part = earlier[node.target % len(earlier)]
        args = (step,) if isinstance(part, Values) else ()
        if node.recompute == "no":
            return torch.tanh(part(x, *args))
        return torch.tanh(checkpoint(part, x, *args, use_reentrant=node.recompute == "reentrant"))


class Root(nn.Module):
    """A graph between two layers of the root's own."""

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.values = Values(nodes, [])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        return self.last(self.values(self.first(x), step))


def node(rng: Random, ops: tuple[Op, ...], depth: int) -> Node:
    op: Op = rng.choice((*ops, "nest") if depth else ops)
    return Node(
        op=op,
        source=rng.choice([0, 0, 0, 1, 2]),
        unit=rng.random() < 0.75,
        frozen=rng.random() < 0.15,
        skip=rng.choice([0, 0, 0, 0, 1, 2, 3]),
        recompute=rng.choice(RECOMPUTE),
        target=rng.randrange(6),
        inside=tuple(node(rng, ops, depth - 1) for _ in range(rng.randint(1, 3))) if op == "nest" else (),
    )


def graph(rng: Random, ops: tuple[Op, ...]) -> Graph:
    return Graph(tuple(node(rng, ops, depth=2) for _ in range(rng.randint(2, 7))))


def uses_again(nodes: tuple[Node, ...]) -> bool:
    """Whether a graph uses a unit more than once."""
    return any(node.op == "again" or uses_again(node.inside) for node in nodes)


def random_case(rng: Random, ops: tuple[Op, ...], meshes: list[tuple[int, ...] | None]) -> Case:
    mesh = rng.choice(meshes)
    strategy = rng.choice(["no_shard", "optim", "optim_grads", *["optim_grads_params"] * 3])
    options: dict[str, Any] = {"prefetch": rng.choice([0, 1, 1, 2, 5]), "staging": rng.choice([1, 2, 2, 3])}
    return Case(
        model=graph(rng, ops),
        strategy=strategy,
        microbatches=rng.randint(1, 3),
        mesh=mesh,
        options=options,
        sync=rng.choice(["each", "each", "no_sync", "accumulating"]),
        steps=4,
        set_to_none=rng.random() < 0.7,
    )
