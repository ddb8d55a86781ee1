"""The order in which lanes are served changes nothing, and a step leaves nothing behind."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hocket.config import Config
from hocket.engine import Engine
from hocket.fsdp.buffers import ShardGrads
from hocket.model.documents import Microbatch
from hocket.program.linearize import linearize
from hocket.program.ops import Op
from hocket.runtime import segment
from hocket.runtime.comm import Pending
from tests.helpers.parity import assert_parity, config
from tests.helpers.ranks import run_ranks
from tests.reference import random_batches

SEEDS = 8
EVERYTHING = config(
    dict(layers=4, dense_layers=(0,), shared_ffn=16, aux_loss=0.01),
    dict(pp=2, dp=2, ep=2),
    dict(chunks=2, merge="on", defer_wgrad="on", defer_layers=2),
    3,
    "fp32",
)


def microbatches_of(engine: Engine, c: Config) -> list[Microbatch]:
    (step,) = random_batches(c.model, 1, c.train.microbatches, c.mesh.dp, (2, 8))
    return [Microbatch(*batches[engine.where.dp]) for batches in step]


def train_in_many_orders(rank: int, c: Config) -> tuple[list[int], int]:
    """Seeds whose step gave other bits than the first one's, and how many different orders there were."""
    engine = Engine(c, rank, torch.device("cpu"))
    batch = microbatches_of(engine, c)
    expected: list[Tensor] = []
    different, orders = [], set()
    for seed in range(SEEDS):
        order = tuple(p for pp, p in linearize(engine.program, seed) if pp == engine.where.pp)
        orders.add(order)
        engine.executor.follow(order)
        engine.init_weights()
        engine.optimizer.steps = 0
        for state in engine.optimizer.state.values():
            state.exp_avg.zero_()
            state.exp_avg_sq.zero_()
        loss = engine.train_step(batch, 1e-2).loss
        engine.assert_clean()
        got = [loss, *(unit.group.main.clone() for unit in engine.sharded.units.values())]
        if not expected:
            expected = got
        elif not all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)):
            different.append(seed)
    return different, len(orders)


def test_every_legal_order_gives_the_same_bits() -> None:
    for different, orders in run_ranks(train_in_many_orders, 4, EVERYTHING):
        assert different == []
        assert orders > SEEDS * 3 // 4, "the seeds must give different orders"


def leftovers(rank: int, c: Config) -> tuple[int, int]:
    """Tensors that segments made and received in a step: how many there were, and how many still live after it."""
    engine = Engine(c, rank, torch.device("cpu"))
    batch = microbatches_of(engine, c)
    seen: list[weakref.ref[Tensor]] = []
    forward, backward = segment.Segment.forward, segment.Segment.backward

    def watch(values: Any) -> None:
        flat = values if isinstance(values, tuple | list) else (values,)
        seen.extend(weakref.ref(value) for value in flat if isinstance(value, Tensor))

    def watched_forward(self: segment.Segment, fn: Any, *inputs: Any) -> Any:
        result = forward(self, fn, *inputs)
        watch(inputs)
        watch(result)
        return result

    def watched_backward(self: segment.Segment, *grads: Any) -> Any:
        result = backward(self, *grads)
        watch(grads)
        watch(result)
        return result

    segment.Segment.forward, segment.Segment.backward = watched_forward, watched_backward  # type: ignore[method-assign]
    engine.train_step(batch, 1e-2)
    engine.assert_clean()
    engine.executor.actions.losses, engine.executor.actions.microbatches = [], ()
    del batch
    gc.collect()
    return len(seen), sum(ref() is not None for ref in seen)


@pytest.mark.parametrize("strategy", [pytest.param("optim_grads", marks=pytest.mark.full), "optim_grads_params"])
def test_a_step_leaves_no_tensor_behind(strategy: str) -> None:
    plan = dict(chunks=2, merge="on", strategy=strategy)
    c = config(dict(layers=4, shared_ffn=16), dict(pp=2, dp=2, ep=2), plan, 3, "bf16")
    for seen, alive in run_ranks(leftovers, 4, c):
        assert seen > 100
        assert alive == 0


