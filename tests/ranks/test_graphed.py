"""What Python keeps between steps that are replayed, with a recording that makes its calls at once and once only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.config import Config
from hocket.config.schema import changed
from hocket.engine import Engine, graphed
from hocket.model.documents import PADDING, Microbatch, attend, documents_of
from hocket.runtime.transports import Null
from tests.helpers.parity import config
from tests.helpers.plans import planned
from tests.helpers.ranks import run_ranks
from tests.reference import awkward_batches, microbatch, random_batches

CONFIG = config(
    dict(layers=2, dense_layers=(1,), experts=8, bias_rate=0.01, aux_loss=0.01), dict(dp=2, ep=2), dict(merge="on"), 2,
    "fp32",
)  # fmt: skip
STEPS = 6


def once(run: Any) -> Any:
    return run(), lambda: None


def steps(rank: int, c: Config, recorded: bool, profiled: int = -1) -> tuple[list[float], list[Tensor], int]:
    """Losses and norms of all steps and of a validation, weights and loads, and the steps that were recorded."""
    engine, count = Engine(c, rank, torch.device("cpu")), 0
    engine.init_weights()

    def counted(run: Any) -> Any:
        nonlocal count
        count += 1
        return once(run)

    if recorded:
        engine._graphed = engine.graphed_by(counted)
    numbers, loads = [], []
    sizes = c.model, STEPS, c.train.microbatches, c.mesh.dp
    every = awkward_batches(*sizes) if c.data.packing == "on" else random_batches(*sizes, (2, 8))
    for i, batches in enumerate(every):
        engine.executor.annotate(i == profiled)
        microbatches = [microbatch(batch[engine.where.dp]) for batch in batches]
        result = engine.train_step(microbatches, 1e-2)
        numbers += [float(result.loss), float(result.grad_norm), result.lacked]
        loads += [load.clone() for load in result.loads.values()]
        if i == 4:
            numbers.append(float(engine.evaluate(microbatches)))
        engine.forget_graph()  # the next one is recorded anew, for this recording makes its calls once only
    engine.assert_clean()
    made = numbers, [*loads, *(unit.group.main.clone() for unit in engine.sharded.units.values())], count
    engine.close()
    return made


def issued_and_recorded(rank: int, c: Config, profiled: int) -> list[tuple[list[float], list[Tensor], int]]:
    """Of issued steps; of recorded ones; and of recorded ones of which one is profiled, unless its number is below 0.

    An engine after the other.
    """
    ways = [(False, -1), (True, -1), *([(True, profiled)] if profiled >= 0 else [])]
    return [steps(rank, c, *way) for way in ways]


def assert_same(c: Config, profiled: int = -1) -> None:
    for (numbers, tensors, none), *found in run_ranks(issued_and_recorded, 2, c, profiled):
        assert none == 0
        for i, (found_numbers, found_tensors, recordings) in enumerate(found):
            assert found_numbers == numbers
            assert all(map(torch.equal, found_tensors, tensors))
            assert recordings == STEPS - graphed.WARM_UP - i


def test_recorded_steps_give_the_same_bits_and_a_profiled_one_runs_op_by_op() -> None:
    assert_same(CONFIG, profiled=5)


def test_a_recorded_step_without_room_is_made_again() -> None:
    assert_same(planned(CONFIG, splits="device", room=1.0))


def test_whole_gradients_are_summed_anew() -> None:
    assert_same(planned(CONFIG, strategy="no_shard"))


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_updates_are_recorded_with_the_next_step(strategy: Any) -> None:
    assert_same(planned(CONFIG, update="next_step", strategy=strategy))


def replayed(rank: int, c: Config, recorded: bool) -> tuple[list[float], list[Tensor], list[str]]:
    """Of twelve steps, between which weights are read: losses, norms and what was read; weights; how steps were made.

    A recording makes its calls again where it has made them, with what Python knew then: all updates are left. What
    Python knows of updates does not change meanwhile, for a replay runs none of it.
    """
    engine, found, ways = Engine(c, rank, torch.device("cpu")), list[float](), list[str]()
    engine.init_weights()
    actions, model = engine.executor.actions, engine.sharded

    def record(run: Any) -> Any:
        losses, made = run(), [1]
        loads = dict(actions.loads)

        def replay() -> None:
            if made:  # the recording's own
                made.clear()
                return
            model.held, (actions.on_step, on_step) = False, (lambda: None, actions.on_step)
            known = {unit: unit.awaits_update for unit in model.units.values()}
            for unit in known:
                unit.awaits_update = True
            again = run()
            for unit, waits in known.items():
                unit.awaits_update = waits
            model.held, actions.on_step = True, on_step
            for into, new in zip([*losses, *loads.values()], [*again, *actions.loads.values()], strict=True):
                into.copy_(new)

        return losses, replay

    if recorded:
        engine._graphed = engine.graphed_by(record)
    for i, batches in enumerate(random_batches(c.model, 12, c.train.microbatches, c.mesh.dp, (2, 8))):
        microbatches = [microbatch(batch[engine.where.dp]) for batch in batches]
        engine.executor.annotate(i == 9)
        result = engine.train_step(microbatches, 1e-2 / (1 + i))
        ways.append(result.way)
        found += [float(result.loss), float(result.grad_norm), result.lacked]
        if i in (2, 5, 6, 8):
            found.append(float(engine.evaluate(microbatches)))
        if i == 7:  # as a checkpoint does
            found += [float(state.piece.main.sum()) for state in engine.optimizer.state.values()]
    engine.catch_up()
    made = found, [unit.group.main.clone() for unit in model.units.values()], ways
    engine.close()
    return made


def issued_and_replayed(rank: int, c: Config) -> list[tuple[list[float], list[Tensor], list[str]]]:
    return [replayed(rank, c, recorded) for recorded in (False, True)]


@pytest.mark.parametrize(
    "changes",
    [{}, pytest.param({"strategy": "no_shard"}, marks=pytest.mark.full), {"splits": "device", "room": 1.0}],
    ids=str,
)
def test_a_replay_makes_each_update_once(changes: Any) -> None:
    """Behind validations, checkpoints, a profiled step, and one that is made again because rows found no room."""
    c = planned(CONFIG, update="next_step", **changes)
    c = changed(c, {"train.microbatches": 3})  # rows of two always find room from the first step on
    for (numbers, tensors, _), (found_numbers, found_tensors, ways) in run_ranks(issued_and_replayed, 2, c):
        assert found_numbers == numbers
        assert all(map(torch.equal, found_tensors, tensors))
        assert ways[:4] == ["issued"] * 3 + ["recorded"]
        assert ways[9:] == ["issued", "recorded", "replayed"]
        assert ("issued" in ways[4:9]) == bool(changes.get("room")), "made again"


def not_recorded(rank: int) -> bool:
    """Whether the updates that a step has left are made, though the recording that began with them has failed."""
    engines = [Engine(planned(CONFIG, update="next_step"), rank, torch.device("cpu")) for _ in range(2)]
    (*steps, last) = random_batches(CONFIG.model, 4, CONFIG.train.microbatches, CONFIG.mesh.dp, (2, 8))

    def fails(run: Any) -> Any:
        for unit in engines[0].sharded.units.values():
            unit.take_grads()  # as an update that is recorded, and not made
        raise torch.OutOfMemoryError("no room")

    engines[0]._graphed = engines[0].graphed_by(fails)
    for engine in engines:
        engine.init_weights()
        for batches in steps:
            engine.train_step([Microbatch(*batch[rank]) for batch in batches], 1e-2)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        engines[0].train_step([Microbatch(*batch[rank]) for batch in last], 1e-2)
    engines[0].abort()
    engines[0].assert_clean()
    engines[1].catch_up()
    units = zip(*(engine.sharded.units.values() for engine in engines), strict=True)
    return all(a.group.grads.flat is None and torch.equal(a.group.main, b.group.main) for a, b in units)


def test_a_recording_that_fails_loses_no_update() -> None:
    assert run_ranks(not_recorded, 2) == [True, True]


def test_documents_have_room_and_weigh_as_ever() -> None:
    assert_same(changed(CONFIG, {"data.packing": "on"}))


@pytest.mark.parametrize("padded", [False, True])
def test_a_recorded_microbatch_becomes_one_of_other_documents(padded: bool) -> None:
    """Attention is that of the other's own documents, whose number differs."""
    few = documents_of(torch.tensor([[0, 0, 0, 1, 1, PADDING if padded else 1], [2] * 6]))
    many = documents_of(torch.tensor([[0, 1, 2, 2, 3, 4], [5, 5, 6, 7, 7, 8]]))
    kept = few.with_capacity(12, padded)
    kept.copy_from(many)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(12, 2, 4, generator=generator) for _ in range(3))
    assert torch.equal(attend(q, k, v, kept), attend(q, k, v, many))
    assert torch.equal(kept.position_T, many.position_T)
    assert (kept.count, kept.longest) == (12, 6)
    assert (kept.real_T is not None) == padded
    assert kept.real_T is None or bool(kept.real_T.all())


