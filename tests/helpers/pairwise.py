"""A small set of configurations in which every pair of values of two settings occurs together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]
Values = Mapping[str, Sequence[Any]]
Legal = Callable[[Case], bool]
Cost = Callable[[Case], float]
Item = tuple[str, Any]
"""The name of a setting, and one of its values."""

CANDIDATES = 60
"""Cases that are looked at for each one that is taken."""


def pairwise(
    values: Values, legal: Legal, cost: Callable[[Case], float] = lambda case: 1.0, seed: int = 0
) -> list[Case]:
    """Cases that cover every pair of values that any legal case has, and cost little together.

    Greedy: each case is built around a pair that is still missing, and covers most other missing ones for its `cost`,
    of many. At the end, those go that the others have made superfluous, the costliest first.
    """
    chooser, parts = random.Random(seed), legal_parts(values, legal)
    pairs = _Pairs(values, parts)
    cases: list[Case] = []
    while wanted := pairs.one_missing():
        fixed = [part for part in parts if all(part.get(name, value) == value for name, value in wanted)]
        candidates = []
        for part in chooser.sample(fixed, min(CANDIDATES, len(fixed))):
            case = pairs.completed({**part, **dict(wanted)}, chooser)
            candidates.append((pairs.new_in(case) / cost(case), case))
        best = max(candidates, key=lambda candidate: candidate[0])[1]
        pairs.take(best)
        cases.append({name: best[name] for name in values})
    return _needed(cases, cost)


def legal_parts(values: Values, legal: Legal) -> list[Case]:
    """All legal combinations of the settings that `legal` looks at; what others are makes no difference."""
    names: list[str] = []
    while True:
        asked, parts = set[str](), []
        for chosen in itertools.product(*(values[name] for name in names)):
            part = dict(zip(names, chosen, strict=True))
            case = _Watched({name: options[0] for name, options in values.items()} | part, asked)
            if legal(case):
                parts.append(part)
        if asked <= set(names):
            return parts
        names = [name for name in values if name in asked or name in names]


class _Watched(dict[str, Any]):
    """A case that notes what is looked at."""

    def __init__(self, case: Case, asked: set[str]) -> None:
        super().__init__(case)
        self._asked = asked

    def __getitem__(self, name: str) -> Any:
        self._asked.add(name)
        return super().__getitem__(name)


class _Pairs:
    """The pairs that are still missing: for each value the others, one bit each."""

    def __init__(self, values: Values, parts: Sequence[Case]) -> None:
        items = [(name, value) for name, options in values.items() for value in options]
        self._items, self._bit = items, {item: 1 << i for i, item in enumerate(items)}
        self._free = {name: options for name, options in values.items() if name not in parts[0]}
        self._missing = dict.fromkeys(items, 0)
        free = self._bits((name, value) for name, options in self._free.items() for value in options)
        for part in parts:
            bits = self._bits(part.items())
            for item in part.items():
                self._missing[item] |= (bits | free) & ~self._bit[item]
        bound = self._bits(item for item in items if self._missing[item])
        for name, options in self._free.items():
            own = self._bits((name, value) for value in options)
            for value in options:
                self._missing[name, value] = (bound | free) & ~own

    def _bits(self, items: Any) -> int:
        return sum(self._bit[item] for item in items)

    def one_missing(self) -> list[Item]:
        """A missing pair, if there is one."""
        for item, others in self._missing.items():
            if others:
                return [item, self._items[(others & -others).bit_length() - 1]]
        return []

    def completed(self, part: Case, chooser: random.Random) -> Case:
        """A case with the values of settings that are free to choose, such that many missing pairs are in it."""
        case, bits = dict(part), self._bits(part.items())
        names = [name for name in self._free if name not in part]
        chooser.shuffle(names)
        for name in names:
            options = chooser.sample(self._free[name], len(self._free[name]))
            new = [(self._missing[name, value] & bits).bit_count() for value in options]
            case[name] = options[new.index(max(new))]
            bits |= self._bit[name, case[name]]
        return case

    def new_in(self, case: Case) -> int:
        """How many missing pairs a case has."""
        bits = self._bits(case.items())
        return sum((self._missing[item] & bits).bit_count() for item in case.items()) // 2

    def take(self, case: Case) -> None:
        bits = self._bits(case.items())
        for item in case.items():
            self._missing[item] &= ~bits


def drawn(values: Values, legal: Legal, count: int, seed: int = 0) -> list[Case]:
    """`count` different legal combinations out of all, which are too many to list."""
    chooser = random.Random(seed)
    cases: dict[str, Case] = {}
    while len(cases) < count:
        case = {name: chooser.choice(options) for name, options in values.items()}
        if legal(case):
            cases[repr(case)] = case
    return list(cases.values())


def _needed(cases: list[Case], cost: Cost) -> list[Case]:
    """Without those of which every pair is in another one, too."""
    counts: dict[tuple[Item, ...], int] = {}
    for case in cases:
        for pair in itertools.combinations(case.items(), 2):
            counts[pair] = counts.get(pair, 0) + 1
    kept = list(cases)
    for case in sorted(cases, key=cost, reverse=True):
        pairs = list(itertools.combinations(case.items(), 2))
        if all(counts[pair] > 1 for pair in pairs):
            kept.remove(case)
            for pair in pairs:
                counts[pair] -= 1
    return kept
