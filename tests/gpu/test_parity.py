"""On GPUs every plan equals the sequential one bit for bit, also when its lanes are delayed at random."""

from __future__ import annotations

import dataclasses
import random
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from hocket.config import (
    Config,
    DataConfig,
    ExpertOverlap,
    MeshConfig,
    ModelConfig,
    OverlapConfig,
    PipelineOverlap,
    PlanConfig,
    PrecisionConfig,
    Strategy,
    TrainConfig,
)
from hocket.config.rule import leaf
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.model.documents import Microbatch
from hocket.recipes import PLAIN
from hocket.runtime.lanes import CudaLanes
from tests.helpers.plans import planned
from tests.helpers.ranks import run_ranks

SEEDS = 20
STEPS = 3

BASE = Config(
    model=ModelConfig(
        vocab=512, hidden=256, layers=8, heads=4, kv_heads=2, head_dim=64, ffn=512, dense_layers=(0, 4), experts=8,
        top_k=2, expert_ffn=128, shared_ffn=128, aux_loss=0.01, bias_rate=0.001,
    ),
    mesh=MeshConfig(pp=2, dp=4, ep=2),
    plan=PlanConfig(chunks=2),
    overlap=OverlapConfig(
        pp=PipelineOverlap(defer_layers=2), ep=ExpertOverlap(merge="on"), defer_wgrad="on"
    ),
    data=DataConfig(sequence_length=256),
    precision=PrecisionConfig(compute="bf16"),
    train=TrainConfig(microbatches=6, sequences=2, transport="nccl", hang_timeout=60.0),
)  # fmt: skip
APART = dataclasses.replace(BASE, overlap=OverlapConfig(ep=ExpertOverlap(merge="off")))
OTHERS: dict[str, Config] = {
    "pairs at the ends": planned(BASE, merge_ends="on", group=4, defer_layers=1),
    "the head's weight gradients at the end": planned(BASE, defer_head=-1),
    "recomputed": planned(BASE, recompute=("attn", "experts", "mlp")),
    "one copy per rank": planned(changed(BASE, {"model.top_k": 4}), copies="per_rank"),
    "gradients that travel in fp32": changed(BASE, {"precision.wire": "fp32"}),
    "zb_h1": planned(APART, order="zb_h1", chunks=1),
    "zb_v": planned(APART, order="zb_v"),
    "merged_v": planned(BASE, order="merged_v"),
    "updates in the next step": planned(BASE, update="next_step"),
    "updates in the next step, gathered once": planned(BASE, update="next_step", strategy="optim"),
    "replicas of shards": changed(BASE, {"mesh.shard": 2}),
}
OTHER_SEEDS = 5

EXPERTS = dataclasses.replace(
    BASE,
    mesh=MeshConfig(dp=2, ep=2),
    plan=PlanConfig(order="1f1b"),
    overlap=OverlapConfig(ep=ExpertOverlap(merge="on", merge_ends="on"), defer_wgrad="on"),
)
"""Experts on two ranks, everything merged, the ends in pairs."""
COPIED = changed(EXPERTS, {"train.transport": "copy_engine"})
PIPED = changed(BASE, {"mesh.dp": 1, "mesh.ep": 1, "overlap.ep.merge": "off", "plan.order": "interleaved"})
"""Two pipeline ranks with two chunks each, experts where their tokens are."""
GATHERED = {"precision.compute": "fp8", "precision.gather": "fp8"}
TWO: dict[str, Config] = {
    "experts in fp8": changed(EXPERTS, {"precision.compute": "fp8"}),
    "a pipeline in fp8": changed(PIPED, {"precision.compute": "fp8"}),
    "weights cast once a step, in fp8": planned(changed(EXPERTS, {"precision.compute": "fp8"}), strategy="optim"),
    "experts in fp8, weights gathered in it": changed(EXPERTS, GATHERED),
    "weights gathered in fp8 once a step, copy_engine": planned(changed(COPIED, GATHERED), strategy="optim"),
    "a layer at each end in bf16, weights gathered in fp8, copy_engine": changed(
        COPIED, {**GATHERED, "precision.fp8": ("but_first:1", "but_last:1")}
    ),
    "nccl": EXPERTS,
    "copy_engine": COPIED,
    "updates in the next step": planned(EXPERTS, update="next_step"),
    "updates in the next step, gathered once": planned(EXPERTS, update="next_step", strategy="optim"),
    "updates in the next step, whole": planned(EXPERTS, update="next_step", strategy="no_shard"),
    "updates in the next step, copy_engine": planned(COPIED, update="next_step"),
    "updates in the next step, gathered once, copy_engine": planned(COPIED, update="next_step", strategy="optim"),
    "updates in the next step, not clipped": changed(planned(EXPERTS, update="next_step"), {"train.clip": 0.0}),
    "updates in the next step of a pipeline": planned(PIPED, update="next_step"),
    "updates in the next step, averages in bf16": changed(
        planned(EXPERTS, update="next_step"), {"precision.averages": "bf16"}
    ),
    "a pipeline": PIPED,
    "a pipeline with a tied head": changed(PIPED, {"model.tied": True}),
    "a pipeline with a tied head, copy_engine": changed(PIPED, {"model.tied": True, "train.transport": "copy_engine"}),
    "a pipeline, copy_engine": changed(PIPED, {"train.transport": "copy_engine"}),
    "a V, copy_engine": changed(
        planned(APART, order="zb_v"), {"mesh.dp": 1, "mesh.ep": 1, "train.transport": "copy_engine"}
    ),
}
"""What two GPUs can show; what some move travels by copies."""


