"""Pairs at the ends, weight gradients behind sends, late ones of the head: chosen together, about as well as can be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from hocket.config import Config
from hocket.config.schema import changed
from hocket.machine import host_for_plan
from hocket.predict.hardware import H200, HARDWARE, hardware_of
from hocket.recipes import recipe
from hocket.resolve import Settings, resolve
from hocket.rules import few_microbatches
from hocket.tune.trials import Trials

ENDS, LAYERS, HEADS = "overlap.ep.merge_ends", "overlap.pp.defer_layers", "overlap.pp.defer_head"
SMALL = {"model.layers": 8, "mesh.dp": 4, "mesh.ep": 4, "mesh.pp": 2, "plan.chunks": 2, "plan.graphs": "off"}
LONG = {"data.sequence_length": 8192}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a large vocabulary": ("qwen3_30b_a3b", {**SMALL, **LONG}),
    "room for pairs": ("qwen3_30b_a3b", {**SMALL, **LONG, "plan.group": 4, "model.vocab": 32768}),
    "both": ("moonlight_16b", {**SMALL, "plan.group": 4}),
    "even stages": ("llama3_8b", {"model.layers": 16, "mesh.pp": 4, "plan.chunks": 2, "plan.layers_per_stage": ()}),
}


def settled(name: str, changes: dict[str, Any]) -> Settings:
    config = changed(recipe(name), changes)
    return resolve(config, host_for_plan(config))


def ways(c: Config, count: int) -> Iterator[Config]:
    """Every combination but for numbers of layers between those that are here."""
    pairs = ("off", "on") if c.overlap.ep.merge == "on" else ("off",)
    covers = (0, 1, 2, -1, "attn:1", "attn:2", "attn")
    for ends, layers, heads in product(pairs, covers, range(count + 1)):
        yield changed(c, {ENDS: ends, LAYERS: layers, HEADS: heads})


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] * (case == "room for pairs")) for case in CASES]
)
def test_no_combination_is_much_better(case: str) -> None:
    found, trials = settled(*CASES[case]), Trials()
    count = few_microbatches(found)
    assert trials.seconds(found, count) < 1.003 * min(trials.seconds(way, count) for way in ways(found, count))


def test_one_layer_waits_after_sends_beside_late_heads_and_without() -> None:
    name, changes = "moonlight_16b", {**SMALL, **LONG, "model.vocab": 151936}
    assert settled(name, {**changes, HEADS: 0}).overlap.pp.defer_layers == "attn:1"
    assert settled(name, changes).overlap.pp.defer_layers == 1


def test_without_room_for_late_heads_it_is_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    name, changes = CASES["a large vocabulary"]
    changes = {**changes, "train.transport": "nccl"}  # another one may have room for them
    plain = settled(name, {**changes, HEADS: 0})
    changes = {**changes, "plan.layers_per_stage": plain.plan.layers_per_stage}
    held = Trials().peak(plain, few_microbatches(plain), 1)
    tight = replace(H200, memory=int(1.001 * held / 0.9))
    monkeypatch.setitem(HARDWARE, "h200", tight)  # type: ignore[arg-type]
    found = settled(name, changes)
    # That of one microbatch takes no memory that is not there anyway; those of more do not fit.
    assert found.overlap.pp.defer_head in (0, 1)
    assert found.overlap.pp.defer_layers == plain.overlap.pp.defer_layers
    assert "there is no memory" in next(d.reason for d in found.decisions if d.setting == HEADS)


def test_few_programs_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Late heads are moved in programs that are there; pairs are tried with two proposals."""
    made: list[Config] = []
    seconds = Trials.seconds

    def asked(self: Trials, c: Config, microbatches: int) -> float:
        made.append(changed(c, {HEADS: 0}))
        return seconds(self, c, microbatches)

    monkeypatch.setattr(Trials, "seconds", asked)
    found = settled(*CASES["both"])
    assert found.overlap.ep.merge_ends == "on"
    plans = {(c.overlap.ep.merge_ends, c.overlap.pp.defer_layers) for c in made}
    assert len([ends for ends, _ in plans if ends == "on"]) <= 2
    assert len(plans) <= 9


def test_what_is_set_is_kept_and_the_others_chosen_beside_it() -> None:
    name, changes = CASES["both"]
    kept = {ENDS: "off", LAYERS: 1, HEADS: 2}
    for setting, value in kept.items():
        found = settled(name, {**changes, setting: value})
        said = {decision.setting for decision in found.decisions if decision.chosen}
        assert setting not in said
        assert {ENDS, LAYERS, HEADS} - said == {setting}


def test_pairs_that_do_not_fit_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    name, changes = CASES["both"]
    sizes = [Trials().step(settled(name, {**changes, ENDS: ends})).nbytes for ends in ("off", "on")]
    tight = replace(H200, memory=int(sum(sizes) / 2 / 0.9))
    monkeypatch.setitem(HARDWARE, "h200", tight)  # type: ignore[arg-type]
    found = settled(name, changes)
    assert hardware_of(found).memory == tight.memory
    assert found.overlap.ep.merge_ends == "off"
    assert "does not fit" in next(d.reason for d in found.decisions if d.setting == ENDS)
