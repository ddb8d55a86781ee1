"""A planned step equals the plain sequential step, bit for bit: losses, gradients, weights."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.config import Config, DataConfig, MeshConfig, ModelConfig, PrecisionConfig, TrainConfig
from hocket.engine import DTYPES, Engine
from hocket.plan.zero_bubble import ZERO_BUBBLE
from hocket.settings.leaves import changed
from tests.helpers.pairwise import drawn, pairwise
from tests.helpers.plans import planned
from tests.helpers.ranks import run_ranks
from tests.reference import Batch, Reference, Result, awkward_batches, microbatch, random_batches

STEPS = 3
LR = 1e-2

Piece = tuple[str, tuple[int, ...], int, int, Tensor]
"""Name, whole shape, first and end element, values."""


def config(
    model: dict[str, Any], mesh: dict[str, int], plan: dict[str, Any], microbatches: int, dtype: Any, lane_seed: int = 0
) -> Config:
    sizes: dict[str, Any] = dict(
        vocab=31, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, expert_ffn=16, experts=4, top_k=2
    )
    whole = Config(
        model=ModelConfig(**{**sizes, **model}),
        mesh=MeshConfig(**mesh),
        precision=PrecisionConfig(compute=dtype),
        data=DataConfig(sequence_length=8),
        train=TrainConfig(
            microbatches=microbatches, sequences=2, transport="gloo", lane_seed=lane_seed,
            betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip=0.5,
        ),
    )  # fmt: skip
    return planned(whole, **plan)


def train(rank: int, config: Config, steps: list[list[list[Batch]]]) -> dict[str, Any]:
    """One rank of a planned run."""
    torch.set_num_threads(1)
    engine = Engine(config, rank, torch.device("cpu"))
    engine.init_weights()
    out: dict[str, Any] = {"losses": [], "grads": [], "norms": [], "coordinates": engine.where}
    units = engine.sharded.units.values()
    finish = engine.optimizer.step

    def step(lr: float | None = None, later: bool = False) -> Tensor:
        out["grads"].append([(p.name, p.shape, p.lo, p.hi, p.grad.clone()) for u in units for p in u.pieces()])
        return finish(lr, later)

    engine.optimizer.step = step  # type: ignore[method-assign]
    for microbatches in steps:
        result = engine.train_step([microbatch(batches[engine.where.dp]) for batches in microbatches], LR)
        out["losses"].append([loss.item() for loss in engine.executor.actions.losses])
        out["norms"].append(float(result.grad_norm))
        engine.assert_clean()
    engine.catch_up()
    out["weights"] = [(p.name, p.shape, p.lo, p.hi, p.main.clone()) for u in units for p in u.pieces()]
    out["biases"] = {f"layers.{n}.router.bias": layer.router.bias for n, layer in engine.moe_layers().items()}
    out["stats"] = dataclasses.asdict(engine.sharded.stats())
    engine.close()
    return out


def whole(pieces: list[Piece]) -> dict[str, Tensor]:
    """Whole tensors from the pieces of all ranks; every element is kept by one of them, or alike by all who have it."""
    out: dict[str, Tensor] = {}
    held: dict[tuple[str, int, int], Tensor] = {}
    for name, shape, lo, hi, values in pieces:
        assert torch.equal(held.setdefault((name, lo, hi), values), values), name
        out.setdefault(name, torch.full((math.prod(shape),), math.nan))[lo:hi] = values
    seen: dict[str, int] = {}
    for name, lo, hi in held:
        seen[name] = seen.get(name, 0) + hi - lo
    assert all(seen[name] == tensor.numel() for name, tensor in out.items())
    shapes = {name: shape for name, shape, *_ in pieces}
    return {name: tensor.view(shapes[name]) for name, tensor in out.items()}


def adamw(params: list[Tensor]) -> torch.optim.Optimizer:
    """The optimizer that the settings of `config` ask for: no weight decay for vectors."""
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8, foreach=True)


def assert_parity(c: Config, batches: list[list[list[Batch]]] | None = None) -> None:
    batches = batches or batches_of(c)
    dtype, strategy = DTYPES[c.precision.compute], c.overlap.dp.strategy
    assert strategy != "auto"
    per_rank = c.overlap.ep.copies == "per_rank"
    wire = DTYPES.get(c.precision.wire)
    plain = Reference(c.model, c.mesh.dp, c.mesh.ep, dtype, 0, c.train.clip, adamw, strategy, per_rank, wire)
    reference = plain.run(batches)
    ranks = run_ranks(train, c.mesh.pp * c.mesh.dp, c, batches)
    compare(reference, ranks)


def batches_of(c: Config, steps: int = STEPS) -> list[list[list[Batch]]]:
    """What to train on: text, or all that there is where documents share sequences."""
    if c.data.packing == "on":
        return awkward_batches(c.model, steps, c.train.microbatches, c.mesh.dp)
    return random_batches(c.model, steps, c.train.microbatches, c.mesh.dp, (2, 8))


def compare(reference: Result, ranks: list[dict[str, Any]]) -> None:
    last = [r for r in ranks if r["losses"][0]]
    for step, expected in enumerate(reference.losses):
        got = [[r["losses"][step][m] for r in last] for m in range(len(expected))]
        assert sorted(map(tuple, got)) == sorted(map(tuple, expected)), f"losses of step {step}"
        grads = whole([piece for r in ranks for piece in r["grads"][step]])
        for name, grad in reference.grads[step].items():
            assert torch.equal(grads[name], grad), f"gradient of {name}, step {step}: {worst(grads[name], grad)}"
        assert all(abs(r["norms"][step] - reference.norms[step]) < 1e-12 for r in ranks)
    weights = whole([piece for r in ranks for piece in r["weights"]])
    assert weights.keys() == reference.weights.keys()
    for name, weight in reference.weights.items():
        assert torch.equal(weights[name], weight), f"{name} after {STEPS} steps: {worst(weights[name], weight)}"
    for r in ranks:
        for name, bias in r["biases"].items():
            if bias is not None:
                assert torch.equal(bias, reference.biases[name])


def worst(a: Tensor, b: Tensor) -> str:
    return f"largest difference {(a - b).abs().max().item():.3g} of {b.abs().max().item():.3g}"


VALUES: dict[str, list[Any]] = {
    "dtype": ["fp32", "bf16"],
    "wire": ["auto", "fp32", "bf16"],
    "merge": ["off", "on"],
    "merge_ends": ["off", "on"],
    "copies": ["per_expert", "per_rank"],
    "defer_wgrad": ["off", "on"],
    "backward_lane": ["on", "off"],
    "defer_layers": [0, 1, 2, -1],
    "defer_parts": ["attn", "all"],
    "defer_head": [0, 1, -1],
    "strategy": ["no_shard", "optim", "optim_grads", "optim_grads_params"],
    "gather_in_update": ["off", "on"],
    "ep": [1, 2],
    "dp": [1, 2],
    "pp": [1, 2],
    "chunks": [1, 2],
    "layers": ["even", "uneven"],
    "kinds": ["dense", "moe", "mixed"],
    "shared_ffn": [0, 16],
    "microbatches": [1, 2, 3, 5, 8],
    "layer_order": ["literature", "early_release", "wgrad_last", "cB eB aF dB aB dF eF cF uB eW aW uF"],
    "splits": ["host", "device"],
    "order": ["auto", "sequential", "zb_h1", "zb_v", "merged_v"],
    "recompute": [(), ("attn",), ("experts", "mlp")],
    "room": [1.0, 2.0],
    "documents": ["off", "on"],
}
"""What the matrix varies. With room of 1 steps are made again. Uneven stages have odd numbers of layers: forward
and backward meet in the middle one."""


def legal(case: dict[str, Any]) -> bool:
    if case["ep"] > case["dp"] or (case["ep"] > 1 and case["kinds"] == "dense"):
        return False
    if case["ep"] == 1 and (case["splits"] == "device" or case["copies"] == "per_rank"):
        return False
    if case["splits"] == "device" and case["copies"] == "per_rank":
        return False
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


def matrix_config(case: dict[str, Any]) -> Config:
    stages = case["pp"] * case["chunks"]
    counts = [2] * stages if case["layers"] == "even" else [3, 1, 2, 3][:stages]
    total = sum(counts)
    dense = {"dense": range(total), "moe": [], "mixed": range(1, total, 2)}[case["kinds"]]
    others = ("dtype", "wire", "ep", "dp", "pp", "layers", "kinds", "shared_ffn", "microbatches", "documents")
    plan = {name: value for name, value in case.items() if name not in others}
    plan["layers_per_stage"] = tuple(counts)
    model = dict(layers=total, dense_layers=tuple(dense), shared_ffn=case["shared_ffn"])
    mesh = {name: case[name] for name in ("pp", "dp", "ep")}
    whole = config(model, mesh, plan, case["microbatches"], case["dtype"], lane_seed=case["microbatches"])
    return changed(whole, {"data.packing": case["documents"], "precision.wire": case["wire"]})


def name_of(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


@pytest.mark.parametrize("case", pairwise(VALUES, legal), ids=name_of)
def test_every_pair_of_features(case: dict[str, Any]) -> None:
    assert_parity(matrix_config(case))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "matrix_case" in metafunc.fixturenames:
        count = metafunc.config.getoption("--parity-cases")
        metafunc.parametrize("matrix_case", drawn(VALUES, legal, count), ids=name_of)


@pytest.mark.full
def test_matrix(matrix_case: dict[str, Any]) -> None:
    assert_parity(matrix_config(matrix_case))


OTHERS: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = {
    "everything on": (
        dict(layers=8, dense_layers=(0, 4), shared_ffn=16, aux_loss=0.01, bias_rate=0.01, qk_norm=True),
        dict(pp=2, dp=2, ep=2),
        dict(chunks=2, merge="on", defer_wgrad="on", defer_layers=2, defer_parts="all"),
    ),
    "everything on, and recomputed": (
        dict(layers=8, dense_layers=(0, 4), shared_ffn=16, aux_loss=0.01, bias_rate=0.01, qk_norm=True),
        dict(pp=2, dp=2, ep=2),
        dict(chunks=2, merge="on", defer_wgrad="on", defer_layers=2, recompute=("attn", "experts", "mlp")),
    ),
    "everything on, one copy per rank": (
        dict(layers=8, experts=8, top_k=3, dense_layers=(0, 4), shared_ffn=16, aux_loss=0.01, bias_rate=0.01),
        dict(pp=2, dp=2, ep=2),
        dict(chunks=2, merge="on", defer_wgrad="on", copies="per_rank"),
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
    "experts sharded too": (dict(layers=3), dict(dp=4, ep=2), dict(merge="on")),
    "sigmoid router with bias": (
        dict(layers=2, router="sigmoid", bias_rate=0.02, route_scale=1.5, normalize_top_k=False),
        dict(dp=2, ep=2),
        dict(merge="on", recompute=("attn",)),
    ),
    "tied head": (dict(layers=3, dense_layers=(0,), tied=True), dict(dp=2), dict(merge="on")),
    "stride 3": (dict(layers=4), dict(pp=2, dp=2, ep=2), dict(chunks=2, merge="on", stride=3, group=3)),
    "a V of three ranks": (
        dict(layers=7, dense_layers=(0, 3, 4), shared_ffn=16),
        dict(pp=3),
        dict(order="zb_v", chunks=2, merge="off"),
    ),
    "a V of two ranks, merged": (
        dict(layers=7, dense_layers=(0, 3), shared_ffn=16, aux_loss=0.01),
        dict(pp=2, dp=2, ep=2),
        dict(order="merged_v", chunks=2, merge="on", defer_wgrad="on", defer_layers=-1, defer_parts="all"),
    ),
    "an even load": (dict(layers=2, routing="even"), dict(dp=2, ep=2), dict(merge="on", recompute=("attn",))),
    "one expert per rank, all chosen": (dict(layers=2, experts=2, top_k=2), dict(dp=2, ep=2), dict(merge="on")),
    "long prefetch": (dict(layers=6), dict(dp=2), dict(merge="on", prefetch=5)),
    "no prefetch": (dict(layers=6), dict(dp=2), dict(merge="on", prefetch=0)),
    "nothing sharded on three ranks": (dict(layers=2), dict(dp=3), dict(merge="on", strategy="no_shard")),
    "experts whole, three ranks": (dict(layers=2, experts=6), dict(dp=6, ep=2), dict(merge="on", strategy="no_shard")),
    "a tied head, reduced once": (dict(layers=2, tied=True), dict(dp=2), dict(merge="on", strategy="optim")),
    "experts kept on one rank, the rest reduced once": (dict(layers=3), dict(dp=2, ep=2), dict(strategy="optim")),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", OTHERS)
def test_other_features(case: str, dtype: str) -> None:
    assert_parity(config(*OTHERS[case], 5, dtype))


@pytest.mark.parametrize(
    ("strategy", "dtype", "wire"),
    [("optim_grads_params", "bf16", "fp32"), ("optim", "fp32", "bf16"), ("no_shard", "bf16", "fp32")],
)
def test_the_gradients_of_a_tied_head_are_added_up_in_what_travels(strategy: str, dtype: str, wire: str) -> None:
    c = config(dict(layers=2, dense_layers=(0,), tied=True), dict(dp=2), dict(strategy=strategy), 3, dtype)
    assert_parity(changed(c, {"precision.wire": wire}))
