"""Planned steps on context-parallel ranks against the plain sequential step: the same but for the order of sums."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import Tensor

from hocket.config import Config, RopeConfig
from hocket.runtime.dtypes import DTYPES
from hocket.settings.schema import changed
from tests.helpers.parity import adamw, batches_of, config, train, whole
from tests.helpers.ranks import run_ranks
from tests.ranks.test_parity import PROJECTIONS
from tests.reference import Reference


def of(model: dict[str, Any], mesh: dict[str, int], plan: dict[str, Any], **settings: Any) -> Config:
    """A configuration of two context-parallel ranks, with documents that share sequences unless told otherwise."""
    microbatches, dtype = settings.pop("microbatches", 3), settings.pop("dtype", "fp32")
    mesh = {"cp": 2, **mesh}
    c = config({"layers": 2, **model}, mesh, plan, microbatches, dtype, lane_seed=microbatches)
    return changed(c, {"data.packing": "on", **settings})


MOE, DENSE = dict(dense_layers=(0,), shared_ffn=16), dict(experts=0)
SINKS = dict(window=3, full_layers=(1,), sinks=True)
GATED = dict(attn_gate=True, norm_plus_one=True, qk_norm=True, rope=RopeConfig(without=(0,)))
CASES: dict[str, Config] = {
    "dense": of(DENSE, {}, {}),
    "sequences of one document": of(MOE, {}, {}, **{"data.packing": "off"}),
    "windows and sinks, experts over cp ranks": of({**MOE, **SINKS}, {"ep": 2}, dict(merge="on")),
    "gates, replicas": of({**MOE, **GATED}, {"dp": 2, "shard": 2}, dict(update="next_step")),
    "norms behind, interleaved": of(
        {**DENSE, **PROJECTIONS["normed"], "norms": "after", "layers": 4},
        {"pp": 2}, dict(chunks=2, layers_per_stage=(1, 1, 1, 1), recompute=("attn:1",), strategy="optim"),
    ),
    "biases, no shards": of({**MOE, "qkv_bias": True, "o_bias": True}, {}, dict(strategy="no_shard", merge="on")),
    "tied, zero bubble": of(
        {**MOE, "tied": True, "layers": 2}, {"pp": 2}, dict(order="zb_h1", layers_per_stage=(1, 1), defer_wgrad="on")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_the_plain_one(name: str) -> None:
    c = CASES[name]
    batches = batches_of(c)[:1]
    plain = Reference(c.model, c.mesh.dp, dtype=DTYPES[c.precision.dtype], clip=c.train.clip, optimizer=adamw)
    wanted = plain.run(batches)
    ranks = run_ranks(train, c.mesh.world, c, batches)
    grads = whole([piece for rank in ranks for piece in rank["grads"][0]])
    assert grads.keys() == wanted.grads[0].keys()
    for parameter, grad in wanted.grads[0].items():
        close(grads[parameter], grad, f"gradient of {parameter}")
    assert all(math.isclose(rank["norms"][0], wanted.norms[0], rel_tol=1e-5) for rank in ranks)


def close(found: Tensor, wanted: Tensor, what: str) -> None:
    worst, scale = (found - wanted).abs().max(), wanted.abs().max()
    assert worst <= 1e-5 * (scale + 1e-6), f"{what}: off by {worst:.3g} of {scale:.3g}"
