"""Which settings make a step shortest under a memory cap: candidates, and the way from one to the next.

Note: [How the search goes]
One trial prices one plan: build its program, simulate it. All combinations would be tens of thousands of trials, each
up to a fifth of a second. So settings are in groups that act on the same thing, and inside a group all combinations are
tried. The first group says which microbatch runs when. For each of the two best orders, the best plan that this group
gives goes through the other groups, always on from the best plan so far; the better of both goes through all groups
once more. What brought nothing goes back in the end. Plans that fit come before those that do not, and these by how
little they lack: so the search also finds its way under the cap. On small recipes it found what all combinations of the
table have as their best.

Note: [Long steps are priced by their period]
In the steady state of a pipeline every group of microbatches takes the same time. So the time of a step with many is
that of one with a few, just enough to reach the steady state, and so many periods more. What a rank holds at most is
reached there too, unless all of the head's weight gradients wait for the end. Other trials of long steps are priced so,
and what is shown in the end is simulated in full.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Protocol, get_args

from hocket.config import Config, Strategy
from hocket.plan.layer import MERGED
from hocket.plan.ops import Layout, Recomputable, recomputable
from hocket.plan.schedule import Kind
from hocket.plan.simulate import Costs
from hocket.settings.leaves import changed, leaf
from hocket.tune.balance import balanced

Changes = Mapping[str, Any]
"""Settings, by dotted names, that a plan has otherwise than the one that the search began with."""

BEAM = 2
"""Orders of microbatches for which all other settings are tried."""
WORTH = 1e-3
"""What a setting must gain to be changed, as a share of the step."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A plan and what the simulator says of it."""

    changes: Changes
    seconds: float
    """Of one step."""
    exposed: Mapping[Kind, float] = field(default_factory=dict)
    """Seconds in which communication of a kind is exposed, mean over ranks."""
    idle: float = 0.0
    """Seconds in which nothing runs, mean over ranks."""
    peak_bytes: int
    """The most that any rank holds at once."""


class Price(Protocol):
    """Tries a plan: builds it and asks the simulator."""

    def __call__(self, changes: Changes, *, whole: bool) -> Trial | None:
        """None if the rules refuse these settings, or one of them would have no effect.

        Without `whole` a long step may be priced by its period: see Note: [Long steps are priced by their period].
        """
        ...


@dataclass(frozen=True)
class Known:
    """What values depend on beside the settings."""

    costs: Costs
    orders: tuple[str, ...] = ()
    """Orders of a merged layer step that have no name."""
    tight: bool = False
    """Whether the plan that the search begins with does not fit: only then is time given for memory."""


@dataclass(frozen=True)
class Choice:
    """A setting that the search may change, and the values worth trying in a plan."""

    setting: str
    values: Callable[[Config, Known], Sequence[Any]]
    instead: bool = False
    """Whether these values are tried instead of the one that the setting has, where there are any."""


def _orders(c: Config, known: Known) -> Sequence[str]:
    """All but that which `auto` takes for one pipeline rank."""
    usual = "1f1b" if c.plan.chunks == 1 else "interleaved"
    return (usual, "sequential", "zb_h1", "zb_v", "merged_v") if c.mesh.pp > 1 else ()


def _chunks(c: Config, known: Known) -> Sequence[int]:
    """As many as can have equally many layers; all, if a rank's layers are not a whole number."""
    per_rank, rest = divmod(c.model.layers, c.mesh.pp)
    if c.mesh.pp == 1:
        return ()
    own = {"sequential": (1,), "zb_h1": (1,), "zb_v": (2,), "merged_v": (2,)}.get(c.plan.order, (1, 2, 3, 4, 6, 8))
    return [count for count in own if count <= per_rank and (rest or per_rank % count == 0)]


