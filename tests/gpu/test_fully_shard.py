"""`fully_shard` on GPUs: the same training on every transport and strategy, in a CUDA graph, in bounded memory, hidden.

What CPU tests prove about order is proved here about streams: the zoo and random graphs run beside their unsharded
twins again, where a missing wait would be garbage.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import record_function

import hocket
from hocket.fsdp.options import ShardTransport
from hocket.program.mesh import HALF
from hocket.runtime.collective_copies import HALVES
from hocket.testing import Overlap, profile_overlap
from tests.fsdp.kinds import ZOO
from tests.fsdp.test_fsdp2 import both
from tests.fsdp.test_fuzz import tell
from tests.fsdp.twin import Case, train_all
from tests.helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]
BF16 = torch.bfloat16
STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Blocks, and parameters of the root around them."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Training:
    """A model in bf16 with AdamW on one rank; `step` does all microbatches and returns the last loss."""

    def __init__(self, rank: int, strategy: str = "optim_grads_params", **options: Any) -> None:
        width, blocks = options.pop("width", 512), options.pop("blocks", 6)
        self.microbatches, wire = options.pop("microbatches", 2), options.pop("wire", None)
        torch.manual_seed(0)
        with torch.device("cuda", rank):
            self.model = Model(width, blocks)
            self.x = torch.randn(options.pop("rows", 256), width, dtype=BF16)
            self.x += rank
        self.ctx = hocket.fully_shard(
            self.model,
            units=Block,
            strategy=strategy,
            precision=hocket.Precision(compute=BF16, wire=wire),
            options=hocket.ShardOptions(**options),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, capturable=True, foreach=True)

    def step(self) -> Tensor:
        for _ in range(self.microbatches):
            with record_function("forward"):
                loss = self.model(self.x).float().square().mean()
            with record_function("backward"):
                loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def step_and_gather(self, optimizer: torch.optim.Optimizer, by_unit: bool, clip: bool) -> Tensor:
        loss = self.model(self.x).float().square().mean()
        loss.backward()
        if clip:
            hocket.clip_grad_norm_(self.ctx, 0.1)
        hocket.sharding.step_and_gather(self.ctx, optimizer) if by_unit else optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def weights(self) -> list[Tensor]:
        return [group.main.detach().cpu() for unit in self.ctx.units for group in unit.groups]


def whole(training: Training) -> list[Tensor]:
    with training.ctx.gathered():
        return [training.model.get_parameter(n).detach().cpu() for n, _ in training.model.named_parameters()]


# The same training


def zoo(rank: int, names: list[str]) -> None:
    torch.backends.cudnn.allow_tf32 = False
    # Not more steps: what overflows on GPUs, as `views` does, overflows in the twin too, and tells nothing any more.
    cases = [Case(name, microbatches=2, device="cuda", steps=3) for name in names]
    cases += [
        Case("stack", s, 3, device="cuda", sync=y) for s in STRATEGIES for y in ("each", "no_sync", "accumulating")
    ]
    cases += [Case("deep", microbatches=2, device="cuda", steps=4)]
    train_all(rank, cases)


def test_the_zoo_beside_its_twins() -> None:
    """But for `mixed_dtypes`, whose bf16 gradients NCCL adds in bf16 and the twin in fp32, and `moe`, on two meshes."""
    run_ranks(zoo, 2, [name for name in ZOO if name not in ("mixed_dtypes", "moe")], backend="nccl", timeout=250)


def test_programs_for_fsdp2_beside_torchs() -> None:
    """Models and batches are made on the host: what is sharded moves to the GPU, and inputs do."""
    run_ranks(both, 2, "plain_loop", "in_bf16", "accumulated", "another_method", backend="nccl", timeout=250)


@pytest.mark.parametrize("batch", range(2))
def test_random_graphs_beside_their_twins(batch: int) -> None:
    run_ranks(tell, 2, range(40 * batch, 40 * (batch + 1)), "cuda", backend="nccl", timeout=250)


def strategies(rank: int) -> None:
    """Sums of two ranks have one order, and halves are exact, so all strategies have the same bits."""
    results = {}
    for strategy in STRATEGIES:
        training = Training(rank, strategy, microbatches=1, wire=torch.float32)
        losses = [training.step() for _ in range(5)]
        results[strategy] = [*losses, *whole(training)]
    for strategy, found in results.items():
        for ours, wanted in zip(found, results["no_shard"], strict=True):
            assert torch.equal(ours, wanted), strategy


def test_all_strategies_have_the_same_bits() -> None:
    run_ranks(strategies, 2, backend="nccl", timeout=120)


def by_unit(rank: int, clip: bool) -> None:
    for strategy in STRATEGIES:
        every: list[dict[str, Any]] = [{}, {"transport": "copy_engine"}]
        for options in every:
            if strategy == "no_shard" and options:
                continue
            found = []
            for one_by_one in (False, True):
                training = Training(rank, strategy, width=1024, blocks=8, **options)
                optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-3, fused=True)
                losses = [training.step_and_gather(optimizer, one_by_one, clip) for _ in range(6)]
                found.append([*losses, *training.weights()])
            assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), (strategy, options)


@pytest.mark.parametrize("clip", [False, True])
def test_updates_by_unit_have_the_same_bits(clip: bool) -> None:
    run_ranks(by_unit, 2, clip, backend="nccl", timeout=120)


def transports(rank: int, strategy: str) -> None:
    results: dict[str, list[Tensor]] = {}
    every: tuple[ShardTransport, ...] = ("nccl", "copy_engine_gathers", "copy_engine")
    for transport in every:
        training = Training(rank, strategy, transport=transport, wire=torch.float32)
        losses = [training.step() for _ in range(5)]
        results[transport] = [*losses, *training.weights()]
    for transport in every[1:]:
        for ours, wanted in zip(results[transport], results["nccl"], strict=True):
            assert torch.equal(ours, wanted), transport


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_transports_have_the_same_bits(strategy: str) -> None:
    """Gathers move bytes; the sums of two fp32 gradients are the same wherever they are made."""
    run_ranks(transports, 2, strategy, backend="nccl", timeout=200)


def buckets(rank: int) -> None:
    first: list[Tensor] = []
    for options in ({}, {"bucket": 5_000_000}, {"bucket": 2**23, "transport": "copy_engine"}):
        training = Training(rank, "optim", wire=torch.float32, microbatches=1, **options)
        found = [*(training.step() for _ in range(4)), *whole(training)]
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True)), options


def test_buckets_change_no_bit() -> None:
    run_ranks(buckets, 2, backend="nccl", timeout=120)


def residency(rank: int) -> None:
    variants: list[dict[str, Any]] = [
        {}, {"prefetch": 2}, {"prefetch": 0}, {"staging": 1},
    ]  # fmt: skip
    first: list[Tensor] = []
    for options in variants:
        training = Training(rank, **options)
        found = [*(training.step() for _ in range(5)), *training.weights()]
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True)), options


def test_residency_changes_no_bit() -> None:
    run_ranks(residency, 2, backend="nccl", timeout=120)


# CUDA graphs


def graph(rank: int) -> None:
    """Memory comes and goes, which a replay would not know. What was begun is over, and the next step is as any."""
    eager, other = (Training(rank) for _ in range(2))
    expected = [eager.step().clone() for _ in range(4)]
    assert all(torch.equal(other.step(), one) for one in expected[:2])
    with (
        pytest.raises(ValueError, match="is called while a CUDA graph is recorded"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
    ):
        other.model(other.x)
    assert all(torch.equal(other.step(), one) for one in expected[2:])


def test_a_step_in_a_cuda_graph_is_refused() -> None:
    run_ranks(graph, 2, backend="nccl", timeout=150)


# Memory


def growth(rank: int, options: dict[str, Any]) -> list[int]:
    training = Training(rank, width=1024, blocks=8, **options)
    for _ in range(3):
        training.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    reserved, peaks = [torch.cuda.memory_reserved()], []
    for _ in range(20):
        training.step()
        reserved.append(torch.cuda.memory_reserved())
        peaks.append(torch.cuda.max_memory_allocated())
    assert len(set(reserved)) == 1, reserved
    return peaks


@pytest.mark.parametrize("options", [{}, {"prefetch": 2, "staging": 3}], ids=str)
def test_memory_does_not_grow(options: dict[str, Any]) -> None:
    for peaks in run_ranks(growth, 2, options, backend="nccl", timeout=120):
        assert max(peaks) == peaks[0], peaks


def bound(rank: int) -> tuple[int, int]:
    """Bytes above the shards at the peak of a step without activations to speak of, and what there should be.

    At its end all gradients are there, two units are gathered, and the gradients of two are on their way. Gathers and
    reductions pass through halves of their own.
    """
    training = Training(rank, width=2048, blocks=8, rows=16)
    training.step()
    training.step()
    torch.cuda.synchronize()
    resting = training.ctx.stats().shard_bytes + sum(
        value.nbytes for state in training.optimizer.state.values() for value in state.values()
    )
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        training.model(training.x)
    training.model(training.x).float().square().mean().backward()
    peak = torch.cuda.max_memory_allocated() - resting
    unit = max(sum(group.total_bytes for group in unit.groups if not group.whole) for unit in training.ctx.units)
    received = unit // 2  # what a reduction writes on 2 ranks before it is added
    gradients = sum(4 * len(shard.detach()) for shard in training.model.parameters())
    return peak, 2 * unit + 2 * unit + received + gradients + 2 * HALVES * HALF


def test_full_buffers_keep_to_their_bound() -> None:
    """Two gathered units and two staging buffers; 72 MiB for activations and cuBLAS, which has 32 MiB a thread."""
    for peak, room in run_ranks(bound, 2, backend="nccl", timeout=120):
        assert peak <= room + (72 << 20), (peak, room)


# Overlap


def overlap(rank: int, transport: ShardTransport) -> tuple[Overlap, int]:
    """Blocks of 134 million weights and 8,192 rows: 4 ms of forward beside 1 ms of gather."""
    training = Training(rank, width=8192, blocks=6, rows=8192, transport=transport)
    for _ in range(4):
        training.step()
    torch.cuda.synchronize()
    with profile_overlap() as seen:
        training.step()
        torch.cuda.synchronize()
    return seen, 6


def hidden(rank: int, transport: ShardTransport) -> None:
    seen, blocks = overlap(rank, transport)
    gathers, reduces = seen.of("gather"), seen.of("reduce")
    units = 2 * blocks - 2 + 2 * blocks - 4
    assert len(gathers) >= units, gathers  # and those of the root
    hideable = gathers[2:]  # behind the root's and the first block's
    assert hideable.overlapped >= len(hideable) - 1, hideable
    assert hideable.hidden >= 0.95, hideable
    if transport == "nccl":
        earlier = reduces[:-2]  # before the first block's and the root's of the last microbatch
        assert len(reduces) >= 2 * blocks, reduces
        assert earlier.hidden >= 0.95, earlier


@pytest.mark.alone
@pytest.mark.parametrize("transport", ["nccl", "copy_engine_gathers"])
def test_gathers_and_reductions_are_hidden(transport: ShardTransport) -> None:
    run_ranks(hidden, 2, transport, backend="nccl", timeout=200)


def asleep(rank: int) -> list[bool]:
    """Whether the device still sleeps in front of each step when the host has issued all of it."""
    torch.manual_seed(0)
    with torch.device("cuda", rank):
        model, x = Model(64, 2), torch.randn(8, 64)
        model.blocks[0].never = nn.Parameter(torch.ones(5))
    hocket.fully_shard(model, units=Block)
    optimizer, found = torch.optim.AdamW(model.parameters(), capturable=True, foreach=True), list[bool]()
    for _ in range(4):
        torch.cuda._sleep(1_000_000_000)  # clocks: more than half a second
        awake = torch.cuda.Event()
        awake.record()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(not awake.query())
        torch.cuda.synchronize()
    assert model.blocks[0].never.grad is None
    return found


def test_a_parameter_that_nobody_uses_has_no_host_wait_for_its_device() -> None:
    """But for the first time."""
    for found in run_ranks(asleep, 2, backend="nccl"):
        assert found[2:] == [True, True]
