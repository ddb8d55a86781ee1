"""Checkpoints of planned steps: on another mesh, in torch's own optimizer, under `fully_shard`, in transformers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

pytest.importorskip(
    "transformers",
    minversion="5.0",
    reason="needs transformers 5, which make setup installs where there is a network",
    exc_type=ImportError,
)

import hocket
from hocket.step import PlannedStep
from tests.adapters.families import batches, model
from tests.adapters.runs import CHOSEN, SETTINGS
from tests.helpers.parity import LINEAR
from tests.helpers.ranks import run_ranks

MICROBATCHES, LR = 4, 0.1
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
PIPELINE = {**CHOSEN, "mesh.pp": 2, "mesh.dp": 2, "mesh.ep": 2, "plan.chunks": 2, "overlap.dp.update": "next_step"}
State = dict[str, Tensor]


def planned(made: nn.Module, settings: dict[str, Any] | None = None) -> PlannedStep:
    settings = settings or {}
    count = MICROBATCHES // settings.get("mesh.dp", 1)
    return hocket.plan_model(made, {**SETTINGS, "train.microbatches": count, "train.eps": LINEAR, **settings})


def mine(step: PlannedStep) -> tuple[Tensor, Tensor]:
    """This rank's part of a batch that is the same on every mesh."""
    given = [of_ranks[0] for of_ranks in batches(MICROBATCHES)][step.engine.where.dp :: step.settings.mesh.dp]
    return torch.cat([ids for ids, _ in given]), torch.cat([targets for _, targets in given])


def trained(
    rank: int, family: str, settings: dict[str, Any], folder: str, changes: dict[str, Any] | None = None
) -> State:
    """The state behind three steps; the step is saved behind two, and goes on."""
    step = planned(model(family, **(changes or {})), settings)
    for _ in range(2):
        step(mine(step), LR)
    saving = step.save(folder, asynchronously=True)
    step(mine(step), LR)
    assert saving.result(timeout=40) == Path(folder)
    return step.state_dict()


def resumed(
    rank: int, family: str, settings: dict[str, Any], folder: str, changes: dict[str, Any] | None = None
) -> State:
    """The state behind the third step of a step that has loaded two, and had taken others."""
    step = planned(model(family, **(changes or {})), settings)
    step((mine(step)[0].flip(1), mine(step)[1]), LR)
    step.load(folder)
    step(mine(step), LR)
    return step.state_dict()


