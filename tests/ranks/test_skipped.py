"""Steps that are not taken: alike on all ranks, and as if their microbatches had never been there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.engine.engine import blame
from hocket.fsdp.planned import optimizer as skipping
from hocket.fsdp.planned.optimizer import ENOUGH, WINDOW, StepGuard
from hocket.recipes import recipe
from hocket.resolve import resolve
from hocket.train import trainer as training
from hocket.train.trainer import Trainer
from tests.helpers.parity import batches_of, config
from tests.helpers.ranks import run_ranks
from tests.reference import microbatch

LR = 1e-2
LAYERS = dict(layers=3, dense_layers=(1,), shared_ffn=16, bias_rate=0.01, aux_loss=0.01)


def poison(engine: Engine, layer: int, part: str, value: float) -> None:
    """From now on a part of a layer, which this rank may have, gives something else once in its output."""
    for chunk in engine.chunks:
        if str(layer) in chunk.layers:
            module = chunk.layer(layer)
            plain = getattr(type(module), f"forward_{part}").__get__(module)

            def spoiled(*args: Any, plain: Any = plain) -> Any:
                result = plain(*args)
                first, *rest = result if isinstance(result, tuple) else (result,)
                factor = torch.ones_like(first)
                factor.view(-1)[0] = value
                return (first * factor, *rest) if rest else first * factor

            setattr(module, f"forward_{part}", spoiled)


def heal(engine: Engine, layer: int, part: str) -> None:
    for chunk in engine.chunks:
        if str(layer) in chunk.layers:
            vars(chunk.layer(layer)).pop(f"forward_{part}", None)


def state_of(engine: Engine) -> list[tuple[str, Tensor]]:
    kept = [
        (f"{name} {key}", getattr(state, key).clone())
        for name, state in engine.optimizer.state.items()
        for key in ("exp_avg", "exp_avg_sq")
    ]
    kept += [(name, state.piece.main.clone()) for name, state in engine.optimizer.state.items()]
    for name, (piece, momentum) in engine.optimizer.momenta.items():
        kept += [(name, piece.main.clone()), (f"{name} momentum", momentum.clone())]
    return [*kept, *((name, bias.clone()) for name, bias in engine.balance.biases().items())]


def train(rank: int, c: Any, spoiled: int, where: tuple[int, str]) -> dict[str, Any]:
    """Four steps; the one of number `spoiled` is one on rank 1's poisoned output, or, if 9, left out: it has none."""
    engine = Engine(c, rank, torch.device("cpu"))
    engine.init_weights()
    skips, norms, text = [], [], ""
    for step, batches in enumerate(batches_of(c, 4)):
        batch = [microbatch(of_ranks[engine.where.dp]) for of_ranks in batches]
        if step == spoiled and rank == 1:
            poison(engine, *where, math.nan)
        if spoiled == 9 and step == 2:
            continue
        result = engine.train_step(batch, LR * (step + 1))
        engine.agree(result.loss)
        engine.assert_clean()
        if step == spoiled:
            text = blame(engine, batch)
            heal(engine, *where)
        skips.append(bool(result.skipped))
        norms.append(float(result.grad_norm))
    total, steps = int(engine.skipped), engine.optimizer.steps
    found = dict(state=state_of(engine), skips=skips, norms=norms, text=text, total=total, steps=steps)
    engine.close()
    return found


@pytest.mark.parametrize(
    ("mesh", "plan", "where", "op"),
    [
        (dict(dp=2, ep=2), dict(merge="on", update="end"), (1, "mlp"), "fwd mlp m0 c0 l1 on rank 1"),
        (dict(dp=2, ep=2), dict(merge="on", update="next_step"), (2, "experts"), "fwd experts m0 c0 l2 on rank 1"),
        (dict(pp=2), dict(strategy="optim", update="next_step"), (2, "attn"), "fwd attn m0 c0 l2 on rank 1"),
    ],
    ids=str,
)
def test_a_step_that_is_not_finite_is_as_if_it_had_not_been(
    mesh: dict[str, int], plan: dict[str, Any], where: tuple[int, str], op: str
) -> None:
    c = config(LAYERS, mesh, plan, 2, "fp32")
    expected = run_ranks(train, 2, c, 9, where)
    for found, other in zip(run_ranks(train, 2, c, 2, where), expected, strict=True):
        assert found["skips"] == [False, False, True, False]
        assert (found["total"], found["steps"]) == (1, 3)
        assert math.isnan(found["norms"].pop(2))
        assert found["norms"] == other["norms"]
        assert found["text"] == f"the first output that is not finite is that of {op}"
        assert len(found["state"]) == len(other["state"]) > 10
        for (name, mine), (_, theirs) in zip(found["state"], other["state"], strict=True):
            assert torch.equal(mine, theirs), name


