"""A planned step equals the plain sequential step, bit for bit: losses, gradients, weights."""

from __future__ import annotations

from typing import Any

import pytest

from hocket.config import Config, RopeConfig
from hocket.config.plan import ZERO_BUBBLE
from hocket.config.schema import changed
from tests.helpers.pairwise import drawn, pairwise, quick
from tests.helpers.parity import assert_parity, config

VALUES: dict[str, list[Any]] = {
    "dtype": ["fp32", "bf16"],
    "wire": ["auto", "fp32", "bf16"],
    "merge": ["off", "on"],
    "merge_ends": ["off", "on"],
    "copies": ["per_expert", "per_rank"],
    "defer_wgrad": ["off", "on"],
    "defer_layers": [0, 1, 2, -1, "attn:1", "attn"],
    "defer_head": [0, 1, -1],
    "strategy": ["no_shard", "optim", "optim_grads", "optim_grads_params"],
    "update": ["end", "next_step"],
    "clip": [0.5, 0.0],
    "ep": [1, 2],
    "dp": [1, 2],
    "projections": ["plain", "biased", "latent", "latent queries", "normed"],
    "pp": [1, 2],
    "chunks": [1, 2],
    "layers": ["even", "uneven"],
    "kinds": ["dense", "moe", "mixed"],
    "shared_ffn": [0, 16],
    "router": ["plain", "groups", "balanced", "sigmoid"],
    "microbatches": [1, 2, 3, 5, 8],
    "layer_order": ["literature", "early_release", "wgrad_last", "cB eB aF dB aB dF eF cF uB eW aW uF"],
    "splits": ["host", "device"],
    "order": ["auto", "sequential", "zb_h1", "zb_v", "merged_v"],
    "recompute": [(), ("attn:1",), ("experts", "mlp"), ("dispatch",), ("attn", "dispatch:1", "experts")],
    "offload": [(), ("attn:1",), ("attn", "experts", "mlp")],
    "room": [1.0, 2.0],
    "documents": ["off", "on"],
    "attention": ["full", "window", "sinks", "both", "delta"],
    "biases": ["off", "on"],
    "tied": [False, True],
}
"""What the matrix varies. With room of 1 steps are made again. Uneven stages have odd numbers of layers: forward
and backward meet in the middle one."""


QUICK = {**VALUES, "microbatches": [1, 2, 3, 4]}
"""Of these every pair is tried, by `make test` and `make parity` together. Two ranks with two chunks each go through
four microbatches in two rounds, and through three in one and a half."""


LATENT: dict[str, Any] = dict(kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
PROJECTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biased": dict(
        qkv_bias=True, o_bias=True, rope=RopeConfig(kind="yarn", factor=4.0, original_positions=16, width=4)
    ),
    "latent": LATENT,
    "latent queries": {
        **LATENT,
        "q_lora_rank": 20,
        "rope": RopeConfig(kind="yarn", factor=4.0, original_positions=16, mscale_all_dim=0.7),
    },
    "normed": dict(qk_norm=True, qk_norm_over="whole", rope=RopeConfig(without=(0,))),
}
"""What is done to queries and keys. With norms over their whole width, dense models have those of layers behind."""


def of_experts(case: dict[str, Any]) -> bool:
    if case["kinds"] == "dense":
        return (
            case["router"] == "plain"
            and case["ep"] == 1
            and case["splits"] == "host"
            and case["copies"] == "per_expert"
        )
    if case["ep"] == 1:
        return case["splits"] == "host" and case["copies"] == "per_expert"
    return case["ep"] <= case["dp"] and not (case["splits"] == "device" and case["copies"] == "per_rank")


def of_memory(case: dict[str, Any]) -> bool:
    return not (case["offload"] and case["recompute"])


def of_attention(case: dict[str, Any]) -> bool:
    return not case["projections"].startswith("latent") or case["attention"] == "full"


