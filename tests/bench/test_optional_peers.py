"""What can be known of peers whose packages are not installed."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.bench.contender import CONTENDERS, load
from benchmarks.bench.peers.deepspeed import options
from benchmarks.bench.plain import plain_model
from benchmarks.bench.workload import Workload
from hocket.config import Config, MeshConfig, ModelConfig, PrecisionConfig, TrainConfig

MOE = ModelConfig(layers=3, experts=4, dense_layers=(0,))


def test_every_optional_peer_names_one_version() -> None:
    packages = {entry.package for entry in CONTENDERS.values() if entry.package}
    assert {re.split("==", package)[0] for package in packages} >= {"megatron-fsdp", "deepspeed"}
    assert all(re.fullmatch(r"[a-z-]+==\d+\.\d+\.\d+", package) for package in packages)


def test_deepspeed_refuses_experts_on_other_ranks() -> None:
    work = Workload(Config(model=MOE, mesh=MeshConfig(dp=2, ep=2)))
    with pytest.raises(ValueError, match=r"against = deepspeed .* mesh\.ep = 2; fix: mesh\.ep = 1"):
        load("deepspeed")(work, 0, torch.device("cpu"))


def test_deepspeed_buckets_hold_the_largest_layer() -> None:
    work = Workload(
        Config(model=MOE, precision=PrecisionConfig(compute="bf16"), train=TrainConfig(sequences=3, microbatches=5))
    )
    model = plain_model(work, 0)
    config = options(model, work)
    largest = max(sum(p.numel() for p in layer.parameters()) for layer in model.layers.values())
    zero = config["zero_optimization"]
    assert zero["reduce_bucket_size"] == zero["stage3_prefetch_bucket_size"] == largest
    assert config["train_micro_batch_size_per_gpu"] == 3
    assert config["gradient_accumulation_steps"] == 5
    assert config["bf16"] == {"enabled": True}
