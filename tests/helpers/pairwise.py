"""A small set of configurations in which every pair of values of two settings occurs together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def pairwise(values: Mapping[str, Sequence[Any]], legal: Callable[[Case], bool], seed: int = 0) -> list[Case]:
    """Greedy covering: every legal pair of values is in at least one case. Pairs that no legal case has are skipped.

    Each case starts from a pair that is still missing, and is the best of many random legal completions.
    """
    chooser = random.Random(seed)
    names = list(values)
    missing = {
        ((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in values[a] for y in values[b]
    }  # fmt: skip
    cases: list[Case] = []
    for pair in sorted(missing, key=repr):
        if pair not in missing:
            continue
        candidates = []
        for _ in range(200):
            case = {name: chooser.choice(values[name]) for name in names} | dict(pair)
            if legal(case):
                candidates.append(case)
        if not candidates:
            missing.discard(pair)
            continue
        best = max(candidates, key=lambda case: len(_pairs(case) & missing))
        missing -= _pairs(best)
        cases.append({name: best[name] for name in names})
    return cases


def drawn(values: Mapping[str, Sequence[Any]], legal: Callable[[Case], bool], count: int, seed: int = 0) -> list[Case]:
    """`count` different legal combinations out of all, which are too many to list."""
    chooser = random.Random(seed)
    cases: dict[str, Case] = {}
    while len(cases) < count:
        case = {name: chooser.choice(options) for name, options in values.items()}
        if legal(case):
            cases[repr(case)] = case
    return list(cases.values())


def _pairs(case: Case) -> set:
    return set(itertools.combinations(case.items(), 2))
