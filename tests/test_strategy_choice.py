"""What data-parallel ranks share where that is left open."""

from __future__ import annotations

from typing import Any

import pytest

from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.recipes import recipe
from hocket.resolve import Settings, resolve

DENSE = {"model.layers": 14, "mesh.dp": 4, "train.microbatches": 1}
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("llama3_8b", DENSE, "optim_grads", "1 microbatch takes"),
    ("llama3_8b", {**DENSE, "train.microbatches": 4}, "optim_grads", "3 microbatches take"),
    ("llama3_8b", {"model.layers": 80, "mesh.dp": 4}, "optim_grads_params", "does not fit"),
    ("llama3_8b", {"model.layers": 120, "mesh.dp": 4}, "optim_grads_params", "nothing fits"),
    ("tiny", {"train.device": "cpu"}, "optim_grads_params", "not known"),
]


def settled(name: str, settings: dict[str, Any]) -> Settings:
    base = {"overlap.dp.strategy": "auto", "train.device": "cuda"}
    return resolve(changed(recipe(name), {**base, **settings}), Host(gpus=8))


@pytest.mark.parametrize(("name", "settings", "value", "reason"), CASES)
def test_as_much_stays_as_fits_and_pays(name: str, settings: dict[str, Any], value: str, reason: str) -> None:
    found = settled(name, settings)
    (decision,) = [decision for decision in found.decisions if decision.setting == "overlap.dp.strategy"]
    assert (found.overlap.dp.strategy, reason in str(decision)) == (value, True), decision


def test_a_pipeline_with_experts_gathers_once_a_step() -> None:
    pipeline = {"mesh.pp": 2, "plan.chunks": 2, "mesh.dp": 4, "mesh.ep": 2, "train.sequences": 4}
    found = settled("moe_8gpu", pipeline)
    assert found.overlap.dp.strategy == "optim_grads"
    assert resolve(found) == found