class Dropped(list[Any]):
    """An executor's values, which notes what still holds a value of a communication lane after the plan dropped it."""

    def __init__(self, ops: Sequence[Op]) -> None:
        super().__init__([None] * len(ops))
        self.ops, self.dropped, self.held = ops, 0, set[str]()

    def __setitem__(self, position: Any, value: Any) -> None:
        old, owner = self[position], self.ops[position]
        super().__setitem__(position, value)
        if isinstance(old, Tensor) and value is None and owner.lane != "compute":
            memory = StorageWeakRef(old.untyped_storage())
            del old
            self.dropped += 1
            deadline = time.monotonic() + 10  # gloo's thread lets go of a finished collective a moment later
            while not self.held and not memory.expired() and time.monotonic() < deadline:
                time.sleep(1e-4)
            if not memory.expired():
                self.held.add(str(owner))


def dropped_values(rank: int, c: Config) -> tuple[int, set[str]]:
    engine = Engine(c, rank, torch.device("cpu"))
    engine.init_weights()
    values = Dropped(engine.program.ranks[engine.where.pp])
    engine.executor._values = values
    for seed in (None, 0):
        engine.executor.follow([p for pp, p in linearize(engine.program, seed) if pp == engine.where.pp])
        engine.train_step(microbatches_of(engine, c), 1e-2)
    return values.dropped, values.held


@pytest.mark.parametrize(
    ("dense", "defer"),
    [
        ((0, 3), "on"),
        ((0, 3), "off"),
        *(pytest.param(*one, marks=pytest.mark.full) for one in (((), "on"), ((0, 1, 2, 3), "off"))),
    ],
)
def test_what_a_communication_lane_drops_is_free(dense: tuple[int, ...], defer: str) -> None:
    """On a GPU the lane reuses such memory at once, so neither a graph nor a queue may have kept it."""
    plan = dict(chunks=2, merge="on", defer_wgrad=defer, defer_layers=-1 if defer == "on" else 0)
    c = config(dict(layers=4, dense_layers=dense, shared_ffn=16), dict(pp=2, dp=2, ep=2), plan, 3, "fp32")
    for dropped, held in run_ranks(dropped_values, 4, c):
        assert dropped >= 3
        assert held == set()


def gradients_by_op(rank: int, c: Config) -> tuple[list[tuple[str, str, str]], list[str], int]:
    """(unit, event, op) for the memory of reduced gradients in a step; the units; bytes that are left behind it."""
    engine = Engine(c, rank, torch.device("cpu"))
    engine.init_weights()
    events: list[tuple[str, str, str]] = []
    running = [""]
    issue = engine.executor.recorder.issue
    units = engine.sharded.units.values()

    def watch(name: str, grads: ShardGrads) -> None:
        make, let_go = grads.make, grads.let_go

        def noted(event: str, change: Callable[[], None]) -> Callable[[], None]:
            def changed() -> None:
                before = grads.flat is not None
                change()
                if before != (grads.flat is not None):
                    events.append((name, event, running[0]))

            return changed

        grads.make, grads.let_go = noted("made", make), noted("gone", let_go)  # type: ignore[method-assign]

    for unit in units:
        watch(str(unit), unit.group.grads)
        unit.group.make_grads, unit.group.let_grads_go = unit.group.grads.make, unit.group.grads.let_go

    def noting(position: int) -> None:
        op = engine.program.ranks[engine.where.pp][position]
        running[0] = f"{op.lane} {op.verb}"
        issue(position)

    engine.executor.recorder.issue = noting  # type: ignore[method-assign]
    engine.train_step(microbatches_of(engine, c), 1e-2)
    return events, [str(unit) for unit in units], sum(unit.group.grads.nbytes for unit in units)


@pytest.mark.parametrize("strategy", [pytest.param("optim_grads", marks=pytest.mark.full), "optim_grads_params"])
def test_memory_of_gradients_is_made_by_a_wgrad_and_given_back_by_the_step(strategy: str) -> None:
    """Both are ops of the compute lane: on a GPU that lane's activations have the memory before and afterwards."""
    plan = dict(chunks=2, merge="on", defer_wgrad="on", strategy=strategy)
    c = config(dict(layers=4, shared_ffn=16), dict(pp=2, dp=2, ep=2), plan, 3, "bf16")
    for events, units, left in run_ranks(gradients_by_op, 4, c):
        assert left == 0
        assert sorted(events) == sorted(
            [(unit, event, op) for unit in units for event, op in (("made", "compute wgrad"), ("gone", "compute step"))]
        )


