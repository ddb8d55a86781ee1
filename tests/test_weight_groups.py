"""Which weights decay: by name, told by `hocket explain`, and refused where no weight has the name."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.trainer_pt_utils import get_parameter_names

import hocket
from hocket.adapters.step import plan_model
from hocket.config import Config
from hocket.config.optimizer import unmatched, weight_groups
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.explain.build import explain
from hocket.explain.explanation import to_text
from hocket.model.source import parameter_shapes
from hocket.recipes import recipe
from hocket.resolve import resolve
from tests.helpers.command import command

PATTERNS = ("embed.weight", "*.router.weight", "layers.[01].attn.w?")


def config(*patterns: str) -> Config:
    alone = {"mesh.dp": 1, "mesh.pp": 1, "mesh.ep": 1, "plan.chunks": 1, "precision.compute": "fp32"}
    return changed(recipe("tiny"), {**alone, "optimizer.no_decay": patterns})


def decaying(settings: Config) -> set[str]:
    """What torch's optimizer of an engine lets decay."""
    engine = Engine(resolve(settings), 0, torch.device("cpu"))
    return {name for name, group in engine.optimizer.settings.items() if group["weight_decay"]}


def test_patterns_take_weights_out_beside_vectors() -> None:
    shapes = parameter_shapes(config().model)
    matrices = {name for name, shape in shapes.items() if len(shape) > 1}
    out = {"embed.weight", *(f"layers.{i}.router.weight" for i in range(8))}
    out |= {f"layers.{i}.attn.w{x}" for i in (0, 1) for x in "qkvo"}
    assert decaying(config()) == matrices
    assert decaying(config(*PATTERNS)) == matrices - out


def test_explain_tells_every_weight_once() -> None:
    settings = config(*PATTERNS)
    shapes = parameter_shapes(settings.model)
    groups = weight_groups(settings.optimizer, settings.train.weight_decay, shapes)
    assert sorted(name for group in groups for name in group.names) == sorted(shapes)
    assert {name for group in groups if group.decay for name in group.names} == decaying(settings)
    rows = explain(resolve(settings), ()).optimizer
    assert sum(row["elements"] for row in rows) == sum(torch.Size(shape).numel() for shape in shapes.values())
    text = to_text(explain(resolve(settings), ()))
    assert "OPTIMIZER" in text
    assert "optimizer.no_decay: *.router.weight" in text


def test_a_pattern_that_no_weight_has_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = command(capsys, "train", "tiny", "--optimizer.no_decay", "embed.weight", "embd*")
    assert code == 2
    assert "optimizer.no_decay = embed.weight embd* (command line, --optimizer.no_decay): no weight is named" in err
    assert "'embd*'; fix: a pattern of names such as embed.weight" in err
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"optimizer.no_decay = .*no weight is named like ''"):
        hocket.plan("tiny", {**{f"mesh.{x}": 1 for x in ("dp", "pp", "ep")}, "optimizer.no_decay": ("",)}).start()
    assert len(unmatched(config("a", "head.*", "b").optimizer, [("head.norm",)], {})) == 2


def test_a_planned_model_is_told_by_its_own_names() -> None:
    """The patterns that leave out what transformers' trainer leaves out, and the embedding."""
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    made = LlamaForCausalLM(LlamaConfig(**sizes))
    given = {"train.microbatches": 1, "data.sequence_length": 8, "optimizer.no_decay": ("model.embed_tokens.*",)}
    step = plan_model(made, given)
    theirs = get_parameter_names(made, [torch.nn.LayerNorm, torch.nn.Embedding], [r"norm", r"bias"])
    own = {name: theirs_name for name, (theirs_name, _) in step.parameters.items()}
    decay = {own[name] for name, group in step.engine.optimizer.settings.items() if group["weight_decay"]}
    assert decay == set(theirs)
    with pytest.raises(ValueError, match=r"no weight is named like 'model.embed_token'"):
        plan_model(made, {**given, "optimizer.no_decay": ("model.embed_token",)})
