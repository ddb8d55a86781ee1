"""Steps that choices compare: they are those that would be built, and each is built once."""

from __future__ import annotations

from typing import Any

import pytest

from hocket.config import Config
from hocket.config.schema import changed
from hocket.machine import host_for_plan
from hocket.predict.arrivals import arrival_bytes
from hocket.predict.simulate import simulate
from hocket.program.lower import build_program
from hocket.program.stages import layout_of, sharding_of
from hocket.recipes import recipe
from hocket.resolve import resolve
from hocket.tune import trials as predicted
from hocket.tune.trials import Trials

SUMS = {"overlap.dp.strategy": "optim", "data.sequence_length": 256}
"""Gradients of experts are held twice for a while: a microbatch's own, and their sum."""
SMALL = {"train.microbatches": 8, "model.layers": 8, "plan.layers_per_stage": ()}
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("qwen3_30b_a3b", {"mesh.pp": 4, "mesh.dp": 8, "mesh.ep": 8, "plan.chunks": 2, "plan.graphs": "on"}),
    ("llama3_8b", {"mesh.pp": 2, "mesh.dp": 8, "overlap.dp.strategy": "optim"}),
    ("llama3_8b", {"mesh.pp": 4, "mesh.dp": 2, "overlap.pp.defer_layers": -1, "data.sequence_length": 32768}),
    ("llama3_8b", {"mesh.pp": 2, "mesh.dp": 2, "plan.recompute": ("attn",), "overlap.dp.strategy": "no_shard"}),
    ("llama3_8b", {"mesh.pp": 10, "mesh.dp": 2, "plan.recompute": ("attn:1",)}),
    ("mixtral_8x7b", {"mesh.pp": 1, "mesh.dp": 8, "mesh.ep": 8, "plan.chunks": 1, "overlap.ep.merge_ends": "on"}),
    ("mixtral_8x7b", {"mesh.pp": 1, "mesh.dp": 2, "mesh.ep": 1, "plan.chunks": 1, **SUMS}),
)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_step_is_the_one_that_would_be_built(name: str, settings: dict[str, Any]) -> None:
    """Also where settings are open."""
    config = changed(recipe(name), SMALL | settings | {"train.eval_batches": 0, "plan.order": "auto"})
    found = resolve(config, host_for_plan(config))
    asked = changed(Config(**{section: getattr(found, section) for section in SECTIONS}), OPEN)
    for each in (found, asked):
        step, costs = Trials().step(each), Trials().costs(each)
        built = build_program(layout_of(each), step.microbatches, each, sharding_of(each))
        timeline = simulate(built, costs)
        assert step.seconds == timeline.makespan
        assert step.ops == max(map(len, built.ranks))
        assert step.nbytes - arrival_bytes(each) == max(use.peak_bytes for use in timeline.ranks)
        assert step.least < step.nbytes
        assert step.fits(int(1.2 * step.nbytes))
        assert not step.fits(step.nbytes)


def test_every_program_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def build(*arguments: Any, **named: Any) -> Any:
        made.append(arguments)
        return build_program(*arguments, **named)

    monkeypatch.setattr(predicted, "build_program", build)
    config = changed(recipe("qwen3_30b_a3b"), SMALL | {"plan.recompute": ("auto",), "overlap.dp.strategy": "auto"})
    resolve(config, host_for_plan(config))
    assert 2 < len(made) == len(set(made))


SECTIONS = ("model", "mesh", "plan", "overlap", "data", "precision", "train", "run")
OPEN = {"overlap.pp.defer_layers": "auto", "overlap.pp.defer_head": "auto"}
