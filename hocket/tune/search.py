"""Searches the settings that make a step shortest under a memory cap.

Note: [How the search goes]
All combinations would be tens of thousands of plans. So the search simulates all orders of microbatches and stages,
each as given and, under a cap, with the strategy and the recomputed parts that `auto` chooses for it under that cap: an
order that needs much memory may be the best one with a part recomputed. It then improves the best plans of three orders
group by group, and tries all combinations inside a group. If a value makes a step shorter but too large, or smaller but
longer, the search tries it again with the parts recomputed that `auto` chooses. In the end it undoes changes that gain
nothing. The number of operations in a step bounds the number of simulations, and no clock does. So the same command
finds the same plan. Compared with all combinations of small recipes the search stays within 1 %
(`tests/plan/test_search.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hocket.config import Config
from hocket.program.simulate import Kind
from hocket.settings.schema import changed, leaf
from hocket.tune.search_values import GROUPS, ORDER, RECOMPUTE, RELIEF, Changes, Choice, Known

BEAM = 3
"""Number of orders, with their numbers of chunks, for which all other settings are tried."""
WORTH = 1e-3
"""Share of the step that a change of a setting must gain."""
SPEND = 2_000_000
"""Largest number of simulated operations, without those of the plans that are shown."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A plan and its simulation."""

    changes: Changes
    seconds: float
    """Seconds of one step."""
    exposed: Mapping[Kind, float] = field(default_factory=dict)
    """Seconds in which communication of a kind is exposed, mean over ranks."""
    idle: float = 0.0
    """Seconds in which nothing runs, mean over ranks."""
    peak_bytes: int
    """Peak bytes of the rank that holds most."""
    ops: int = 0
    """Operations that were simulated for it."""


class Price(Protocol):
    """Tries a plan."""

    def __call__(self, changes: Changes, *, whole: bool) -> Trial | None:
        """The simulation. None if the rules refuse these settings, or one of them would have no effect.

        Without `whole` a long step may be priced by its period: see Note: [Long steps are priced by their period].
        """
        ...

    def relieved(self, changes: Changes, names: Collection[str]) -> Changes | None:
        """The plan with some settings as `auto` chooses them under the cap. None where the rules refuse that."""
        ...


@dataclass(frozen=True)
class Found:
    """The outcome of a search."""

    path: tuple[Trial, ...]
    """Plans from the first one to the winner. Each has one change more than the one before. All are simulated in
    full."""
    fits: bool
    """Whether the winner keeps to the cap. If not, no plan did, and the winner is the plan that needs least."""


