"""The copy-engine transport on GPUs: exact values, no kernels, the same steps as with NCCL, a clean end."""

from __future__ import annotations

import dataclasses
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.config import (
    COPIED,
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
from hocket.engine import Engine
from hocket.measured import named
from hocket.model.documents import Microbatch
from hocket.program.mesh import Mesh
from hocket.runtime.comm import CommOptions, make_groups
from hocket.runtime.lanes import CudaLanes
from hocket.runtime.transports import local_sum
from hocket.runtime.world import everyone
from hocket.testing import profile_overlap
from tests.helpers.ranks import run_ranks
from tests.ranks.test_copy_engine import rank_order_sum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]
WORLD = 4 if torch.cuda.device_count() >= 4 else 2
ROOT = Path(__file__).resolve().parents[2]
N = (1 << 26) + 64 * 5
"""Elements of a shard: 128 MiB in bf16 and some, so that it goes in several pieces."""
BF16 = torch.bfloat16


# The local sum


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(("world", "numel"), [(1, 64), (2, 1), (3, 4097), (4, 1 << 20), (8, 64 * 1001)])
def test_parts_are_added_in_rank_order(world: int, numel: int, dtype: torch.dtype) -> None:
    for kept in (torch.float32, BF16):
        parts, into = torch.randn(world, numel).to(dtype), torch.randn(numel).to(kept)
        on_gpu = into.cuda()
        local_sum(parts.cuda(), on_gpu, 1 / 3)
        assert torch.equal(on_gpu.cpu(), rank_order_sum(parts, into, 1 / 3)), kept
        local_sum(parts.cuda(), on_gpu, 1 / 3, add=False)
        assert torch.equal(on_gpu.cpu(), rank_order_sum(parts, torch.zeros_like(into), 1 / 3)), kept


# The transport


def collectives(rank: int) -> float:
    """Gather and reduce on two streams, and check every bit. Returns the host's seconds while the device sleeps."""
    device, world = torch.device("cuda", rank), WORLD
    groups = make_groups(Mesh(dp=world), rank, device, "copy_engine")
    torch.manual_seed(rank)
    shard, out = torch.randn(N, device=device).to(BF16), torch.zeros(world * N, device=device, dtype=BF16)
    full = torch.randn(world * N, device=device).to(BF16)
    into = torch.randn(N, device=device)
    shards, fulls = (torch.stack(everyone(t.cpu())) for t in (shard, full))
    expected = rank_order_sum(fulls.view(world, world, N)[:, rank], into.cpu(), 1 / world)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)  # all the work must come after this, and the host must not
        begin = time.monotonic()
        assert groups.gather_dense.all_gather(out, shard).done
        assert groups.reduce_dense.reduce_sum(full, into, 1 / world).done
        host = time.monotonic() - begin
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(out.cpu(), shards.view(-1))
    assert torch.equal(into.cpu(), expected)
    # Once more from the default stream.
    out.zero_()
    groups.gather_dense.all_gather(out, shard)
    groups.reduce_dense.reduce_sum(full, into, 1 / world)
    assert torch.equal(out.cpu(), shards.view(-1))
    assert torch.equal(into.cpu(), rank_order_sum(fulls.view(world, world, N)[:, rank], expected, 1 / world))
    return host


@pytest.mark.alone
def test_gathers_and_sums_are_exact_and_the_host_goes_on() -> None:
    assert max(run_ranks(collectives, WORLD, backend="nccl", timeout=120)) < 0.05  # the device sleeps for 0.2 s


