"""Checkpoints of sharded models: from any number of ranks and way of sharding to any other, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hocket.fsdp.checkpoint import load, save
from tests.fsdp.saved import Way, adamw, check, fill, shard, step
from tests.helpers.ranks import run_ranks

STATES = 3
"""Tensors of AdamW's state per parameter."""


def save_true(rank: int, folder: Path, way: Way, asynchronously: bool = False) -> None:
    module, ctx = shard(way)
    optimizer = adamw(module)
    step(module, optimizer)
    fill(module, ctx, optimizer, way)
    saved = save(ctx, optimizer, folder, asynchronously=asynchronously)
    with torch.no_grad():  # as the next optimizer step would
        for group in optimizer.param_groups:
            group["lr"] = 99.0
            for param in group["params"]:
                param.fill_(-1)
                for value in optimizer.state[param].values():
                    value.fill_(-1)
        module.seen.fill_(-1)
    assert saved.result(timeout=40) == folder


def load_true(rank: int, folder: Path, way: Way) -> None:
    module, ctx = shard(way)
    optimizer = adamw(module)
    optimizer.param_groups[0]["lr"] = 7.0
    module.scratch.fill_(5)
    load(ctx, optimizer, folder)
    looked = check(module, ctx, optimizer, way)
    trained = sum(param.requires_grad for param in module.parameters()) - 2  # two have no gradient, so no state
    assert looked >= STATES * trained, looked
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.01]
    assert module.scratch.tolist() == [5, 5, 5]
    step(module, optimizer)


F32 = [
    Way(3),
    Way(4, "no_shard"),
    Way(1, "optim"),
    Way(4, "optim_grads", mesh=(2, 2)),
    Way(4, mesh=(2, 2), outer="shard"),
    Way(2, "no_shard", ep=2),
    Way(4, ep=2),
    Way(4, "optim", ep=4),
]


def test_saved_on_two_ranks_and_loaded_in_any_way(tmp_path: Path) -> None:
    run_ranks(save_true, 2, tmp_path / "saved", Way(2))
    for way in F32:
        run_ranks(load_true, way.world, tmp_path / "saved", way)


@pytest.mark.parametrize("way", F32, ids=str)
def test_saved_in_any_way_and_loaded_on_two_ranks(tmp_path: Path, way: Way) -> None:
    run_ranks(save_true, way.world, tmp_path / "saved", way)
    run_ranks(load_true, 2, tmp_path / "saved", Way(2, ep=2))