def of_order(case: dict[str, Any]) -> bool:
    if case["order"] == "sequential" and case["merge"] == "on" and case["pp"] * case["chunks"] > 1:
        return False
    if case["order"] in ZERO_BUBBLE:
        chunks = 2 if case["order"] == "zb_v" else 1
        apart = case["merge"] == "off" and case["defer_wgrad"] == "on"
        return case["pp"] > 1 and case["chunks"] == chunks and apart and case["microbatches"] > 1
    if case["order"] == "merged_v":
        merged = case["merge"] == "on" and case["defer_wgrad"] == "on" and case["merge_ends"] == "off"
        return case["pp"] > 1 and case["chunks"] == 2 and merged and case["microbatches"] >= 2 * case["pp"]
    if case["merge_ends"] == "on" and (case["merge"] == "off" or case["microbatches"] == 1):
        return False
    if case["merge_ends"] == "on" and case["chunks"] > case["pp"]:  # groups of one microbatch
        return False
    merges = case["microbatches"] * case["chunks"] > (case["chunks"] - 1) * min(case["pp"], case["microbatches"]) + 1
    return case["merge"] == "off" or merges


LEGAL = (of_experts, of_memory, of_attention, of_order)
"""Each looks at settings of its own: so their combinations are few."""


ROUTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": dict(route_groups=2),
    "balanced": dict(aux_loss=0.01, bias_rate=0.01),
    "sigmoid": dict(
        router="sigmoid", bias_rate=0.02, experts=8, top_k=3, route_groups=4, route_top_groups=2, aux_loss=0.01,
        route_group_score="best", route_scale=1.5, normalize_top_k=False,
    ),
}  # fmt: skip
"""How experts are chosen, and kept busy alike."""
DELTA: dict[str, Any] = dict(
    delta_heads=4, delta_key_heads=2, delta_key_dim=6, delta_value_dim=5, delta_conv=3, full_layers=(1,),
    attn_gate=True, norm_plus_one=True, shared_gate=True,
)  # fmt: skip
ATTENTION: dict[str, dict[str, Any]] = {
    "full": {},
    "window": dict(window=3, full_layers=(1,)),
    "sinks": dict(sinks=True),
    "both": dict(window=3, full_layers=(1,), sinks=True),
    "delta": DELTA,
}
BIASES: dict[str, Any] = dict(router_bias=True, expert_bias=True, swiglu_limit=0.01)
"""With gates and ups of which some are cut off."""


def cost(case: dict[str, Any]) -> float:
    """What a case takes, about: processes, and layers that they and the plain step run."""
    return 10 * case["pp"] * case["dp"] + 2 * case["pp"] * case["chunks"] * case["dp"] * case["microbatches"]


def matrix_config(case: dict[str, Any]) -> Config:
    stages = case["pp"] * case["chunks"]
    counts = [2] * stages if case["layers"] == "even" else [3, 1, 2, 3][:stages]
    total = sum(counts)
    dense = {"dense": range(total), "moe": [], "mixed": range(1, total, 2)}[case["kinds"]]
    others = ("dtype", "wire", "ep", "dp", "pp", "layers", "kinds", "shared_ffn", "microbatches", "documents", "clip",
              "router", "attention", "biases", "tied")  # fmt: skip
    plan = {name: value for name, value in case.items() if name not in others}
    plan["layers_per_stage"] = tuple(counts)
    behind = case["kinds"] == "dense" and case["projections"] == "normed"
    projections = PROJECTIONS[plan.pop("projections")] | (dict(norms="after") if behind else {})
    model = dict(layers=total, dense_layers=tuple(dense), shared_ffn=case["shared_ffn"])
    model |= ROUTERS[case["router"]] | ATTENTION[case["attention"]] | (BIASES if case["biases"] == "on" else {})
    mesh = {name: case[name] for name in ("pp", "dp", "ep")}
    whole = config(model | projections, mesh, plan, case["microbatches"], case["dtype"])
    others = {"data.packing": "documents", "precision.wire": "wire", "train.clip": "clip"}
    return changed(whole, {setting: case[name] for setting, name in others.items()})


