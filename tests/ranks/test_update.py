"""Updates that are left to the next step: who reads weights in between, what runs beside, who keeps what is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from hocket.config import Strategy
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.model.documents import Microbatch
from hocket.program.check import check
from hocket.program.lower import build_program
from hocket.program.ops import WHOLE_MATRICES, Op, Program
from hocket.program.stages import layout_of, sharding_of
from hocket.program.values import unit_moved, unit_read
from hocket.recipes import recipe
from hocket.resolve import resolve
from hocket.tune.choose import contended_seconds
from hocket.tune.trials import Trials, model_costs
from tests.helpers.command import SMALL, end_all, hocket, text_in
from tests.helpers.dryrun import dry_run
from tests.helpers.parity import config
from tests.helpers.plans import known_of, planned
from tests.helpers.ranks import run_ranks
from tests.plan.programs import with_op
from tests.reference import random_batches

MODEL = dict(layers=3, dense_layers=(0,))


def engine_of(rank: int, value: str, optimizer: str) -> Engine:
    plan: dict[str, Any] = dict(update=value)
    c = changed(config(MODEL, dict(dp=2, ep=2), plan, 2, "fp32"), {"optimizer.name": optimizer})
    engine = Engine(c, rank, torch.device("cpu"))
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


def in_between(rank: int, optimizer: str) -> None:
    """Validation, optimizer state, and an interrupted step find the weights of the last one."""
    found = {}
    for value in ("end", "next_step"):
        engine = engine_of(rank, value, optimizer)
        first, second, third = batches_of(engine, 3)
        before = weights(engine)
        engine.train_step(first, 0.1)
        assert same(before, weights(engine)) == (value == "next_step")
        losses = [engine.evaluate(first)]
        engine.train_step(second, 0.1)
        state = [x.clone() for one in engine.optimizer.state.values() for x in (one.piece.main, one.exp_avg)]
        state += [momentum.clone() for _, momentum in engine.optimizer.momenta.values()]
        # behind the updates, before the first one, and before the first whole matrix
        for fail in (("on_step",), ("on_step", "on_update"), ("on_step", "on_matrices")):
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
    assert same(found["end"], found["next_step"])


def _fail(*_: Any) -> None:
    raise RuntimeError("interrupted")


def begun_anew(rank: int) -> bool:
    """Whether first values that are given behind a step stay, though the step has left its updates."""
    engine = engine_of(rank, "next_step", "adamw")
    first = weights(engine)
    (batch,) = batches_of(engine, 1)
    engine.train_step(batch, 0.1)
    engine.init_weights()
    engine.catch_up()
    return same(first, weights(engine))


def test_no_update_comes_behind_first_values() -> None:
    assert run_ranks(begun_anew, 2) == [True, True]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_who_reads_weights_in_between_finds_those_of_the_last_step(optimizer: str) -> None:
    run_ranks(in_between, 2, optimizer)


def test_a_run_saves_validates_and_ends_as_one_that_updates_at_the_end(tmp_path: Path) -> None:
    """Losses, validations, and what runs go on with from a checkpoint in the middle and from the last one."""
    words = [*SMALL, "--model.layers", "2", "--mesh.pp", "1", "--data.paths", text_in(tmp_path)]
    words += ["--train.save_every", "2", "--train.eval_every", "2", "--train.steps"]
    found: dict[str, list[dict[str, float]]] = {"end": [], "next_step": []}
    try:
        for value, records in found.items():
            ended = hocket(tmp_path, "train", *words, "5", "--overlap.dp.update", value, "--run.name", value)
            assert ended.code == 0, ended.err
            records += records_of(tmp_path / "runs" / value)
            for step in (4, 5):
                saved = str(tmp_path / "runs" / value / "checkpoints" / f"step-0000000{step}")
                name = ["--run.name", f"{value}{step}", "--run.resume", saved, "--overlap.dp.update", "end"]
                again = hocket(tmp_path, "train", *words, "6", *name)
                assert again.code == 0, again.err
                records += records_of(tmp_path / "runs" / f"{value}{step}")
    finally:
        end_all()
    assert len(found["end"]) == 5 + 3 + 2 + 1 + 1 + 1
    assert found["end"] == found["next_step"]


@pytest.mark.full
def test_a_run_with_averages_in_bf16_goes_on_as_if_it_had_not_ended(tmp_path: Path) -> None:
    """Exactly; and with fp32 averages too, which is said."""
    words = [*SMALL, "--mesh.pp", "1", "--mesh.dp", "2", "--data.paths", text_in(tmp_path), "--train.steps", "6"]
    words += ["--train.save_every", "4"]
    bf16, found = ["--precision.averages", "bf16"], {}
    try:
        for name, more in {
            "whole": bf16,
            "resumed": [*bf16, "--run.resume", str(tmp_path / "runs/whole/checkpoints/step-00000004")],
            "changed": ["--run.resume", str(tmp_path / "runs/whole/checkpoints/step-00000004")],
        }.items():
            ended = hocket(tmp_path, "train", *words, *more, "--run.name", name)
            assert ended.code == 0, ended.err
            found[name] = records_of(tmp_path / "runs" / name)
            assert ("precision.averages" in ended.out + ended.err) == (name == "changed"), ended.out
    finally:
        end_all()
    assert found["resumed"] == found["whole"][-len(found["resumed"]) :]
    before, after = ([r["loss"] for r in found[name] if "loss" in r] for name in ("resumed", "changed"))
    assert after == pytest.approx(before, rel=1e-2)
    assert found["changed"] != found["resumed"]


def learnt(rank: int, averages: str) -> list[float]:
    """Losses of the recipe tiny's model on one rank, over and over the same eight microbatches, while they fall."""
    c = changed(
        config({}, {}, {}, 2, "fp32"),
        {"model": replace(recipe("tiny").model, layers=2, dense_layers=(0,)), "precision.averages": averages},
    )
    engine = Engine(c, rank, torch.device("cpu"))
    engine.init_weights()
    batches = batches_of(engine, 4)
    losses = [float(engine.train_step(batches[step % 4], 3e-3).loss) for step in range(16)]
    engine.close()
    return losses


