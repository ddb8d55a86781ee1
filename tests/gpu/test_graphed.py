"""Steps that are replayed as one CUDA graph give the bits of steps issued op by op, and take the host no time.

Beside copy engines and pipelines they are compared with the sequential plan too, under random delays that are recorded
with them.
"""

from __future__ import annotations

import dataclasses
import random
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.config import Config, ExpertOverlap, MeshConfig, OverlapConfig, PlanConfig
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.model.documents import Microbatch, documents_of
from hocket.recipes import PLAIN
from hocket.runtime.hangs import Watchdog
from hocket.runtime.lanes import CudaLanes
from hocket.train.profiling import Recording
from hocket_trace import load, report
from tests.gpu.test_parity import BASE, restart
from tests.gpu.test_placed_splits import CONFIG, WORLD, batches_of
from tests.gpu.test_tensor import ALL, OFF
from tests.helpers.plans import planned
from tests.helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]
STEPS = 10
DENSE = changed(planned(CONFIG, splits="host"), {"mesh.ep": 1, "model.experts": 0, "overlap.ep.merge": "off"})
CONFIGS = {
    "experts": CONFIG,
    "little room": planned(CONFIG, room=1.0),
    "whole gradients": planned(CONFIG, strategy="no_shard"),
    "updates in the next step": planned(CONFIG, update="next_step"),
    "dense": dataclasses.replace(DENSE, plan=dataclasses.replace(DENSE.plan, order="sequential")),
}


def steps(rank: int, config: Config) -> tuple[list[float], list[Tensor], float]:
    """Losses and norms of all steps and of validations between them; weights; seconds of the host in the last step."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    engine = Engine(config, rank, device)
    engine.init_weights()
    numbers: list[float] = []
    seconds = 0.0
    for i, batch in enumerate(batches_of(engine, STEPS)):
        torch.cuda.synchronize()
        started = time.perf_counter()
        result = engine.train_step(batch, 1e-3)
        seconds = time.perf_counter() - started
        numbers += [float(result.loss), float(result.grad_norm)]
        if i in (2, 6):
            numbers.append(float(engine.evaluate(batch)))
    engine.catch_up()
    weights = [unit.group.main.cpu() for unit in engine.sharded.units.values()]
    engine.close()
    return numbers, weights, seconds


def issued_and_replayed(rank: int, config: Config) -> tuple[bool, float, float]:
    """Whether steps issued op by op and replayed steps have the same bits; the host's seconds in one of each."""
    # With little room, steps are made again, and room grows.
    numbers, weights, seconds = steps(rank, planned(config, splits="host"))
    found_numbers, found, found_seconds = steps(rank, planned(config, graphs="on"))
    return found_numbers == numbers and all(map(torch.equal, found, weights)), seconds, found_seconds


@pytest.mark.alone
@pytest.mark.parametrize("name", CONFIGS)
def test_replayed_steps_give_the_same_bits(name: str) -> None:
    for same, issued, replayed in run_ranks(issued_and_replayed, WORLD, CONFIGS[name], backend="nccl", timeout=200):
        assert same
        assert replayed < 0.7 * issued


