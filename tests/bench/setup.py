"""Workloads small enough for a laptop."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from benchmarks.bench import gate
from benchmarks.bench.contender import Contender, load
from benchmarks.bench.peers.bound import WholeWeights, bound
from benchmarks.bench.plain import MainWeights
from benchmarks.bench.variants import settled
from benchmarks.bench.workload import Workload
from hocket.config import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from hocket.config.rule import Host
from hocket.resolve import resolve
from tests.helpers.plans import planned
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")


def workload(
    dp: int,
    ep: int = 1,
    *,
    cp: int = 1,
    moe: bool = False,
    optimizer: bool = True,
    microbatches: int = 2,
    kv_heads: int = 1,
    **plan: Any,
) -> Workload:
    """Three layers, two microbatches of two sequences of 16 tokens."""
    sizes = dict(vocab=64, hidden=32, layers=3, heads=2 * kv_heads, kv_heads=kv_heads, head_dim=16, ffn=64)
    experts = dict(experts=8, top_k=2, expert_ffn=32, shared_ffn=32, dense_layers=(0,), aux_loss=0.01) if moe else {}
    config = Config(
        model=ModelConfig(**sizes, **experts),  # pyrefly: ignore
        mesh=MeshConfig(dp=dp, ep=ep, cp=cp),
        data=DataConfig(sequence_length=16),
        train=TrainConfig(microbatches=microbatches, sequences=2, clip=0.0),
    )
    return gate.gentle(Workload(resolve(planned(config, **plan)), optimizer))


def curves(rank: int, names: list[str], work: Workload, steps: int) -> dict[str, list[float]]:
    """The gate's curves of contenders on one rank."""
    found = {}
    for name in names:
        contender = built(name, rank, work)
        assert all(contender.settings.values())
        found[name] = gate.curve(contender, work, rank, CPU, steps)
        contender.close()
    return found


def learn_the_same(world: int, work: Workload, names: list[str]) -> None:
    """Contenders on so many ranks come to the curves of the first, well within the gate's tolerance."""
    found = run_ranks(curves, world, names, work, 4)
    verdict = gate.judge(found[0], work)
    assert found[1] == found[0], "every rank comes to the same verdict"
    assert verdict.worst < 0.4 * verdict.tolerance, "better than the gate demands"
    assert verdict.fall > 0.02


def built(name: str, rank: int, work: Workload) -> Contender:
    """A contender, with the settings that it has of its own."""
    variants = settled([name], {}, work.config, Host(), {})
    return load(name)(dataclasses.replace(work, variants=variants).of(name) if variants else work, rank, CPU)


def half_gradients(work: Workload, rank: int, device: torch.device) -> Contender:
    """A contender that gets its gradients wrong by a factor."""
    made = bound(work, rank, device)
    assert isinstance(made, WholeWeights)
    made.optimizers = [MainWeights(dict(made.model.named_parameters()), work, rank, scale=0.5)]
    return made
