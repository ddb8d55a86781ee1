"""What recomputation costs and saves, measured on a small model: every choice steps, to the same losses."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks.prediction_tables import recomputation
from benchmarks.recomputation import STUDIES, settings_of, take_turns
from hocket.config.rule import Host
from tests.helpers.ranks import run_ranks

SMALL: dict[str, Any] = {
    "model.vocab": 256, "model.hidden": 64, "model.layers": 2, "model.heads": 2, "model.kv_heads": 2,
    "model.head_dim": 32, "model.experts": 4, "model.top_k": 2, "model.expert_ffn": 64, "mesh.pp": 1, "mesh.dp": 1,
    "mesh.ep": 1, "plan.chunks": 1, "train.microbatches": 2, "train.device": "cpu",
}  # fmt: skip


def measured(rank: int, study: str) -> dict[str, Any]:
    choices = {name: settings_of(choice, 32, Host(), SMALL) for name, choice in STUDIES[study].items()}
    return take_turns(study, choices, 1, 1, torch.device("cpu"))


@pytest.mark.parametrize("study", ["recomputation", pytest.param("offload", marks=pytest.mark.full)])
def test_every_choice_has_its_row_and_the_same_losses(study: str) -> None:
    found = json.loads(json.dumps(run_ranks(measured, 1, study)[0]))
    lines = recomputation({"lengths": [found]}).splitlines()
    assert [line.split(" |")[0] for line in lines[2:]] == [f"| 32, {name or 'nothing'}" for name in STUDIES[study]]
    found["blocks"][list(STUDIES[study])[1]][0]["first_losses"][0] += 1e-6
    with pytest.raises(AssertionError, match="losses differ"):
        recomputation({"lengths": [found]})