@pytest.mark.parametrize("order", ["interleaved", "zb_h1"])
def test_pipelines_are_recorded_rank_by_rank(order: Any) -> None:
    chunks = 2 if order == "interleaved" else 1
    c = changed(CONFIG, {"model.layers": 4, "mesh.pp": 2, "mesh.dp": 1, "mesh.ep": 1, "train.microbatches": 4})
    c = changed(c, {"model.tied": order == "interleaved"})  # then ranks exchange gradients in the recording
    plan = dict(order=order, chunks=chunks, merge="off", defer_wgrad="on", defer_layers=1)
    assert_same(planned(c, **plan))


def muted(rank: int) -> list[int]:
    """Recordings that were made until: the first replay, a replay without communication, and one with it again."""
    engine, count = Engine(CONFIG, rank, torch.device("cpu"), update=False), 0
    engine.init_weights()

    def counted(run: Any) -> Any:
        nonlocal count
        count += 1
        return once(run)

    engine._graphed = engine.graphed_by(counted)
    steps = random_batches(CONFIG.model, 1, CONFIG.train.microbatches, CONFIG.mesh.dp, (2, 8))
    microbatches = [Microbatch(*batch[rank]) for batch in next(iter(steps))]
    counts = []
    moved_by = {group: group.transport for group in engine.groups}
    pretended = {group: Null(group.size, group.rank, engine.device) for group in engine.groups}
    for transports in (moved_by, pretended, moved_by):
        for group, transport in transports.items():
            group.transport = transport
        for _ in range(graphed.WARM_UP + 1):
            engine.train_step(microbatches, 0.0)
        counts.append(count)
    return counts