def assert_same(found: State, expected: State, bitwise: bool = False) -> None:
    """Sums have another order on another mesh, and experts' products another one under transformers."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if bitwise:
            assert torch.equal(found[name], value), name
        else:
            torch.testing.assert_close(
                found[name], value, rtol=1e-3, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.parametrize("family", [pytest.param("qwen3_moe", marks=pytest.mark.full), "deepseek_v3"])
def test_a_step_goes_on_with_what_it_has_saved(family: str, tmp_path: Path) -> None:
    """On four ranks, and on one rank what four have saved. deepseek_v3 has a saved buffer."""
    folder = str(tmp_path / "two")
    expected = run_ranks(trained, 4, family, PIPELINE, folder)
    assert all(torch.equal(each, expected[0][name]) for rank in expected for name, each in rank.items())
    assert_same(run_ranks(resumed, 4, family, PIPELINE, folder)[0], expected[0], bitwise=True)
    assert_same(resumed(0, family, {}, folder), expected[0])


def test_a_step_of_one_rank_goes_on_on_two(tmp_path: Path) -> None:
    """And one that keeps copies of the weights, sharded over none."""
    folder = str(tmp_path / "two")
    tied = {"tie_word_embeddings": True}
    expected = trained(0, "llama", {}, folder, tied)
    for settings in ({"mesh.dp": 2, "overlap.dp.strategy": "no_shard"}, {"mesh.pp": 2}):
        assert_same(run_ranks(resumed, 2, "llama", settings, folder, tied)[0], expected)
    first, last = run_ranks(trained, 2, "llama", {"mesh.pp": 2}, f"{folder}_in_a_pipeline", tied)
    assert all(torch.equal(first[name], last[name]) for name in first)
    assert_same(resumed(0, "llama", {}, f"{folder}_in_a_pipeline", tied), first)


def plain_step(made: Any, optimizer: torch.optim.Optimizer) -> None:
    """One step of transformers' own forward and torch's own optimizer."""
    optimizer.zero_grad()
    for ((ids, targets),) in batches(MICROBATCHES):
        logits = made(input_ids=ids, use_cache=False).logits
        (F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / MICROBATCHES).backward()
    optimizer.step()


def adamw(made: nn.Module, step: PlannedStep) -> torch.optim.AdamW:
    """torch's own, with what `train.*` says. Whole shapes say what decays: under `fully_shard` all shards are flat."""
    t, shapes = step.settings.train, dict(step.parameters.values())
    groups = [
        {
            "params": [p for name, p in made.named_parameters() if (len(shapes[name]) > 1) == large],
            "weight_decay": decay,
        }
        for large, decay in ((True, t.weight_decay), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=t.betas, eps=t.eps, foreach=True)


def test_the_plain_model_goes_on(tmp_path: Path) -> None:
    """torch's DCP loads the folder into transformers' model and torch's AdamW, whose next step is the planned one."""
    folder = str(tmp_path / "two")
    expected = run_ranks(trained, 4, "qwen3_moe", PIPELINE, folder)[0]
    made: Any = model("qwen3_moe")
    step = planned(made)
    optimizer = adamw(made, step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's words about a process group that is not there
        state = {"model": made.state_dict(), "optimizer": get_optimizer_state_dict(made, optimizer, options=FLAT)}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        set_model_state_dict(made, state["model"])
        set_optimizer_state_dict(made, optimizer, state["optimizer"], options=FLAT)
    plain_step(made, optimizer)
    assert_same(dict(made.state_dict()), expected)


def test_fully_shard_goes_on_and_back(tmp_path: Path) -> None:
    """`hocket.checkpoint` loads the folder into the sharded model; the planned step loads what that saves."""
    expected = trained(0, "qwen3_moe", {}, str(tmp_path / "two"))
    made: Any = model("qwen3_moe")
    step = planned(model("qwen3_moe"))
    context = hocket.fully_shard(made, units=type(made.model.layers[0]))
    optimizer = adamw(made, step)
    hocket.checkpoint.load(context, optimizer, tmp_path / "two")
    hocket.checkpoint.save(context, optimizer, tmp_path / "again")
    plain_step(made, optimizer)
    assert_same(dict[str, Any](get_model_state_dict(made)), expected)
    step.load(tmp_path / "again")
    step(mine(step), LR)
    assert_same(step.state_dict(), expected)


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {"tie_word_embeddings": True}), ("deepseek_v3", {}), ("gpt_oss", {})]
)
def test_transformers_takes_the_state(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """With tied heads and saved buffers, so `load_state_dict` is strict; and `from_pretrained` reads what was saved."""
    made = model(family, **changes)
    step = planned(made)
    step(mine(step), LR)
    fresh = type(made)(made.config)
    fresh.load_state_dict(step.state_dict())
    ids, targets = mine(step)
    expected = step.evaluate((ids, targets))
    made.save_pretrained(tmp_path, state_dict=step.state_dict())
    for each in (fresh, type(made).from_pretrained(tmp_path)):
        logits = each(input_ids=ids, use_cache=False).logits.detach().flatten(0, 1)
        assert float(F.cross_entropy(logits.float(), targets.flatten())) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("trains", [False, True])
def test_a_parameter_that_no_gradient_reaches_stays(trains: bool) -> None:
    """A routing correction, as by torch's AdamW, also where `requires_grad_(True)` was called for the whole model."""
    made, twin = (model("ernie4_5_moe") for _ in range(2))
    for each in (made, twin) if trains else ():
        each.requires_grad_(True)
    first = {name: param.detach().clone() for name, param in made.named_parameters()}
    step = planned(made, {"train.weight_decay": 0.1})
    groups = [
        {"params": [p for p in twin.parameters() if (p.dim() > 1) == large], "weight_decay": 0.1 * large}
        for large in (True, False)
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=LR, betas=step.settings.train.betas, eps=step.settings.train.eps, foreach=True
    )
    for _ in range(3):
        step(mine(step), LR)
        plain_step(twin, optimizer)
    assert_same(step.state_dict(), dict(twin.state_dict()))
    step.load_into(made)
    same = {name for name, param in made.named_parameters() if torch.equal(param, first[name])}
    assert same == {f"model.layers.{n}.mlp.gate.moe_statics.e_score_correction_bias" for n in (1, 2, 3)}


@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe"])
def test_what_no_step_changes_is_loaded_too(family: str, tmp_path: Path) -> None:
    """A routing correction, a buffer or a parameter: steps go by the one that was loaded, and so does the state."""
    saved, other = planned(model(family)), model(family)
    with torch.no_grad():
        for name, value in other.state_dict().items():
            if "correction" in name:
                value.copy_(torch.arange(4.0).flip(0))
    before, step = {n: v.clone() for n, v in other.state_dict().items()}, planned(other)
    expected = saved.evaluate(mine(saved))
    assert step.evaluate(mine(step)) != expected
    saved.save(tmp_path / "dcp")
    hocket.checkpoint.save_pretrained(saved, tmp_path / "pretrained")
    for load in (
        lambda s: s.load(tmp_path / "dcp"),
        lambda s: hocket.checkpoint.load_pretrained(s, tmp_path / "pretrained"),
    ):
        step = planned(other)
        load(step)
        assert step.evaluate(mine(step)) == expected
        assert_same(step.state_dict(), saved.state_dict(), bitwise=True)
    assert_same(dict(other.state_dict()), before, bitwise=True)
    sharded = model(family)
    context = hocket.fully_shard(sharded, units=type(sharded.model.layers[0]))
    hocket.checkpoint.load(context, None, tmp_path / "dcp")
    hocket.checkpoint.save(context, None, tmp_path / "back")
    step.load(tmp_path / "back", optimizer=False)
    assert_same(step.state_dict(), saved.state_dict(), bitwise=True)


def test_a_model_on_the_meta_device_has_its_buffers(tmp_path: Path) -> None:
    made = model("deepseek_v3")
    known = made.state_dict()
    with torch.device("meta"):
        shell = type(made)(made.config).train()
    step = hocket.plan_model(shell, {**SETTINGS, "train.microbatches": 1}, values=known.__getitem__)
    assert_same(step.state_dict(), dict(known), bitwise=True)


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    step = planned(model("llama"))
    step(mine(step), LR)
    step.save(tmp_path / "one")
    with pytest.raises(ValueError, match="one exists already"):
        step.save(tmp_path / "one")
    with pytest.raises(ValueError, match="folder = '': it has no name"):
        step.save("")
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / ".metadata").write_bytes(b"junk")
    before = step.state_dict()
    other = planned(model("llama", num_hidden_layers=2))
    other.save(tmp_path / "other")
    wide = planned(model("llama", intermediate_size=64))
    wide.save(tmp_path / "wide")
    made = model("llama")
    hocket.checkpoint.save(hocket.fully_shard(made, units=type(made.model.layers[0])), None, tmp_path / "weights")
    for name, words in (
        ("junk", r"junk is damaged: .*junk/.metadata cannot be read: pickle data was truncated; load another one"),
        ("none", r"none: it is not complete, for it has no .metadata"),
        ("other", r"other: it is of another model: it lacks model.layers.2.* and 14 more; fix: "),
        ("wide", r"wide: it is of another model: .*mlp.*weight is 64 x 32 in it and 48 x 32 in the module"),
        ("weights", r"weights: it is of another optimizer: it lacks .*; fix: load\(folder, optimizer=False\)"),
    ):
        with pytest.raises(ValueError, match=words):
            step.load(tmp_path / name)
        assert_same(step.state_dict(), before, bitwise=True)
    step.load(tmp_path / "weights", optimizer=False)
    assert_same(step.state_dict(), dict(model("llama").state_dict()), bitwise=True)
    assert step.engine.optimizer.steps == 0
    assert not any(state.exp_avg.any() or state.exp_avg_sq.any() for state in step.engine.optimizer.state.values())


