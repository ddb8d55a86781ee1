"""A rough model of a step, of chunks instead of ops. It finds the plans that are worth a simulation.

Note: [What the rough model knows]
A forward or a backward of a chunk is one block of time. The block adds up its compute, and the all-to-alls that no
compute covers. It is at least as long as its gathers, its reductions, and the time that the host needs to issue it.
Blocks run in the order of the plan's own steps. Values from another rank arrive one p2p transfer later. Memory is the
sum of everything that is always held, and of the activations of all chunks in flight. The model takes ten thousandths
of a second for a small step and a hundredth for a large one. Its result is mostly within a tenth of the simulation. The
search corrects it by simulations of plans with the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from hocket.config import Config
from hocket.program.cost import CostTable, units_of
from hocket.program.lower import choose_order
from hocket.program.ops import Layout, Op, Verb
from hocket.program.p2p import activation
from hocket.program.pipeline import Item, Order, Step, in_flight
from hocket.program.simulate import Overheads
from hocket.program.stages import layout_of, sharding_of
from hocket.tune.layer_orders import layer_seconds, step_seconds

_OPS = {"fwd": 4, "bwd": 5, "wgrad": 2}
"""Ops of a layer that the host issues."""


@dataclass(frozen=True)
class Block:
    """Seconds of a chunk's forward, backward or weight gradients, all its layers together."""

    compute: float = 0.0
    exchange: float = 0.0
    """All-to-alls."""
    covered: float = 0.0
    """Seconds of all-to-alls that have compute beside them without another half."""
    moved: float = 0.0
    """Gathers, or reductions."""
    copied: float = 0.0
    """Copies to the host's memory, or back."""
    issue: float = 0.0

    def __add__(self, other: Block) -> Block:
        more = vars(other)
        return type(self)(**{name: seconds + more[name] for name, seconds in vars(self).items()})


