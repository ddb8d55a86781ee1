"""A planned step on tensor-parallel ranks against the plain sequential step on one: the same but for rounding."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.config import Config, RopeConfig
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.predict import tensor_costs
from hocket.runtime.weights import DTYPES
from tests.helpers.pairwise import pairwise, quick
from tests.helpers.parity import LINEAR, STEPS, adamw, batches_of, config, learn, one_checks
from tests.helpers.ranks import run_ranks
from tests.ranks.test_parity import DELTA, LATENT, PROJECTIONS
from tests.reference import Batch, Reference, microbatch, random_batches

Piece = tuple[str, tuple[int, ...], int, int, Any, Tensor]
"""Name, whole shape, first and end element in the part of a rank, that part, values."""


def train(rank: int, config: Config, steps: list[list[list[Batch]]]) -> dict[str, Any]:
    """One rank of a planned run. New memory holds nan, so reads of memory that was not written show up."""
    torch.use_deterministic_algorithms(True)
    one_checks(rank)
    Engine.lane_seed = config.train.microbatches  # in this process alone
    if config.mesh.tp == config.model.kv_heads == 4:
        tensor_costs.splits_for = lambda c, cell, method: 2  # pieces of two ranks each
    engine = Engine(config, rank, torch.device("cpu"))
    engine.init_weights()
    pieces = [piece for unit in engine.sharded.units.values() for piece in unit.pieces()]
    first = [(p.name, p.shape, p.lo, p.hi, p.span.part, p.main.clone()) for p in pieces]
    out = learn(engine, steps, lambda: [(p.name, p.shape, p.lo, p.hi, p.span.part, p.grad.clone()) for p in pieces])
    out |= {"first": first, "tp": engine.where.tp, "rows": [int(n.sum()) for n in engine.balance.loads.values()]}
    out["validation"] = engine.evaluate([microbatch(batches[engine.where.dp]) for batches in steps[0]]).item()
    out["weights"] = [(p.name, p.shape, p.lo, p.hi, p.span.part, p.main.clone()) for p in pieces]
    out["calls"] = dict(engine.groups.tp.calls)
    engine.close()
    return out


def whole(pieces: list[Piece]) -> dict[str, Tensor]:
    """Whole tensors from the pieces of all ranks. What several ranks keep must be the same on all of them."""
    parts: dict[Any, Tensor] = {}
    for name, shape, lo, hi, part, values in pieces:
        within = shape if part is None else part.shape
        into = parts.setdefault((name, shape, part), torch.full((math.prod(within),), math.nan))
        before = into[lo:hi]
        assert torch.equal(before[~before.isnan()], values[~before.isnan()]), f"replicas of {name} differ"
        into[lo:hi] = values
    out: dict[str, Tensor] = {}
    for (name, shape, part), values in parts.items():
        if part is None:
            out[name] = values.view(shape)
            continue
        into = out.setdefault(name, torch.full(shape, math.nan))
        blocks = values.view(part.shape).split(part.block, part.dim)
        for start, block in zip(part.starts, blocks, strict=True):
            into.narrow(part.dim, start, part.block).copy_(block)
    assert not any(tensor.isnan().any() for tensor in out.values())
    return out


def close(found: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    worst, scale = (found - wanted).abs().max(), wanted.abs().max()
    assert worst <= tolerance * (scale + 1e-6), f"{what}: off by {worst:.3g} of {scale:.3g}"


def assert_close(c: Config, tolerance: float, steps: int = STEPS) -> list[dict[str, Any]]:
    """Losses, gradients, norms and weights of a run are those of the plain step, within `tolerance` of the largest.

    Gradients and weights within ten times as much.
    """
    c, batches = changed(c, {"train.eps": LINEAR}), batches_of(c)[:steps]
    update = partial(adamw, eps=LINEAR)
    plain = Reference(c.model, c.mesh.dp, dtype=DTYPES[c.precision.compute], clip=c.train.clip, optimizer=update)
    reference = plain.run(batches)
    ranks = run_ranks(train, c.mesh.world, c, batches)
    last = [r for r in ranks if r["losses"][0]]
    for step, wanted in enumerate(reference.losses):
        for m, of_ranks in enumerate(wanted):
            found = sorted(r["losses"][step][m] for r in last if r["tp"] == 0)
            close(torch.tensor(found), torch.tensor(sorted(of_ranks)), tolerance, f"losses of step {step}")
    assert len({(r["tp"], *map(tuple, r["losses"])) for r in last}) >= c.mesh.tp  # all have them
    grads = whole([piece for r in ranks for piece in r["grads"][0]])
    assert grads.keys() == reference.grads[0].keys()
    for name, grad in reference.grads[0].items():
        close(grads[name], grad, 10 * tolerance, f"gradient of {name}")
    rows = c.mesh.dp * c.mesh.tp * c.train.microbatches * c.tokens * c.model.top_k
    for r in ranks:
        assert r["norms"] == pytest.approx(reference.norms, rel=10 * tolerance)
        if c.data.packing == "off":
            assert set(r["rows"]) <= {rows}, "experts' loads are those of all ranks"
            agreed = sum(sum(m) / len(m) for m in wanted) / len(wanted)
            assert r["agreed"] == pytest.approx(agreed, rel=10 * tolerance)
    weights = whole([piece for r in ranks for piece in r["weights"]])
    for name, weight in reference.weights.items():
        close(weights[name], weight, 10 * tolerance, f"{name} after {steps} steps")
    return ranks


def of(model: dict[str, Any], mesh: dict[str, int], plan: dict[str, Any], **settings: Any) -> Config:
    """A configuration with two tensor-parallel ranks."""
    dtype, microbatches = settings.pop("dtype", "fp32"), settings.pop("microbatches", 2)
    base = config({"vocab": 32, **model}, {"tp": 2, **mesh}, plan, microbatches, dtype)
    ways = dict(qkv_forward="ring", qkv_backward="bulk", proj_forward="pipeline", proj_backward="ring",
                fc1_forward="ring", fc1_backward="pipeline", fc2_forward="pipeline", fc2_backward="ring")  # fmt: skip
    ways.update(settings)
    return changed(base, {"overlap.tp.method": tuple(f"{where}:{way}" for where, way in ways.items())})


OFF = dict.fromkeys(
    (f"{role}_{direction}" for role in ("qkv", "proj", "fc1", "fc2") for direction in ("forward", "backward")), "off"
)
BIASES = dict(qkv_bias=True, o_bias=True)
GPT_OSS = dict(window=3, full_layers=(1,), sinks=True, router_bias=True, expert_bias=True, swiglu_limit=0.02)
WHOLE_NORMS = dict(qk_norm=True, qk_norm_over="whole")
MIXED = dict(layers=2, shared_ffn=16, dense_layers=(0,))
CASES: dict[str, Config] = {
    "pieces": of(MIXED, {}, {}),
    "four ranks": of(dict(layers=1, kv_heads=4, dense_layers=(0,)), dict(tp=4), {}),
    "four ranks, two heads of keys": of(dict(layers=1, kv_heads=2, shared_ffn=16, qk_norm=True), dict(tp=4), {}),
    "pipeline, heads normed, attention once more": of(
        dict(layers=4, dense_layers=(1, 2), qk_norm=True, rope=RopeConfig(width=4, without=(1,))),
        dict(pp=2),
        dict(chunks=2, recompute=("attn", "mlp")),
    ),
    "latent attention, one after the other, documents": changed(
        of({**MIXED, **LATENT, "heads": 8}, dict(tp=4), dict(recompute=("attn",)), **OFF), {"data.packing": "on"}
    ),
    "delta nets and gates, documents": changed(
        of({**MIXED, **DELTA, "layers": 3}, dict(ep=2), dict(merge="on", recompute=("attn",))),
        {"data.packing": "on"},
    ),
    "biases, whole norms, four ranks, two heads of keys, experts over all": of(
        {**MIXED, **BIASES, **WHOLE_NORMS}, dict(tp=4, ep=4), dict(merge="on")
    ),
    "windows, sinks, biases of experts and a limit": of(
        {**MIXED, **BIASES, **GPT_OSS}, dict(dp=2, ep=4), dict(merge="on", recompute=("attn", "experts"))
    ),
    "sinks, four ranks, two heads of keys, documents": changed(
        of({**MIXED, **GPT_OSS, "bias_rate": 0.01}, dict(tp=4, ep=2), {}), {"data.packing": "on"}
    ),
    "pipeline, experts over a tensor-parallel group": of(
        dict(layers=4, dense_layers=(1,), bias_rate=0.01), dict(pp=2, ep=2), dict(chunks=2, merge="on")
    ),
}
MORE: dict[str, Config] = {
    "experts over a tensor-parallel group": of({**MIXED, "bias_rate": 0.01}, dict(ep=2), dict(merge="on")),
    "embedding and head alone in their stages": of(dict(layers=2, dense_layers=(0,)), dict(pp=2), dict(chunks=2)),
    "replicas of shards": of({**MIXED, "aux_loss": 0.1}, dict(dp=4, ep=2, shard=2), {}),
    "replicas of shards, experts over all ranks of one": of(
        {**MIXED, "aux_loss": 0.1}, dict(dp=4, ep=4, shard=2), dict(merge="on")
    ),
    "z-loss": of({**MIXED, "z_loss": 0.1}, dict(ep=2), dict(merge="on")),
    "sharded three ways, balanced": of({**MIXED, "bias_rate": 0.01}, dict(pp=2, dp=2, ep=2), dict(merge="on")),
}


VALUES: dict[str, list[Any]] = {
    "ways": ["off", "pieces"],
    "strategy": ["no_shard", "optim", "optim_grads", "optim_grads_params"],
    "merge": ["off", "on"],
    "defer_wgrad": ["off", "on"],
    "dp": [1, 2],
    "ep": [1, 2, 4],
    "pp": [1, 2],
    "order": ["auto", "zb_v", "merged_v"],
    "kinds": ["dense", "moe", "mixed"],
    "splits": ["host", "device"],
    "copies": ["per_expert", "per_rank"],
    "recompute": [(), ("attn", "mlp"), ("experts",)],
    "documents": ["off", "on"],
    "tied": [False, True],
    "kv_heads": [2, 1],
    "like": ["llama", "gpt_oss"],
    "projections": list(PROJECTIONS),
}
"""What stands beside two tensor-parallel ranks, on four ranks at most."""


def legal(case: dict[str, Any]) -> bool:
    if case["dp"] * case["pp"] > 2 or case["ep"] > 2 * case["dp"]:
        return False
    moved = case["ep"] > 1 and case["kinds"] != "dense"
    others = (case["ep"] > 1, case["splits"] == "device", case["copies"] == "per_rank")
    if (any(others) and not moved) or all(others):
        return False
    merge = "on" if case["order"] == "merged_v" else "off"
    apart = case["merge"] == merge and case["defer_wgrad"] == "on"
    return case["order"] == "auto" or (case["pp"] == 2 and apart)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Not in a decorator, for ranks of other tests import this module."""
    if "pairwise_case" in metafunc.fixturenames:
        cases = pairwise(VALUES, [legal], lambda case: 1.0 + case["pp"] * case["dp"], seed=1)
        metafunc.parametrize("pairwise_case", quick(cases, every=2), ids=lambda case: "-".join(map(str, case.values())))


