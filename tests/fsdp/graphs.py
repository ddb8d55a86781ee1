"""Random module graphs: nesting, ties, frozen parts, reuse, steps that skip, branches, recomputation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fsdp.models import WIDTH, Block, OddBlock, ViewBlock
from tests.fsdp.twin import Case
from tests.fsdp.zoo import Kind

Op = Literal["block", "linear", "odd", "views", "nest", "tied", "again", "read"]
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
    recompute: Literal["no", "reentrant", "plain"] = "no"
    target: int = 0
    """Whose weight is shared."""
    inside: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Graph:
    """A model."""

    nodes: tuple[Node, ...]

    def __str__(self) -> str:
        return f"Graph({self.nodes})"

    @property
    def kind(self) -> Kind:
        units = _is_unit if any(node.unit for node in self._all()) else None
        return Kind(lambda: Root(self.nodes), units, skips=True)

    @property
    def exact(self) -> bool:
        """Whether sums have one order only: more than two uses of a weight may be added up in any."""
        return not any(node.op in SHARING or node.recompute != "no" for node in self._all())

    def _all(self) -> list[Node]:
        return [one for node in self.nodes for one in (node, *node.inside)]


def _is_unit(name: str, module: nn.Module) -> bool:
    return bool(getattr(module, "is_unit", False))


class Values(nn.Module):
    """Runs nodes; every one takes an earlier value."""

    def __init__(self, nodes: tuple[Node, ...], squares: list[nn.Linear]) -> None:
        super().__init__()
        self.nodes = nodes
        self.parts = nn.ModuleList(self._part(node, squares) for node in nodes)
        self.squares = [square for square in squares]  # noqa: C416 - a list of its own, that registers nothing
        for node, part in zip(nodes, self.parts, strict=True):
            if node.frozen:
                part.requires_grad_(False)
            part.is_unit = node.unit and node.op not in ("again", "read")

    def _part(self, node: Node, squares: list[nn.Linear]) -> nn.Module:
        if node.op == "nest":
            return Values(node.inside, squares)
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
        place = node.target % i if node.op == "again" and i else i
        part, args = self.parts[place], (step,) if self.nodes[place].op == "nest" else ()
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


@st.composite
def nodes(draw: Callable[..., object], ops: tuple[Op, ...], depth: int) -> Node:
    op = draw(st.sampled_from([*ops, "nest"] if depth else ops))
    node = Node(
        op=op,
        source=draw(st.sampled_from([0, 0, 0, 1, 2])),
        unit=draw(st.sampled_from([True, True, True, False])),
        frozen=draw(st.sampled_from([False] * 5 + [True])),
        skip=draw(st.sampled_from([0, 0, 0, 0, 1, 2, 3])),
        recompute=draw(st.sampled_from(["no"] * 5 + ["reentrant", "plain"])),
        target=draw(st.integers(0, 5)),
    )
    if op != "nest":
        return node
    inside = draw(st.lists(nodes(ops, depth - 1), min_size=1, max_size=3))
    return replace(node, inside=tuple(inside))


def graphs(ops: tuple[Op, ...]) -> st.SearchStrategy[Graph]:
    return st.lists(nodes(ops, depth=2), min_size=2, max_size=7).map(lambda found: Graph(tuple(found)))


OPTIONS = {
    "prefetch": st.sampled_from([0, 1, 1, 2, 5, "1KiB", "4KiB"]),
    "staging": st.sampled_from([1, 2, 2, 3]),
    "unified": st.sampled_from([False, False, False, True]),
    "slots": st.sampled_from(["auto", "dynamic", 64]),
    "granularity": st.just("element"),
}


def random_cases(ops: tuple[Op, ...], meshes: list[tuple[int, ...] | None]) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        model=graphs(ops),
        strategy=st.sampled_from(["no_shard", "optim", "optim_grads", *["optim_grads_params"] * 3]),
        microbatches=st.integers(1, 3),
        mesh=st.sampled_from(meshes),
        options=st.fixed_dictionaries(OPTIONS),
        sync=st.sampled_from(["each", "each", "no_sync", "accumulating"]),
        steps=st.just(4),
        set_to_none=st.booleans(),
    )