class Rough:
    """The rough model of a plan. See Note: [What the rough model knows]. Raises ValueError if it has no order."""

    def __init__(self, config: Config, costs: CostTable, overheads: Overheads) -> None:
        self._config, self._costs, self._overheads = config, costs, overheads
        self._layout, self._sharding = layout_of(config), sharding_of(config)
        self._order: Order = choose_order(self._layout, config.train.microbatches, config)[0]
        self._contention = {kind: float(value) for kind, value in overheads.contention.items()}

    @cached_property
    def seconds(self) -> float:
        """Of a step."""
        update = self._costs.table.get(("step", "all", ""))
        return self._makespan() + (float(update.seconds) if update else 0.0)

    @cached_property
    def nbytes(self) -> int:
        """Peak bytes of a rank, without the part that is the same in all plans of an order and a strategy."""
        return max(self._held(rank, in_flight(steps)) for rank, steps in enumerate(self._order))

    def _held(self, rank: int, count: int) -> int:
        layout, costs = self._layout, self._costs
        chunks = [activation(layout, costs, rank, chunk) for chunk in range(layout.chunks)]
        held = costs.state_bytes[rank] if costs.state_bytes else 0
        for unit, kind in units_of(layout, rank):
            held += costs.table["add", unit, kind].grad_bytes if self._sharding.adds_up(unit) else 0
        return held + count * sum(chunks) // len(chunks)

    def _seconds(self, verb: Verb, part: str, layer: int = -1) -> float:
        return float(self._costs.seconds(0, Op(verb, part, 0, 0, layer)))

    def _layer(self, verb: Verb, layer: int) -> Block:
        """One layer's share of a block."""
        parts = self._layout.forward_parts(layer)
        wide = [part for part in parts if self._layout.part(part, layer).communicates]
        own = [part for part in parts if part not in wide]
        exchange = 0.0 if verb == "wgrad" else sum(self._seconds(verb, part, layer) for part in wide)
        compute = sum(self._seconds(verb, part, layer) for part in own)
        if verb == "bwd":
            more = {part: self._seconds("recompute", part, layer) for part in parts}
            exchange += sum(more[part] for part in wide if self._layout.recomputes(part, layer))
            compute += sum(more[part] for part in own if self._layout.recomputes(part, layer))
        covered = sum(
            min(exchange / 2, self._seconds("wgrad", part, layer)) for part in self._layout.weighted_parts(layer)
        )
        covered = covered if verb == "bwd" and self._config.overlap.defer_wgrad != "off" else 0.0
        moved, copied = self._moved(verb, layer), self._copied(verb, layer)
        return Block(compute, exchange, covered, moved, copied, _OPS[verb] * self._issue)

    def _alike(self, layer: int) -> tuple[object, ...]:
        """All that a layer's share of a block depends on: its kind, and what is done again or copied."""
        layout, parts = self._layout, self._layout.forward_parts(layer)
        again = tuple(part for part in parts if layout.recomputes(part, layer))
        return layout.kinds[layer], again, tuple(part for part in parts if layout.offloads(part, layer))

    @cached_property
    def _issue(self) -> float:
        return max((float(value) for value in self._overheads.issue.values()), default=0.0)

    def _moved(self, verb: Verb, layer: int) -> float:
        kind, found = self._layout.kinds[layer], 0.0
        for unit in dict.fromkeys(part.unit for part in self._layout.type_of(layer).weighted if part.unit):
            if verb != "wgrad" and self._sharding.gathers(unit) and self._config.overlap.dp.strategy[-6:] == "params":
                found += float(self._costs.table["gather", unit, kind].seconds)
            if verb == "wgrad" and not self._sharding.adds_up(unit) and self._sharding.size(unit) > 1:
                found += float(self._costs.table["reduce", unit, kind].seconds)
        return found

    def _copied(self, verb: Verb, layer: int) -> float:
        """Seconds of copies to the host's memory, or back."""
        host: Verb = "offload" if verb == "fwd" else "reload"
        parts = self._layout.forward_parts(layer) if verb != "wgrad" else ()
        return sum(self._seconds(host, part, layer) for part in parts if self._layout.offloads(part, layer))

    @cached_property
    def _blocks(self) -> Mapping[tuple[str, int], Block]:
        """Blocks by verb and stage. Embedding and head are part of the blocks of the first and last stage."""
        layout, found = self._layout, dict[tuple[str, int], Block]()
        verbs: tuple[Verb, ...] = ("fwd", "bwd", "wgrad")
        alike = [self._alike(n) for n in range(len(layout.kinds))]
        layers = {(verb, what): self._layer(verb, alike.index(what)) for verb in verbs for what in set(alike)}
        for stage in range(layout.stages):
            for verb in verbs:
                ends = (("embed", stage == 0), ("head", stage == layout.stages - 1))
                block = Block(sum(self._seconds(verb, part) for part, there in ends if there))
                for layer in range(layout.bounds[stage], layout.bounds[stage + 1]):
                    block += layers[verb, alike[layer]]
                found[verb, stage] = block
        return found

    def _alone(self, block: Block, covered: float) -> float:
        """Seconds of a block if so much of its exchanges has compute beside it."""
        contend = self._contention
        compute = block.compute + contend.get("a2a", 0.0) * covered + contend.get("gather", 0.0) * block.moved
        return max(compute + block.exchange - covered, block.moved, block.copied, block.issue)

    @cached_property
    def _merged(self) -> float:
        """Time of a merged layer step beyond its compute, as a share of its exchanges."""
        seconds = layer_seconds(self._costs, self._layout)
        exchange = sum(value for word, value in seconds.items() if word[0] in "dc")
        if not exchange:
            return 0.0
        order = self._config.plan.layer_order
        words = order if " " in order else "cB aF eB dF eW dB eF cF aB uB aW uF"
        return max(0.0, step_seconds(words.split(), seconds, 2) / 2 - sum(seconds.values()) + exchange) / exchange

    def _duration(self, verb: str, stages: tuple[int, ...], apart: bool) -> float:
        """Seconds of a step of the order. `both`: forward beside backward; else items of one kind in turn."""
        blocks = self._blocks
        if verb == "both":
            forward, backward = blocks["fwd", stages[0]], blocks["bwd", stages[1]]
            back = backward if apart else backward + blocks["wgrad", stages[1]]
            block, fewer = forward + back, min(forward.exchange, backward.exchange)
            beside = min(block.exchange, 2 * fewer + backward.covered)
            return self._alone(block, beside * (1 - self._merged))
        total = 0.0
        for stage in stages:
            block = blocks[verb, stage]
            block = block + blocks["wgrad", stage] if verb == "bwd" and not apart else block
            total += self._alone(block, block.exchange if len(stages) > 1 else 0.0 if apart else block.covered)
        return total

    def _makespan(self) -> float:
        layout, done = self._layout, dict[_Done, float]()
        p2p = self._seconds("recv", "act")
        known: dict[_What, float] = {}
        clocks = [0.0] * layout.pp
        for rank, what, items, here, come in _in_turn(self._order, layout.pp, layout.chunks, layout.turning):
            if what not in known:
                known[what] = self._duration(*what)
            arrivals = [*(done[key] for key in here), *(done[key] + p2p for key in come)]
            clocks[rank] = max([clocks[rank], *arrivals]) + known[what]
            for item in items:
                done[item] = clocks[rank]
        return max(clocks)