def _layout(c: Config, sizes: tuple[int, ...]) -> Layout | None:
    """Where the layers of a plan are, as many per stage as `sizes` says, none for evenly many; None if that fails."""
    stages = c.mesh.pp * c.plan.chunks
    if c.mesh.pp == 1 or stages > c.model.layers or len(sizes) not in (0, stages):
        return None
    bounds = tuple(accumulate(sizes, initial=0)) if sizes else ()
    return Layout(c.model.kinds(), c.mesh.pp, c.plan.chunks, c.mesh.ep, bounds, turning=c.plan.turning)


def _balanced(c: Config, known: Known) -> Sequence[tuple[int, ...]]:
    """So that ranks compute for equally long."""
    layout = _layout(c, ())
    return [balanced(layout, known.costs)] if layout else ()


def _splits(c: Config, known: Known) -> Sequence[tuple[int, ...]]:
    """One layer from the last stage, which has the head too, to the first one of another rank, or the other way."""
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
    return [split for split in moved if min(split) > 0]


def _groups(c: Config, known: Known) -> Sequence[int]:
    """The smallest, and one so large that the hop around the ring has time."""
    return (0, 2 * c.mesh.pp) if c.mesh.pp > 1 else ()


def _recomputed(c: Config, known: Known) -> Sequence[tuple[Recomputable, ...]]:
    """Each part alone, and all."""
    parts = recomputable(c.model.kinds()) if known.tight else ()
    return ((), *((part,) for part in parts), parts) if parts else ()


GROUPS: tuple[tuple[Choice, ...], ...] = (
    (
        Choice("plan.order", _orders),
        Choice("overlap.ep.merge", lambda c, known: ("on", "off")),
        Choice("plan.chunks", _chunks),
        Choice("plan.layers_per_stage", _balanced, instead=True),
    ),
    (
        Choice("plan.stride", lambda c, known: (2, 3)),
        Choice("plan.group", _groups),
    ),
    (Choice("overlap.ep.merge_ends", lambda c, known: ("on", "off")),),
    (Choice("plan.layers_per_stage", _splits),),
    (Choice("plan.layer_order", lambda c, known: (*MERGED, *known.orders)),),
    (
        Choice("overlap.defer_wgrad", lambda c, known: ("on", "off")),
        Choice("overlap.pp.defer_layers", lambda c, known: (0, 1, 2, -1)),
        Choice("overlap.pp.defer_parts", lambda c, known: ("attn", "all")),
    ),
    (Choice("overlap.pp.defer_head", lambda c, known: (0, 1, 2, -1)),),
    (Choice("overlap.pp.backward_lane", lambda c, known: ("on", "off")),),
    (Choice("overlap.dp.strategy", lambda c, known: get_args(Strategy)),),
    (Choice("overlap.dp.prefetch", lambda c, known: (0, 1, 2, 4)),),
    (Choice("plan.recompute", _recomputed),),
)
"""What is searched, and beside what. See Note: [How the search goes]."""


@dataclass(frozen=True)
class Found:
    """The outcome of a search."""

    path: tuple[Trial, ...]
    """From the plan that the search began with to the winner, each with one change more, all simulated in full."""
    fits: bool
    """Whether the winner keeps to the cap. If not, nothing did, and it is the plan that needs least."""


