"""Parts that run forward once more: what a plan with them holds, what the checker asks of it, what it costs."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from hocket.config import Config
from hocket.config.plan import part_and_layers
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.predict.cost import Pricing, costs_of
from hocket.predict.hardware import H200
from hocket.predict.simulate import simulate
from hocket.program.check import check
from hocket.program.lower import build_program
from hocket.program.ops import Layout, Program
from hocket.program.shard import Sharding
from hocket.program.stages import layout_of
from hocket.recipes import TINY, qwen3_30b_a3b
from hocket.resolve import resolve
from hocket.tune.choose import stage_seconds
from hocket.tune.trials import Trials, activation, memory_of
from tests.helpers.costs import Table
from tests.helpers.dryrun import dry_run
from tests.helpers.plans import planned
from tests.plan.programs import find, moved, with_op, without

LAYOUT = Layout(kinds=("moe", "dense", "moe"), ep=2, recompute=("attn", "experts", "mlp"))
PLAIN = planned(merge="off")


def program(layout: Layout = LAYOUT, config: Config = PLAIN, microbatches: int = 2) -> Program:
    return build_program(layout, microbatches, config, Sharding(dense=2, experts=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: without(p, 0, find(p, 0, "recompute attn m0")), "recompute attn m0 c0 l2 is missing"),
        (
            lambda p: moved(p, 0, find(p, 0, "recompute mlp m1"), find(p, 0, "bwd mlp m1") + 1),
            "bwd mlp m1 c0 l1 may run before",
        ),
        (
            lambda p: with_op(p, 0, find(p, 0, "fwd combine m0"), frees=(find(p, 0, "fwd dispatch m0"),)),
            "recompute experts m0 c0 l0 may still read it",
        ),
        (
            lambda p: moved(p, 0, find(p, 0, "recompute experts m0 c0 l0"), find(p, 0, "fwd head m0")),
            "recompute experts m0 c0 l0 reads weights that are in no slot",
        ),
    ],
    ids=["missing", "too late", "input dropped", "weights gone"],
)
def test_broken_plans_are_noticed(change: object, message: str) -> None:
    there = program(config=planned(PLAIN, prefetch=0))
    assert check(there) == []
    assert callable(change)
    found = [str(violation) for violation in check(change(there))]
    assert any(message in text for text in found), found


def test_it_must_not_take_the_place_of_another_layers_forward() -> None:
    """What a recomputation leaves must be what forward would have left: the dry run compares them by hashes."""
    there = program()
    at = find(there, 0, "recompute mlp m1")
    dry_run(there, 0)
    wrong = with_op(there, 0, at, microbatch=0)
    with pytest.raises(ValueError, match="dry run"):
        dry_run(wrong, 0)


def test_rows_travel_while_a_forward_runs_once_more() -> None:
    """Each transfer of a backward alone is as long as the part that is recomputed behind it: nothing is exposed."""
    times = {("fwd", "attn"): 9, ("recompute", "attn"): 2, ("recompute", "experts"): 2}
    times |= {("bwd", "dispatch"): 2, ("bwd", "combine"): 2, ("bwd", "attn"): 1, ("bwd", "experts"): 1}
    inside = {key: value for key, value in times.items() if key[0] != "recompute"}
    inside |= {("bwd", part): 3 for part in ("attn", "experts")}
    there = program(Layout(kinds=("moe",) * 3, ep=2, recompute=("attn", "experts")), microbatches=1)
    assert simulate(there, Table(times)).ranks[0].exposed["a2a"] == 0
    assert simulate(there, Table(inside)).ranks[0].exposed["a2a"] > 0


def test_rows_are_dispatched_again_between_the_last_layer_and_the_experts_backward() -> None:
    there = program(Layout(kinds=("moe",) * 2, ep=2, recompute=("dispatch:1",)), microbatches=1)
    ops = there.ranks[0]
    assert [str(op) for op in ops if op.verb == "recompute"] == ["recompute dispatch m0 c0 l0"]
    again, backward = find(there, 0, "recompute dispatch m0 c0 l0"), find(there, 0, "bwd experts m0 c0 l0")
    assert ops[again].lane == "a2a"
    assert again < find(there, 0, "bwd combine m0 c0 l0") < backward
    assert find(there, 0, "fwd dispatch m0 c0 l0") in ops[find(there, 0, "fwd combine m0 c0 l0")].frees
    assert find(there, 0, "bwd experts m0 c0 l1") < again, "nobody holds two layers' rows"
    early = with_op(there, 0, backward, deps=tuple(p for p in ops[backward].deps if ops[p].lane != "a2a"))
    assert "recompute dispatch m0 c0 l0" in " ".join(map(str, check(early)))
    dropped = with_op(there, 0, find(there, 0, "fwd combine m0 c0 l0"), frees=(find(there, 0, "fwd attn m0 c0 l0"),))
    assert "recompute dispatch m0 c0 l0 may still read it" in " ".join(map(str, check(dropped)))


def test_rows_that_arrive_in_order_stay_until_the_weight_gradient_has_run() -> None:
    layout = Layout(kinds=("moe",), ep=2, placed=True, recompute=("dispatch",))
    ops = program(layout, microbatches=1).ranks[0]
    (again,) = (i for i, op in enumerate(ops) if op.verb == "recompute")
    (freed,) = (i for i, op in enumerate(ops) if again in op.frees)
    assert freed > next(i for i, op in enumerate(ops) if op.key[:2] == ("wgrad", "experts"))


def test_where_all_experts_are_here_rows_are_made_again_right_ahead_of_the_experts_backward() -> None:
    ops = [str(op) for op in program(Layout(kinds=("moe",), recompute=("dispatch",)), microbatches=1).ranks[0]]
    assert ops.index("recompute dispatch m0 c0 l0") + 1 == ops.index("bwd experts m0 c0 l0")


@pytest.mark.parametrize("ep", [1, 2])
def test_a_layer_of_qwen3_30b_a3b_keeps_29_percent_less(ep: int) -> None:
    """MiB of 8,192 tokens: all but their 8 rows each, of 2,048 numbers in bf16."""
    c = changed(qwen3_30b_a3b(), {"mesh.pp": 1, "mesh.dp": 2, "mesh.ep": ep, "model.layers": 1, "plan.chunks": 1})
    c = changed(c, {"train.sequences": 2, "data.sequence_length": 4096, "train.transport": "nccl"})
    kept = []
    for parts in ((), ("dispatch",)):
        less = changed(c, {"plan.recompute": parts})
        layout = layout_of(less)
        kept.append(round(activation(layout, costs_of(less, H200), 0, 0) / 2**20))
    assert kept == [892, 636]


def test_a_number_means_the_first_layers_of_every_stage() -> None:
    layout = Layout(("dense",) * 3 + ("moe",) * 4, pp=2, ep=2, bounds=(0, 2, 7), recompute=("attn:1", "experts:2"))
    assert layout.recomputed == {("attn", 0), ("attn", 2), ("experts", 3)}
    assert (layout.recomputing("attn", "dense"), layout.recomputing("experts", "moe")) == (2, 1)
    there = program(layout)
    again = [op for _, _, op in there if op.verb == "recompute" and op.microbatch == 0]
    assert {(op.part, op.layer) for op in again} == layout.recomputed
    assert check(there) == []
    for seed in range(5):
        dry_run(there, seed)
    elsewhere = with_op(there, 0, find(there, 0, "recompute attn m0 c0 l0"), layer=1)
    assert "recompute attn m0 c0 l1 has no place in this layout" in " ".join(map(str, check(elsewhere)))
    with pytest.raises(ValueError, match="'attn:x' is no part with a number of layers, such as attn:2"):
        replace(layout, recompute=("attn:x",))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("attn:0", "'attn:0' is no part with a number of layers, such as attn:2"),
        ("attn:-1", "'attn:-1' is no part with a number of layers, such as attn:2"),
        ("norm", "'norm' is none of the parts attn, dispatch, experts, kv, mlp"),
    ],
)
def test_a_setting_that_names_no_part_or_no_layers_is_one_line(text: str, reason: str) -> None:
    line = f"plan.recompute = {text} (configuration): {reason}; fix: auto, or such as attn:2"
    with pytest.raises(ValueError, match=re.escape(line)):
        resolve(planned(qwen3_30b_a3b(), recompute=(text,)), Host(gpus=8))


def test_each_layer_that_recomputes_less_holds_more_and_takes_less_time() -> None:
    bytes_of, seconds_of, kept = [], [], []
    for recompute in ((), ("attn:1",), ("attn:2",), ("attn:3",), ("attn",)):
        layout = Layout(kinds=("dense",) * 4, recompute=recompute)
        costs = Pricing(TINY, layout, 8192, 128, Sharding(), H200, 2).costs()
        timeline = simulate(program(layout, microbatches=1), costs)
        bytes_of.append(timeline.ranks[0].peak_bytes)
        seconds_of.append(float(timeline.makespan))
        kept.append(activation(layout, costs, 0, 0))
    assert bytes_of == sorted(bytes_of, reverse=True)
    assert seconds_of == sorted(set(seconds_of))
    less = {a - b for a, b in pairwise(kept)}
    assert len(less) == 1, "each layer keeps the same less"
    assert min(less) > 0


def test_balance_knows_which_layers_of_a_stage_run_again() -> None:
    """With a layer of each stage run again, a rank with one layer of two has no more of that to do."""
    layout = Layout(("dense",) * 4, pp=2, recompute=("attn:1",))
    some = Table({("fwd", "attn"): 1, ("recompute", "attn"): 10})
    assert stage_seconds(layout, some, (3, 1))[1] == [13, 11]
    assert stage_seconds(replace(layout, recompute=("attn",)), some, (3, 1))[1] == [33, 11]


def test_auto_recomputes_only_what_does_not_fit() -> None:
    config = planned(qwen3_30b_a3b(), recompute=("auto",), defer_layers="attn:1", chunks=2)
    config = changed(config, {"model.layers": 24})
    usable = Host(gpus=8)
    few, many = (resolve(changed(config, {"train.sequences": sequences}), usable) for sequences in (1, 6))
    for settings in (few, many):
        (decision,) = (d for d in settings.decisions if d.setting == "plan.recompute")
        assert "of 125 GiB" in decision.reason
    assert few.plan.recompute == ()
    assert many.plan.recompute, "what does not fit is not left as it is"
    parts, counts = zip(*map(part_and_layers, many.plan.recompute), strict=True)
    (count,) = set(counts)
    step = Trials().step
    chosen, fewer = (
        step(changed(many, {"plan.recompute": tuple(f"{part}:{n}" for part in parts)})) for n in (count, count - 1)
    )
    memory = memory_of(many, usable)
    assert chosen.fits(memory)
    assert not fewer.fits(memory)
    laptop = resolve(changed(config, {"precision.compute": "fp32", "train.transport": "gloo", "train.device": "cpu"}))
    assert laptop.plan.recompute == ()