def test_every_pair_of_features(pairwise_case: dict[str, Any]) -> None:
    case = pairwise_case
    chunks = 1 if case["order"] == "auto" else 2
    layers = max(2, case["pp"] * chunks)
    dense = {"dense": range(layers), "moe": (), "mixed": (1,)}[case["kinds"]]
    model = dict(layers=layers, dense_layers=tuple(dense), shared_ffn=16, tied=case["tied"], kv_heads=case["kv_heads"])
    model |= GPT_OSS if case["like"] == "gpt_oss" else {}
    others = ("ways", "dp", "ep", "pp", "kinds", "documents", "tied", "kv_heads", "like")
    plan = {name: value for name, value in case.items() if name not in others}
    behind = case["kinds"] == "dense" and case["projections"] == "normed"
    model |= PROJECTIONS[plan.pop("projections")] | (dict(norms="after") if behind else {})
    mesh = {name: case[name] for name in ("pp", "dp", "ep")}
    ways = OFF if case["ways"] == "off" else {}
    c = of(model, mesh, {**plan, "chunks": chunks}, microbatches=4 if case["order"] == "merged_v" else 2, **ways)
    # The first update is a sign but for gradients as small as AdamW's epsilon, which rounding changes.
    assert_close(changed(c, {"data.packing": case["documents"]}), 2e-5, steps=1)


