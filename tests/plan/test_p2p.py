"""What hides p2p transfers: where weight gradients are put, the automatic choice."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from hocket.config.schema import changed
from hocket.planning import predict, program_of
from hocket.predict.cost import CostTable, costs_of
from hocket.predict.hardware import LAPTOP
from hocket.predict.simulate import OpCost
from hocket.program.check import check
from hocket.program.lower import build_program
from hocket.program.ops import Layout, Op, Program
from hocket.program.shard import Sharding
from hocket.recipes import recipe
from hocket.resolve import Settings, resolve
from tests.helpers.dryrun import dry_run
from tests.helpers.plans import known_of, planned

DENSE = Layout(("dense",) * 8, pp=2, chunks=2)
MERGED = planned(chunks=2, merge="on", defer_wgrad="on")


def build(layout: Layout, microbatches: int = 6, **plan: Any) -> Program:
    return build_program(layout, microbatches, planned(MERGED, **plan), Sharding(2, 2))


def costs(layout: Layout, p2p: float, attn: float = 1.0, mlp: float = 2.0) -> CostTable:
    """Weight gradients take `attn` and `mlp` (or experts), all other compute 1, a gradient's p2p transfer `p2p`."""
    parts, kinds = ("attn", "mlp", "experts"), ("dense", "moe")
    table = {(verb, *key): OpCost(1.0, saved_bytes=10) for verb in ("fwd", "bwd") for key in product(parts, kinds)}
    for kind in ("dense", "moe"):
        table["wgrad", "attn", kind] = OpCost(attn)
        table["wgrad", "mlp", kind] = table["wgrad", "experts", kind] = OpCost(mlp)
    table["recv", "grad", ""] = table["recv", "act", ""] = OpCost(p2p)
    return CostTable(layout.kinds, table)


