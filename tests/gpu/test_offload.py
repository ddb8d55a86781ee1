"""Shards in the host's memory: the same training in less of the GPUs' memory, with copies beside compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hocket
from hocket.fsdp.buffers import Offload
from tests.fsdp.elements import local
from tests.fsdp.test_fsdp2 import both
from tests.gpu.test_fully_shard import BF16, STRATEGIES, Block, Model, Training
from tests.helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
]
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
WORLDS = [1, pytest.param(2, marks=two)]


def trained(rank: int, offload: Offload, strategy: str, late: bool, **options: Any) -> list[Tensor]:
    """Losses, and gradients of every step. Weights move by signs of gradients, with the same bits on any device."""
    training = Training(rank, strategy, offload=offload, wire=torch.float32, **options)
    found = list[Tensor]()
    for _ in range(4):
        for _ in range(3):
            loss = training.model(training.x).float().square().mean()
            loss.backward()
        if late:  # the device is far behind: what is read too early is wrong
            torch.cuda._sleep(100_000_000)
        grads = [local(p.grad).clone() for p in training.model.parameters() if p.grad is not None]
        found += [loss.detach().cpu(), *(grad.cpu() for grad in grads)]
        with torch.no_grad():
            for p, grad in zip(training.model.parameters(), grads, strict=True):
                local(p).sub_(torch.sign(grad) / 256)
        training.optimizer.zero_grad()
    for p in training.model.parameters():
        assert p.device.type == ("cuda" if offload == "none" else "cpu")
    return found


def same(rank: int, strategy: str) -> None:
    ways: list[tuple[Offload, dict[str, Any]]] = [
        ("pinned", {}), ("pageable", {}), ("pinned", {"prefetch": 2}),
        ("pinned", {"transport": "copy_engine"}),
    ]  # fmt: skip
    expected = trained(rank, "none", strategy, late=False)
    for offload, options in ways:
        if "transport" in options and (strategy == "no_shard" or torch.cuda.device_count() < 2):
            continue
        for late in (False, True):
            found = trained(rank, offload, strategy, late, **options)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (offload, options, late)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_offloading_changes_no_bit(strategy: str, world: int) -> None:
    run_ranks(same, world, strategy, backend="nccl", timeout=250)


@two
def test_a_program_for_fsdp2_beside_torchs() -> None:
    run_ranks(both, 2, "offloaded", backend="cpu:gloo,cuda:nccl", timeout=250)


def peak(rank: int, offload: Offload) -> int:
    training = Training(rank, width=2048, blocks=8, rows=16, offload=offload)
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-3)
    for _ in range(3):
        training.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    training.step()
    return torch.cuda.max_memory_allocated()


@two
def test_shards_gradients_and_averages_leave_the_device() -> None:
    """16 bytes for each of 67 million weights of a rank, but for the gradients of one unit on their way."""
    for without, with_it in zip(*(run_ranks(peak, 2, way, backend="nccl") for way in ("none", "pinned")), strict=True):
        assert without - with_it > 0.8 * 16 * (2 * 2048 * 4096 * 8 // 2)


def alone(rank: int) -> tuple[int, int]:
    """The most memory that a model on the CPU takes of the GPU when it is sharded, and in a step; in bytes."""
    model, x = Model(2048, 12).to(BF16), torch.randn(16, 2048, device="cuda", dtype=BF16)
    options = hocket.ShardOptions(device="cuda", offload="pinned")
    hocket.fully_shard(model, units=Block, options=options)
    optimizer, peaks = torch.optim.AdamW(model.parameters(), lr=1e-3), list[int]()
    for _ in range(2):
        peaks.append(torch.cuda.max_memory_allocated())
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.stack([p.norm() for p in model.parameters()]).isfinite().all()
    return peaks[0], torch.cuda.max_memory_allocated()


def test_one_gpu_holds_a_few_units_at_a_time() -> None:
    """Of twelve: two gathered, two staged, and one reduced in fp32."""
    unit = 2 * 2 * 2048 * 4096
    for sharding, step in run_ranks(alone, 1, backend="nccl"):
        assert sharding < 3 * unit
        assert step < 9 * unit


def beside(rank: int) -> float:
    """Share of the copies from and to the host that ran while kernels computed, for longer than the copies take."""
    training = Training(rank, width=8192, blocks=6, rows=32768, offload="pinned", prefetch=2)
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-3)
    for _ in range(2):
        training.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        loss = training.model(training.x).float().square().mean()
        loss.backward()
        torch.cuda.synchronize()
    events = [e for e in seen.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
    copies = [e.time_range for e in events if "DtoH" in e.name or "HtoD" in e.name]
    kernels = [e.time_range for e in events if "gemm" in e.name.lower() or "nvjet" in e.name.lower()]
    total = sum(c.end - c.start for c in copies)
    hidden = sum(max(0.0, min(c.end, k.end) - max(c.start, k.start)) for c in copies for k in kernels)
    assert total > 0
    return hidden / total


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.alone
def test_copies_run_beside_compute(world: int) -> None:
    assert all(share > 0.5 for share in run_ranks(beside, world, backend="nccl", timeout=120))
