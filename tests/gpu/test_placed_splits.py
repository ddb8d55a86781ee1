"""Splits that only devices know: no host waits in a step, rows arrive as ever, and every plan gives the same bits."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.config import Config, ExpertOverlap, MeshConfig, OverlapConfig, PlanConfig
from hocket.engine import Engine
from hocket.layers.dispatch import exchange_counts, group_rows, place_counts
from hocket.layers.routing import Routing
from hocket.model.documents import Microbatch
from hocket.program.mesh import Mesh
from hocket.runtime.blocks import Room
from hocket.runtime.comm import CommOptions, make_groups
from hocket.runtime.lanes import CudaLanes
from tests.gpu.test_parity import BASE, STEPS, run
from tests.helpers.plans import planned
from tests.helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]
WORLD = 4 if torch.cuda.device_count() >= 4 else 2
WIDTH, TOKENS, LOCAL = 512, 3000, 8
CONFIG = dataclasses.replace(
    BASE,
    mesh=MeshConfig(dp=WORLD, ep=WORLD),
    plan=PlanConfig(order="1f1b"),
    overlap=OverlapConfig(ep=ExpertOverlap(merge="on", splits="device", room=8.0), defer_wgrad="on"),
)
"""Eight experts; capacity for whatever comes."""


def exchanges(rank: int, capacity: int) -> list[int]:
    """Rows by pushes are those by NCCL, also where some are late or a rank has no room; returns the rows needed."""
    device = torch.device("cuda", rank)
    mesh = Mesh(dp=WORLD, ep=WORLD)
    arrival = max(capacity, TOKENS) * WIDTH * 2
    pushed = make_groups(mesh, rank, device, "nccl", CommOptions(arrival=arrival, device_splits=True)).a2a
    nccl = make_groups(mesh, rank, device, "nccl").a2a
    generator = torch.Generator(device).manual_seed(rank)
    stream = torch.cuda.Stream(priority=-1)
    kept: list[Any] = []
    needed = []
    for turn in range(12):
        experts = (WORLD * LOCAL, 1, LOCAL, 5)[turn % 4]
        expert = torch.randint(experts, (TOKENS,), device=device, generator=generator)
        counts = expert.bincount(minlength=WORLD * LOCAL)
        routing = Routing(torch.arange(TOKENS, device=device, dtype=torch.int32), counts, TOKENS, 1)
        rows = torch.randn(TOKENS, WIDTH, device=device, generator=generator).bfloat16()
        known = exchange_counts(routing, nccl)
        arrived = rows.new_empty(known.table.room, WIDTH)
        room = Room(capacity, torch.zeros(1, dtype=torch.int64, device=device))
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            nccl.all_to_all(arrived, rows, known.table)
            wanted = group_rows(arrived, known)
            if (turn + rank) % 3 == 0:
                torch.cuda._sleep(2_000_000)  # this rank is late
            if turn:
                torch.cuda.set_sync_debug_mode("error")
            placed = place_counts(routing, pushed, room)
            out = rows.new_full((capacity, WIDTH), -7.0)
            pushed.all_to_all(out, rows, placed.table)
            returned = rows.new_full(rows.shape, -7.0)
            pushed.all_to_all(returned, out, placed.table.back)
            torch.cuda.set_sync_debug_mode("default")
        kept.append((rows, known, wanted, placed, out, returned, routing, arrived))  # what another stream uses
        needed.append(room.needed)
    torch.cuda.synchronize()
    for rows, known, wanted, placed, out, returned, *_ in kept:
        end = min(len(wanted), capacity)
        assert int(placed.count) == end
        assert torch.equal(placed.offsets_L, known.offsets_L.clamp(max=capacity))
        assert torch.equal(out[:end], wanted[:end])
        assert (out[end:] == -7).all(), "rows beyond those that came were written"
        if capacity == WORLD * TOKENS:
            assert torch.equal(returned, rows)
    return [int(n) for n in needed]


@pytest.mark.parametrize("capacity", [WORLD * TOKENS, TOKENS], ids=["enough", "too little"])
def test_pushed_rows_are_those_of_nccl(capacity: int) -> None:
    needs = run_ranks(exchanges, WORLD, capacity, backend="nccl", timeout=150)
    assert all(need == needs[0] for need in needs)
    assert needs[0][1] == WORLD * TOKENS, "all rows went to one expert"


def steps_without_waiting(rank: int, config: Config) -> list[float]:
    """Losses of steps in whose loop any wait of the host raises an error, and without them, in turns."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    engine = Engine(config, rank, device)
    engine.init_weights()
    actions = engine.executor.actions
    finish = actions.on_step
    assert finish is not None

    def finish_freely() -> None:  # the end of a step may look whether rows found room
        torch.cuda.set_sync_debug_mode("default")
        finish()

    actions.on_step = finish_freely
    batches = batches_of(engine, 4)
    losses = []
    for turn, batch in enumerate(batches):
        torch.cuda.synchronize()
        if turn:  # the first step is a rehearsal, which waits for every op
            torch.cuda.set_sync_debug_mode("error")
        result = engine.train_step(batch, 1e-3)
        torch.cuda.set_sync_debug_mode("default")
        losses.append(float(result.loss))
        engine.assert_clean()
    return losses