def fail_at(engine: Engine, batch: list[Microbatch], share: float) -> None:
    """A step that fails when so much of it has been issued, and is abandoned."""
    recorder = engine.executor.recorder
    issue, ops = recorder.issue, iter(range(round(share * len(engine.program.ranks[0]))))

    def noting(position: int) -> None:
        next(ops)
        issue(position)

    recorder.issue = noting  # type: ignore[method-assign]
    with pytest.raises(StopIteration):
        engine.train_step(batch, 1e-2)
    recorder.issue = issue  # type: ignore[method-assign]
    engine.abort()
    engine.assert_clean()


def interrupted(rank: int, c: Config) -> bool:
    """Steps that fail half-way, then a step that must equal that of an undisturbed engine."""
    engine = Engine(c, rank, torch.device("cpu"))
    batch = microbatches_of(engine, c)
    engine.init_weights()
    result = engine.train_step(batch, 1e-2)
    expected, loads = result.loss.clone(), {n: load.tolist() for n, load in result.loads.items()}
    weights = [unit.group.main.clone() for unit in engine.sharded.units.values()]
    engine.init_weights()
    engine.optimizer.steps = 0
    for state in engine.optimizer.state.values():
        state.exp_avg.zero_()
        state.exp_avg_sq.zero_()
    engine.evaluate(batch)
    assert engine._validation is not None
    for executor in (engine._validation, engine.executor):
        with pytest.raises(IndexError):
            executor.run(batch[:1])  # the plan asks for the second microbatch, and there is none
        engine.abort()
        engine.assert_clean()
    for share in (0.2, 0.45, 0.7, 0.95):
        fail_at(engine, batch, share)
    result = engine.train_step(batch, 1e-2)
    engine.assert_clean()
    assert {n: load.tolist() for n, load in result.loads.items()} == loads
    again = [unit.group.main for unit in engine.sharded.units.values()]
    return torch.equal(result.loss, expected) and all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))


def test_a_failed_step_can_be_abandoned() -> None:
    c = config(dict(layers=3), dict(dp=2, ep=2), dict(merge="on", defer_wgrad="on"), 2, "fp32")
    assert run_ranks(interrupted, 2, c) == [True, True]


def closed_one_after_the_other(rank: int, c: Config) -> list[Tensor]:
    """Losses of two engines on the same groups, the second of which steps when the first one is closed."""
    first = Engine(c, rank, torch.device("cpu"))
    engines, losses = [Engine(c, rank, torch.device("cpu"), groups=first.groups), first], []
    for engine in engines:
        engine.init_weights()
        losses.append(engine.train_step(microbatches_of(engine, c), 1e-2).loss)
        engine.close()
    return losses


def test_an_engine_leaves_groups_alone_that_it_was_lent() -> None:
    for first, second in run_ranks(closed_one_after_the_other, 2, config(dict(layers=2), dict(dp=2), {}, 2, "fp32")):
        assert torch.equal(first, second)


def timed_step(rank: int, c: Config) -> float:
    engine = Engine(c, rank, torch.device("cpu"))
    engine.init_weights()
    batch = microbatches_of(engine, c)
    started = time.perf_counter()
    engine.train_step(batch, 1e-2)
    return time.perf_counter() - started


def test_the_slow_transport_takes_its_time_and_changes_nothing_else() -> None:
    fast = config(dict(layers=2), dict(dp=2, ep=2), dict(merge="on"), 2, "fp32")
    slow = replace(fast, train=replace(fast.train, transport="slow", slow=("a2a:20ms",)))
    exchanges = 2 * 2 * 4
    assert min(run_ranks(timed_step, 2, slow)) > exchanges * 0.02 / 2  # at most two are under way at once
    assert_parity(slow)


def read_old_weights(rank: int, c: Config) -> bool:
    """The optimizer steps, as it seems, between a gather and its readers."""
    engine = Engine(c, rank, torch.device("cpu"))
    engine.init_weights()
    unit = engine.sharded.unit("dense", 0, 1)
    gather = unit.gather

    def gather_and_step(slot: int) -> Pending:
        pending = gather(slot)
        unit.version += 1
        return pending

    unit.gather = gather_and_step  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="dense of layer 1 is read at version 1, but the weights are at version 2"):
        engine.train_step(microbatches_of(engine, c), 1e-2)
    return True


def test_weights_of_before_the_last_step_are_never_read() -> None:
    c = config(dict(layers=2), dict(dp=2), dict(merge="off"), 2, "fp32")
    assert run_ranks(read_old_weights, 2, c) == [True, True]