_Done = tuple[str, int, int]
"""(verb, stage, microbatch)."""
_What = tuple[str, tuple[int, ...], bool]
"""The arguments of `Rough._duration`."""


class _Turn(NamedTuple):
    """A step of a rank: what it is and does, and what it needs of its own rank, and of others."""

    rank: int
    what: _What
    items: list[_Done]
    here: list[_Done]
    come: list[_Done]


@lru_cache(maxsize=64)
def _in_turn(order: Order, pp: int, chunks: int, turning: bool) -> list[_Turn]:
    """All steps of an order, each behind those that it waits for. Many plans have the same order."""
    layout = Layout(("dense",) * pp * chunks, pp=pp, chunks=chunks, turning=turning)
    found, done, place = list[_Turn](), set[_Done](), [0] * pp
    apart = [{step.wgrad for step in steps} - {None} for steps in order]
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(order):
            while place[rank] < len(steps):
                step = steps[place[rank]]
                items = list(_items(step, layout, rank))
                needed = [key for item in items for key in _needs(item, layout)]
                if not done.issuperset(needed):
                    break
                verb = "both" if step.fwd and step.bwd else items[0][0]
                what = verb, tuple(stage for _, stage, _ in items), step.bwd in apart[rank]
                here = [key for key in needed if layout.owner(key[1])[0] == rank]
                found.append(_Turn(rank, what, items, here, [key for key in needed if key not in here]))
                done.update(items)
                place[rank] += 1
                moved = True
    return found


def _items(step: Step, layout: Layout, rank: int) -> Iterator[_Done]:
    """(verb, stage, microbatch) of everything that runs in a step, forwards first."""
    items: tuple[tuple[str, tuple[Item, ...]], ...] = (
        ("fwd", step.forwards),
        ("bwd", step.backwards),
        ("wgrad", (step.wgrad,) if step.wgrad else ()),
    )
    for verb, those in items:
        for microbatch, chunk in those:
            yield verb, layout.stage(rank, chunk), microbatch


def _needs(item: _Done, layout: Layout) -> Iterator[_Done]:
    """The items that must be done before an item."""
    verb, stage, microbatch = item
    if verb == "fwd" and stage:
        yield "fwd", stage - 1, microbatch
    if verb == "bwd":
        if stage + 1 < layout.stages:
            yield "bwd", stage + 1, microbatch
        yield "fwd", stage, microbatch