def backward_only(rank: int, c: Any) -> str:
    engine = Engine(c, rank, torch.device("cpu"))
    engine.init_weights()
    batch = [microbatch(of_ranks[engine.where.dp]) for of_ranks in batches_of(c, 1)[0]]
    complete = engine.sharded.complete_grads

    def spoil() -> None:
        complete()
        for (_, _, layer), unit in engine.sharded.units.items():
            if rank == 0 and layer in (0, 1) and unit.kind == "dense":
                unit.group.main_grad[0] = math.inf

    engine.sharded.complete_grads = spoil  # type: ignore[method-assign]
    assert bool(engine.train_step(batch, LR).skipped)
    found = blame(engine, batch)
    engine.close()
    return found


def test_what_backward_loses_is_named_by_its_unit() -> None:
    c = config(LAYERS, dict(dp=2), {}, 2, "fp32")
    texts = run_ranks(backward_only, 2, c)
    assert set(texts) == {
        "all outputs of its forward are finite, and backward loses that in the gradient of dense of layer 1"
    }


def test_spikes_are_those_above_the_median_of_steps_that_were_taken() -> None:
    generator = torch.Generator().manual_seed(0)
    norms = torch.rand(3 * WINDOW, generator=generator, dtype=torch.float64) + 0.5
    norms[[5, 40, 41, 200, 300]] *= 100
    norms[100] = math.inf
    guard, taken = StepGuard(torch.device("cpu"), 10.0), list[float]()
    for norm in norms:
        last = torch.tensor(taken[-WINDOW:], dtype=torch.float64)
        expected = not math.isfinite(norm) or (len(last) >= ENOUGH and bool(norm > 10 * last.median()))
        assert bool(guard.judge(norm)) == expected
        taken += [] if expected else [float(norm)]
        assert guard.norms == taken[-WINDOW:]
    assert int(guard.total) == 5  # the spike of step 5 came before there were enough
    other = StepGuard(torch.device("cpu"), 10.0)
    for name, value in guard.remembered.items():
        other.remembered[name].copy_(value)
    assert (other.norms, int(other.total), other.usual) == (guard.norms, 5, guard.usual)
    never = StepGuard(torch.device("cpu"))
    assert [bool(never.judge(norm)) for norm in norms] == [not math.isfinite(norm) for norm in norms]


def scaled(engine: Engine, factor: float) -> None:
    for unit in engine.sharded.units.values():
        unit.complete()
        unit.group.main_grad.mul_(factor)


