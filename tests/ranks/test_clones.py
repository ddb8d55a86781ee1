"""Hot experts on two ranks at once: the same training but for the order of sums, with rows that are more even.

That a planned step with clones has the bits of the plain one is in test_parity.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.config import Config
from hocket.engine import Engine
from hocket.fsdp.layout import FlatLayout
from hocket.parallel.clones import ClonedExperts
from hocket.parallel.routing import placed
from hocket.program.cloning import choose, fullest, loads_with, rank_loads
from hocket.settings.schema import changed
from tests.helpers.command import SMALL, hocket
from tests.helpers.parity import LR, config, learn, whole
from tests.helpers.ranks import run_ranks
from tests.ranks.test_planned_memory import PADDING, bytes_of
from tests.reference import Batch, microbatch, random_batches

CPU = torch.device("cpu")


def test_rows_of_a_cloned_expert_go_to_owner_and_clone_and_no_other_row_moves_ranks() -> None:
    torch.manual_seed(0)
    experts, ranks, seats, tokens = 8, 4, 2, 50
    chosen = torch.stack([torch.randperm(experts)[:3].clamp(max=5) for _ in range(tokens)])
    routing = placed(chosen, experts)
    cloned = ClonedExperts(experts, ranks, seats)
    for clones in ((), choose(routing.counts_E.tolist(), ranks, seats)):
        cloned.choose(clones)
        found, places = cloned.divided(routing), experts // ranks + seats
        assert torch.equal(found.load_E, routing.load_E)
        assert sorted(found.inverse_R.tolist()) == list(range(3 * tokens))
        ends = found.counts_E.cumsum(0)
        place_R = torch.searchsorted(ends, found.inverse_R.long(), right=True)
        seat_of = {clone.rank * places + experts // ranks + clone.seat: clone.expert for clone in clones}
        for expert, place in zip(chosen.flatten().tolist(), place_R.tolist(), strict=True):
            own = expert // 2 * places + expert % 2
            assert place == own or seat_of[place] == expert
        assert found.counts_E.view(ranks, -1).sum(1).tolist() == loads_with(routing.counts_E.tolist(), clones, ranks)


def test_a_buffer_with_room_has_parameters_and_room_behind_them() -> None:
    flat = FlatLayout.build([("a", (3, 5)), ("b", (3, 2, 2))], world=2, room=2)
    a, b = flat.views(torch.arange(flat.total))
    assert (a.shape, b.shape) == ((5, 5), (5, 2, 2))
    inside = {n for lo, hi in flat.gaps for n in range(lo, hi)}
    assert set(a[3:].flatten().tolist()) | set(b[3:].flatten().tolist()) <= inside, "nobody owns what is in the room"
    assert not inside & {*a[:3].flatten().tolist(), *b[:3].flatten().tolist()}


def skewed(c: Config, steps: int) -> list[list[list[Batch]]]:
    """Batches in which few tokens are frequent, so that few experts get most rows."""
    batches = random_batches(c.model, steps, c.train.microbatches, c.mesh.dp, (2, 8))
    return [
        [[(ids * ids % 7, targets) for ids, targets in of_ranks] for of_ranks in microbatches]
        for microbatches in batches
    ]


def trained(
    rank: int, c: Config, steps: list[list[list[Batch]]], validated: bool = False, spoiled: bool = False
) -> dict[str, Any]:
    """One rank of a run: losses, gradients, weights, clones and received rows of every step.

    What is made without values holds NaN, and if it is `spoiled`, so does what a step leaves where it wrote gradients.
    """
    torch.use_deterministic_algorithms(True)
    engine = Engine(c, rank, CPU)
    engine.init_weights()
    units = engine.sharded.units.values()
    rows, idle = received(engine)
    chosen: list[int] = []

    def grads() -> list[Any]:
        for buffer in (buffer for unit in units if spoiled and not unit.alone for buffer in unit._grad_slots.buffers):
            buffer.fill_(float("nan"))
        layers = engine.balance.layers.values()
        chosen.append(sum(len(layer.cloned.clones) for layer in layers if layer.cloned is not None))
        if validated:
            return []
        return [(p.name, p.shape, p.lo, p.hi, p.grad.clone()) for u in units for p in u.pieces()]

    out = learn(engine, steps[:2], grads) if validated else learn(engine, steps, grads)
    if validated:
        batches = [microbatch(batches[engine.where.dp]) for batches in steps[2]]
        out["validation"] = [float(engine.evaluate(batches)) for _ in range(2)]
        engine.assert_clean()
        engine.train_step(batches, LR)
    out["weights"] = [(p.name, p.shape, p.lo, p.hi, p.main.clone()) for u in units for p in u.pieces()]
    engine.close()
    return {**out, "clones": chosen, "rows": rows, "idle": idle}


def received(engine: Engine) -> tuple[list[int], list[int]]:
    """Grows by the rows that come to this rank in each exchange, and by its experts and clones without any."""
    rows, idle = list[int](), list[int]()
    split: Callable[..., Any] = engine.executor.actions._split

    def seen(op: Any) -> Any:
        splits = split(op)
        rows.append(int(splits.counts_PL.sum()))
        idle.append(int((splits.counts_PL.sum(0) == 0).sum()))
        return splits

    engine.executor.actions._split = seen  # type: ignore[method-assign]
    return rows, idle


WAYS = [
    (dict(dp=2, ep=2), dict(strategy="optim_grads_params"), {}),
    (dict(dp=4, ep=2), dict(strategy="optim_grads_params", copies="per_rank"), dict(expert_bias=True)),
    (dict(dp=4, ep=2), dict(strategy="optim", merge="off", recompute=("attn", "experts")), {}),
    (dict(dp=4, ep=2), dict(strategy="no_shard", update="next_step"), {}),
    (dict(dp=4, ep=2, shard=2), dict(strategy="optim_grads", prefetch=0), {}),
    (dict(dp=4, ep=4), dict(strategy="optim_grads_params", recompute=("dispatch",)), {}),
    (dict(pp=2, dp=2, ep=2), dict(strategy="optim_grads_params", chunks=2), dict(bias_rate=0.01)),
]
BOUNDS = (0.0, 2e-6, 1e-4)
"""Largest difference of a gradient in fp32, of the parameter's largest, by step. The first has no clones. The second
has the same weights, and sums of some hundred rows in another order. Between it and the third AdamW divides gradients
by their size, which makes more of what is small."""


@pytest.mark.parametrize(("mesh", "plan", "model"), WAYS, ids=str)
def test_training_is_that_without_clones_but_for_the_order_of_sums(
    mesh: dict[str, int], plan: dict[str, Any], model: dict[str, Any]
) -> None:
    c = config(dict(layers=4, experts=8, **model), mesh, {"merge": "on", **plan}, 3, "fp32")
    steps = skewed(c, 3)
    plain = run_ranks(trained, c.mesh.world, c, steps)
    cloned = run_ranks(trained, c.mesh.world, changed(c, {"overlap.ep.clones": 2}), steps)
    assert all(rank["clones"] == [0, 0, 0] for rank in plain)
    assert all(rank["clones"][0] == 0 < min(rank["clones"][1:]) for rank in cloned)
    for step in range(3):
        wanted, found = (whole([p for rank in ranks for p in rank["grads"][step]]) for ranks in (plain, cloned))
        assert wanted.keys() == found.keys()
        for name, grad in wanted.items():
            assert worst(found[name], grad) <= BOUNDS[step], f"{name}, step {step}: {worst(found[name], grad):.1e}"
    for one, other in zip(plain, cloned, strict=True):
        assert one["losses"] == [pytest.approx(losses, rel=1e-6) for losses in other["losses"]]
    before, after = (unevenness(ranks, c) for ranks in (plain, cloned))
    assert before > 1.2, "the text is not skewed enough to show anything"
    assert after < 1 + 0.7 * (before - 1)


@pytest.mark.parametrize(("mesh", "plan", "model"), [WAYS[0], WAYS[2], WAYS[3]], ids=str)
def test_gradients_come_home_from_memory_that_held_others(
    mesh: dict[str, int], plan: dict[str, Any], model: dict[str, Any]
) -> None:
    """A product writes all experts and clones, also those without rows, before `home` adds to them and reads them."""
    c = config(dict(layers=3, experts=16, **model), mesh, {"merge": "on", **plan, "clones": 2}, 2, "fp32")
    found, spoiled = (run_ranks(trained, c.mesh.world, c, skewed(c, 3), False, how) for how in (False, True))
    assert all(min(rank["clones"][1:]) > 0 for rank in found)
    for one, other in zip(found, spoiled, strict=True):
        assert max(one["idle"]) > 0, "an expert or a clone of every rank has no rows in some microbatch"
        for mine, theirs in zip((*one["grads"], one["weights"]), (*other["grads"], other["weights"]), strict=True):
            for (name, *_, a), (_, *_, b) in zip(mine, theirs, strict=True):
                assert a.isfinite().all(), name
                assert torch.equal(a, b), name


def test_tensor_parallel_ranks_have_clones() -> None:
    c = config(dict(layers=3, experts=8), dict(tp=2, dp=2, ep=4), dict(merge="on"), 2, "fp32")
    steps = skewed(c, 3)
    plain, cloned = (run_ranks(losses, 4, changed(c, {"overlap.ep.clones": n}), steps) for n in (0, 1))
    assert plain[0][0] == cloned[0][0]
    assert cloned == [pytest.approx(rank, rel=1e-5) for rank in plain]


def losses(rank: int, c: Config, steps: list[list[list[Batch]]]) -> list[float]:
    engine = Engine(c, rank, CPU)
    engine.init_weights()
    found = []
    for microbatches in steps:
        result = engine.train_step([microbatch(of_ranks[engine.where.dp]) for of_ranks in microbatches], LR)
        found.append(engine.agree(result.loss).loss)
    assert all(layer.cloned is None or layer.cloned.clones for layer in engine.balance.layers.values())
    engine.close()
    return found


def worst(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


def unevenness(ranks: list[dict[str, Any]], c: Config) -> float:
    """Rows of the fullest rank over the mean, as a mean over exchanges behind the first step."""
    first = len(ranks[0]["rows"]) // 3
    found = []
    for start in range(0, len(ranks), c.mesh.ep):
        group = [rank["rows"][first:] for rank in ranks[start : start + c.mesh.ep]]
        found += [fullest(rows) for rows in zip(*group, strict=True)]
    return sum(found) / len(found)


@pytest.mark.parametrize("mesh", [dict(dp=2, ep=2), dict(dp=4, ep=2)], ids=str)
def test_a_validation_has_clones_and_leaves_no_trace(mesh: dict[str, int]) -> None:
    c = config(dict(layers=2, experts=8), mesh, dict(merge="on", clones=1, update="next_step"), 2, "bf16")
    steps = skewed(c, 3)
    seen = run_ranks(trained, c.mesh.world, c, steps, True)
    plain = run_ranks(trained, c.mesh.world, c, steps)
    without = run_ranks(trained, c.mesh.world, changed(c, {"overlap.ep.clones": 0}), steps, True)
    for one, other, bare in zip(seen, plain, without, strict=True):
        assert one["validation"][0] == one["validation"][1] == pytest.approx(bare["validation"][0], rel=1e-2)
        for (name, *_, a), (_, *_, b) in zip(one["weights"], other["weights"], strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize(("mesh", "strategy", "dtype"), [
    (dict(dp=2, ep=2), "optim_grads_params", "fp32"),
    (dict(dp=2, ep=2), "optim_grads_params", "bf16"),
    (dict(dp=4, ep=2), "optim_grads_params", "bf16"),
    (dict(dp=4, ep=2), "optim", "bf16"),
    (dict(dp=4, ep=2), "no_shard", "bf16"),
], ids=str)  # fmt: skip
def test_a_plan_predicts_the_room_of_clones(mesh: dict[str, int], strategy: str, dtype: Any) -> None:
    model = dict(layers=4, dense_layers=(0, 2), hidden=64, head_dim=16, ffn=192, expert_ffn=128, vocab=256)
    c = config(model, mesh, dict(merge="on", strategy=strategy, clones=1), 3, dtype)
    ranks = run_ranks(bytes_of, c.mesh.world, c)
    for what, (_, predicted) in ranks[0].items():
        most = max(found[what][0] for found in ranks)
        assert most == pytest.approx(predicted, rel=PADDING), what


def test_a_run_goes_on_with_the_clones_that_it_had(tmp_path: Path) -> None:
    """A run that was interrupted has the losses of one that was not, bit for bit: the loads are in checkpoints."""
    text = tmp_path / "text"
    text.mkdir()
    (text / "one.txt").write_text("abracadabra, a simsalabim and a hocus pocus. " * 300)
    words = [
        *SMALL,
        "--mesh.pp",
        "1",
        "--plan.chunks",
        "1",
        "--mesh.dp",
        "2",
        "--mesh.ep",
        "2",
        "--data.paths",
        str(text),
    ]
    words += ["--overlap.ep.clones", "1", "--train.schedule", "constant"]

    def losses() -> list[float]:
        lines = map(json.loads, (tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    assert hocket(tmp_path, "train", *words, "--train.steps", "4").code == 0
    unbroken = losses()
    os.rename(tmp_path / "runs", tmp_path / "unbroken")
    for steps in ("2", "4"):
        ended = hocket(tmp_path, "train", *words, "--train.steps", steps, fresh=False)
        assert ended.code == 0, ended
    assert losses() == unbroken


def test_the_skew_of_the_batches_is_what_clones_even_out() -> None:
    counts = [60, 0, 5, 3, 2, 1, 1, 0]
    assert fullest(rank_loads(counts, 2)) > 1.8
    assert fullest(loads_with(counts, choose(counts, 2, 1), 2)) < 1.1