def test_averages_in_bf16_learn_as_those_in_fp32_do() -> None:
    """Within 2 % of what has been learnt; more is left to chance between two seeds."""
    wide, narrow = (run_ranks(learnt, 1, averages)[0] for averages in ("fp32", "bf16"))
    assert wide != narrow
    gained = wide[0] - sum(wide[-4:]) / 4
    assert gained > 1.0, wide
    assert abs(sum(narrow[-4:]) - sum(wide[-4:])) / 4 < 0.02 * gained, (wide[-4:], narrow[-4:])


def records_of(folder: Path) -> list[dict[str, float]]:
    """What a run has measured of itself, but for times."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    kept = ("step", "loss", "grad_norm", "validation_loss")
    of_steps = (record for record in records if "step" in record and "saved" not in record)
    return [{name: record[name] for name in kept if name in record} for record in of_steps]


def program_of(optimizer: str = "adamw", **settings: Any) -> Program:
    s = resolve(changed(planned(recipe("tiny"), **{"update": "next_step", **settings}), {"optimizer.name": optimizer}))
    return build_program(layout_of(s), s.train.microbatches, s, sharding_of(s))


def position(ops: tuple[Op, ...], name: str) -> int:
    return next(i for i, op in enumerate(ops) if str(op).startswith(name))


@pytest.mark.parametrize("strategy", get_args(Strategy))
def test_an_update_stands_in_front_of_what_needs_it(strategy: str) -> None:
    """Its gather, or its first reader; and it waits for nothing, on a lane of its own."""
    program = program_of(strategy=strategy)
    for rank, ops in enumerate(program.ranks):
        updates = {unit_moved(op): i for i, op in enumerate(ops) if op.verb == "update"}
        assert updates.keys() == {unit_read(op, program.layout) for op in ops} - {None}
        for unit, i in updates.items():
            gathers = [g for g, op in enumerate(ops) if op.verb == "gather" and unit_moved(op) == unit]
            readers = [r for r, op in enumerate(ops) if unit_read(op, program.layout) == unit]
            first = min([*gathers, *readers])
            assert i < first
            assert (ops[i].lane, ops[i].deps) == ("update", ())
            assert known_of(ops)["update"][first] >= i
            assert bool(gathers) == (unit[0] in program.weight_slots)
        assert str(ops[-1]) == "step norm", rank


def test_forwards_and_first_gathers_run_beside_updates_of_other_units() -> None:
    """Nothing of an update but its own unit's is known to be done when a layer begins."""
    for strategy in get_args(Strategy):
        ops = program_of(strategy=strategy).ranks[0]
        known = known_of(ops)["update"]
        first = next(i for i, op in enumerate(ops) if op.verb == "fwd" and op.part == "attn")
        assert str(ops[known[first]]) == "update dense c0 l0"
        assert len([op for op in ops[first:] if op.verb == "update"]) >= 2


