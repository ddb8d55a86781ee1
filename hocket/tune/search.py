"""Searches the settings that make a step shortest under a memory cap.

Note: [How the search goes]
All combinations would be tens of thousands of plans. The rough model (`rough.py`) prices the combinations of the most
important settings: the order of microbatches and stages, and the settings that trade time for memory. It prices them
together, because an order that needs much memory may be the best one with a part recomputed. The search simulates the
plans that the model finds promising, the most promising first. Each simulation corrects the model's price of similar
plans. The search then improves the best plans of three orders group by group, and tries all combinations inside a
group. If a value makes a step shorter but too large, or smaller but longer, the search tries it again with other parts
recomputed or another strategy. In the end it undoes changes that gain nothing. The number of operations in a step
bounds the number of simulations, and no clock does. So the same command finds the same plan. Compared with all
combinations of small recipes the search stays within 3 % (`tests/plan/test_search.py`).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hocket.config import Config
from hocket.program.simulate import Kind
from hocket.settings.schema import changed, leaf
from hocket.tune.candidates import GROUPS, ORDER, RELIEF, Changes, Choice, Known

BEAM = 3
"""Number of orders, with their numbers of chunks, for which all other settings are tried."""
WORTH = 1e-3
"""Share of the step that a change of a setting must gain."""
LEADS = 24
"""Largest number of simulations to find these orders."""
_NEAR = 1.02
"""Factor by which the corrected rough model may be wrong about memory, and about time."""
_HOPED = 0.75
"""Hoped-for memory beyond a guess of an unknown order, as a share of the least that simulations have shown."""
_FAR = 1.15
"""Factor by which the rough model may be wrong about time before a correction."""
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


@dataclass(frozen=True)
class Guess:
    """A plan and its price by the rough model."""

    changes: Changes
    seconds: float
    nbytes: int


class Price(Protocol):
    """Tries a plan."""

    def __call__(self, changes: Changes, *, whole: bool) -> Trial | None:
        """The simulation. None if the rules refuse these settings, or one of them would have no effect.

        Without `whole` a long step may be priced by its period: see Note: [Long steps are priced by their period].
        """
        ...

    def guess(self, changes: Changes) -> Guess | None:
        """The price by the rough model. None in the same cases."""
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
        self._corrections: dict[tuple[Any, ...], tuple[float, int]] = {}
        """Simulations of similar plans: (seconds as a share of the guess, bytes beyond the guess)."""
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
        """The best plans of the best orders, by simulations of promising guesses."""
        start = self._tried({})
        self._learn(start)
        left = self._guesses()
        best, tried = start, [start]
        for _ in range(LEADS):
            left.sort(key=self._promise)
            if not left or not self._promising(left[0], best):
                break
            trial = self._try(left.pop(0).changes)
            if trial is not None:
                self._learn(trial)
                tried.append(trial)
                best = min(best, trial, key=self._rank)
        leads: dict[tuple[Any, ...], Trial] = {}
        for trial in sorted(tried, key=self._rank):
            leads.setdefault(tuple(self._alike(trial.changes))[-1], trial)
        return list(leads.values())[:BEAM]

    def _guesses(self) -> list[Guess]:
        """Orders with all trades of time for memory. Leaves out orders that are far too long without such trades."""
        plain: dict[str, Guess] = {}
        for changes in self._combined({}, self._order):
            guess = self._price.guess(changes)
            if guess is not None:
                plain[str(sorted(guess.changes.items()))] = guess
        found, shortest = list[Guess](), float("inf")
        for guess in sorted(plain.values(), key=lambda guess: guess.seconds):
            if guess.seconds > _FAR * shortest:
                break
            for changes in self._combined(guess.changes, self._relief):
                relieved = self._price.guess(changes)
                if relieved is not None:
                    found.append(relieved)
                    if self._expected(relieved)[1] <= self._limit / _NEAR:
                        shortest = min(shortest, relieved.seconds)
        return found

    @property
    def _limit(self) -> float:
        return self._cap or float("inf")

    def _alike(self, changes: Changes) -> Iterator[tuple[Any, ...]]:
        """Names of groups of plans similar to this one, the closest group first."""
        config = changed(self._start, changes)
        order = config.plan.order, config.overlap.ep.merge, config.plan.chunks
        yield (*order, config.plan.offload, config.plan.recompute, config.overlap.dp.strategy)
        yield (*order, bool(config.plan.offload), bool(config.plan.recompute))
        yield order

    def _learn(self, trial: Trial) -> None:
        guess = self._price.guess(trial.changes)
        if guess is not None:
            for name in self._alike(trial.changes):
                self._corrections[name] = trial.seconds / guess.seconds, trial.peak_bytes - guess.nbytes

    def _expected(self, guess: Guess) -> tuple[float, int]:
        """Corrected seconds and bytes of a guess. An order without a simulation gets the best possible values."""
        known = [self._corrections[name] for name in self._alike(guess.changes) if name in self._corrections]
        if not known and self._corrections:
            longer, more = (min(values) for values in zip(*self._corrections.values(), strict=True))
            known = [(min(longer, 1.0), int(_HOPED * more))]
        longer, more = known[0] if known else (1.0, 0)
        return guess.seconds * longer, guess.nbytes + more

    def _promise(self, guess: Guess) -> tuple[Any, ...]:
        """Sort key: the most promising guess has the smallest."""
        seconds, nbytes = self._expected(guess)
        lacks = max(0.0, nbytes - _NEAR * self._limit)
        return lacks, seconds, nbytes, str(sorted(guess.changes.items()))

    def _promising(self, guess: Guess, best: Trial) -> bool:
        lacks, seconds, *_ = self._promise(guess)
        lacking = self._lacks(best)
        return lacks < lacking if lacking else lacks == 0 and seconds < best.seconds * _NEAR

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
        relief = {choice.setting for choice in group} & {choice.setting for choice in RELIEF}
        for changes in self._combined(trial.changes, group):
            if relief and not self._worth_trying(changes, trial):
                continue
            found = self._try(changes)
            if found is not None:
                yield found
                if self._cap and not relief:
                    yield from self._relieved(found, trial)

    def _worth_trying(self, changes: Changes, than: Trial) -> bool:
        """Whether a plan may be better by the rough model, for settings that the model knows well."""
        guess = self._price.guess(changes)
        here = self._price.guess(than.changes)
        if guess is None or here is None:
            return guess is None
        seconds, nbytes = self._beside(guess, than, here)
        if self._lacks(than):
            return nbytes < than.peak_bytes
        return nbytes < _NEAR * self._limit and seconds < _NEAR * than.seconds

    def _beside(self, guess: Guess, trial: Trial, here: Guess) -> tuple[float, int]:
        """Expected seconds and bytes of a guess, from a trial whose own guess is `here`."""
        return trial.seconds * guess.seconds / here.seconds, trial.peak_bytes + guess.nbytes - here.nbytes

    def _relieved(self, trial: Trial, than: Trial) -> Iterator[Trial]:
        """Variants of a plan that is shorter but too large, or smaller but longer, than another: they trade it back.

        Of the variants that may be better than the other plan, the two with the shortest guesses are tried.
        """
        faster, smaller = trial.seconds < than.seconds, trial.peak_bytes < than.peak_bytes
        here = self._price.guess(trial.changes)
        if here is None or faster == smaller or (faster and not self._lacks(trial)):
            return
        open_: list[tuple[float, int, Changes]] = []
        for changes in self._combined(trial.changes, self._relief):
            guess = self._price.guess(changes)
            if guess is not None and changes != trial.changes:
                open_.append((*self._beside(guess, trial, here), changes))
        worth = than.seconds * (1 - WORTH)
        room = _NEAR * self._limit
        likely = [some for some in open_ if some[0] < worth and some[1] < room]
        for _, _, changes in sorted(likely, key=lambda some: (*some[:2], str(some[2])))[:2]:
            found = self._try(changes)
            if found is not None:
                yield found

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
