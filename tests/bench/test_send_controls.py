"""The benchmarks of sends and orders, on two gloo ranks: every plan is there, computes the same, and has its table."""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

import torch

from benchmarks.order_tables import orders, send_controls
from benchmarks.orders import measure as measure_orders
from benchmarks.orders import placements, programs_of, rows_of
from benchmarks.pipelines import bench_of
from benchmarks.send_controls import COUNTS, LANES, PARTS, measure, on_slow_link, plans, prepare, report, settings
from hocket.runtime.pretended import Link
from tests.helpers.ranks import run_ranks

OPTIONS = argparse.Namespace(
    cpu=True, microbatches=4, tokens=64, blocks=1, steps=1, latency=2e-3, bandwidth=1e9, out=None, commit=""
)


def test_the_matrix_is_whole() -> None:
    config = settings(OPTIONS, 2)
    links = {"real": config, "slow": on_slow_link(config, Link(0.05, 1e9))}
    found = plans(config, links)
    controls = {
        (c.overlap.pp.backward_lane, c.overlap.pp.defer_layers, c.overlap.pp.defer_parts) for c in found.values()
    }
    every = {(lane, count, parts) for lane, count, parts in product(LANES, COUNTS, PARTS) if count or parts == "attn"}
    assert every <= controls
    assert found["auto for the slow link"].overlap.pp.defer_parts == "all"  # 50 ms are more than wgrads take
    assert found["stride 3"].plan.stride == 3


def controls_on(rank: int, options: argparse.Namespace) -> dict[str, Any]:
    bench, links, slow = prepare(options, rank, torch.device("cpu"))
    return report(bench, links, slow, measure(options, bench, slow, rank))  # fails where losses differ


def test_every_combination_runs_on_either_link_and_computes_the_same() -> None:
    result = run_ranks(controls_on, 2, OPTIONS)[0]
    names = set(result["in_flight"])
    for link in ("real", "slow"):
        assert {row["plan"] for row in result["rows"] if row["link"] == link} == names
    assert len([row for row in result["rows"] if row["link"] == "signal"]) == 1
    slow = {row["plan"]: row["predicted"] for row in result["rows"] if row["link"] == "slow"}
    assert slow["lane off, 0 layers, attn"] > slow["lane on, 2 layers, all"]
    assert send_controls(result).count("\n") == 1 + len(names)


def orders_on(rank: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for found in placements(options, 2):
        bench = bench_of(programs_of(options, found), rank, torch.device("cpu"))
        rows += rows_of(options, bench, found, measure_orders(options, bench, rank))
    return rows


def test_every_order_runs_with_as_many_and_twice_as_many_microbatches() -> None:
    rows = run_ranks(orders_on, 2, OPTIONS)[0]
    assert len(rows) == 8
    assert all(0 < few < many for few, many in (row["predicted"] for row in rows))
    assert all(row["signal_seconds"] > 0 for row in rows)
    assert orders({"rows": rows, "microbatches": 4}).count("\n") == 1 + len(rows)
