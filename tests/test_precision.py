"""Number formats: what is chosen, what it costs, and what older runs did."""

from __future__ import annotations

import pytest

from benchmarks.stored import config_of
from hocket.config import PrecisionConfig
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.predict.cost import costs_of
from hocket.predict.hardware import H200
from hocket.recipes import recipe
from hocket.resolve import resolve

TINY, MOE = recipe("tiny"), recipe("moe_8gpu")


@pytest.mark.parametrize(
    ("compute", "wire", "found"), [("bf16", "auto", "bf16"), ("fp32", "auto", "fp32"), ("bf16", "fp32", "fp32")]
)
def test_gradients_travel_in_what_computes_unless_somebody_asks(compute: str, wire: str, found: str) -> None:
    settings = resolve(changed(TINY, {"precision.compute": compute, "precision.wire": wire}), Host())
    assert settings.precision.wire == found
    chosen = [decision for decision in settings.decisions if decision.setting == "precision.wire"]
    assert len(chosen) == (wire == "auto")
    assert resolve(settings) == settings


def test_a_wire_that_nothing_travels_on_is_remarked_and_no_error() -> None:
    alone = changed(TINY, {"mesh.pp": 1, "mesh.dp": 1, "mesh.ep": 1, "plan.chunks": 1, "precision.wire": "fp32"})
    settings = resolve(alone, Host(), {"precision.wire": "command line, --precision.wire"})
    [remark] = [decision for decision in settings.decisions if decision.setting == "precision.wire"]
    assert "shared weights" in remark.reason
    assert remark.fix


def test_fp32_on_the_wire_sends_twice_the_bytes_of_gradients_alone() -> None:
    narrow, wide = (
        costs_of(resolve(changed(MOE, {"precision.wire": wire}), Host(gpus=8)), H200) for wire in ("bf16", "fp32")
    )
    for key, cost in narrow.table.items():
        times = 2 if key[0] == "reduce" else 1
        assert wide.table[key].wire_bytes == times * cost.wire_bytes, key
    for one, two in zip(narrow.slot_bytes, wide.slot_bytes, strict=True):
        assert {unit: (weight, 2 * gradient) for unit, (weight, gradient) in one.items()} == two


def test_runs_from_before_there_was_a_choice_sent_what_they_computed_in() -> None:
    stored = {"train": {"dtype": "bf16", "steps": 3}, "overlap": {"ep": {}, "dp": {}, "pp": {}, "tp": {}}}
    assert config_of(stored).precision == PrecisionConfig(compute="bf16", wire="bf16")


def test_averages_in_bf16_take_four_bytes_and_less_time() -> None:
    wide, narrow = (
        costs_of(resolve(changed(TINY, {"precision.averages": kept}), Host()), H200) for kept in ("fp32", "bf16")
    )
    assert [3 * few for few in narrow.state_bytes] == [2 * many for many in wide.state_bytes]
    assert all(narrow.table[key].seconds < wide.table[key].seconds for key in wide.table if key[0] == "update")


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.99, 0.95)])
def test_averages_in_bf16_that_would_not_follow_are_refused(betas: tuple[float, float]) -> None:
    chosen = changed(TINY, {"precision.averages": "bf16", "train.betas": betas})
    with pytest.raises(ValueError, match=r"precision.averages = bf16.*0\.984.*fix: precision.averages = fp32") as error:
        resolve(chosen, Host(), {"precision.averages": "command line, --precision.averages"})
    assert str(betas[0]) in str(error.value)
    resolve(changed(chosen, {"train.betas": (0.9, 0.98)}), Host())