def activities(rank: int) -> dict[str, list[str]]:
    """Names of what runs on the device for a gather, and for a reduction."""
    device, world = torch.device("cuda", rank), WORLD
    groups = make_groups(Mesh(dp=world), rank, device, "copy_engine")
    shard, out = torch.ones(N, device=device, dtype=BF16), torch.zeros(world * N, device=device, dtype=BF16)
    full = torch.ones(world * N, device=device, dtype=BF16)
    into, stream = torch.zeros(N, device=device), torch.cuda.Stream()
    found = {}
    for name, call in (
        ("gather", lambda: groups.gather_dense.all_gather(out, shard)),
        ("reduce", lambda: groups.reduce_dense.reduce_sum(full, into, 1.0)),
    ):
        kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        with torch.cuda.stream(stream):
            for _ in range(2):  # the first profile of a process misses activities
                with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
                    call()
                    stream.synchronize()
        events = profile.events() or []
        found[name] = [event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    return found


def test_no_kernel_communicates() -> None:
    for found in run_ranks(activities, WORLD, backend="nccl", timeout=120):
        for names in found.values():
            assert any("Memcpy PtoP" in name for name in names), found  # a batch of copies is one activity
            assert not [name for name in names if "ncclDevKernel" in name or "ncclSymk" in name], found
        pieces = -(-2 * N // (CommOptions().half // (WORLD - 1)))
        assert sum("_local_sum" in name for name in found["reduce"]) == pieces, found


# Steps

DENSE = Config(
    model=ModelConfig(vocab=512, hidden=512, layers=4, heads=8, kv_heads=4, head_dim=64, ffn=1024),
    mesh=MeshConfig(dp=WORLD),
    plan=PlanConfig(order="sequential"),
    overlap=OverlapConfig(ep=ExpertOverlap(merge="off"), defer_wgrad="off"),
    data=DataConfig(sequence_length=256),
    precision=PrecisionConfig(compute="bf16"),
    train=TrainConfig(microbatches=4, device="cuda", transport="nccl", hang_timeout=60.0),
)
MOE = dataclasses.replace(
    DENSE,
    model=ModelConfig(
        vocab=512, hidden=256, layers=4, heads=4, kv_heads=2, head_dim=64, ffn=512, dense_layers=(0,), experts=8,
        top_k=2, expert_ffn=128, shared_ffn=128, aux_loss=0.01,
    ),
    mesh=MeshConfig(dp=WORLD, ep=WORLD // 2),
    plan=PlanConfig(order="1f1b"),
    overlap=OverlapConfig(ep=ExpertOverlap(merge="on"), defer_wgrad="on"),
)  # fmt: skip
CONFIGS = {"dense": DENSE, "moe": MOE}


def engine_on(transport: Any, config: Config, rank: int) -> tuple[Engine, list[Microbatch]]:
    device = torch.device("cuda", rank)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, transport=transport))
    engine = Engine(config, rank, device)
    engine.init_weights()
    generator = torch.Generator().manual_seed(engine.where.dp)
    ids = [torch.randint(512, (1, 257), generator=generator).to(device) for _ in range(4)]
    return engine, [Microbatch(i[:, :-1].contiguous(), i[:, 1:].contiguous()) for i in ids]


def steps(engine: Engine, batch: list[Microbatch], count: int = 3) -> list[Tensor]:
    """Losses of some steps from the start, then this rank's weights."""
    engine.init_weights()
    engine.optimizer.steps = 0
    for state in engine.optimizer.state.values():
        state.exp_avg.zero_()
        state.exp_avg_sq.zero_()
    losses = [engine.train_step(batch, 1e-2).loss.clone() for _ in range(count)]
    engine.assert_clean()
    return [*losses, *(unit.group.main.clone() for unit in engine.sharded.units.values())]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def parity(rank: int, config: Config) -> dict[str, Any]:
    """Steps with NCCL and with gathers on copy engines, and with all on copy engines under random delays."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    expected = steps(*engine_on("nccl", config, rank))
    gathers = steps(*engine_on("copy_engine_gathers", config, rank))
    engine, batch = engine_on("copy_engine", config, rank)
    plain = steps(engine, batch)
    late = []
    assert isinstance(engine.lanes, CudaLanes)
    for seed in range(5):
        chooser = random.Random(1000 * rank + seed)
        engine.lanes.delays = [0 if chooser.random() < 0.7 else chooser.randrange(1_000_000) for _ in range(997)]
        if not equal(plain, steps(engine, batch)):
            late.append(seed)
    losses = [float(run[2]) for run in (expected, gathers, plain)]
    return {"gathers": equal(expected, gathers), "late": late, "losses": losses}


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_are_those_of_nccl(name: str) -> None:
    for rank, found in enumerate(run_ranks(parity, WORLD, CONFIGS[name], backend="nccl", timeout=250)):
        assert found["gathers"], f"rank {rank}: gathers on copy engines give other bits than NCCL's: {found}"
        assert found["late"] == [], f"rank {rank}: other bits under the delays of seeds {found['late']}"
        nccl, _, both = found["losses"]
        assert abs(nccl - both) < 0.1, found  # sums in another order and precision


def a_step(rank: int, config: Config, transport: str) -> dict[str, Any]:
    """What communicated in a step, and how much memory 20 further steps took."""
    engine, batch = engine_on(transport, config, rank)
    for _ in range(4):
        engine.train_step(batch, 1e-4)
    engine.executor.annotate()
    plan = named(engine.program, engine.where.pp, tensors=config.mesh.tp > 1)
    with profile_overlap(plan=plan) as overlap:
        engine.train_step(batch, 1e-4)
    gathers, reduces = overlap.of("gather", op="^gather"), overlap.of("reduce", op="^reduce")
    assert overlap.trace is not None
    names = {str(word) for word in overlap.trace.words}
    before = torch.cuda.memory_reserved()
    for _ in range(20):
        engine.train_step(batch, 1e-4)
    torch.cuda.synchronize()
    grown = torch.cuda.memory_reserved() - before
    ops = [op.verb for op in engine.program.ranks[engine.where.pp]]
    return {
        "gathers": (len(gathers), ops.count("gather")),
        "reduces": (len(reduces), ops.count("reduce")),
        "kernels": sorted(name for name in names if re.search("nccl.*(AllGather|ReduceScatter)", name)),
        "copies": any("Memcpy PtoP" in name for name in names),
        "grown": grown,
    }


@pytest.mark.parametrize("transport", sorted(COPIED))
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_uses_no_kernel_where_it_need_not(name: str, transport: str) -> None:
    for rank, found in enumerate(run_ranks(a_step, WORLD, CONFIGS[name], transport, backend="nccl", timeout=120)):
        assert found["copies"], f"rank {rank}: no copy between GPUs: {found}"
        wanted = {"copy_engine": [], "copy_engine_gathers": ["ReduceScatter"]}[transport]
        assert all(any(word in kernel for word in wanted) for kernel in found["kernels"]), f"rank {rank}: {found}"
        for kind in ("gathers", "reduces"):
            assert found[kind][0] == found[kind][1], f"rank {rank}: seen and planned {kind} differ: {found}"
        assert found["grown"] <= 32 << 20, f"rank {rank}: memory grows: {found}"


# The end


@pytest.mark.parametrize("ending", ["groups", "nothing"])
def test_a_process_ends_by_itself(ending: str) -> None:
    """Whether or not it has destroyed its groups."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
    command = [*launcher, "-m", "tests.helpers.copy_engine_end", ending]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-6000:]
    assert ended.stdout.count(f"ends ({ending})") == WORLD, ended.stdout
