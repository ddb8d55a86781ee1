"""The benchmarks of sends and orders, on two gloo ranks: every plan is there, computes the same, and has its table."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import pytest
import torch

from benchmarks import orders as of_orders
from benchmarks.order_tables import orders, send_controls
from benchmarks.orders import measure as measure_orders
from benchmarks.orders import of_result as orders_of_result
from benchmarks.orders import placements, programs_of, rows_of
from benchmarks.pipelines import bench_of
from benchmarks.send_controls import (
    measure,
    of_result,
    on_slow_link,
    plans,
    prepare,
    report,
    settings,
)
from hocket.runtime.transports import Link
from tests.helpers.ranks import run_ranks

OPTIONS = argparse.Namespace(
    cpu=True, microbatches=4, tokens=64, blocks=1, steps=1, latency=2e-3, bandwidth=1e9, out=None, commit=""
)


def test_the_matrix_is_whole() -> None:
    config = settings(OPTIONS, 2)
    links = {"real": config, "slow": on_slow_link(config, Link(0.05, 1e9))}
    found = plans(config, links)
    controls = {c.overlap.pp.defer_layers for c in found.values()}
    assert controls >= {0, "attn:1", "attn:2", 1, 2}
    assert found["auto for the slow link"].overlap.pp.late[1] == "all"  # 50 ms are more than wgrads take


def controls_on(rank: int, options: argparse.Namespace) -> dict[str, Any]:
    chosen, links, slow = prepare(options)
    bench = bench_of({name: (plan, 4) for name, plan in chosen.items()}, rank, torch.device("cpu"))
    return report(bench, chosen, links["real"], slow, measure(options, bench, slow, rank))  # fails where losses differ


@pytest.mark.full
def test_every_combination_runs_on_either_link_and_computes_the_same() -> None:
    result = run_ranks(controls_on, 2, OPTIONS)[0]
    names = set(result["in_flight"])
    for link in ("real", "slow"):
        assert {row["plan"] for row in result["rows"] if row["link"] == link} == names
    assert len([row for row in result["rows"] if row["link"] == "signal"]) == 1
    predicted = of_result(result)
    assert set(predicted) == {(link, name) for link in ("real", "slow") for name in names}
    assert predicted["slow", "0 layers, attn"] > predicted["slow", "2 layers, all"]
    assert ("real", "auto for the real link") not in of_result({**result, "picked": {}}), "nothing is guessed"
    assert send_controls(result).count("\n") == 1 + len(names)


LAYERS = 2
"""Of a rank, for orders: one of each of two chunks."""


def orders_on(rank: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    of_orders.LAYERS = LAYERS  # pyrefly: ignore  (in this process alone)
    rows: list[dict[str, Any]] = []
    for found in placements(options, 2):
        bench = bench_of(programs_of(options, found), rank, torch.device("cpu"))
        rows += rows_of(options, bench, found, measure_orders(options, bench, rank))
    return rows


@pytest.mark.full
def test_every_order_runs_with_as_many_and_twice_as_many_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_orders, "LAYERS", LAYERS)
    rows = run_ranks(orders_on, 2, OPTIONS)[0]
    assert len(rows) == 8
    (config, *_), *_ = [list(found.values()) for found in placements(OPTIONS, 2)]
    result = {"config": asdict(config), "rows": rows, "microbatches": 4}
    predicted = orders_of_result(result)
    assert all(0 < few < many for few, many in predicted.values())
    assert set(predicted) == {row["order"] for row in rows}
    assert all(row["signal_seconds"] > 0 for row in rows)
    assert orders(result).count("\n") == 1 + len(rows)
