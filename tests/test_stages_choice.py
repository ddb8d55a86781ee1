"""How many layers every stage gets by itself: where that pays, what it costs in memory, and that it can be set."""

from __future__ import annotations

from typing import Any

import pytest

from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.planning import predict, program_of
from hocket.predict.hardware import H200
from hocket.program.stages import layout_of
from hocket.recipes import recipe
from hocket.resolve import Settings, resolve
from hocket.tune.choose import splits, stage_seconds
from hocket.tune.trials import Trials

LLAMA = changed(recipe("llama3_8b"), {"mesh.pp": 4, "mesh.dp": 2})
NAME = "plan.layers_per_stage"


def resolved(**settings: Any) -> Settings:
    return resolve(changed(LLAMA, {name.replace("__", "."): value for name, value in settings.items()}), Host(gpus=8))


def reason(settings: Settings) -> str:
    return next(decision.reason for decision in settings.decisions if decision.setting == NAME)


def test_a_heavy_head_gets_fewer_layers_and_the_step_is_shorter() -> None:
    chosen, even = resolved(), resolved(plan__layers_per_stage=())
    split = chosen.plan.split
    assert sum(split) == 32
    assert split[-1] < 8
    assert "the longest rank computes" in reason(chosen)
    layout, costs = layout_of(even), Trials().costs(even)
    before, after = (max(stage_seconds(layout, costs, sizes)[1]) for sizes in ((8,) * 4, split))
    assert after < 0.96 * before
    seconds = [float(predict(each, program_of(each), H200).makespan) for each in (chosen, even)]
    assert seconds[0] < 0.96 * seconds[1]


def test_a_head_that_takes_longer_than_its_share_of_layers_gets_none() -> None:
    few = {"model__layers": 8, "mesh__dp": 1, "model__vocab": 160_000}
    chosen, other = resolved(**few), resolved(**few, plan__layers_per_stage=(2, 3, 2, 1))
    assert chosen.plan.split == (2, 3, 3, 0)
    seconds = [float(predict(each, program_of(each), H200).makespan) for each in (chosen, other)]
    assert seconds[0] < 0.95 * seconds[1]


def test_a_small_vocabulary_leaves_stages_even() -> None:
    small = resolved(model__vocab=1024)
    assert small.plan.layers_per_stage == ()
    assert "shorter" in reason(small)
    assert resolve(recipe("tiny")).plan.layers_per_stage == ()


def test_one_rank_has_nothing_to_split_and_what_is_set_stays() -> None:
    assert resolved(mesh__pp=1).plan.layers_per_stage == ()
    assert resolved(plan__layers_per_stage=(5, 9, 9, 9)).plan.layers_per_stage == (5, 9, 9, 9)
    chosen = resolved()
    assert resolve(chosen) == chosen


@pytest.mark.parametrize(("vocab", "fits"), [(128_256, 0), (524_288, 1)])
def test_a_split_that_does_not_fit_is_left(vocab: int, fits: int) -> None:
    """Memory for the split after so many moved layers, or for even stages alone."""
    even = resolved(mesh__pp=2, model__vocab=vocab, plan__layers_per_stage=())
    ways = [sizes for sizes, _ in splits(layout_of(even), Trials().costs(even))]
    held = [Trials().step(changed(even, {NAME: sizes})).nbytes for sizes in ways]
    assert held[fits] < held[fits + 1]
    host = Host(gpus=8, memory=int((held[fits] + held[fits + 1]) / 1.8))
    chosen = resolve(changed(LLAMA, {"mesh.pp": 2, "model.vocab": vocab}), host)
    assert (chosen.plan.split or ways[0]) == ways[fits]
    assert "does not fit: " in reason(chosen)


def test_a_small_gain_of_a_merged_order_is_simulated() -> None:
    found = resolve(changed(recipe("qwen3_30b_a3b"), {"train.microbatches": 4}), Host(gpus=8))
    assert "4 microbatches take" in reason(found)