def test_a_recording_is_void_where_bytes_move_in_another_way() -> None:
    assert run_ranks(muted, 2) == [[1, 2, 3]] * 2


def both(rank: int) -> list[list[float]]:
    return [interrupted(rank, fails) for fails in (False, True)]


def interrupted(rank: int, fails: bool) -> list[float]:
    """Losses of all steps; if one `fails`, steps are recorded, and a replayed one is made again after an exception."""
    engine, losses = Engine(CONFIG, rank, torch.device("cpu")), []
    engine.init_weights()
    if fails:
        engine._graphed = engine.graphed_by(once)
    for i, batches in enumerate(random_batches(CONFIG.model, STEPS, CONFIG.train.microbatches, CONFIG.mesh.dp, (2, 8))):
        microbatches = [Microbatch(*batch[rank]) for batch in batches]
        if fails and i == STEPS - 2:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine.executor.actions, "on_step", lambda: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    engine.train_step(microbatches, 1e-2)
            assert engine.executor.recorder.replayed
            engine.abort()
            engine.assert_clean()
            assert engine.current_recorder is None, "nothing waits for the abandoned step"
        losses.append(float(engine.train_step(microbatches, 1e-2).loss))
        engine.forget_graph()
    engine.close()
    return losses


def test_a_replayed_step_that_fails_is_abandoned_like_others() -> None:
    for undisturbed, failed in run_ranks(both, 2):
        assert failed == undisturbed


def begun_anew(rank: int) -> list[bool]:
    """Whether a step moves biases and weights, and first values come to where the former ones lay, and are the same."""
    engine = Engine(CONFIG, rank, torch.device("cpu"))
    engine.init_weights()
    (batches,) = random_batches(CONFIG.model, 1, CONFIG.train.microbatches, CONFIG.mesh.dp, (2, 8))
    tensors = [*engine.balance.biases().values(), *(unit.group.main for unit in engine.sharded.units.values())]
    first = [tensor.clone() for tensor in tensors]
    engine.train_step([Microbatch(*batch[rank]) for batch in batches], 1e-2)
    moved = [not torch.equal(*pair) for pair in zip(tensors, first, strict=True)]
    engine.init_weights()
    now = [*engine.balance.biases().values(), *(unit.group.main for unit in engine.sharded.units.values())]
    same = [a is b or a.data_ptr() == b.data_ptr() for a, b in zip(tensors, now, strict=True)]
    return [any(moved[:2]), all(moved[2:]), all(same), all(map(torch.equal, now, first))]


def test_a_recorded_step_reads_first_values_that_are_given_again() -> None:
    """They lie where the recording has found them."""
    assert run_ranks(begun_anew, 2) == [[True] * 4] * 2


class Streams:
    """Lanes of which a recording only asks whether they were left."""

    left = False
    left_alone = contextlib.nullcontext

    def abort(self) -> None:
        self.left = True

    def join(self) -> None:
        raise AssertionError("joined behind an error")


def test_the_first_error_in_a_recording_is_the_one_that_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def capture(graph: object, **how: object) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("the recording is broken")

    def run() -> list[Tensor]:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    lanes: Any = Streams()
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        graphed.recorder_of(lanes)(run)
    assert lanes.left