def run_of(folder: Path, name: str, spoiled: dict[int, float], **more: Any) -> Trainer:
    """A run of one rank with steps in which its gradients are multiplied, or layer 1 puts out nan."""
    small = dict(hidden=16, heads=2, kv_heads=1, head_dim=8, ffn=16, expert_ffn=16, layers=2, dense_layers=(0,))
    alone = {"mesh.pp": 1, "mesh.dp": 1, "mesh.ep": 1, "plan.chunks": 1, "plan.order": "auto"}
    text = folder / "text.txt"
    text.write_text("one and two are three " * 400)
    c = changed(
        changed(recipe("tiny"), {f"model.{key}": value for key, value in small.items()}),
        {
            **alone, "data.paths": (str(text),), "data.sequence_length": 8, "data.cache": str(folder / "cache"),
            "train.steps": 12, "train.microbatches": 2, "train.save_every": 4, "train.eval_batches": 0,
            "train.keep": (9,), "run.folder": str(folder / name), **more,
        },
    )  # fmt: skip
    trainer = Trainer(resolve(c), 0, torch.device("cpu"))
    step = trainer._step

    def spoiling(*args: Any) -> Any:
        factor = spoiled.get(1 + trainer.position // trainer.settings.batch, 1.0)
        heal(trainer.engine, 1, "attn")
        if math.isnan(factor):
            poison(trainer.engine, 1, "attn", factor)
        monkey.setattr(trainer.engine.sharded, "complete_grads", lambda: scaled(trainer.engine, factor))
        return step(*args)

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(trainer, "_step", spoiling)
        trainer.begin()
        trainer.run()
    return trainer


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_goes_on_exactly_behind_skipped_steps(tmp_path: Path, monkeypatch, capsys, optimizer: str) -> None:
    """With its count of corrections, and with what its norms are compared with."""
    monkeypatch.setattr(skipping, "ENOUGH", 2)
    spoiled = {3: math.nan, 7: 1e4}
    balance = {"model.aux_loss": 0.5, "model.aux_loss_over": "batch", "model.bias_rate": 0.01}
    falls = {"train.schedule": "wsd:5", "train.warmup": 2, "optimizer.no_decay": ("embed.*",)}
    spikes = {"optimizer.name": optimizer, "optimizer.skip_spikes": 4.0, **balance, **falls}
    spikes |= {"train.eval_batches": 1, "train.eval_every": 4}
    if optimizer == "muon":
        spikes["overlap.dp.update"] = "next_step"
    whole = run_of(tmp_path, "whole", spoiled, **spikes)
    out = capsys.readouterr().out
    assert "step 3 has loss nan and a gradient of norm nan: it was skipped, weights stay; the run ends after 5" in out
    assert "2 of the run skipped" in out, out
    lines = (tmp_path / "whole/metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "loss" in record]
    assert [record["skipped"] for record in records[:6]] == [0, 0, 1, 1, 1, 1]
    assert whole.engine.optimizer.steps == 10
    assert [record["step"] for record in records if "rows" in record] == [4, 8, 12]
    (rows,) = records[3]["rows"].values()
    assert sum(rows) == 2 * 4 * 8 * 2  # microbatches, sequences, tokens, experts of each
    assert records[3]["loads"] == {"1": pytest.approx(max(rows) / (sum(rows) / len(rows)))}
    assert all(record["load"] == max(record["loads"].values()) for record in records)
    from_four = str(tmp_path / "whole/checkpoints/step-00000004")
    again = run_of(tmp_path, "again", spoiled, **{**spikes, "run.resume": from_four})
    assert again.engine.optimizer.steps == 10
    assert again.engine.optimizer.guard.norms == whole.engine.optimizer.guard.norms
    assert sum("momentum" in name for name, _ in state_of(again.engine)) == (15 if optimizer == "muon" else 0)
    for (name, mine), (_, theirs) in zip(state_of(whole.engine), state_of(again.engine), strict=True):
        assert torch.equal(mine, theirs), name
    shares = [trainer.engine.balance.shares()["1"] for trainer in (whole, again)]
    assert torch.equal(*shares)
    assert shares[0].std() > 0


def test_too_many_skipped_steps_end_a_run_and_none_is_saved_between(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(training, "MOST_SKIPPED", 3)
    spoiled = dict.fromkeys(range(3, 13), math.nan)
    with pytest.raises(
        ValueError, match=r"^train.lr = .* step 6 has loss nan .*, the last of 4 skipped in a row"
    ) as caught:
        run_of(tmp_path, "ends", spoiled, **{"train.save_every": 2})
    assert "that of fwd attn m0 c0 l1 on rank 0; fix: a lower train.lr" in str(caught.value)
    assert [path.name for path in (tmp_path / "ends/checkpoints").glob("step-*")] == ["step-00000002"]


def test_spikes_that_last_end_a_run_too(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(skipping, "ENOUGH", 2)
    monkeypatch.setattr(training, "MOST_SKIPPED", 1)
    ended = r"^optimizer.skip_spikes = 4.0 .*: step 6 has loss \d.*, and the usual norm is .*, the last of 2 skipped"
    with pytest.raises(ValueError, match=ended):
        run_of(tmp_path, "ends", {5: 1e4, 6: 1e4, 7: 1e4}, **{"optimizer.skip_spikes": 4.0})


def test_a_run_does_not_go_on_with_another_optimizer(tmp_path: Path) -> None:
    run_of(tmp_path, "one", {}, **{"train.steps": 4})
    with pytest.raises(ValueError, match=r"optimizer.name was adamw and is muon"):
        run_of(tmp_path, "one", {}, **{"train.steps": 6, "optimizer.name": "muon"})
