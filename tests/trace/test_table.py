"""The report as text and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from hocket_trace.as_json import to_json
from hocket_trace.columns import bar, duration, grid, milliseconds, rate, shortened, size, wrapped
from hocket_trace.table import headline, render, step_parts, warnings
from tests.helpers.golden import assert_golden
from tests.trace.reports import NAN, report, share, step_of, tax


@pytest.mark.parametrize("width", [80, 100])
def test_table_is_the_one_that_was_looked_at(width: int, pytestconfig: pytest.Config) -> None:
    assert_golden(f"trace_{width}.txt", render(report(), tax(), width) + "\n", pytestconfig)


def test_json_is_the_one_that_was_looked_at(pytestconfig: pytest.Config) -> None:
    figures = to_json(report(), tax())
    rounded = json.loads(json.dumps(figures), parse_float=lambda text: float(f"{float(text):.9g}"))
    assert_golden("trace.json", json.dumps(rounded, indent=1) + "\n", pytestconfig)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_line_is_longer_than_asked(width: int) -> None:
    lines = render(report(), tax(), width).splitlines()
    assert not [line for line in lines if len(line) > width]
    assert any("late peers" in line for line in lines)


def test_columns_that_do_not_fit_are_left_out_from_the_right() -> None:
    heads, rows = ["name", "one", "two"], [["a long name", "1.00", "2.00"]]
    assert grid(heads, rows, 40) == ["  name          one   two", "  a long name  1.00  2.00"]
    assert grid(heads, rows, 24) == ["  name         one   two", "  a long…ame  1.00  2.00"]
    assert grid(heads, rows, 20) == ["  name          one", "  a long name  1.00"]


# ---------------------------------------------------------------------------------------------------- figures


def test_figures_are_means_of_steps_and_ranks() -> None:
    """Of 12 steps one has 10 ms more, all of them exposed."""
    step = to_json(report())["step"]
    assert step["step_seconds"] == pytest.approx(0.100)  # median of 100, 100 and 110 ms
    assert step["rank_seconds"] == pytest.approx(0.100 + 0.010 / 12)
    assert step["exposed_seconds"] == pytest.approx(0.006 + 0.010 / 12)
    assert step["exposed_share"] == pytest.approx(step["exposed_seconds"] / step["rank_seconds"])
    assert step["hidden_fraction"] == pytest.approx(0.044 / (0.050 + 0.010 / 12))
    assert step["absent_seconds"] == pytest.approx(0.020 + 0.010 / 12)
    assert step["waiting_seconds"] == pytest.approx(0.001 + 0.0005 * 1.5 + 0.010 / 12)


def test_parts_of_a_step_add_up_to_it() -> None:
    figures = to_json(report())
    for row in [figures["step"], *figures["by_rank"], *figures["by_rank_and_step"]]:
        parts = step_parts(row)
        assert sum(seconds for *_, seconds, _, _ in parts) == pytest.approx(row["rank_seconds"])
        assert sum(share for *_, share, _ in parts) == pytest.approx(1)
        assert all(seconds >= 0 for *_, seconds, _, _ in parts)


def test_kinds_count_exposed_time_twice_and_once() -> None:
    figures = to_json(report())
    kinds = {row["kind"]: row for row in figures["kinds"]}
    assert list(kinds) == ["gather", "reduce", "a2a"]
    assert kinds["reduce"]["exposed_seconds"] == pytest.approx(0.001)
    assert kinds["reduce"]["counted_seconds"] == pytest.approx(0.0005)
    assert sum(row["counted_seconds"] for row in kinds.values()) == pytest.approx(figures["step"]["exposed_seconds"])
    assert kinds["gather"]["bandwidth_bytes_per_second"] == pytest.approx(9e9 / 0.029)  # 1 ms of 30 was waiting
    assert kinds["gather"]["hidden_fraction"] == pytest.approx(1 - 4 / 30)


def test_a_kind_that_one_rank_has_is_a_mean_of_all() -> None:
    one = replace(step_of(0, 1), kinds={"pp": share(4, 0.02, 0.01, 1e9)}, exposed_for={"pp": 0.01})
    two = replace(step_of(1, 1), kinds={}, exposed_for={})
    row = to_json(report(steps=(one, two)))["kinds"][0]
    assert (row["count"], row["seconds"], row["bytes"]) == (2, 0.01, 5e8)
    assert row["bandwidth_bytes_per_second"] == pytest.approx(5e10)


def test_layers_are_means_of_the_ranks_that_have_them() -> None:
    one = replace(step_of(0, 1), layers={0: {"gather": share(1, 0.02, 0.01)}})
    two = replace(step_of(1, 1), layers={1: {"gather": share(1, 0.02, 0.02), "a2a": share(1, 0.01, 0.0)}})
    rows = to_json(report(steps=(one, two)))["layers"]
    assert [(row["layer"], row["exposed_seconds"], row["hidden_fraction"]) for row in rows] == [
        (1, 0.02, pytest.approx(1 / 3)),
        (0, 0.01, 0.5),
    ]


def test_imbalance_names_the_slowest_rank_and_whom_the_others_wait_for() -> None:
    steps = tuple(replace(step_of(rank, 1), compute=0.08 - 0.01 * (rank == 2)) for rank in range(4))
    found = to_json(report(steps=steps))["imbalance"]
    assert found["compute_spread"] == pytest.approx(1 / 8)
    assert (found["fastest_rank"], found["awaited_rank"]) == (2, 0)
    assert set(to_json(report(steps=steps[:1]))["imbalance"].values()) == {None}


def test_what_is_not_known_is_null_in_json_and_a_dash_in_the_table() -> None:
    one = replace(step_of(0, 1), kinds={"gather": share(4, 0.02, 0.01, 0.0, waiting=NAN)})
    alone = report(steps=(one,))
    row = to_json(alone)["kinds"][0]
    assert (row["waiting_seconds"], row["bandwidth_bytes_per_second"]) == (None, None)
    line = next(line for line in render(alone).splitlines() if line.startswith("  gather"))
    assert line.split() == ["gather", "4", "20.00", "–", "–", "–", "10.00", "50.0", "%", "4.0", "%"]
    json.dumps(to_json(alone, tax()), allow_nan=False)


def test_names_of_figures_end_in_their_unit() -> None:
    """A number that is a time, a size or a rate says so."""
    plain_names = {"version", "world", "rank", "step", "ratio", "count", "layer", "compute_spread", "step_spread"}
    plain_names |= {"slowest_rank", "fastest_rank", "awaited_rank"}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, key)
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, dict):
                    walk(item, name)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            units = ("seconds", "_share", "_fraction", "bytes", "_bytes_per_second")
            assert name in plain_names or name.endswith(units), name

    walk(to_json(report(), tax()), "")


# ------------------------------------------------------------------------------------------------------- text


def test_headline_says_what_matters() -> None:
    text = headline(to_json(report(), tax()))
    for part in ("A step takes 100 ms", "exposed for 6.833 ms (6.8 %)", "86.6 % of it is hidden", "the tax is 17.6 %"):
        assert part in text
    assert "host is late" in text


def test_headline_of_a_run_without_communication_or_steps() -> None:
    quiet = replace(step_of(0, 1), communication=0.0, exposed=0.0, kinds={}, layers={}, host_bound=0.0)
    text = headline(to_json(report(steps=(quiet,), transport="null")))
    assert "without any communication" in text
    assert "exposed" not in text
    assert "late" not in text
    empty = report(steps=())
    assert headline(to_json(empty)) == "The traces contain no step."
    assert "no step" in render(empty)
    assert math.isnan(empty.step_seconds)
    json.dumps(to_json(empty), allow_nan=False)


@pytest.mark.parametrize(
    ("transport", "words"),
    [("null", "NULL TRANSPORT: no communication, not training"), ("slow", "EMULATED NETWORK"), ("nccl", "")],
)
def test_what_is_no_real_training_is_said_loudly(transport: str, words: str) -> None:
    figures = to_json(report(transport=transport))
    assert [words in text for text in warnings(figures)] == ([True] if words else [])
    assert words in render(report(transport=transport))
    assert (figures["emulated"], figures["null_transport"]) == (transport == "slow", transport == "null")


def test_a_single_rank_and_step_need_no_mean() -> None:
    text = render(report(steps=(step_of(0, 7),), world=1))
    assert text.startswith("hocket trace: rank 0, NVIDIA H200, nccl, step 7\n")
    assert "mean of" not in text
    assert "mbalance" not in text


# ------------------------------------------------------------------------------------------------------ words


def test_numbers_and_their_units() -> None:
    assert [milliseconds(x) for x in (None, 0.0, 1e-6, 0.0123456, 12.3)] == ["–", "0.00", "<0.01", "12.35", "12,300.00"]
    assert [size(x) for x in (0, 12, 1.5e3, 2e6, 37.42e9, 2e12)] == [
        "–",
        "12 B",
        "1.5 kB",
        "2 MB",
        "37.4 GB",
        "2,000 GB",
    ]
    assert [rate(x) for x in (None, 1e6, 3.25e9, 312e9)] == ["–", "<0.1", "3.2", "312"]
    assert [shortened("abcdefghij", n) for n in (10, 7, 4)] == ["abcdefghij", "abcd…ij", "ab…j"]
    assert [bar(x, 4) for x in (0, 0.001, 0.5, 0.53125, 1)] == ["", "▏", "██", "██▏", "████"]


def test_a_number_is_not_parted_from_its_unit() -> None:
    text = "It takes 10 ms or 5 % of 3 s there"
    for width in range(8, 30):
        assert not any(line.endswith(("10", "5", "3")) for line in wrapped(text, width))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 µs"),
        (3e-6, "3 µs"),
        (2.5e-4, "250 µs"),
        (9.9949e-4, "999 µs"),
        (9.996e-4, "0.9996 ms"),
        (0.0125, "12.5 ms"),
        (0.99996, "1 s"),
        (1.25, "1.25 s"),
    ],
)
def test_durations_have_a_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text