def name_of(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


def test_every_pair_of_features(pairwise_case: dict[str, Any]) -> None:
    assert_parity(matrix_config(pairwise_case))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Not in decorators, for ranks of other tests import this module."""
    if "pairwise_case" in metafunc.fixturenames:
        cases = quick(pairwise(QUICK, LEGAL, cost, seed=9), every=3, first=1)
        metafunc.parametrize("pairwise_case", cases, ids=name_of)
    if "matrix_case" in metafunc.fixturenames:
        wanted = "not full" not in metafunc.config.option.markexpr  # else they would be drawn for nothing
        count = metafunc.config.getoption("--parity-cases") if wanted else 1
        metafunc.parametrize("matrix_case", drawn(VALUES, LEGAL, count), ids=name_of)


@pytest.mark.full
def test_matrix(matrix_case: dict[str, Any]) -> None:
    assert_parity(matrix_config(matrix_case))


OTHERS: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = {
    "everything on": (
        dict(layers=6, dense_layers=(0, 4), shared_ffn=16, aux_loss=0.01, bias_rate=0.01, qk_norm=True),
        dict(pp=2, dp=2, ep=2),
        dict(chunks=2, merge="on", defer_wgrad="on", defer_layers=2),
    ),
    "norms behind, and a head behind all layers": (
        dict(layers=3, experts=0, norms="after"),
        dict(pp=2, dp=2),
        dict(chunks=2, merge="off", layers_per_stage=(1, 1, 1, 0), update="next_step", strategy="optim"),
    ),
    "rows made again for biased experts": (
        dict(layers=2, **BIASES),
        dict(dp=2),
        dict(merge="off", recompute=("dispatch",)),
    ),
    "rows dispatched again in a pipeline, some recomputed": (
        dict(layers=9, dense_layers=(0, 1, 4), shared_ffn=16, aux_loss=0.01),
        dict(pp=2, dp=2, ep=2),
        dict(
            chunks=2,
            merge="on",
            merge_ends="on",
            defer_wgrad="on",
            defer_layers=2,
            recompute=("attn:2", "dispatch:2", "experts:1"),
        ),
    ),
    "rows that nobody counts, dispatched again": (
        dict(layers=2, router="sigmoid", router_bias=True),
        dict(dp=2, ep=2),
        dict(merge="on", splits="device", defer_wgrad="on", recompute=("dispatch",)),
    ),
    "all rows to one rank, dispatched again": (
        dict(layers=2, experts=8, top_k=1, router="sigmoid", bias_rate=0.02),
        dict(dp=4, ep=4),
        dict(merge="on", recompute=("dispatch",)),
    ),
    "one part on the host, others made again": (
        dict(layers=9, dense_layers=(0, 1, 4), shared_ffn=16, aux_loss=0.01),
        dict(pp=2, dp=2, ep=2),
        dict(chunks=2, merge="on", defer_wgrad="on", recompute=("attn:1", "mlp"), offload=("experts:2",)),
    ),
    "embedding and head alone in their stages": (
        dict(layers=6, dense_layers=(0, 3), shared_ffn=16, aux_loss=0.01, bias_rate=0.01),
        dict(pp=2, dp=2, ep=2),
        dict(
            chunks=4, merge="on", merge_ends="on", defer_wgrad="on", defer_layers=1, defer_head=2, recompute=("attn:1",)
        ),
    ),
    "one layer between embedding and head": (dict(layers=1), dict(pp=3), dict(merge="off", defer_layers=1)),
    "a head behind all layers": (
        dict(layers=3, dense_layers=(1,)),
        dict(pp=2, dp=2),
        dict(chunks=2, merge="off", layers_per_stage=(1, 1, 1, 0), update="next_step", strategy="optim"),
    ),
    "a V without layers at its ends": (
        dict(layers=3, dense_layers=(0,)),
        dict(pp=2, dp=2, ep=2),
        dict(order="merged_v", chunks=2, layers_per_stage=(0, 1, 2, 0), merge="on", defer_wgrad="on"),
    ),
    "a V of weight gradients without layers at its ends": (
        dict(layers=2),
        dict(pp=2),
        dict(order="zb_v", chunks=2, merge="off"),
    ),
    "one copy for each of four ranks": (
        dict(layers=2, experts=8, top_k=4, router="sigmoid", bias_rate=0.02),
        dict(dp=4, ep=4),
        dict(merge="on", merge_ends="on", copies="per_rank"),
    ),
    "one copy to a rank with all choices": (
        dict(layers=2, experts=2, top_k=2),
        dict(dp=2, ep=2),
        dict(copies="per_rank"),
    ),
    "windows in all layers, and biases that nobody counts": (
        dict(layers=2, window=5, expert_bias=True, router="sigmoid", router_bias=True),
        dict(dp=2, ep=2),
        dict(merge="on", splits="device", defer_wgrad="on"),
    ),
    "delta nets alone, dense": (
        dict(layers=2, experts=0, **{**DELTA, "full_layers": ()}),
        dict(dp=2),
        dict(defer_wgrad="on", merge="off"),
    ),
    "experts sharded too": (dict(layers=2), dict(dp=4, ep=2), dict(merge="on")),
    "a V of three ranks": (
        dict(layers=7, dense_layers=(0, 3, 4), shared_ffn=16),
        dict(pp=3),
        dict(order="zb_v", chunks=2, merge="off"),
    ),
    "a V of two ranks, merged": (
        dict(layers=7, dense_layers=(0, 3), shared_ffn=16, aux_loss=0.01),
        dict(pp=2, dp=2, ep=2),
        dict(order="merged_v", chunks=2, merge="on", defer_wgrad="on", defer_layers=-1),
    ),
    "an even load": (dict(layers=2, routing="even"), dict(dp=2, ep=2), dict(merge="on", recompute=("attn",))),
    "one expert per rank, all chosen": (dict(layers=2, experts=2, top_k=2), dict(dp=2, ep=2), dict(merge="on")),
    "long prefetch": (dict(layers=3), dict(dp=2), dict(merge="on", prefetch=5)),
    "no prefetch": (dict(layers=3), dict(dp=2), dict(merge="on", prefetch=0)),
    "nothing sharded on three ranks": (dict(layers=2), dict(dp=3), dict(merge="on", strategy="no_shard")),
    "experts whole, three ranks": (dict(layers=1, experts=6), dict(dp=6, ep=2), dict(merge="on", strategy="no_shard")),
    "a tied head in an interleaved pipeline of three": (
        dict(layers=6, tied=True),
        dict(pp=3),
        dict(chunks=2, merge="on", update="next_step"),
    ),
    "a tied head in a V": (dict(layers=4, tied=True), dict(pp=2, dp=2), dict(order="zb_v", chunks=2, merge="off")),
    "a tied head on another rank, reduced once": (
        dict(layers=2, tied=True),
        dict(pp=2, dp=2),
        dict(merge="on", strategy="no_shard"),
    ),
    "a tied head on one rank of two chunks": (dict(layers=4, tied=True), dict(), dict(chunks=2, merge="on")),
    "a tied head, reduced once": (dict(layers=2, tied=True), dict(dp=2), dict(merge="on", strategy="optim")),
}


def other(case: str, dtype: str) -> Config:
    model, mesh, plan = OTHERS[case]
    microbatches = 5 if mesh.get("pp") == 3 else 4 if plan.get("order") == "merged_v" else 3
    return config(model, mesh, plan, microbatches, dtype)


TOLD_BY_OTHERS = ("a head behind all layers", "a V of two ranks, merged")
"""A head behind all layers stands with norms behind; pairs of features, and a V without layers at its ends, are merged
Vs.
"""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] * (case in TOLD_BY_OTHERS)) for case in OTHERS]
)
def test_other_features(case: str) -> None:
    """In bf16, where every rounding shows in which order, and in which dtype, something is added up.

    Three microbatches are a first one, one in the middle, and a last one, and of two ranks a round and a half.
    """
    assert_parity(other(case, "bf16"))


@pytest.mark.full
@pytest.mark.parametrize("case", ["everything on", "a tied head, reduced once"])
def test_other_features_in_fp32(case: str) -> None:
    assert_parity(other(case, "fp32"))


@pytest.mark.parametrize(
    ("strategy", "dtype", "wire"),
    [("optim_grads_params", "bf16", "fp32"), ("optim", "fp32", "bf16"), ("no_shard", "bf16", "fp32")],
)
def test_the_gradients_of_a_tied_head_are_added_up_in_what_travels(strategy: str, dtype: str, wire: str) -> None:
    c = config(dict(layers=2, dense_layers=(0,), tied=True), dict(dp=2), dict(strategy=strategy), 3, dtype)
    assert_parity(changed(c, {"precision.wire": wire}))