@pytest.mark.parametrize("strategy", get_args(Strategy))
def test_what_an_update_has_read_is_dropped_by_the_compute_lane_behind_it(strategy: str) -> None:
    """With its unit's first reader at the latest; before new gradients are made, that is."""
    program = program_of(strategy=strategy)
    for ops in program.ranks:
        dropped = {p: q for q, op in enumerate(ops) for p in op.frees}
        known = known_of(ops)["update"]
        for i, op in enumerate(ops):
            if op.verb == "update":
                q, unit = dropped[i], unit_moved(op)
                assert ops[q].lane == "compute"
                assert known[q] >= i
                assert q <= next(r for r, op in enumerate(ops) if unit_read(op, program.layout) == unit)


def test_a_missing_dependency_of_an_update_is_noticed() -> None:
    for strategy, reader in (("optim", "gather dense"), ("no_shard", "fwd attn")):
        program = program_of(strategy=strategy)
        ops = program.ranks[0]
        late, update = position(ops, reader), position(ops, "update dense")
        assert update in ops[late].deps
        mutant = with_op(program, 0, late, deps=tuple(p for p in ops[late].deps if p != update))
        assert any("may run before" in str(one) for one in check(mutant))
        noticed = 0
        for seed in range(20):
            try:
                dry_run(mutant, seed)
            except ValueError:
                noticed += 1
        assert noticed


def test_memory_that_goes_too_early_is_noticed() -> None:
    program = program_of()
    ops = program.ranks[0]
    update = position(ops, "update dense c0 l1")
    q = next(i for i, op in enumerate(ops) if update in op.frees)
    early = next(i for i, op in enumerate(ops) if i > update and op.lane == "compute" and i < q)
    others = tuple(p for p in ops[q].frees if p != update)
    mutant = with_op(with_op(program, 0, q, frees=others), 0, early, frees=(*ops[early].frees, update))
    assert any("may still read it" in str(one) for one in check(mutant))
    elsewhere = next(i for i, op in enumerate(ops) if i > q and op.lane == "gather")
    mutant = with_op(with_op(program, 0, q, frees=others), 0, elsewhere, frees=(update,))
    assert any("memory belongs to lane compute" in str(one) for one in check(mutant))
    assert any("never dropped" in str(one) for one in check(with_op(program, 0, q, frees=others)))


def test_whole_matrices_are_exchanged_beside_those_of_other_units() -> None:
    """Nothing of an update but its own unit's is known of the reduce lane when matrices are made orthogonal."""
    ops = program_of("muon").ranks[0]
    of_layers = [str(op) for op in ops if op.verb in (*WHOLE_MATRICES, "update") and op.part == "dense"]
    assert of_layers[:8] == [
        "collect dense c0 l0 s0", "collect dense c0 l1 s1", "orthogonalise dense c0 l0 s0", "scatter dense c0 l0 s0",
        "collect dense c1 l4 s0", "orthogonalise dense c0 l1 s1", "scatter dense c0 l1 s1", "update dense c0 l0 s0",
    ]  # fmt: skip
    known, scattered = known_of(ops)["reduce"], position(ops, "scatter dense c0 l0")
    assert known[position(ops, "orthogonalise dense c0 l1")] < scattered
    assert known[position(ops, "update dense c0 l0")] == scattered
    forwards = [i for i, op in enumerate(ops) if op.verb == "fwd"]
    assert forwards[0] < position(ops, "scatter dense c1 l4") < forwards[-1]


@pytest.mark.parametrize("verb", [*WHOLE_MATRICES[1:], "update"])
def test_a_missing_dependency_of_whole_matrices_is_noticed(verb: str) -> None:
    program = program_of("muon")
    late = position(program.ranks[0], f"{verb} dense")
    mutant = with_op(program, 0, late, deps=())
    assert any("may run before" in str(one) for one in check(mutant))
    noticed = 0
    for seed in range(20):
        try:
            dry_run(mutant, seed)
        except ValueError:
            noticed += 1
    assert noticed


