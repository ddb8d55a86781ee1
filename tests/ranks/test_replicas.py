"""Replicas of shards: a planned step of four data-parallel ranks, of which two share a copy of the weights."""

from __future__ import annotations

from typing import Any

import pytest

from hocket.config.schema import changed
from hocket.program.mesh import Mesh
from tests.helpers.parity import assert_parity, config, train
from tests.helpers.ranks import run_ranks
from tests.reference import random_batches

MIXED: dict[str, Any] = dict(layers=3, dense_layers=(1,), shared_ffn=16, aux_loss=0.01, bias_rate=0.01)
CASES: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = {
    "dense": (dict(layers=2, dense_layers=(0, 1)), dict(dp=4, shard=2), {}),
    "tied, updated later": (dict(layers=2, tied=True), dict(dp=4, shard=2), dict(update="next_step")),
    "experts on every rank": (MIXED, dict(dp=4, shard=2), dict(merge="on")),
    "experts whole in a copy": (MIXED, dict(dp=4, ep=2, shard=2), dict(merge="on", recompute=("experts",))),
    "gradients whole": (MIXED, dict(dp=4, ep=2, shard=2), dict(strategy="optim")),
    "gradients shared": (MIXED, dict(dp=4, shard=2), dict(strategy="optim_grads")),
    "a pipeline": (MIXED | dict(layers=4), dict(pp=2, dp=4, ep=2, shard=2), dict(chunks=2, defer_wgrad="on")),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.full] * (case == "dense")) for case in CASES])
def test_a_step_is_the_plain_one_that_sums_copies_last(case: str) -> None:
    """Losses, gradients, norms and weights, bit for bit; in bf16, where every rounding shows."""
    assert_parity(config(*CASES[case], 3, "bf16"))


def test_documents_count_over_all_copies() -> None:
    assert_parity(changed(config(*CASES["experts whole in a copy"], 4, "fp32"), {"data.packing": "on"}))


def test_gathers_stay_inside_of_a_copy_and_sums_over_copies_come_once_a_step() -> None:
    c = config(*CASES["dense"], 3, "fp32")
    wide = changed(c, {"mesh.shard": 0})
    batches = random_batches(c.model, 1, 3, 4, (2, 8))
    (narrow, *_), (whole, *_) = run_ranks(train, 4, c, batches), run_ranks(train, 4, wide, batches)
    assert narrow["stats"]["gathers"] == whole["stats"]["gathers"]
    assert 2 * narrow["stats"]["gathered_bytes"] < 1.5 * whole["stats"]["gathered_bytes"]
    assert narrow["stats"]["shard_bytes"] > 1.9 * whole["stats"]["shard_bytes"]


def test_who_shares_a_group() -> None:
    mesh = Mesh(pp=2, dp=4, ep=2, shard=2)
    assert mesh.groups("gather_dense") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("replicas") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("gather_experts") == tuple((rank,) for rank in range(8))
    assert Mesh(dp=8, ep=2, shard=4).groups("reduce_experts") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert all(len(ranks) == 1 for ranks in Mesh(dp=4).groups("replicas"))
    for wrong in (3, 1):
        with pytest.raises(ValueError, match=f"mesh.shard={wrong} must divide mesh.dp=4"):
            Mesh(dp=4, ep=2, shard=wrong)