class Search:
    """One search, from the settings of a run on. `cap` is in bytes, 0 for none; `fixed` settings stay as they are."""

    def __init__(self, start: Config, known: Known, price: Price, cap: int = 0, fixed: Container[str] = ()) -> None:
        self._start, self._known = start, known
        self._price, self._cap = price, cap
        self._groups = [[choice for choice in group if choice.setting not in fixed] for group in GROUPS]
        self._trials: dict[tuple[bool, tuple[tuple[str, Any], ...]], Trial | None] = {}

    def run(self) -> Found:
        """Search. The same arguments find the same plan."""
        first, *others = self._groups
        shapes: dict[str, Trial] = {}
        for trial in sorted(self._around(self._tried({}), first), key=self._rank):
            shapes.setdefault(trial.changes.get("plan.order", ""), trial)
        swept = (self._swept(trial, others) for trial in list(shapes.values())[:BEAM])
        path = self._path(self._pruned(self._swept(min(swept, key=self._rank), self._groups)))
        end = min(range(len(path)), key=lambda n: self._rank(path[n]))
        path = path[: end + 1] if self._better(path[end], path[0]) else path[:1]
        return Found(path, self._lacks(path[-1]) == 0)

    def _try(self, changes: Changes, whole: bool = False) -> Trial | None:
        key = (whole, tuple(sorted(changes.items())))
        if key not in self._trials:
            self._trials[key] = self._price(changes, whole=whole)
        return self._trials[key]

    def _tried(self, changes: Changes, whole: bool = False) -> Trial:
        """A plan that is known to be possible."""
        trial = self._try(changes, whole)
        assert trial is not None, f"refused after all: {changes}"
        return trial

    def _lacks(self, trial: Trial) -> int:
        """Bytes above the cap."""
        return max(0, trial.peak_bytes - self._cap) if self._cap else 0

    def _rank(self, trial: Trial) -> tuple[Any, ...]:
        """The best plan has the smallest. Of equal ones it is the one that needs less, then that with fewer changes."""
        changes = sorted(trial.changes.items())
        return self._lacks(trial), trial.seconds, trial.peak_bytes, len(changes), str(changes)

    def _better(self, trial: Trial, than: Trial) -> bool:
        """Whether a plan is worth changing settings for."""
        lacks, there = self._lacks(trial), self._lacks(than)
        return lacks < there or (lacks == there and trial.seconds < than.seconds * (1 - WORTH))

    def _swept(self, trial: Trial, groups: Sequence[Sequence[Choice]]) -> Trial:
        """A plan after what every group in turn makes of it. A group is tried again as long as it helps."""
        for group in groups:
            best = min(self._around(trial, group), key=self._rank)
            while self._better(best, trial):
                trial, best = best, min(self._around(best, group), key=self._rank)
        return trial

    def _around(self, trial: Trial, group: Sequence[Choice]) -> Iterator[Trial]:
        """A plan, and those with any combination of a group's values in place of its own."""
        yield trial
        for changes in self._combined(trial.changes, group):
            found = self._try(changes)
            if found is not None:
                yield found

    def _combined(self, changes: Changes, group: Sequence[Choice]) -> Iterator[Changes]:
        """Changes with each combination of values; those of a setting may depend on the settings before it."""
        if not group:
            yield changes
            return
        choice, *others = group
        given = choice.values(changed(self._start, changes), self._known)
        there = leaf(self._start, choice.setting)
        rest = {name: value for name, value in changes.items() if name != choice.setting}
        kept = () if choice.instead and given else (there, changes.get(choice.setting, there))
        for value in dict.fromkeys((*kept, *given)):
            yield from self._combined(rest if value == there else {**rest, choice.setting: value}, others)

    def _pruned(self, trial: Trial) -> Trial:
        """A plan without the changes that bring nothing."""
        for name in self._in_order(trial.changes):
            without = self._try({other: value for other, value in trial.changes.items() if other != name})
            if without is not None and not self._better(trial, without):
                trial = without
        return trial

    def _in_order(self, changes: Changes) -> list[str]:
        """The names of changes, in the order of the table."""
        return [name for name in dict.fromkeys(c.setting for group in GROUPS for c in group) if name in changes]

    def _path(self, winner: Trial) -> tuple[Trial, ...]:
        """The way to the winner, a change at a time in the order of the table; those that need another come with it."""
        path, changes = [self._tried({}, whole=True)], dict[str, Any]()
        for name in self._in_order(winner.changes):
            changes[name] = winner.changes[name]
            step = self._try(dict(changes), whole=True)
            if step is not None:
                path.append(step)
        return tuple(path)