def batches_of(engine: Engine, steps: int) -> list[list[Microbatch]]:
    generator = torch.Generator().manual_seed(engine.where.dp)
    train, data = engine.config.train, engine.config.data
    shape = (train.sequences, data.sequence_length + 1)
    batches = []
    for _ in range(steps):
        ids = [torch.randint(engine.config.model.vocab, shape, generator=generator) for _ in range(train.microbatches)]
        batches.append([Microbatch(*(h.contiguous().to(engine.device) for h in (i[:, :-1], i[:, 1:]))) for i in ids])
    return batches


@pytest.mark.parametrize("transport", ["nccl", "null"])
def test_no_host_waits_in_a_step(transport: Any) -> None:
    config = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, transport=transport))
    for losses in run_ranks(steps_without_waiting, WORLD, config, backend="nccl", timeout=200):
        assert all(0 < loss < 20 for loss in losses), losses


def test_splits_that_the_host_knows_make_it_wait() -> None:
    """So the test above can fail."""
    config = planned(CONFIG, splits="host")
    with pytest.raises(RuntimeError, match="synchroniz"):
        run_ranks(steps_without_waiting, WORLD, config, backend="nccl", timeout=200)


def compare(rank: int, config: Config, seeds: int) -> dict[str, Any]:
    """One rank: a sequential plan whose host knows the splits, then the merged one under every seed's delays."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyrefly: ignore
    plain = planned(config, order="sequential", merge="off", defer_wgrad="off", splits="host")
    batches: list[list[Microbatch]] = []
    results: list[list[Tensor]] = []
    for c in (plain, config):
        engine = Engine(c, rank, device)
        batches = batches or batches_of(engine, STEPS)
        lanes = engine.lanes
        assert isinstance(lanes, CudaLanes)
        for seed in range(seeds if c is config else 1):
            chooser = random.Random(1000 * rank + seed)
            lanes.delays = [0 if chooser.random() < 0.7 else chooser.randrange(1_000_000) for _ in range(997)]
            results.append(run(engine, batches))
        engine.groups.control.barrier()
    expected, *others = results
    return {
        "different": [s for s, got in enumerate(others) if not all(map(torch.equal, expected, got))],
        "finite": all(bool(torch.isfinite(t).all()) for t in expected),
    }


@pytest.mark.parametrize("transport", ["nccl", "copy_engine"])
def test_every_plan_and_delay_gives_the_bits_of_host_known_splits(transport: Any) -> None:
    config = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, transport=transport))
    for rank, result in enumerate(run_ranks(compare, WORLD, config, 10, backend="nccl", timeout=250)):
        assert result["finite"], f"rank {rank}"
        assert result["different"] == [], f"rank {rank}: other bits under the delays of seeds {result['different']}"
