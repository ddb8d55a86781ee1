"""Checkpoints of sharded modules on GPUs: through pinned memory in the background, and from any number of GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hocket
from hocket.fsdp.saving.background import HostMemory
from hocket.fsdp.saving.checkpoint import load, save
from tests.fsdp.models import Block, Stack
from tests.helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def train(rank: int, folder: Path, resumed: str, steps: int) -> list[float]:
    """Train, saving after every step while the next ones run; from a checkpoint if one is named."""
    torch.manual_seed(0)
    module = Stack(3).cuda()
    ctx = hocket.fully_shard(module, units=Block)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, fused=True)
    if resumed:
        load(ctx, optimizer, folder / resumed)
    losses, saves = [], []
    for i in range(steps):
        loss = module(torch.linspace(-1, 1, 3 * 5 * 11, device="cuda").view(3, 5, 11)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if not resumed:
            saves.append(save(ctx, optimizer, folder / str(i), asynchronously=i % 2 == 1))
    for saved in saves:
        saved.result(timeout=40)
    assert torch.cuda.current_device() == rank
    return losses


def test_training_goes_on_from_checkpoints_of_gpus(tmp_path: Path) -> None:
    first, second = run_ranks(train, 2, tmp_path, "", 5, backend="nccl")
    assert first == second
    for after in (1, 2):
        assert run_ranks(train, 2, tmp_path, str(after), 4 - after, backend="nccl")[0] == first[after + 1 :]
    [alone] = run_ranks(train, 1, tmp_path, "1", 3, backend="nccl")
    assert alone == pytest.approx(first[2:], rel=1e-4)


def test_copies_are_pinned_and_lie_where_the_last_ones_did() -> None:
    memory, state = HostMemory(), {"a": torch.arange(5.0, device="cuda"), "b": [torch.ones(3, 2).cuda().bfloat16()]}
    first = memory.copy(state)
    assert first["a"].is_pinned()
    assert first["a"].tolist() == [0, 1, 2, 3, 4]
    assert first["b"][0].tolist() == [[1, 1]] * 3
    place = first["a"].data_ptr()
    state["a"].neg_()
    second = memory.copy(state)
    assert (second["a"].data_ptr(), second["a"].tolist()) == (place, [0, -1, -2, -3, -4])
    larger = memory.copy({**state, "c": torch.zeros(1000, device="cuda")})
    assert larger["a"].is_pinned()
    memory.let_go()