class Search:
    """One search that starts from the settings of a run. `cap` is in bytes, 0 for none. `fixed` settings stay."""

    def __init__(self, start: Config, known: Known, price: Price, cap: int = 0, fixed: Container[str] = ()) -> None:
        self._start, self._known = start, known
        self._price, self._cap = price, cap
        self._groups = [self._open(group, fixed) for group in GROUPS]
        self._order, self._relief = self._open(ORDER, fixed), self._open(RELIEF, fixed)
        self._trials: dict[tuple[bool, tuple[tuple[str, Any], ...]], Trial | None] = {}
        self._spent = 0

    def _open(self, group: Sequence[Choice], fixed: Container[str]) -> list[Choice]:
        return [choice for choice in group if choice.setting not in fixed]

    def run(self) -> Found:
        """Search. The same arguments find the same plan."""
        swept = [self._swept(trial) for trial in self._leads()]
        path = self._path(self._pruned(self._swept(min(swept, key=self._rank))))
        end = min(range(len(path)), key=lambda n: self._rank(path[n]))
        path = path[: end + 1] if self._better(path[end], path[0]) else path[:1]
        return Found(path, self._lacks(path[-1]) == 0)

    def _leads(self) -> list[Trial]:
        """The best plans of the best orders."""
        tried = [self._tried({})]
        for changes in self._combined({}, self._order):
            relief = (choice.setting for choice in self._relief)
            tried += filter(None, [self._try(changes), self._relieved(changes, *relief)])
        leads: dict[tuple[Any, ...], Trial] = {}
        for trial in sorted(tried, key=self._rank):
            plan = changed(self._start, trial.changes)
            leads.setdefault((plan.plan.order, plan.overlap.ep.merge, plan.plan.chunks), trial)
        return list(leads.values())[:BEAM]

    def _relieved(self, changes: Changes, *names: str) -> Trial | None:
        """A plan with settings as `auto` chooses them under the cap."""
        open_ = {choice.setting for group in self._groups for choice in group}.intersection(names)
        found = self._price.relieved(changes, open_) if self._cap and open_ else None
        if found is None:
            return None
        there = {name: leaf(self._start, name) for name in found}
        return self._try({name: value for name, value in found.items() if value != there[name]})

    def _try(self, changes: Changes, whole: bool = False) -> Trial | None:
        key = (whole, tuple(sorted(changes.items())))
        if key not in self._trials:
            if not whole and self._spent > SPEND:
                return None
            self._trials[key] = trial = self._price(changes, whole=whole)
            self._spent += trial.ops if trial and not whole else 0
        return self._trials[key]

    def _tried(self, changes: Changes, whole: bool = False) -> Trial:
        """The trial of a plan that is known to be possible."""
        trial = self._try(changes, whole)
        assert trial is not None, f"refused after all: {changes}"
        return trial

    def _lacks(self, trial: Trial) -> int:
        """Bytes above the cap."""
        return max(0, trial.peak_bytes - self._cap) if self._cap else 0

    def _rank(self, trial: Trial) -> tuple[Any, ...]:
        """Sort key: the best plan has the smallest. Of equal plans less memory wins, then fewer changes."""
        changes = sorted(trial.changes.items())
        return self._lacks(trial), trial.seconds, trial.peak_bytes, len(changes), str(changes)

    def _better(self, trial: Trial, than: Trial) -> bool:
        """Whether a plan is so much better that settings should change."""
        lacks, there = self._lacks(trial), self._lacks(than)
        return lacks < there or (lacks == there and trial.seconds < than.seconds * (1 - WORTH))

    def _swept(self, trial: Trial) -> Trial:
        """A plan improved by every group in turn. A group is tried again as long as it helps."""
        for group in self._groups[1:]:
            best = min(self._around(trial, group), key=self._rank)
            while self._better(best, trial):
                trial, best = best, min(self._around(best, group), key=self._rank)
        return trial

    def _around(self, trial: Trial, group: Sequence[Choice]) -> Iterator[Trial]:
        """A plan, and the plans with every combination of a group's values in place of its own."""
        yield trial
        names = {choice.setting for choice in group}
        if "plan.offload" in names and (found := self._relieved(trial.changes, *names)):
            yield found
        for changes in self._combined(trial.changes, group):
            found = self._try(changes)
            if found is None:
                continue
            yield found
            shorter, larger = found.seconds < trial.seconds, self._lacks(found) > 0
            smaller = found.peak_bytes < trial.peak_bytes
            if (shorter and larger) or (not shorter and smaller):
                relieved = self._relieved(changes, RECOMPUTE)
                if relieved is not None:
                    yield relieved

    def _combined(self, changes: Changes, group: Sequence[Choice]) -> Iterator[Changes]:
        """Changes with each combination of values. The values of a setting may depend on the settings before it."""
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
        """A plan without the changes that gain nothing."""
        for name in self._in_order(trial.changes):
            without = self._try({other: value for other, value in trial.changes.items() if other != name})
            if without is not None and not self._better(trial, without):
                trial = without
        return trial

    def _in_order(self, changes: Changes) -> list[str]:
        """The names of changes, in the order of the table."""
        return [name for name in dict.fromkeys(c.setting for group in GROUPS for c in group) if name in changes]

    def _path(self, winner: Trial) -> tuple[Trial, ...]:
        """The way to the winner, one change at a time in the order of the table. Dependent changes come together."""
        path, changes = [self._tried({}, whole=True)], dict[str, Any]()
        for name in self._in_order(winner.changes):
            changes[name] = winner.changes[name]
            step = self._try(dict(changes), whole=True)
            if step is not None:
                path.append(step)
        return tuple(path)
