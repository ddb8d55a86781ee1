"""The settings that the search may change, and the values that it tries in a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_args

from hocket.config import Config, Strategy
from hocket.config.layout import part_and_layers
from hocket.program.layer import MERGED
from hocket.program.ops import Layout
from hocket.program.simulate import Costs
from hocket.program.stages import layout_of
from hocket.settings.derived import most_layers
from hocket.settings.schema import changed
from hocket.tune.candidates import balanced
from hocket.tune.choose import offloaded, recomputed

Changes = Mapping[str, Any]
"""Settings by dotted name in which a plan differs from the first plan of the search."""


@dataclass(frozen=True)
class Known:
    """What the values to try depend on, beside the settings."""

    costs: Costs
    orders: tuple[str, ...] = ()
    """Unnamed orders of a merged layer step."""


@dataclass(frozen=True)
class Choice:
    """A setting that the search may change, and the values that it tries in a plan."""

    setting: str
    values: Callable[[Config, Known], Sequence[Any]]
    instead: bool = False
    """Whether these values, if there are any, replace the setting's present value instead of joining it."""


def _orders(c: Config, known: Known) -> Sequence[str]:
    """All orders except the one that `auto` takes for one pipeline rank."""
    usual = "1f1b" if c.plan.chunks == 1 else "interleaved"
    return (usual, "sequential", "zb_h1", "zb_v", "merged_v") if c.mesh.pp > 1 else ()


def _chunks(c: Config, known: Known) -> Sequence[int]:
    """Numbers of chunks with equally many layers; all numbers, if ranks cannot have equally many layers."""
    per_rank, rest = divmod(c.model.layers, c.mesh.pp)
    if c.mesh.pp == 1:
        return ()
    own = {"sequential": (1,), "zb_h1": (1,), "zb_v": (2,), "merged_v": (2,)}.get(c.plan.order, (1, 2, 3, 4, 6, 8))
    most = (c.model.layers + 2) // c.mesh.pp
    return [count for count in own if count <= most and (rest or per_rank % count == 0)]


def _layout(c: Config, sizes: tuple[int, ...]) -> Layout | None:
    """The layout of a plan with `sizes` layers per stage; empty sizes are even. None if there is no such layout."""
    stages = c.mesh.pp * c.plan.chunks
    if c.mesh.pp == 1 or stages > c.model.layers + 2 or len(sizes) not in (0, stages):
        return None
    return layout_of(changed(c, {"plan.layers_per_stage": sizes}))


def _balanced(c: Config, known: Known) -> Sequence[tuple[int, ...]]:
    """The split with which all ranks compute for the same time."""
    layout = _layout(c, ())
    return [balanced(layout, known.costs)] if layout else ()


def _splits(c: Config, known: Known) -> Sequence[tuple[int, ...]]:
    """Even stages, and one layer from the last stage, which has the head, to the first of another rank, or back."""
    layout = _layout(c, c.plan.split)
    if layout is None:
        return ()
    sizes = tuple(hi - lo for lo, hi in pairwise(layout.bounds))
    last, _ = layout.owner(layout.stages - 1)
    moved = [
        (*sizes[:n], sizes[n] + count, *sizes[n + 1 : -1], sizes[-1] - count)
        for n in range(layout.pp)
        for count in (1, -1)
        if layout.owner(n)[0] != last
    ]
    return [(), *(split for split in moved if min(split) >= 0 and 0 not in split[1:-1])]


def _groups(c: Config, known: Known) -> Sequence[int]:
    """The smallest group, and one so large that the p2p transfer around the ring has time."""
    return (0, 2 * c.mesh.pp) if c.mesh.pp > 1 else ()


def _in_fewer_layers(items: tuple[str, ...], c: Config) -> Sequence[tuple[str, ...]]:
    """The plan's recomputed or offloaded parts in a quarter, a half, three quarters of the longest stage's layers."""
    parts, layers = [part for part, _ in map(part_and_layers, items)], most_layers(c)
    counts = dict.fromkeys(layers * quarters // 4 for quarters in (1, 2, 3)) if parts else ()
    return [tuple(f"{part}:{count}" for part in parts) for count in counts if count]


RECOMPUTE = "plan.recompute"


def _one_more_or_less(items: tuple[str, ...], parts: Iterable[str]) -> list[tuple[str, ...]]:
    """Items without one of them, and with one more of the parts, in all layers."""
    fewer = [tuple(other for other in items if other != item) for item in items]
    named = {part for part, _ in map(part_and_layers, items)}
    return [*fewer, *((*items, part) for part in parts if part not in named)]


def _recomputed(c: Config, known: Known) -> list[tuple[str, ...]]:
    return _one_more_or_less(c.plan.recompute, recomputed(c)[-1])


def _offloaded(c: Config, known: Known) -> list[tuple[str, ...]]:
    return _one_more_or_less(c.plan.offload, offloaded(c)[-1])


ORDER: tuple[Choice, ...] = (
    Choice("plan.order", _orders),
    Choice("overlap.ep.merge", lambda c, known: ("on", "off")),
    Choice("plan.chunks", _chunks),
    Choice("plan.layers_per_stage", _balanced, instead=True),
)
"""Settings that decide which microbatch runs when, and where."""

RELIEF: tuple[Choice, ...] = (
    Choice("overlap.dp.strategy", lambda c, known: get_args(Strategy)),
    Choice(RECOMPUTE, _recomputed),
)
"""Settings that trade time for memory, or memory for time."""

GROUPS: tuple[tuple[Choice, ...], ...] = (
    ORDER,
    RELIEF,
    (
        Choice("plan.stride", lambda c, known: (2, 3)),
        Choice("plan.group", _groups),
        Choice("overlap.ep.merge_ends", lambda c, known: ("on", "off")),
    ),
    (
        Choice("overlap.defer_wgrad", lambda c, known: ("on", "off")),
        Choice("overlap.pp.defer_layers", lambda c, known: (0, "attn:1", "attn:2", "attn", 1, 2, -1)),
    ),
    (Choice("overlap.cp.method", lambda c, known: ("gather", "heads") if c.mesh.cp > 1 else ()),),
    (Choice("plan.layers_per_stage", _splits),),
    (Choice("plan.offload", _offloaded), Choice(RECOMPUTE, _recomputed)),
    (Choice("plan.recompute", lambda c, known: _in_fewer_layers(c.plan.recompute, c)),),
    (Choice("plan.offload", lambda c, known: _in_fewer_layers(c.plan.offload, c)),),
    (Choice("overlap.pp.defer_head", lambda c, known: (0, 1, 2, -1)),),
    (Choice("plan.layer_order", lambda c, known: (*MERGED, *known.orders)),),
    (Choice("overlap.dp.prefetch", lambda c, known: (0, 1, 2, 4)),),
)
"""Groups of settings that are searched together, the most important first. See Note: [How the search goes]."""
