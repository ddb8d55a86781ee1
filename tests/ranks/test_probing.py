"""Measurements of links and rates: their answers travel whole, and a rank that fails says why."""

from __future__ import annotations

import os

import pytest

from hocket.doctor.measure import Transfers, run
from hocket.doctor.rank import measure
from hocket.predict.hardware import RATES
from hocket.predict.simulate import Kind
from tests.helpers.ranks import run_ranks

TRANSFERS: list[tuple[Kind, int]] = [("gather", 4096), ("reduce", 4096), ("a2a", 8192), ("pp", 4096)]


def on_a_rank(rank: int) -> tuple[Transfers, dict[str, float]]:
    return measure(TRANSFERS, "cpu", rank, 2)


def test_all_ranks_measure_what_was_asked_for_and_agree() -> None:
    first, second = run_ranks(on_a_rank, 2)
    assert first == second
    transfers, rates = first
    assert set(transfers) == set(TRANSFERS)
    assert set(rates) == set(RATES)
    assert all(value > 0 for value in (*rates.values(), *transfers.values()))


def test_an_answer_comes_from_processes_of_their_own() -> None:
    transfers, _ = run(2, TRANSFERS, os.environ, "cpu", limit=200.0)
    assert set(transfers) == set(TRANSFERS)


def test_a_rank_that_fails_says_why_and_nobody_waits_for_it() -> None:
    with pytest.raises(ValueError, match=r"measuring \(rank [01] of 2\): .*; fix: "):
        run(2, [], {**os.environ, "CUDA_VISIBLE_DEVICES": ""}, limit=200.0)


def test_ranks_that_do_not_end_are_told() -> None:
    with pytest.raises(ValueError, match=r"measuring: no end after 0\.01 s; fix: "):
        run(2, TRANSFERS, os.environ, "cpu", limit=0.01)
