"""What hides p2p transfers: where the three controls put things, the automatic choice, the price of a stride of 3."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, Literal

import pytest

from hocket.planning import predict, program_of
from hocket.program.check import check
from hocket.program.cost import CostTable, OpCost
from hocket.program.dryrun import dry_run
from hocket.program.hardware import LAPTOP
from hocket.program.lower import build_program
from hocket.program.ops import Layout, Op, Program
from hocket.program.p2p import smallest_cover, stride_price
from hocket.program.pipeline import in_flight, one_f_one_b
from hocket.program.shard import Sharding
from hocket.program.simulate import simulate
from hocket.program.stages import costs_of
from hocket.recipes import recipe
from hocket.resolve import Settings, resolve
from hocket.settings.schema import changed
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


# ----------------------------------------------------------------------------------------- on the compute lane or not


def forwards_that_wait_for_gradients(program: Program, rank: int) -> list[str]:
    ops = program.ranks[rank]
    gradients = {i for i, op in enumerate(ops) if (op.verb, op.part) == ("recv", "grad")}
    return [str(op) for op in ops if op.verb == "fwd" and gradients & set(op.deps)]


def test_on_the_compute_lane_the_forward_half_waits_for_the_gradient_too() -> None:
    on, off = build(DENSE), build(DENSE, backward_lane="off")
    assert forwards_that_wait_for_gradients(on, 0) == []
    late = forwards_that_wait_for_gradients(off, 0)
    received = sum((op.verb, op.part) == ("recv", "grad") for op in on.ranks[0])
    assert (len(late), received) == (7, 12)  # the others come in the cool-down, whose steps begin with their reader
    assert all(name.startswith(("fwd attn", "fwd embed")) for name in late)


def test_a_late_gradient_holds_up_the_forward_half_only_on_the_compute_lane() -> None:
    slow = costs(DENSE, p2p=6.0)
    on, off = (simulate(build(DENSE, backward_lane=lane), slow).makespan for lane in ("on", "off"))
    assert off > on
    fast = costs(DENSE, p2p=0.0)
    on, off = (simulate(build(DENSE, backward_lane=lane), fast).makespan for lane in ("on", "off"))
    assert off == on


def test_where_a_moe_layer_heads_the_step_the_lane_makes_no_difference() -> None:
    layout = Layout(("moe",) * 8, pp=2, chunks=2, ep=2)
    assert build(layout).ranks == build(layout, backward_lane="off").ranks


LAYOUTS = (
    Layout(("dense",) * 3, pp=3),
    Layout(("moe", "dense") * 4, pp=2, chunks=2, ep=2, bounds=(0, 2, 5, 7, 8)),
    Layout(("dense", "moe", "moe", "dense", "dense"), pp=2, ep=2),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{len(layout.kinds)} layers on {layout.pp}")
def test_any_combination_is_valid_and_right(layout: Layout) -> None:
    for merge, lane, layers, parts in product(("on", "off"), ("on", "off"), (0, 1, 2, -1), ("attn", "all")):
        program = build(
            layout, 4, merge=merge, backward_lane=lane, defer_layers=layers, defer_parts=parts, order="auto"
        )
        assert check(program) == [], (merge, lane, layers, parts)
        for seed in (None, 1):
            dry_run(program, seed)


@pytest.mark.parametrize("lane", ["on", "off"])
@pytest.mark.parametrize(("layers", "parts"), [(1, "attn"), (2, "all"), (-1, "attn")])
def test_a_gradient_travels_beside_what_was_put_behind_it(lane: Literal["on", "off"], layers: int, parts: str) -> None:
    """Neither the send nor the next receive is ordered against the weight gradients behind the send."""
    program = build(DENSE, backward_lane=lane, defer_layers=layers, defer_parts=parts)
    ops = list(program.ranks[1])
    known = known_of(ops)
    send = next(i for i, op in enumerate(ops) if str(op) == "send grad m1 c1")
    behind = [i for i, op in enumerate(ops) if i > send and op.verb == "wgrad" and (op.microbatch, op.chunk) == (1, 1)]
    assert len(behind) == {(1, "attn"): 1, (2, "all"): 4, (-1, "attn"): 2}[layers, parts]
    assert all(known["compute"][send] < i for i in behind)
    assert all(known["send_grad"][i] < send for i in behind)


# ------------------------------------------------------------------------------------------------ the automatic choice


@pytest.mark.parametrize(
    ("p2p", "expected"),
    [(1.0, (1, "attn")), (1.5, (2, "attn")), (2.5, (1, "all")), (4.0, (2, "all")), (9.0, (2, "all"))],
)  # fmt: skip
def test_as_few_weight_gradients_as_cover_the_p2p(p2p: float, expected: tuple[int, str]) -> None:
    cover = smallest_cover(DENSE, costs(DENSE, p2p))
    assert (cover.layers, cover.parts) == expected
    assert cover.exposed == max(0.0, p2p - cover.seconds)


def test_the_chunk_with_the_least_to_put_behind_its_send_decides() -> None:
    """Stage 0 sends no gradient, so that it has one layer does not matter; that stage 2 has one does."""
    uneven = Layout(("dense",) * 7, pp=2, chunks=2, bounds=(0, 1, 4, 5, 7))
    assert smallest_cover(uneven, costs(uneven, 2.0)).parts == "all"
    first = Layout(("dense",) * 7, pp=2, chunks=2, bounds=(0, 1, 3, 5, 7))
    assert (smallest_cover(first, costs(first, 2.0)).layers, smallest_cover(first, costs(first, 2.0)).parts) == (
        2,
        "attn",
    )


def test_what_is_chosen_hides_the_p2p_in_the_simulator_and_less_does_not() -> None:
    """The time in which only a gradient travels, on the rank that waits for it, with one pair less and as chosen."""
    layout = Layout(("dense",) * 8, pp=2)
    table = costs(layout, 3.5)
    chosen = smallest_cover(layout, table)
    assert (chosen.layers, chosen.parts) == (4, "attn")

    def step(layers: int) -> float:
        program = build(layout, 16, chunks=1, defer_layers=layers, defer_parts="attn")
        return float(simulate(program, table).makespan)

    most, best = step(1), step(-1)
    assert step(chosen.layers) == best < most


def test_stride_3_is_priced_by_what_its_order_holds() -> None:
    layout = Layout(("dense",) * 16, pp=4, chunks=2)
    price = stride_price(layout, 24, 4, costs(layout, 1.0))
    assert price is not None
    two = [in_flight(steps) for steps in one_f_one_b(4, 2, 24, group=4)]
    three = [in_flight(steps) for steps in one_f_one_b(4, 2, 24, group=6, stride=3)]
    assert (price.group, price.chunks) == (6, max(b - a for a, b in zip(two, three, strict=True))) == (6, 5)
    assert price.nbytes == 5 * 2 * 2 * 10  # two layers of two parts
    assert stride_price(layout, 5, 4, costs(layout, 1.0)) is None  # 1.5 groups of 4 need six microbatches


@pytest.mark.parametrize("pp", [2, 4])
def test_a_stride_of_3_hides_p2p_as_long_as_a_step(pp: int) -> None:
    """Its receives are posted a step earlier, so a p2p transfer may take a whole step; with 2 each step waits."""
    layout = Layout(("dense",) * 2 * pp, pp=pp, chunks=2)
    count = 9 * pp
    free, late = costs(layout, p2p=0.0), costs(layout, p2p=6.0)  # a merged step of one layer computes for 7
    near, far = build(layout, count), build(layout, count, stride=3, group=3 * pp // 2)
    assert check(far) == []
    dry_run(far, 1)
    waits = [float(simulate(program, late).makespan - simulate(program, free).makespan) for program in (near, far)]
    merged = 2 * count - far.in_flight[0]
    assert waits[0] > 4 * merged  # the p2p transfer, but for the weight gradients behind it
    assert waits[1] < 2 * merged


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
    assert isinstance(found.overlap.pp.defer_layers, int)
    assert found.overlap.pp.defer_parts in ("attn", "all")
    (reason,) = said(found, "overlap.pp.defer_layers")
    assert "a gradient's p2p transfer" in reason
    assert "no difference" in said(resolve(recipe("tiny")), "overlap.pp.backward_lane")[0]
    assert "the forward half" in said(found, "overlap.pp.backward_lane")[0]
    assert (
        "weight gradients are not deferred" in said(settings(overlap__defer_wgrad="off"), "overlap.pp.defer_layers")[0]
    )
    alone = settings(mesh__pp=1)
    assert (alone.overlap.pp.defer_layers, alone.overlap.pp.backward_lane) == (0, "off")


def test_what_is_set_is_kept_and_the_rest_chosen_to_fit() -> None:
    fixed = settings(overlap__pp__defer_layers=1)
    assert (fixed.overlap.pp.defer_layers, fixed.overlap.pp.defer_parts) == (
        1,
        "all",
    )  # attention's of one would not do
    assert settings(overlap__pp__defer_parts="attn").overlap.pp.defer_layers in (1, 2, -1)
    assert settings(overlap__pp__defer_parts="attn").overlap.pp.defer_parts == "attn"


def test_a_slower_network_has_more_put_behind_it_and_then_names_the_price_of_a_stride() -> None:
    late = settings(train__transport="slow", train__slow=("pp_bwd:6ms",))
    assert (late.overlap.pp.defer_layers, late.overlap.pp.defer_parts) != (
        settings().overlap.pp.defer_layers, settings().overlap.pp.defer_parts,
    )  # fmt: skip
    assert said(settings(), "plan.stride") == []
    found = settings(train__transport="slow", train__slow=("pp_bwd:500ms",), train__microbatches=12)
    (reason,) = said(found, "plan.stride")
    assert "with plan.stride = 3 and plan.group = 3, 6 microbatches would take" in reason
    assert "GiB" in reason


def test_what_would_uncover_more_than_it_hides_is_left_where_it_is() -> None:
    """In a MoE, weight gradients hide all-to-alls where they stand."""
    found = resolve(recipe("tiny"))
    assert (found.overlap.pp.defer_layers, found.overlap.pp.defer_parts) == (1, "attn")
    (reason,) = said(found, "overlap.pp.defer_layers")
    assert "4 microbatches take" in reason
    assert "with weight gradients of all layers" in reason


def test_nothing_is_moved_where_it_brings_nothing() -> None:
    """No p2p transfer to hide, and weight gradients that take no time: all choices are equal, and none is the least."""
    config = planned(settings(), defer_layers="auto", defer_parts="auto")
    found = resolve(config, price=lambda c: costs(Layout(c.model.kinds()), 0.0, attn=0.0, mlp=0.0))
    assert found.overlap.pp.defer_layers == 0
    assert said(found, "overlap.pp.defer_layers")[0].startswith(
        "nothing behind a send; a gradient's p2p transfer takes"
    )
    late = resolve(config, price=lambda c: costs(Layout(c.model.kinds()), 3.0, attn=1.0, mlp=2.0))
    assert late.overlap.pp.defer_layers != 0
    assert "with no weight gradients" in said(late, "overlap.pp.defer_layers")[0]


def test_all_go_behind_the_send_where_that_shortens_the_bubble() -> None:
    """No rank waits for them, and without an all-to-all to cover they are needed at no other place."""
    found = settings(train__microbatches=4)
    assert (found.overlap.pp.defer_layers, found.overlap.pp.defer_parts) == (-1, "all")

    def seconds(layers: int, parts: str) -> float:
        fixed = settings(train__microbatches=4, overlap__pp__defer_layers=layers, overlap__pp__defer_parts=parts)
        return float(predict(fixed, program_of(fixed), LAPTOP).makespan)

    assert seconds(-1, "all") < min(seconds(1, "attn"), seconds(2, "attn"), seconds(1, "all"))


def test_costs_that_were_measured_take_the_place_of_modelled_ones() -> None:
    config = settings()
    config = planned(config, defer_layers="auto", defer_parts="auto")
    for p2p, words in ((0.125, "a gradient's p2p transfer 125 ms"), (6.0, "a gradient's p2p transfer 6 s")):
        found = resolve(config, price=lambda c, p2p=p2p: costs(Layout(c.model.kinds()), p2p))
        assert words in said(found, "overlap.pp.defer_layers")[0]


def test_an_op_that_waits_for_what_it_does_not_read_is_no_reader() -> None:
    """The value stays until its reader has run: the wait alone is no reason to drop it."""
    program = build(DENSE, backward_lane="off")
    for ops in program.ranks:
        dropped = {p: i for i, op in enumerate(ops) for p in op.frees}
        readers = {op.key: i for i, op in enumerate(ops) if op.verb == "bwd"}
        for p, op in enumerate(ops):
            if op.verb == "recv" and op.part == "grad":
                layers = DENSE.layers(program.ranks.index(ops), op.chunk)
                assert dropped[p] > readers["bwd", "mlp", op.microbatch, op.chunk, layers.stop - 1]


def test_ops_have_the_cost_of_their_kind() -> None:
    table = costs(DENSE, 1.0)
    assert table.seconds(0, Op("wgrad", "mlp", layer=0)) == 2.0


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