def restart(engine: Engine) -> None:
    """Back to the state before the first step."""
    engine.init_weights()
    engine.optimizer.steps = 0
    engine.balance.loads = {}
    for state in engine.optimizer.state.values():
        state.exp_avg.zero_()
        state.exp_avg_sq.zero_()


def run(engine: Engine, batches: list[list[Microbatch]]) -> list[Tensor]:
    """Losses of every step, then this rank's weights."""
    restart(engine)
    losses = [engine.train_step(batch, 1e-2).loss.clone() for batch in batches]
    engine.forget_graph()  # which keeps its gradients
    engine.assert_clean()
    engine.catch_up()
    return [*losses, *(unit.group.main.clone() for unit in engine.sharded.units.values())]


def compare(rank: int, config: Config, seeds: int) -> dict[str, Any]:
    """One rank: the sequential plan once, then the other plan under every seed's delays.

    Layers of a V are on other ranks than the sequential plan has them. So its losses are compared by the caller, and
    its weights with those of its own first steps, the first of them a rehearsal in which lanes wait for each other.
    """
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyrefly: ignore
    plain = dataclasses.replace(config, plan=PlanConfig(chunks=config.plan.chunks), overlap=OverlapConfig())
    same = ("overlap.dp.strategy", "overlap.ep.copies")
    same_sums = {name: leaf(config, name) for name in same}
    sequential = Engine(
        changed(plain, {"plan.order": "sequential", "precision.gather": "bf16", **PLAIN, **same_sums}), rank, device
    )
    turns = config.plan.turning
    apart = turns or config.overlap.ep.splits == "device"  # whose rows are moved by kernels
    merged = Engine(config, rank, device, groups=None if apart else sequential.groups)
    generator = torch.Generator().manual_seed(sequential.where.dp)
    shape = (config.train.sequences, config.data.sequence_length + 1)
    batches = []
    for _ in range(STEPS):
        ids = [torch.randint(config.model.vocab, shape, generator=generator).to(device) for _ in range(6)]
        batches.append([Microbatch(i[:, :-1].contiguous(), i[:, 1:].contiguous()) for i in ids])
    expected = run(sequential, batches)
    losses = [float(loss) for loss in expected[:STEPS]]
    expected = run(merged, batches) if turns else expected
    different = []
    lanes = merged.lanes
    assert isinstance(lanes, CudaLanes)
    for seed in range(seeds):
        chooser = random.Random(1000 * rank + seed)
        lanes.delays = [0 if chooser.random() < 0.7 else chooser.randrange(1_000_000) for _ in range(997)]
        got = run(merged, batches)
        if not all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)):
            different.append(seed)
    finite = all(bool(torch.isfinite(t).all()) for t in expected)
    return {
        "different": different, "finite": finite, "sequential": losses, "loss": [float(x) for x in expected[:STEPS]],
    }  # fmt: skip


def check(config: Config, seeds: int) -> None:
    world = 8 if torch.cuda.device_count() >= 8 else 4
    check_on(world, changed(config, {"mesh.dp": world // 2}), seeds)


def check_on(world: int, config: Config, seeds: int) -> None:
    ranks = run_ranks(compare, world, config, seeds, backend="nccl", timeout=300)
    for rank, result in enumerate(ranks):
        assert result["finite"], f"rank {rank}: {result}"
        assert result["different"] == [], f"rank {rank}: other bits under the delays of seeds {result['different']}"
    for step in range(STEPS):  # 0 on ranks without the head
        same = [sorted(result[name][step] for result in ranks) for name in ("sequential", "loss")]
        assert same[0] == same[1], f"losses of step {step}"


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 GPUs")
@pytest.mark.parametrize("strategy", get_args(Strategy))
def test_merged_equals_sequential_under_random_delays(strategy: Any) -> None:
    check(planned(BASE, strategy=strategy), SEEDS)


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 GPUs")
@pytest.mark.parametrize("name", OTHERS)
def test_other_plans_equal_the_sequential_one_under_random_delays(name: str) -> None:
    check(OTHERS[name], OTHER_SEEDS)


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("name", TWO)
def test_on_two_gpus_too(name: str) -> None:
    check_on(2, TWO[name], SEEDS)
