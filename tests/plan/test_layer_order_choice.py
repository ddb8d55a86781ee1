"""`plan.layer_order = auto`: another order than the literature's where a simulation finds the step shorter."""

from __future__ import annotations

from dataclasses import replace

from hocket.config import Config
from hocket.config.schema import changed
from hocket.machine import host_for_plan
from hocket.predict.cost import CostTable
from hocket.recipes import RECIPES
from hocket.resolve import Settings, resolve
from hocket.tune.trials import Trials, model_costs

SKEWED = {
    "aF": 4, "aB": 6, "aW": 2, "eF": 9, "eB": 9, "eW": 9, "uF": 1, "uB": 1, "cF": 11, "dF": 11, "cB": 11, "dB": 11,
}  # fmt: skip
"""All-to-alls that take longer than attention."""
VERBS = {"F": "fwd", "B": "bwd", "W": "wgrad"}
PARTS = {"a": "attn", "d": "dispatch", "e": "experts", "c": "combine", "u": "unpermute"}


def skewed(config: Config) -> CostTable:
    seconds = {(VERBS[word[1]], PARTS[word[0]], "moe"): value / 1e3 for word, value in SKEWED.items()}
    costs = model_costs(config)
    changed = {key: replace(costs.table[key], seconds=value) for key, value in seconds.items()}
    return replace(costs, table={**costs.table, **changed})


def resolved(**changes: object) -> Settings:
    config = changed(RECIPES["moe_8gpu"](), changes)
    return resolve(config, host_for_plan(config), {}, skewed)


def test_long_exchanges_get_another_order_with_the_gain_as_its_reason() -> None:
    settings = resolved()
    (decision,) = [d for d in settings.decisions if d.setting == "plan.layer_order"]
    assert settings.plan.layer_order == decision.value == "wgrad_last"
    assert "instead of" in decision.reason
    assert decision.source == "auto"
    usual, count = changed(settings, {"plan.layer_order": "literature"}), settings.train.microbatches
    trials = Trials(skewed)
    assert trials.seconds(settings, count) < 0.97 * trials.seconds(usual, count)


def test_what_is_asked_for_stays() -> None:
    settings = resolved(**{"plan.layer_order": "early_release"})
    assert settings.plan.layer_order == "early_release"
    assert not [d for d in settings.decisions if d.setting == "plan.layer_order"]


def test_nothing_is_said_where_nothing_is_merged() -> None:
    settings = resolved(**{"overlap.ep.merge": "off"})
    assert settings.plan.layer_order == "literature"
    assert not [d for d in settings.decisions if d.setting == "plan.layer_order"]