LAYOUTS = (
    Layout(("dense",) * 3, pp=3),
    Layout(("moe", "dense") * 4, pp=2, chunks=2, ep=2, bounds=(0, 2, 5, 7, 8)),
    Layout(("dense", "moe", "moe", "dense", "dense"), pp=2, ep=2),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{len(layout.kinds)} layers on {layout.pp}")
def test_any_combination_is_valid_and_right(layout: Layout) -> None:
    for merge, layers in product(("on", "off"), (0, 1, 2, -1, "attn:1", "attn:2", "attn")):
        program = build(layout, 4, merge=merge, defer_layers=layers, order="auto")
        assert check(program) == [], (merge, layers)
        for seed in (None, 1):
            dry_run(program, seed)


@pytest.mark.parametrize(("layers", "count"), [("attn:1", 1), (2, 4), ("attn", 2)])
def test_a_gradient_travels_beside_what_was_put_behind_it(layers: int | str, count: int) -> None:
    """Neither the send nor the next receive is ordered against the weight gradients behind the send."""
    program = build(DENSE, defer_layers=layers)
    ops = list(program.ranks[1])
    known = known_of(ops)
    send = next(i for i, op in enumerate(ops) if str(op) == "send grad m1 c1")
    behind = [i for i, op in enumerate(ops) if i > send and op.verb == "wgrad" and (op.microbatch, op.chunk) == (1, 1)]
    assert len(behind) == count
    assert all(known["compute"][send] < i for i in behind)
    assert all(known["send_grad"][i] < send for i in behind)


# ------------------------------------------------------------------------------------------------ the automatic choice


def settings(**changes: Any) -> Settings:
    """The tiny recipe with nothing but dense layers, whose weight gradients cover nothing else."""
    changes = {"model__dense_layers": tuple(range(8)), "mesh__ep": 1, "overlap__ep__merge": "on", **changes}
    config = recipe("tiny")
    for name, value in changes.items():
        config = changed(config, {name.replace("__", "."): value})
    return resolve(config)


def said(found: Settings, setting: str) -> list[str]:
    return [decision.reason for decision in found.decisions if decision.setting == setting]


def test_auto_becomes_numbers_with_a_reason() -> None:
    found = settings()
    assert found.overlap.pp.defer_layers != "auto"
    (reason,) = said(found, "overlap.pp.defer_layers")
    assert "4 microbatches take 522.3 ms instead of 533.8 ms with defer_layers = 0" in reason
    assert not said(settings(overlap__defer_wgrad="off"), "overlap.pp.defer_layers")
    alone = settings(mesh__pp=1)
    assert alone.overlap.pp.defer_layers == 0


@pytest.mark.parametrize("value", [0, 1, -1, "attn:2", "attn"])
def test_what_is_set_is_kept(value: int | str) -> None:
    assert settings(overlap__pp__defer_layers=value).overlap.pp.defer_layers == value


def test_a_slower_network_has_more_put_behind_it() -> None:
    slow = {"train.transport": "slow", "train.slow": ("pp_bwd:6ms",)}
    found = [resolve(changed(recipe("tiny"), changes)).overlap.pp.defer_layers for changes in ({}, slow)]
    assert found == ["attn:1", -1]


def test_what_would_uncover_more_than_it_hides_is_left_where_it_is() -> None:
    """In a MoE, weight gradients hide all-to-alls where they stand."""
    found = resolve(recipe("tiny"))
    assert found.overlap.pp.defer_layers == "attn:1"
    (reason,) = said(found, "overlap.pp.defer_layers")
    assert "4 microbatches take" in reason
    assert "with defer_layers = " in reason


def test_nothing_is_moved_where_it_brings_nothing() -> None:
    """No p2p transfer to hide, and weight gradients that take no time: all choices are equal, and none is the least."""
    config = planned(settings(), defer_layers="auto")
    found = resolve(config, price=lambda c: costs(Layout(c.model.kinds()), 0.0, attn=0.0, mlp=0.0))
    assert found.overlap.pp.defer_layers == 0
    assert "with defer_layers = " in said(found, "overlap.pp.defer_layers")[0]
    late = resolve(config, price=lambda c: costs(Layout(c.model.kinds()), 3.0, attn=1.0, mlp=2.0))
    assert late.overlap.pp.defer_layers != 0
    assert "with defer_layers = " in said(late, "overlap.pp.defer_layers")[0]


def test_all_go_behind_the_send_where_that_shortens_the_bubble() -> None:
    """No rank waits for them, and without an all-to-all to cover they are needed at no other place."""
    found = settings(train__microbatches=4)
    assert found.overlap.pp.defer_layers == -1

    def seconds(layers: int | str) -> float:
        fixed = settings(train__microbatches=4, overlap__pp__defer_layers=layers)
        return float(predict(fixed, program_of(fixed), LAPTOP).makespan)

    assert seconds(-1) < min(seconds("attn:1"), seconds("attn:2"), seconds(1))


def test_costs_that_were_measured_take_the_place_of_modelled_ones() -> None:
    config = planned(settings(), defer_layers="auto")
    chosen = []
    for p2p in (0.125, 6.0):
        found = resolve(config, price=lambda c, p2p=p2p: costs(Layout(c.model.kinds()), p2p))
        chosen += said(found, "overlap.pp.defer_layers")
    assert "4 microbatches take 120.6 s instead of" in chosen[0]
    assert "4 microbatches take 120.6 s" not in chosen[1]


def test_ops_have_the_cost_of_their_kind() -> None:
    table = costs(DENSE, 1.0)
    assert table.of(Op("wgrad", "mlp", layer=0)).seconds == 2.0


CARRIED: dict[str, set[tuple[str, str]]] = {
    "gather_dense": {("gather", "dense"), ("gather", "embed"), ("gather", "head")},
    "reduce_dense": {("reduce", "dense"), ("reduce", "embed"), ("reduce", "head")},
    "gather_experts": {("gather", "experts")},
    "reduce_experts": {("reduce", "experts")},
    "a2a": {(verb, part) for verb in ("fwd", "bwd") for part in ("dispatch", "combine")},
    "pp_fwd": {("recv", "act")},
    "pp_bwd": {("recv", "grad")},
}


@pytest.mark.parametrize("purpose", CARRIED)
def test_an_imitated_network_is_in_the_costs_of_what_it_carries(purpose: Any) -> None:
    config = changed(recipe("tiny"), {"mesh.dp": 4})
    slow = replace(config.train, transport="slow", slow=(f"{purpose}:7s,1MB/s",))
    plain, late = (costs_of(c, LAPTOP).table for c in (config, replace(config, train=slow)))
    slower = {key: cost for key, cost in late.items() if cost != plain[key]}
    assert {key[:2] for key in slower} == CARRIED[purpose]
    for key, cost in slower.items():
        assert float(cost.seconds) == pytest.approx(float(plain[key].seconds) + 7.0 + cost.wire_bytes / 1e6)
