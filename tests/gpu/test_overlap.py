"""On GPUs, communication runs beside compute: counted and timed from each rank's own trace.

Sizes are such that a layer computes for milliseconds and the host stays ahead of the device; thresholds leave room for
a busy host. What cannot be hidden is left out by name: the gathers in front of the first layer and the reduces behind
the last backward have nothing beside them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import record_function

from hocket.config import (
    Config,
    DataConfig,
    ExpertOverlap,
    MeshConfig,
    ModelConfig,
    OverlapConfig,
    PlanConfig,
    PrecisionConfig,
    TrainConfig,
)
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.measured import named
from hocket.model.documents import Microbatch
from hocket.recipes import PLAIN
from hocket.testing import Overlap, profile_overlap
from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(240)]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
FOUR = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 GPUs")

WARM_UP = 4
"""Steps before the one that is looked at: the rehearsal, and some in which memory and clocks settle."""

DENSE = Config(
    model=ModelConfig(vocab=512, hidden=4096, layers=6, heads=32, kv_heads=8, head_dim=128, ffn=14336),
    mesh=MeshConfig(dp=2),
    data=DataConfig(sequence_length=4096),
    precision=PrecisionConfig(compute="bf16"),
    train=TrainConfig(microbatches=2, device="cuda", transport="nccl", hang_timeout=60.0),
    plan=PlanConfig(order="sequential"),
    overlap=OverlapConfig(ep=ExpertOverlap(merge="off"), defer_wgrad="off"),
)
"""Layers of 218 million weights, so 218 MB to receive beside 1.8 TFLOP of a forward: about 0.8 ms beside 3 ms."""

MOE = Config(
    model=ModelConfig(
        vocab=512, hidden=2048, layers=4, heads=16, kv_heads=4, head_dim=128, ffn=5632, experts=32, top_k=4,
        expert_ffn=1024, shared_ffn=1024, aux_loss=0.01,
    ),
    mesh=MeshConfig(dp=4, ep=4),
    data=DataConfig(sequence_length=2048),
    precision=PrecisionConfig(compute="bf16"),
    train=TrainConfig(microbatches=6, sequences=4, device="cuda", transport="nccl", hang_timeout=60.0),
    plan=PlanConfig(order="1f1b"),
    overlap=OverlapConfig(ep=ExpertOverlap(merge="on"), defer_wgrad="on"),
)  # fmt: skip
"""All-to-alls of 100 MB over the link of each rank: about 0.4 ms beside 1 ms and more of compute."""

SEQUENTIAL = changed(MOE, {"plan.order": "sequential", **PLAIN})


def a_step(rank: int, config: Config) -> tuple[Overlap, Counter[str]]:
    """What ran beside what in a step of hocket, and how many ops of each verb its plan has."""
    device = torch.device("cuda", rank)
    engine = Engine(config, rank, device)
    engine.init_weights()
    generator = torch.Generator().manual_seed(engine.where.dp)
    shape = (config.train.sequences, config.data.sequence_length + 1)
    ids = [torch.randint(config.model.vocab, shape, generator=generator) for _ in range(config.train.microbatches)]
    batch = [Microbatch(*(half.contiguous().to(device) for half in (i[:, :-1], i[:, 1:]))) for i in ids]
    for _ in range(WARM_UP):
        engine.train_step(batch, 1e-4)
    engine.executor.annotate()
    engine.groups.control.barrier()
    plan = named(engine.program, engine.where.pp, tensors=config.mesh.tp > 1)
    with profile_overlap(plan=plan) as overlap:
        engine.train_step(batch, 1e-4)
    engine.groups.control.barrier()
    return overlap, Counter(op.verb for op in engine.program.ranks[engine.where.pp])


def dense(rank: int) -> None:
    overlap, ops = a_step(rank, DENSE)
    gathers, reduces = overlap.of("gather"), overlap.of("reduce")
    assert len(gathers) == ops["gather"], gathers
    assert len(reduces) == ops["reduce"], reduces
    hideable = gathers[2:]  # behind the embedding's and the first layer's
    assert hideable.overlapped >= len(hideable) - 1, hideable
    assert hideable.hidden >= 0.9, hideable
    earlier = reduces[:-2]  # before the first layer's and the embedding's of the last microbatch
    assert earlier.overlapped >= len(earlier) - 1, earlier
    assert earlier.hidden >= 0.8, earlier


@TWO
def test_gathers_and_reduces_of_a_dense_model_are_hidden() -> None:
    run_ranks(dense, 2, backend="nccl", timeout=180)


def all_exchanges(rank: int) -> tuple[float, str]:
    """Hidden share of the exchanges of a plan whose ends are merged too; and what was seen."""
    whole = changed(MOE, {"overlap.ep.merge_ends": "on"})
    found = a_step(rank, whole)[0].of("a2a", op=r"fwd \w+ m|bwd \w+ m")
    return found.hidden, str(found)


@FOUR
def test_pairs_at_the_ends_hide_the_exchange_of_all_experts() -> None:
    for hidden, seen in run_ranks(all_exchanges, 4, backend="nccl", timeout=200):
        assert hidden >= 0.7, seen


def exchanges(rank: int) -> tuple[float, float, str]:
    """Hidden shares of the exchanges that a merged plan can hide: merged, sequential; and what was seen."""
    last = MOE.train.microbatches - 1
    merged, _ = a_step(rank, MOE)
    # The first forward and the last backward have no other microbatch beside them.
    hideable = merged.of("a2a", op=rf"fwd \w+ m[1-{last}] |bwd \w+ m[0-{last - 1}] ")
    assert len(hideable) >= 2 * last * 2 * MOE.model.layers, hideable
    plain, _ = a_step(rank, SEQUENTIAL)
    return hideable.hidden, plain.of("a2a").hidden, str(hideable)


@FOUR
def test_a_merged_plan_hides_the_exchange_of_experts() -> None:
    for merged, sequential, seen in run_ranks(exchanges, 4, backend="nccl", timeout=200):
        assert merged >= 0.7, seen
        assert merged >= sequential + 0.3, seen


WIDTH, BLOCKS = 8192, 6


class Block(nn.Module):
    """134 million weights: 134 MB to receive beside 2.2 TFLOP, about 0.5 ms beside 3 ms."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def another_library(rank: int) -> None:
    """FSDP2, to which hocket is a stranger."""
    with torch.device("cuda", rank):
        model = nn.Sequential(*(Block() for _ in range(BLOCKS))).bfloat16()
        x = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16)
    for block in model:
        fully_shard(block)
    fully_shard(model)

    def step() -> Any:
        with record_function("forward"):
            loss = model(x).float().pow(2).mean()
        loss.backward()

    for _ in range(WARM_UP):
        step()
    with profile_overlap() as overlap:
        step()
    gathers = overlap.of("gather").within("forward")
    assert len(gathers) == BLOCKS, gathers
    assert gathers.overlapped >= BLOCKS - 1, gathers
    assert gathers[1:].hidden >= 0.9, gathers
    assert len(overlap.of("reduce")) == BLOCKS, overlap.all


@TWO
def test_overlap_of_another_library_is_seen() -> None:
    run_ranks(another_library, 2, backend="nccl", timeout=120)