@pytest.mark.parametrize("verb", WHOLE_MATRICES)
def test_whole_matrices_in_a_wrong_slot_or_on_a_wrong_lane_are_noticed(verb: str) -> None:
    program = program_of("muon")
    place = position(program.ranks[0], f"{verb} dense")
    mutant = with_op(program, 0, place, slot=1)
    words = "in no slot" if verb == "orthogonalise" else "finds no"
    assert any(words in str(one) for one in check(mutant))
    with pytest.raises(ValueError, match=r"dry run.*matrices"):
        dry_run(mutant, None)
    assert any("is on lane compute" in str(one) for one in check(with_op(program, 0, place, lane="compute")))
    gone = with_op(program, 0, place, verb="release", lane="compute")
    assert any(f"is of a unit without {verb}" in str(one) for one in check(gone))


def test_an_update_that_is_missing_is_noticed() -> None:
    program = program_of()
    update = position(program.ranks[0], "update dense")
    gone = with_op(program, 0, update, verb="release", lane="compute")
    assert any("never updated" in str(one) for one in check(gone))
    elsewhere = with_op(program, 0, update, lane="compute")
    assert any("is on lane compute, not update" in str(one) for one in check(elsewhere))


ONE: dict[str, Any] = {"train.microbatches": 1, "train.transport": "copy_engine"}
CHOICES: list[tuple[dict[str, Any], str, str]] = [
    ({**ONE, "train.transport": "nccl"}, "end", "beside NCCL's kernels no more than noise was gained"),
    (ONE, "next_step", "updates in the next step hide"),
    ({**ONE, "optimizer.name": "muon"}, "end", "Muon beside forwards is not measured on GPUs yet"),
    ({**ONE, "train.microbatches": 64}, "end", "updates in the next step hide 2.9"),
    ({**ONE, "mesh.dp": 1}, "end", "updates in the next step hide 0 µs of"),
    ({**ONE, "overlap.dp.strategy": "no_shard"}, "end", "updates in the next step hide 0 µs of"),
    ({"train.microbatches": 1, "plan.graphs": "on"}, "end", "recorded"),
    ({"train.device": "cpu"}, "end", "on CPUs"),
]


@pytest.mark.parametrize(("settings", "value", "reason"), CHOICES, ids=lambda one: str(one)[:40])
def test_what_it_would_hide_is_said(settings: dict[str, Any], value: str, reason: str) -> None:
    base = {"model.layers": 6, "mesh.dp": 4, "train.device": "cuda"}
    found = resolve(changed(recipe("llama3_8b"), {**base, **settings}), Host(gpus=4))
    (decision,) = [decision for decision in found.decisions if decision.setting == "overlap.dp.update"]
    assert (decision.value, reason in str(decision)) == (value, True), decision


def test_what_is_sure_to_be_hidden_is_what_the_first_gathers_take() -> None:
    """Or what there is to run beside them: counted apart from the choice. Forwards gain nothing."""
    asked = {"model.layers": 6, "mesh.dp": 4, "train.device": "cuda", "overlap.dp.strategy": "optim", **ONE}
    settings = resolve(changed(recipe("llama3_8b"), asked), Host(gpus=4))
    table = model_costs(settings).table
    first = table["gather", "embed", ""].seconds + table["gather", "dense", "dense"].seconds
    others = 6 * table["update", "dense", "dense"].seconds + table["update", "head", ""].seconds
    trials = Trials()
    end, later = (changed(settings, {"overlap.dp.update": value}) for value in ("end", "next_step"))
    hidden = trials.seconds(end, 1) - trials.seconds(later, 1) - contended_seconds(later, trials)
    assert hidden == pytest.approx(float(min(first, others)), rel=0.15)


def test_a_recorded_step_has_no_updates_of_muon() -> None:
    asked = {"overlap.dp.update": "next_step", "train.device": "cuda", "plan.graphs": "on", "mesh.dp": 4}
    asked |= {"optimizer.name": "muon"}
    with pytest.raises(ValueError, match="a recorded step cannot have Muon's updates"):
        resolve(changed(recipe("llama3_8b"), asked), Host(gpus=4), dict.fromkeys(asked, "command line"))


def test_sharding_is_the_same_without_updates() -> None:
    """Nothing but the updates is there that was not."""
    with_updates, without = program_of(), program_of(update="end")
    assert (with_updates.weight_slots, with_updates.grad_slots) == (without.weight_slots, without.grad_slots)
    for ours, plain in zip(with_updates.ranks, without.ranks, strict=True):
        kept = [op.key for op in ours if op.verb not in ("update", "step")]
        assert kept == [op.key for op in plain if op.verb != "step"]
