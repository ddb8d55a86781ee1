"""When a token is sent once for each rank that has some of its experts."""

from __future__ import annotations

from typing import Any

import pytest

from hocket.config.schema import changed
from hocket.recipes import recipe
from hocket.resolve import resolve

APART = {"overlap.ep.merge": "off"}
SLOW = {"train.transport": "slow", "train.slow": ("10MB/s",)}
MANY = {"model.experts": 64, "mesh.dp": 64, "mesh.ep": 64}

CASES: list[tuple[dict[str, Any], str, str]] = [
    ({}, "per_expert", "all-to-alls of a merged layer take 9.498 ms beside 28.7 ms of compute"),
    (APART, "per_rank", "on 1.6 of 2 ranks on average: one copy for each is 17% fewer bytes"),
    (SLOW, "per_rank", "of compute"),
    ({**APART, "model.top_k": 1}, "per_expert", "eats up"),
    ({**APART, **MANY}, "per_expert", "eats up"),
    ({**APART, "overlap.ep.splits": "device"}, "per_expert", "where the device alone knows splits"),
]


@pytest.mark.parametrize(("settings", "value", "reason"), CASES)
def test_copies_are_chosen_by_what_is_not_hidden_and_by_bytes(
    settings: dict[str, Any], value: str, reason: str
) -> None:
    settled = resolve(changed(recipe("tiny"), settings))
    assert settled.overlap.ep.copies == value
    (decision,) = [decision for decision in settled.decisions if decision.setting == "overlap.ep.copies"]
    assert reason in str(decision)
