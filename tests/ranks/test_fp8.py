"""A planned step with products in fp8 equals the plain sequential one, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from hocket.settings.schema import changed
from tests.helpers.parity import assert_parity, config

MIXED = dict(layers=4, dense_layers=(0, 2), shared_ffn=16, qk_norm=True)

CASES: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "a merged pipeline with deferred weight gradients": (
        dict(layers=8, dense_layers=(0, 4), shared_ffn=16, aux_loss=0.01, bias_rate=0.01),
        dict(pp=2, dp=2, ep=2),
        dict(chunks=2, merge="on", defer_wgrad="on", defer_layers=2, defer_parts="all"),
        {},
    ),
    "recomputed": (
        MIXED, dict(dp=2, ep=2), dict(merge="on", defer_wgrad="on", recompute=("attn", "experts", "mlp")), {},
    ),
    "whole weights, cast once a step": (MIXED, dict(dp=2), dict(strategy="no_shard", update="next_step"), {}),
    "weights gathered once a step": (MIXED, dict(dp=2), dict(strategy="optim", defer_wgrad="on"), {}),
    "some layers in bf16": (MIXED, dict(dp=2), dict(merge="on"), {"fp8_ends": (1, 1)}),
    "forward alone": (MIXED, dict(dp=2), dict(defer_wgrad="on"), {"fp8_products": ("forward",)}),
    "all but weight gradients": (MIXED, dict(dp=2), {}, {"fp8_products": ("forward", "dgrad")}),
    "weight gradients alone": (MIXED, dict(dp=2), dict(defer_wgrad="on"), {"fp8_products": ("wgrad",)}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str) -> None:
    model, mesh, plan, precision = CASES[case]
    c = config(model, mesh, plan, 3, "fp8")
    assert_parity(changed(c, {f"precision.{name}": value for name, value in precision.items()}))
