"""`hocket.plan`, `check`, `simulate`, `draw` and the step that trains: the programs of docs/models.md, and refusals."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hocket
from hocket import cli
from hocket.config import Config
from hocket.config.schema import changed
from hocket.predict.hardware import H200
from hocket.recipes import RECIPES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
SECTION = PAGE.read_text().partition("\n## Plans from Python\n")[2]
PROGRAMS = re.findall(r"```python\n(.*?)```", SECTION, flags=re.DOTALL)
ONE = {"mesh.pp": 1, "mesh.dp": 1, "mesh.ep": 1, "plan.chunks": 1, "train.device": "cpu", "train.microbatches": 2}


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_programs_of_the_page_run(number: int) -> None:
    names: dict[str, Any] = {}
    exec(compile(PROGRAMS[number], f"{PAGE}:{number}", "exec"), names)
    assert "hocket" in names


def test_there_are_at_most_twelve_names_and_help_shows_the_idea() -> None:
    assert len(hocket.__all__) <= 12
    assert all(getattr(hocket, name) is not None for name in hocket.__all__)
    assert hocket.__doc__ is not None
    assert all(f"\n{name} " in hocket.__doc__ or name in hocket.__doc__ for name in hocket.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'plam'"):
        _ = hocket.plam


def test_a_plan_needs_no_torch() -> None:
    code = (
        "import hocket, sys; step = hocket.plan('tiny'); assert hocket.check(step) == []; hocket.draw(step); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("value", [None, "2", [1], {}, 2.0])
def test_a_value_of_another_type_is_named(value: object) -> None:
    with pytest.raises(ValueError, match=r"^mesh.dp = .* \(plan\): not a whole number; fix: give a whole number$"):
        hocket.plan("tiny", {"mesh.dp": value})


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^3 = 4 \(plan\): no such setting; fix: "):
        hocket.plan("tiny", {3: 4})  # type: ignore[dict-item]


@pytest.mark.parametrize("recipe", [None, 3, {}, [], b"tiny", "", Path("run.toml"), Config])
def test_a_recipe_is_a_name_or_a_config(recipe: Any) -> None:
    with pytest.raises(ValueError, match=r"^recipe = .* \(plan\): no name; fix: a recipe's name, a TOML file, mod"):
        hocket.plan(recipe)


@pytest.mark.parametrize("settings", [[("mesh.dp", 2)], "mesh.dp=2", 3, {"mesh.dp"}])
def test_settings_are_values_by_name(settings: Any) -> None:
    with pytest.raises(ValueError, match=r"^settings = .* \(plan\): no values by dotted name; fix: such as"):
        hocket.plan("tiny", settings)


def test_nested_settings_are_told_as_dotted_ones() -> None:
    with pytest.raises(ValueError, match=r"no such setting; fix: \{'mesh.dp': 2, 'mesh.ep': 2\}$"):
        hocket.plan("tiny", {"mesh": {"dp": 2, "ep": 2}})


def test_a_configuration_has_the_right_types_and_no_preset() -> None:
    with pytest.raises(ValueError, match=r"^mesh = None \(plan\): not a MeshConfig"):
        hocket.plan(replace(Config(), mesh=None), {"mesh.dp": 2})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^preset = memory \(plan\): a Config has all settings already"):
        hocket.plan(Config(), preset="memory")
    with pytest.raises(ValueError, match=r"^preset = 3 \(plan\): no name"):
        hocket.plan("tiny", preset=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("ask", [hocket.check, hocket.simulate, hocket.draw])
@pytest.mark.parametrize("step", [None, 3, "tiny", {}, Config()])
def test_what_is_no_plan_is_named(ask: Any, step: Any) -> None:
    with pytest.raises(ValueError, match=rf"^step = {type(step).__name__}: no plan.*; fix: what hocket.plan returns"):
        ask(step)


def test_a_program_alone_has_no_costs() -> None:
    with pytest.raises(ValueError, match=r"^step = Program: no plan, so nothing says what its ops cost"):
        hocket.simulate(hocket.plan("tiny").program)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [0, -3, 10**9, "80", True, None])
def test_a_width_is_one_of_a_line(width: Any) -> None:
    with pytest.raises(ValueError, match=rf"^width = {width}: not the characters of a line; fix: "):
        hocket.draw(hocket.plan("tiny"), width=width)


def test_a_list_is_given_as_a_python_list() -> None:
    step = hocket.plan("tiny", {**ONE, "plan.recompute": ["attn"]})
    assert step.settings.plan.recompute == ("attn",)


LONG = ("kimi_k2", "qwen3_235b_a22b", "deepseek_v3", "glm4_5_air")
"""Recipes whose plans take several seconds."""


@pytest.mark.parametrize("recipe", [pytest.param(r, marks=[pytest.mark.full] * (r in LONG)) for r in sorted(RECIPES)])
def test_every_recipe_can_be_planned_holds_fits_and_keeps_the_usual_order(recipe: str) -> None:
    """In one test, for choices take longer than all that is asked of them."""
    step = hocket.plan(recipe)
    settings = step.settings
    assert settings.run.folder == f"runs/{recipe}"
    assert settings.plan.layer_order == "literature"
    assert hocket.check(step) == []
    timeline = hocket.simulate(step)
    assert timeline.makespan > 0
    assert max(rank.peak_bytes for rank in timeline.ranks) < H200.memory


def test_drawings() -> None:
    step = hocket.plan("tiny")
    assert "compute" in hocket.draw(step, width=100)
    assert hocket.draw(step, "svg").startswith("<svg")
    assert hocket.draw(step, "html").startswith("<!doctype html>")
    with pytest.raises(ValueError, match="kind = pdf: draw makes text, svg or html"):
        hocket.draw(step, "pdf")  # type: ignore[arg-type]


def test_a_broken_program_is_told() -> None:
    step = hocket.plan("tiny")
    ops = step.program.ranks[0]
    less = (*ops[:5], *ops[6:])
    assert hocket.check(replace(step.program, ranks=(less, *step.program.ranks[1:])))


def test_a_configuration_is_a_recipe() -> None:
    assert hocket.plan(Config(), {"mesh.dp": 2}).settings.mesh.dp == 2


def test_what_cannot_be_planned_is_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"mesh\.pd = 4 \(plan\): no such setting; fix: "):
        hocket.plan("tiny", {"mesh.pd": 4})
    with pytest.raises(ValueError, match="recipe = tinny"):
        hocket.plan("tinny")
    with pytest.raises(ValueError, match=r"mesh\.ep"):
        hocket.plan("tiny", {"mesh.dp": 2, "mesh.ep": 3})
    with pytest.raises(
        ValueError, match=r"mesh.pp \* mesh.dp \* mesh.tp = 4: 1 rank has started, without a process group"
    ):
        hocket.plan("tiny").start()
    with pytest.raises(ValueError, match=r"batch: give the microbatches, or \(token ids, targets\)"):
        hocket.plan("tiny", {**ONE, "train.sequences": 1}).start()([])  # type: ignore[arg-type]


def test_documents_of_a_packed_batch_stay_apart() -> None:
    """Tokens of the first document say nothing about the second one's targets; without documents they do."""
    import torch

    from hocket.model.documents import Microbatch, documents_of

    torch.manual_seed(0)
    step = hocket.plan("tiny", {**ONE, "precision.compute": "fp32", "data.packing": "on"}).start()
    shape = step.settings.train.sequences, step.settings.data.sequence_length
    numbers = (torch.arange(shape[1]) >= shape[1] // 2).int().expand(shape).contiguous()
    ids = torch.randint(256, shape)
    targets = torch.where(numbers == 1, ids.roll(-1, 1), -100)
    others = torch.where(numbers == 1, ids, ids.flip(1))
    assert not torch.equal(ids, others)

    def loss(ids: torch.Tensor, numbers: torch.Tensor) -> float:
        return step.evaluate([Microbatch(ids, targets, documents=documents_of(numbers))] * 2)

    assert loss(ids, numbers) == loss(others, numbers)
    whole = torch.zeros_like(numbers)
    assert loss(ids, whole) != loss(others, whole)
    for documents in (None, numbers, documents_of(numbers[:, 1:])):
        with pytest.raises(
            ValueError, match=r"microbatch 0 has no documents of its tokens, and data.packing = on; fix"
        ):
            step.evaluate([Microbatch(ids, targets, documents=documents)] * 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="microbatch 0 has no documents"):
        step((ids.repeat(2, 1), targets.repeat(2, 1)))


def test_a_loaded_step_goes_on_with_its_balance_and_its_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, from its own checkpoint and from a run's; and one that has neither says so."""
    import torch

    from hocket.step import state_of
    from hocket.train.checkpoint import Moment, save

    model = {"model.aux_loss": 1.0, "model.aux_loss_over": "batch", "optimizer.skip_spikes": 3.0}
    model |= {"model.layers": 2, "model.dense_layers": (0,), "data.sequence_length": 16}
    plan = hocket.plan("tiny", {**ONE, **model, "precision.compute": "fp32"})
    shape = 2 * plan.settings.train.sequences, plan.settings.data.sequence_length
    batches = [torch.randint(256, shape, generator=torch.Generator().manual_seed(n)) for n in range(5)]

    def trained(step: Any, some: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        for ids in some:
            step((ids, ids.roll(-1, 1)), 1e-2)
        return step.state_dict()

    step, other, third = (plan.start() for _ in range(3))
    trained(step, batches[:2])
    step.save(tmp_path / "two")
    state = {f"{key}.{name}": v for key, values in state_of(step.engine).items() for name, v in values.items()}
    run = save(changed(plan.settings, {"run.folder": str(tmp_path)}), Moment(2, 0), state).result()
    expected, guard = trained(step, batches[2:]), step.engine.optimizer.guard
    for folder in (tmp_path / "two", run):
        trained(other, [batches[4]])  # which leaves shares and norms that must not stay
        other.load(folder)
        found = trained(other, batches[2:])
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert other.engine.optimizer.guard.norms == guard.norms
    other.load(tmp_path / "two", optimizer=False)
    assert other.engine.optimizer.guard.norms == []
    assert all(share.unique().numel() == 1 for share in other.engine.balance.shares().values())
    with monkeypatch.context() as patched:
        patched.setattr("hocket.step.step_state", lambda engine: {})
        other.save(tmp_path / "without")
    words = "lacks the shares of rows .* goes by and the norms that optimizer.skip_spikes = 3 compares with: they begin"
    with pytest.warns(UserWarning, match=words):
        third.load(tmp_path / "without")


def test_a_plan_over_ids_of_its_own_has_any_vocabulary() -> None:
    """A run would read text, and its tokenizer has 256 tokens; a step takes what its caller hands in."""
    assert hocket.plan("tiny", {"model.vocab": 64}).settings.model.vocab == 64


def test_a_plan_is_shown_in_one_line() -> None:
    assert re.fullmatch(r"Plan\(tiny: pp 2 x dp 2 x tp 1, ep 2, \d+ ops\)", repr(hocket.plan("tiny")))


def test_a_step_takes_whole_numbers_and_a_finite_learning_rate() -> None:
    import torch

    step = hocket.plan("tiny", {**ONE, "precision.compute": "fp32"}).start()
    c = step.settings
    ids = torch.zeros(2 * c.train.sequences, c.data.sequence_length, dtype=torch.int32)
    for lr in (float("nan"), float("inf"), -1.0, 10**400, True, "1", torch.tensor(0.1)):
        with pytest.raises(ValueError, match=r"^lr = .*: it would spoil all weights; fix: "):
            step((ids, ids), lr)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="token ids and targets are whole numbers"):
        step((ids.float(), ids))
    assert step((ids, ids), 1e-9).loss == pytest.approx(step.evaluate((ids.long(), ids.long())), rel=1e-4)
    step.close()


@pytest.mark.parametrize("setting", ["optimizer.adamw", "optimizer.no_decay"])
def test_a_pattern_that_no_weight_has_is_refused_wherever_settings_are_resolved(setting: str) -> None:
    line = rf"^{setting} = nosuch\* \(.*\): no weight is named like 'nosuch\*'; fix: a pattern of names such as embed"
    with pytest.raises(ValueError, match=line):
        hocket.plan("tiny", {"optimizer.name": "muon", setting: ["nosuch*"]})
    for command in ("plan", "explain"):
        with pytest.raises(ValueError, match=line):
            cli.run([command, "tiny", "--optimizer.name", "muon", f"--{setting}", "nosuch*"])
