"""Pairwise coverage is complete, whatever is legal, and cheap."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.helpers.pairwise import drawn, legal_parts, pairwise

VALUES: dict[str, list[Any]] = {
    "a": [1, 2, 3], "b": [False, True], "c": ["x", "y", "z"], "d": [(), (1,)], "e": [0, 1, 2, 3], "f": [1, 2, 3],
}  # fmt: skip


def rare(case: dict[str, Any]) -> bool:
    """Looks at `e` where `a` is 3 only, and makes what has d = (1,) rare."""
    if case["a"] == 3:
        return case["e"] > 1
    return case["d"] == () or (case["b"] and case["a"] == 2)


def apart(case: dict[str, Any]) -> bool:
    """Looks at settings of which the other rule knows nothing."""
    return case["c"] != "x" or case["f"] < 3


RULES = (rare, apart)


def legal(case: dict[str, Any]) -> bool:
    return rare(case) and apart(case)


def pairs(cases: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
    return {pair for case in cases for pair in itertools.combinations(case.items(), 2)}


def every(values: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def test_every_pair_of_any_legal_case_is_in_one() -> None:
    wanted = pairs([case for case in every(VALUES) if legal(case)])
    assert wanted < pairs(every(VALUES)), "some pairs are in no legal case"
    for seed in range(20):
        cases = pairwise(VALUES, RULES, seed=seed)
        assert all(map(legal, cases))
        assert pairs(cases) == wanted
        assert all(list(case) == list(VALUES) for case in cases)
        for case in cases:
            assert pairs([other for other in cases if other is not case]) < wanted, "none can be left out"


def test_all_that_a_rule_looks_at_is_found() -> None:
    parts = legal_parts(VALUES, RULES)
    assert [list(group[0]) for group in parts] == [["a", "b", "d", "e"], ["c", "f"]]
    whole = [{name: (one | other)[name] for name in VALUES} for one, other in itertools.product(*parts)]
    assert pairs(whole) == pairs([case for case in every(VALUES) if legal(case)])
    assert len(whole) == sum(map(legal, every(VALUES)))


def test_rules_that_share_a_setting_are_one_group() -> None:
    parts = legal_parts(VALUES, [*RULES, lambda case: case["c"] == "y" or case["d"] == ()])
    assert [set(group[0]) for group in parts] == [set(VALUES)]


def test_rules_that_exclude_each_other_are_an_error() -> None:
    with pytest.raises(AssertionError, match="no values of a keep all rules"):
        legal_parts(VALUES, [lambda case: case["a"] > 2, lambda case: case["a"] < 2])


def test_without_rules_cases_are_few() -> None:
    values = {str(n): [0, 1, 2] for n in range(13)}
    assert len(pairwise(values, [])) <= 24


def test_dear_cases_are_few() -> None:
    values = {"ranks": [1, 4], **{str(n): [0, 1, 2] for n in range(6)}}
    dear, any_cost = (
        sum(case["ranks"] for case in pairwise(values, [], cost))
        for cost in (lambda case: case["ranks"], lambda case: 1.0)
    )
    assert dear < any_cost


def test_drawn_cases_are_legal_and_differ() -> None:
    cases = drawn(VALUES, RULES, 50)
    assert all(map(legal, cases))
    assert len({repr(case) for case in cases}) == 50