SEEDS = 5
APART = {"overlap.ep.merge": "off", "plan.order": "1f1b", "plan.chunks": 1}
PIPELINE = dataclasses.replace(BASE, mesh=MeshConfig(pp=2, dp=WORLD // 2, ep=1), overlap=OverlapConfig())
"""Two pipeline ranks with two chunks each, experts where their tokens are."""
PIPED = changed(PIPELINE, {"plan.order": "interleaved", "overlap.ep.merge": "off", "overlap.defer_wgrad": "on"})
BESIDE: dict[str, Config] = {
    "copy engines": changed(CONFIG, {"train.transport": "copy_engine"}),
    "copy engines, updates in the next step": changed(
        planned(CONFIG, update="next_step"), {"train.transport": "copy_engine"}
    ),
    "copy engines, dense": changed(CONFIGS["dense"], {"train.transport": "copy_engine"}),
    "copy engines, whole gradients": changed(planned(CONFIG, strategy="optim"), {"train.transport": "copy_engine"}),
    "interleaved": planned(PIPED, defer_layers=2),
    "1f1b": changed(PIPED, APART),
    "zb_h1": changed(PIPED, {**APART, "plan.order": "zb_h1"}),
    "interleaved, copy engines": changed(planned(PIPED, defer_layers=2), {"train.transport": "copy_engine"}),
    "recomputed": planned(PIPED, recompute=("attn", "experts")),
}
TENSORS = {"mesh.dp": WORLD // 2, "plan.order": "sequential", "overlap.defer_wgrad": "on"}
BESIDE |= {
    "tokens by NCCL": changed(OFF, TENSORS),
    "tokens by copies": changed(ALL, TENSORS),
}
BESIDE["documents"] = changed(CONFIG, {"data.packing": "on"})
if WORLD == 4:
    MERGED = dataclasses.replace(
        BASE,
        mesh=MeshConfig(pp=2, dp=2, ep=2),
        overlap=OverlapConfig(ep=ExpertOverlap(merge="on", splits="device", room=8.0), defer_wgrad="on"),
    )
    BESIDE |= {
        "merged pipeline": MERGED,
        "everything": changed(MERGED, {"train.transport": "copy_engine"}),
        "merged at the ends": planned(MERGED, merge_ends="on", group=4, defer_layers=1),
    }


def with_documents(batches: list[list[Microbatch]]) -> list[list[Microbatch]]:
    """The same with documents, whose number differs from step to step."""
    found = []
    for step, batch in enumerate(batches):
        numbers = torch.arange(batch[0].ids.shape[1]).div((97, 31, 61, 11)[step % 4], rounding_mode="floor")
        documents = documents_of(numbers.repeat(batch[0].ids.shape[0], 1)).to(batch[0].ids.device)
        found.append([dataclasses.replace(microbatch, documents=documents) for microbatch in batch])
    return found


def train(engine: Engine, batches: list[Any]) -> list[Tensor]:
    """Losses and norms of steps from the first weights on, and the weights behind them."""
    restart(engine)
    numbers = []
    for batch in batches:
        result = engine.train_step(batch, 1e-2)
        numbers += [result.loss.clone(), result.grad_norm.clone()]
    engine.catch_up()
    return [*numbers, *(unit.group.main.clone() for unit in engine.sharded.units.values())]


def delayed(rank: int, config: Config) -> tuple[list[int], int, bool]:
    """Seeds whose replays differ from the sequential plan, replays that were made, and whether all was finite."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    packed = config.data.packing == "on"  # for which attention adds in a fixed order only if it must not warn instead
    torch.use_deterministic_algorithms(True, warn_only=not packed)
    engine = Engine(changed(config, {"plan.graphs": "on"}), rank, device)
    assert isinstance(engine.lanes, CudaLanes)
    assert engine._graphed is not None
    watchdog = Watchdog(40.0, lambda device: engine.report(rank, device), lambda: engine.current_recorder)
    plain = dataclasses.replace(
        config, plan=PlanConfig(chunks=config.plan.chunks), overlap=OverlapConfig(tp=config.overlap.tp)
    )
    same = {"overlap.dp.strategy": config.overlap.dp.strategy, "overlap.ep.splits": "host"}
    same |= {
        "train.transport": "nccl"
    }  # it borrows the groups, whose copy engines push rows that splits of the device place
    plan = {"plan.order": "sequential", "plan.graphs": "off", **PLAIN, **same}
    sequential = Engine(changed(plain, plan), rank, device, groups=engine.groups)
    *batches, other = with_documents(batches_of(sequential, 4)) if packed else batches_of(sequential, 4)
    expected = train(sequential, batches)
    sequential.executor.recorder.end()
    train(engine, batches)  # op by op
    different, replays = [], 0
    record = engine._graphed._record

    def counted(run: Any) -> Any:
        result, replay = record(run)

        def again() -> None:
            nonlocal replays
            replays += 1
            replay()

        return result, again

    engine._graphed._record = counted
    for seed in range(SEEDS):
        chooser = random.Random(1000 * rank + seed)
        engine.forget_graph()
        engine.lanes.delays = [0 if chooser.random() < 0.7 else chooser.randrange(1_000_000) for _ in range(997)]
        found = train(engine, batches)
        engine.evaluate(other)  # op by op, between replays
        if not all(map(torch.equal, expected, found)):
            different.append(seed)
    engine.forget_graph()
    engine.lanes.delays = ()
    engine.assert_clean()
    torch.cuda.synchronize()
    engine.executor.recorder.end()
    watchdog.close()
    return different, replays, all(bool(torch.isfinite(t).all()) for t in expected)


@pytest.mark.parametrize("name", BESIDE)
def test_replays_under_random_delays_are_the_sequential_step(name: str) -> None:
    found: list[Any] = run_ranks(delayed, WORLD, BESIDE[name], backend="nccl", timeout=130)
    assert found == [([], 3 * SEEDS, True)] * WORLD


def abandoned(rank: int) -> tuple[bool, bool]:
    """Of a replayed step that fails: whether the caller stays on its stream, and whether the step can be made again."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    engine = Engine(planned(CONFIG, graphs="on"), rank, device)
    *batches, last = batches_of(engine, 6)
    expected = train(engine, [*batches, last])
    train(engine, batches)
    caller, actions = torch.cuda.current_stream(), engine.executor.actions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actions, "on_step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.train_step(last, 1e-2)
    engine.abort()
    engine.assert_clean()
    stays = torch.cuda.current_stream() == caller
    again = engine.train_step(last, 1e-2)
    found = [again.loss, again.grad_norm, *(unit.group.main for unit in engine.sharded.units.values())]
    return stays, all(map(torch.equal, expected[-len(found) :], found))


def test_a_replayed_step_that_fails_can_be_abandoned() -> None:
    assert run_ranks(abandoned, WORLD, backend="nccl", timeout=100) == [(True, True)] * WORLD


def kernels(rank: int) -> list[str]:
    """Names of what runs on the device in a replayed step on copy engines."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    engine = Engine(changed(BESIDE["copy engines, dense"], {"plan.graphs": "on"}), rank, device)
    engine.init_weights()
    *first, last = batches_of(engine, 6)
    for batch in first:
        engine.train_step(batch, 1e-3)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        engine.train_step(last, 1e-3)
        torch.cuda.synchronize()
    return [event.name for event in profile.events() or ()]


def test_no_kernel_of_nccl_gathers_in_a_replay_on_copy_engines() -> None:
    for names in run_ranks(kernels, WORLD, backend="nccl", timeout=100):
        assert names
        assert not [n for n in names if n.startswith("nccl") and ("AllGather" in n or "ReduceScatter" in n)]


def profiled(rank: int, folder: Path) -> tuple[list[str], bool]:
    """How steps were made of which two are recorded, and whether all have the bits of steps that nobody records."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    engine = Engine(planned(CONFIG, graphs="on"), rank, device)
    batches = batches_of(engine, STEPS)
    expected = train(engine, batches)
    engine.forget_graph()
    restart(engine)
    recording: Any = None
    ways, found = [], []
    for step, batch in enumerate(batches):
        if step == 5:
            recording = Recording(engine, rank)
        if step == 6:
            recording.start()
        with recording.step(step) if step > 5 else nullcontext():
            result = engine.train_step(batch, 1e-2)
            torch.cuda.synchronize()
        ways.append(result.way)
        found += [result.loss.clone(), result.grad_norm.clone()]
        if step == 7:
            recording.stop()
            recording.write(folder / f"rank{rank}.json.gz")
    found += [unit.group.main for unit in engine.sharded.units.values()]
    return ways, all(map(torch.equal, expected[-len(found) :], found))


@pytest.mark.alone  # compares times of kernels
def test_a_recorded_window_of_replays_shows_replays(tmp_path: Path) -> None:
    """Kernels inside of a graph are there, and their communication is known for what it is."""
    for ways, same in run_ranks(profiled, WORLD, tmp_path, backend="nccl", timeout=150):
        assert ways[6:] == ["replayed"] * 4
        assert same
    found = report(load(sorted(tmp_path.iterdir())))
    for step in found.steps:
        assert "gather" in step.kinds, step.kinds
        assert step.exposed < step.compute < step.seconds
