"""A planned step with products in fp8 equals the plain sequential one, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hocket.config.schema import changed
from tests.helpers.parity import assert_parity, batches_of, config, train
from tests.helpers.ranks import run_ranks

MIXED = dict(layers=3, dense_layers=(0, 2), shared_ffn=16, qk_norm=True)
BUT_ENDS = ("but_first:1", "but_last:1")

CASES: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "a merged pipeline with deferred weight gradients": (
        dict(layers=5, dense_layers=(0, 3), shared_ffn=16, aux_loss=0.01, bias_rate=0.01),
        dict(pp=2, dp=2, ep=2),
        dict(chunks=2, merge="on", defer_wgrad="on", defer_layers=2),
        {},
    ),
    "recomputed": (
        MIXED, dict(dp=2, ep=2), dict(merge="on", defer_wgrad="on", recompute=("attn", "experts", "mlp")), {},
    ),
    "whole weights, cast once a step": (MIXED, dict(dp=2), dict(strategy="no_shard", update="next_step"), {}),
    "weights gathered once a step": (MIXED, dict(dp=2), dict(strategy="optim", defer_wgrad="on"), {}),
    "gathered in fp8": (
        MIXED, dict(dp=2, ep=2), dict(merge="on", defer_wgrad="on", recompute=("attn", "mlp")), {"gather": "fp8"},
    ),
    "gathered in fp8, but for the ends, with experts": (
        dict(MIXED, layers=4), dict(dp=4, ep=2), dict(merge="on"), {"gather": "fp8", "fp8": BUT_ENDS},
    ),
    "gathered in fp8 once a step by three": (
        dict(MIXED, experts=3, hidden=48, heads=3, kv_heads=1, head_dim=16), dict(dp=3),
        dict(strategy="optim", defer_wgrad="on"), {"gather": "fp8"},
    ),
    "all but weight gradients": (MIXED, dict(dp=2), {}, {"fp8": ("forward", "dgrad")}),
    "weight gradients alone": (MIXED, dict(dp=2), dict(defer_wgrad="on"), {"fp8": ("wgrad",)}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str) -> None:
    model, mesh, plan, precision = CASES[case]
    c = config(model, mesh, plan, 3 if "pp" in mesh else 2, "fp8")
    assert_parity(changed(c, {f"precision.{name}": value for name, value in precision.items()}))


def test_gathers_in_fp8_move_half_of_the_bytes_and_keep_every_bit() -> None:
    """Shards begin and end inside of rows. Norms, and units at both ends of the model, travel as without."""
    c = config(MIXED, dict(dp=3), dict(defer_wgrad="on"), 2, "fp8")
    wide, eight = (run_ranks(train, 3, changed(c, {"precision.gather": way}), batches_of(c)) for way in ("bf16", "fp8"))
    for before, after in zip(wide, eight, strict=True):
        assert before["losses"] == after["losses"]
        for (*_, mine), (*_, other) in zip(before["weights"], after["weights"], strict=True):
            assert torch.equal(mine, other)
        stats, less = before["stats"], after["stats"]
        assert less["gathers"] == stats["gathers"]
        assert less["gathered_bytes"] < 0.7 * stats["gathered_bytes"]
        assert less["weight_slot_bytes"] < 0.7 * stats["weight_slot_bytes"]
