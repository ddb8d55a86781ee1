"""A step that begins with the update that the last one left: who reads weights in between, and what runs beside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.engine import Engine
from hocket.model.microbatch import Microbatch
from hocket.plan.check import check
from hocket.plan.lower import build_program
from hocket.plan.ops import Op, Program
from hocket.plan.stages import layout_of, sharding_of
from hocket.recipes import recipe
from hocket.resolve import resolve
from hocket.settings.leaves import changed
from hocket.settings.rule import Host
from tests.helpers.parity import config
from tests.helpers.plans import planned
from tests.helpers.ranks import run_ranks
from tests.plan.programs import with_op
from tests.reference import random_batches

MODEL = dict(layers=3, dense_layers=(0,))


def engine_of(rank: int, value: str) -> Engine:
    plan: dict[str, Any] = dict(gather_in_update=value)
    engine = Engine(config(MODEL, dict(dp=2, ep=2), plan, 2, "fp32"), rank, torch.device("cpu"))
    engine.init_weights()
    return engine


def batches_of(engine: Engine, count: int) -> list[list[Microbatch]]:
    c, dp = engine.config, engine.where.dp
    batches = random_batches(c.model, count, c.train.microbatches, c.mesh.dp, (2, 8))
    return [[Microbatch(*batch[dp]) for batch in microbatches] for microbatches in batches]


def weights(engine: Engine) -> list[Tensor]:
    return [unit.group.main.clone() for unit in engine.sharded.units.values()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def in_between(rank: int) -> None:
    """Validation, optimizer state, and an interrupted step find the weights of the last one."""
    found = {}
    for value in ("off", "on"):
        engine = engine_of(rank, value)
        first, second, third = batches_of(engine, 3)
        before = weights(engine)
        engine.train_step(first, 0.1)
        assert same(before, weights(engine)) == (value == "on")
        losses = [engine.evaluate(first)]
        engine.train_step(second, 0.1)
        state = [x.clone() for one in engine.optimizer.state.values() for x in (one.piece.main, one.exp_avg)]
        for fail in (("on_step",), ("on_step", "on_update")):  # behind the updates, and before the first one
            engine.train_step(third, 0.1)
            with pytest.MonkeyPatch.context() as patch:
                for call in fail:
                    patch.setattr(engine.executor.actions, call, _fail)
                with pytest.raises(RuntimeError, match="interrupted"):
                    engine.train_step(third, 0.1)
            engine.abort()
            engine.assert_clean()
        found[value] = [*losses, *state, *weights(engine)]
        engine.close()
    assert same(found["off"], found["on"])


def _fail(*_: Any) -> None:
    raise RuntimeError("interrupted")


def test_who_reads_weights_in_between_finds_those_of_the_last_step() -> None:
    run_ranks(in_between, 2)


def program_of(**settings: Any) -> Program:
    s = resolve(planned(recipe("tiny"), **{"gather_in_update": "on", **settings}))
    return build_program(layout_of(s), s.train.microbatches, s, sharding_of(s))


def position(ops: tuple[Op, ...], name: str) -> int:
    return next(i for i, op in enumerate(ops) if str(op).startswith(name))


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_first_gathers_stand_behind_the_updates_of_their_own_units(strategy: str) -> None:
    program = program_of(strategy=strategy)
    for rank, unit in ((0, "embed"), (1, "dense")):
        ops = program.ranks[rank]
        gather = position(ops, f"gather {unit}")
        assert ops[gather].deps == (position(ops, f"update {unit}"),)
        updates = [i for i, op in enumerate(ops) if op.verb == "update"]
        assert len([i for i in updates if i > gather]) >= len(updates) - 1
        assert all(op.verb in ("update", "gather") for op in ops[: updates[-1]])
        assert str(ops[-1]) == "step norm"


def test_an_update_that_is_missing_or_late_is_noticed() -> None:
    program = program_of()
    ops = program.ranks[0]
    gather, update = position(ops, "gather dense"), position(ops, "update dense")
    late = with_op(program, 0, gather, deps=())
    assert any("may run before" in str(one) for one in check(late))
    gone = with_op(program, 0, update, verb="release", lane="compute")
    assert any("never updated" in str(one) for one in check(gone))


CHOICES: list[tuple[dict[str, Any], str, str]] = [
    ({"train.microbatches": 1}, "off", "NCCL's kernels gain nothing"),
    ({"train.microbatches": 1, "train.transport": "copy_engine"}, "on", "beside the updates of other units"),
    ({"train.microbatches": 64, "train.transport": "copy_engine"}, "off", "not worth it"),
    ({"mesh.dp": 1}, "off", "nothing is gathered"),
    ({"overlap.dp.strategy": "no_shard"}, "off", "nothing is gathered"),
    ({"train.microbatches": 1, "plan.graphs": "on"}, "off", "recorded"),
    ({"train.device": "cpu"}, "off", "on CPUs"),
]


@pytest.mark.parametrize(("settings", "value", "reason"), CHOICES, ids=lambda one: str(one)[:40])
def test_what_it_would_hide_is_said(settings: dict[str, Any], value: str, reason: str) -> None:
    base = {"model.layers": 14, "mesh.dp": 4, "train.device": "cuda"}
    found = resolve(changed(recipe("llama3_8b"), {**base, **settings}), Host(gpus=4))
    (decision,) = [decision for decision in found.decisions if decision.setting == "overlap.dp.gather_in_update"]
    assert (decision.value, reason in str(decision)) == (value, True), decision


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"plan.graphs": "on", "mesh.dp": 4}, "a step is recorded without its update"),
        ({"mesh.dp": 1}, "nothing is gathered"),
    ],
)
def test_requests_without_effect(settings: dict[str, Any], message: str) -> None:
    asked = {"overlap.dp.gather_in_update": "on", "train.device": "cuda", **settings}
    with pytest.raises(ValueError, match=message):
        resolve(changed(recipe("llama3_8b"), asked), Host(gpus=4), dict.fromkeys(asked, "command line"))


def test_sharding_is_the_same_without_updates() -> None:
    """Slots and reduces do not change: only where the first gathers stand."""
    with_updates, without = program_of(), program_of(gather_in_update="off")
    assert (with_updates.weight_slots, with_updates.grad_slots) == (without.weight_slots, without.grad_slots)
    for ours, plain in zip(with_updates.ranks, without.ranks, strict=True):
        kept = [op.key for op in ours if op.verb not in ("update", "step", "gather")]
        assert kept == [op.key for op in plain if op.verb not in ("step", "gather")]
        assert {op.key for op in ours if op.verb == "gather"} == {op.key for op in plain if op.verb == "gather"}
