"""A small set of configurations in which every pair of values of two settings occurs together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

Case = dict[str, Any]
Values = Mapping[str, Sequence[Any]]
Rule = Callable[[Case], bool]
"""Whether a case is legal, as far as the settings go that this rule looks at. All rules must be kept."""
Cost = Callable[[Case], float]
Item = tuple[str, Any]
"""The name of a setting, and one of its values."""

CANDIDATES = 60
"""Cases that are looked at for each one that is taken."""
PARTS = 12
"""Combinations of settings that rules tie together which are looked at for each candidate."""


def pairwise(
    values: Values, rules: Sequence[Rule], cost: Callable[[Case], float] = lambda case: 1.0, seed: int = 0
) -> list[Case]:
    """Cases that cover every pair of values that any legal case has, and cost little together.

    Greedy: each case is built around a pair that is still missing, and covers most other missing ones for its `cost`,
    of many. At the end, those go that the others have made superfluous, the costliest first.
    """
    chooser = random.Random(seed)
    pairs = _Pairs(values, legal_parts(values, rules))
    cases: list[Case] = []
    while wanted := pairs.one_missing():
        candidates, groups = [], pairs.with_values(wanted)
        for _ in range(CANDIDATES):
            case = pairs.completed(groups, chooser)
            candidates.append((pairs.new_in(case) / cost(case), case))
        best = max(candidates, key=lambda candidate: candidate[0])[1]
        pairs.take(best)
        cases.append({name: best[name] for name in values})
    return _needed(cases, cost)


def legal_parts(values: Values, rules: Sequence[Rule]) -> list[list[Case]]:
    """Groups of settings that no rule ties to those of other groups, and of each group all legal combinations.

    So a case is legal if its part in each group is. Few rules that each look at few settings make small groups.
    """
    groups: list[tuple[set[str], list[Rule]]] = [({name}, []) for name in values]
    for rule in rules:
        names, kept = _looked_at(values, rule), [rule]
        for group in [group for group in groups if group[0] & names]:
            groups.remove(group)
            names, kept = names | group[0], kept + group[1]
        groups.append((names, kept))
    return [_legal(values, [name for name in values if name in names], kept) for names, kept in groups]


def _legal(values: Values, names: Sequence[str], rules: Sequence[Rule]) -> list[Case]:
    """All combinations of these settings that the rules allow."""
    parts = (dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*(values[name] for name in names)))
    legal = [part for part in parts if all(rule(part) for rule in rules)]
    assert legal, f"no values of {', '.join(names)} keep all rules"
    return legal


def _looked_at(values: Values, rule: Rule) -> set[str]:
    """The settings that a rule looks at, whatever their values are."""
    names: list[str] = []
    while True:
        asked = set[str]()
        for chosen in itertools.product(*(values[name] for name in names)):
            case = {name: options[0] for name, options in values.items()} | dict(zip(names, chosen, strict=True))
            rule(_Watched(case, asked))
        if asked <= set(names):
            return asked
        names = [name for name in values if name in asked or name in names]


class _Watched(dict[str, Any]):
    """A case that notes what is looked at."""

    def __init__(self, case: Case, asked: set[str]) -> None:
        super().__init__(case)
        self._asked = asked

    def __getitem__(self, name: str) -> Any:
        self._asked.add(name)
        return super().__getitem__(name)


class _Part(NamedTuple):
    """A part of a case: the settings of one group."""

    case: Case
    items: tuple[Item, ...]
    bits: int
    """Of its items."""


class _Pairs:
    """The pairs that are still missing: for each value the others, one bit each."""

    def __init__(self, values: Values, groups: Sequence[Sequence[Case]]) -> None:
        items = [(name, value) for name, options in values.items() for value in options]
        self._items, self._bit = items, {item: 1 << i for i, item in enumerate(items)}
        self._groups = [[_Part(part, tuple(part.items()), self._bits(part.items())) for part in g] for g in groups]
        self._missing = dict.fromkeys(items, 0)
        possible = [self._bits({item for part in parts for item in part.items()}) for parts in groups]
        for own, parts in zip(possible, self._groups, strict=True):
            others = sum(possible) - own  # no rule ties these to any of the group's
            for part in parts:
                for item in part.items:
                    self._missing[item] |= (part.bits | others) & ~self._bit[item]

    def _bits(self, items: Any) -> int:
        return sum(self._bit[item] for item in items)

    def one_missing(self) -> list[Item]:
        """A missing pair, if there is one."""
        for item, others in self._missing.items():
            if others:
                return [item, self._items[(others & -others).bit_length() - 1]]
        return []

    def with_values(self, wanted: Sequence[Item]) -> list[tuple[list[_Part], bool]]:
        """The parts of every group that have these values, and whether the group has settings of them."""
        found = []
        for parts in self._groups:
            fixed = [(name, value) for name, value in wanted if name in parts[0].case]
            fitting = [part for part in parts if all(part.case[name] == value for name, value in fixed)]
            found.append((fitting, bool(fixed)))
        return found

    def completed(self, groups: Sequence[tuple[list[_Part], bool]], chooser: random.Random) -> Case:
        """A legal case of the parts `with_values`, chosen such that many missing pairs are in it.

        First come the groups of those values, then all others in any order.
        """
        case, bits = dict[str, Any](), 0
        for parts, _ in sorted(groups, key=lambda group: (not group[1], chooser.random())):
            options = chooser.sample(parts, min(PARTS, len(parts)))
            new = [self._new_with(part, bits) for part in options]
            best = options[new.index(max(new))]
            case |= best.case
            bits |= best.bits
        return case

    def _new_with(self, part: _Part, bits: int) -> int:
        """How many missing pairs a part of a case brings, inside of it and with the bits that are there."""
        missing, own = self._missing, part.bits
        new = 0
        for item in part.items:
            found = missing[item]
            new += 2 * (found & bits).bit_count() + (found & own).bit_count()
        return new

    def new_in(self, case: Case) -> int:
        """How many missing pairs a case has."""
        bits = self._bits(case.items())
        return sum((self._missing[item] & bits).bit_count() for item in case.items()) // 2

    def take(self, case: Case) -> None:
        bits = self._bits(case.items())
        for item in case.items():
            self._missing[item] &= ~bits


def quick(cases: Sequence[Case], every: int, first: int = 0) -> list[Any]:
    """The cases as parameters: `make test` runs one of `every` so many, `make parity` the others.

    Those of `make test` have every value.
    """
    chosen = cases[first::every]
    assert all(any(case[name] == other[name] for case in chosen) for other in cases for name in other)
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.full) for case in cases]


def drawn(values: Values, rules: Sequence[Rule], count: int, seed: int = 0) -> list[Case]:
    """`count` different legal combinations out of all, which are too many to list."""
    chooser = random.Random(seed)
    cases: dict[str, Case] = {}
    while len(cases) < count:
        case = {name: chooser.choice(options) for name, options in values.items()}
        if all(rule(case) for rule in rules):
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
