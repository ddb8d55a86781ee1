"""What recomputation costs and saves, measured on a small model: every choice steps, to the same losses."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks.prediction_tables import recomputation
from benchmarks.recomputation import CHOICES, settings_of, take_turns
from hocket.settings.rule import Host
from tests.helpers.ranks import run_ranks

SMALL: dict[str, Any] = {
    "model.vocab": 256, "model.hidden": 64, "model.layers": 2, "model.heads": 2, "model.kv_heads": 2,
    "model.head_dim": 32, "model.experts": 4, "model.top_k": 2, "model.expert_ffn": 64, "mesh.pp": 1, "mesh.dp": 1,
    "mesh.ep": 1, "plan.chunks": 1, "train.microbatches": 2, "train.device": "cpu",
}  # fmt: skip


def measured(rank: int) -> dict[str, Any]:
    choices = {part: settings_of(part, 32, Host(), SMALL) for part in CHOICES}
    return take_turns(choices, 1, 1, torch.device("cpu"))


def test_every_choice_has_its_row_and_the_same_losses() -> None:
    found = json.loads(json.dumps(run_ranks(measured, 1)[0]))
    lines = recomputation({"lengths": [found]}).splitlines()
    assert [line.split(" |")[0] for line in lines[2:]] == [f"| 32, {part or 'nothing'}" for part in CHOICES]
    found["blocks"]["dispatch"][0]["first_losses"][0] += 1e-6
    with pytest.raises(AssertionError, match="losses differ"):
        recomputation({"lengths": [found]})