def test_without_communication_nothing_is_saved(tmp_path: Path) -> None:
    step = planned(model("llama"), {"train.transport": "null"})
    for call in (step.save, step.load):
        with pytest.raises(ValueError, match=r"^train.transport = null: .*; fix: another train.transport$"):
            call(tmp_path / "one")


def own(rank: int, settings: dict[str, Any], load: str, save: str) -> State:
    """hocket's own transformer: the state that was loaded, or that a step has made; saved."""
    one = {"mesh.pp": 1, "mesh.dp": 1, "mesh.ep": 1, "plan.chunks": 1, "train.microbatches": 2, "train.device": "cpu"}
    step = hocket.plan("tiny", {**one, "model.bias_rate": 0.1, "precision.compute": "fp32", **settings}).start()
    c = step.settings
    ids = torch.arange(2 * c.train.sequences * c.data.sequence_length).view(-1, c.data.sequence_length) % c.model.vocab
    if load:
        step.load(load)
    else:
        step((ids, ids), LR)
    step.save(save)
    return {} if c.mesh.tp > 1 else step.state_dict()


def test_the_own_transformer_through_tensor_parallel_ranks(tmp_path: Path) -> None:
    """One rank -> two tensor-parallel ranks -> a pipeline of two -> one rank: the same weights and biases."""
    folders = [str(tmp_path / str(n)) for n in range(4)]
    expected = own(0, {}, "", folders[0])
    assert any(name.endswith("router.bias") and bool(value.any()) for name, value in expected.items())
    run_ranks(own, 2, {"mesh.tp": 2}, folders[0], folders[1])
    assert_same(run_ranks(own, 2, {"mesh.pp": 2}, folders[1], folders[2])[0], expected, bitwise=True)
    assert_same(own(0, {}, folders[2], folders[3]), expected, bitwise=True)