TWICE = ("pieces", "pipeline, heads normed, attention once more", "delta nets and gates, documents")
"""What the first step leaves for the second is that of every case."""


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_plain_one(case: str) -> None:
    ranks = assert_close(CASES[case], 1e-5, STEPS if case in TWICE else 1)
    assert all(r["calls"] for r in ranks)


SUMMED = dict(layers=2, shared_ffn=16, aux_loss=0.3)
BALANCED: dict[str, Config] = {
    "softmax": of(SUMMED, {}, {}),
    "sigmoid, documents, attention once more": changed(
        of(SUMMED | dict(router="sigmoid"), {}, dict(recompute=("attn",))), {"data.packing": "on"}
    ),
    "four ranks": of(SUMMED | dict(kv_heads=4), dict(tp=4), {}),
    "experts on all ranks": of(SUMMED, dict(dp=2, ep=4), dict(merge="on")),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] * (case == "four ranks")) for case in BALANCED]
)
def test_the_balance_loss_is_that_of_all_tokens(case: str) -> None:
    """A mean over each rank's tokens would be another loss: gradients were off by percents."""
    assert_close(BALANCED[case], 3e-7, steps=1)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE)
def test_a_step_with_more_is_the_plain_one(case: str) -> None:
    assert_close(MORE[case], 1e-5)


def test_a_step_in_bf16() -> None:
    assert_close(of(MIXED, {}, {}, dtype="bf16"), 0.01)


def test_the_first_weights_are_those_of_one_rank() -> None:
    c = CASES["pieces"]
    batches = random_batches(c.model, 1, c.train.microbatches, 1, (2, 8))
    parts, one = (run_ranks(train, c.mesh.world, c, batches) for c in (c, changed(c, {"mesh.tp": 1})))
    wanted = whole([piece for r in one for piece in r["first"]])
    found = whole([piece for r in parts for piece in r["first"]])
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
