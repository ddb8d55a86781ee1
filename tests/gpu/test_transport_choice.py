"""On GPUs of one host a run that asks for no transport copies; trials leave nothing, and NCCL runs where one fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.config import Config
from hocket.engine import Engine
from hocket.plan.mesh import Purpose
from hocket.runtime.comm import CommOptions, Group
from hocket.runtime.trial import of_all, why_no_copies
from hocket.settings.leaves import changed
from tests.gpu.test_copy_engine import CONFIGS, engine_on
from tests.helpers.command import SMALL, hocket, text_in
from tests.helpers.ranks import run_ranks

WORLD = 4 if torch.cuda.device_count() >= 4 else 2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]
TWO = [*SMALL, "--mesh.pp", "1", "--mesh.dp", "2", "--mesh.ep", "2", "--plan.chunks", "1", "--train.steps", "3"]
PURPOSES: list[Purpose] = ["gather_dense", "a2a"]
WINDOWLESS = "NCCL_CUMEM_ENABLE"


def moved_by(folder: Path, name: str) -> dict[str, str]:
    """What explanation.json says of the groups."""
    found = json.loads((folder / "runs" / name / "explanation.json").read_text())
    return {group["purpose"]: group["moved_by"] for group in found["groups"]}


@pytest.mark.parametrize(
    ("variables", "way", "told"),
    [({}, "copy engines, no SM", ""), ({WINDOWLESS: "0"}, "NCCL, at most", f"{WINDOWLESS} = 0 (environment)")],
    ids=["as it is", "no memory can be shown"],
)
def test_a_run_that_asks_for_nothing(tmp_path: Path, variables: dict[str, str], way: str, told: str) -> None:
    words = [*TWO, "--run.name", "open", "--data.paths", text_in(tmp_path), "--plan.graphs", "off"]
    done = hocket(tmp_path, "train", *words, fresh=True, **variables)
    assert done.code == 0, done.err
    assert all(moved.startswith(way) for name, moved in moved_by(tmp_path, "open").items() if name != "control")
    notes = [line for line in f"{done.out}\n{done.err}".splitlines() if "hocket: train.transport" in line]
    assert len(notes) == bool(told)
    assert all(told in note for note in notes)


def stepped(transport: str, config: Config, rank: int) -> list[float]:
    """Losses of some steps."""
    engine, batch = engine_on(transport, config, rank)
    assert isinstance(engine, Engine)
    return [float(engine.train_step(batch, 1e-3).loss) for _ in range(3)]


def tried(rank: int, config: Config) -> dict[str, Any]:
    """Two trials that succeed, a step on copy engines, a trial that fails behind its groups, and a step on NCCL."""
    device = torch.device("cuda", rank)

    def fail(purpose: Purpose, on: torch.device, options: CommOptions) -> Group | None:
        assert of_all(purpose, on, options) is not None
        raise RuntimeError("Operation not permitted")

    found: dict[str, Any] = {"first": why_no_copies(PURPOSES, device, 60.0)}
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    found["again"] = why_no_copies(PURPOSES, device, 60.0)
    found["left"] = torch.cuda.memory_allocated() - held
    found["copied"] = stepped("copy_engine", config, rank)
    found["failed"] = why_no_copies(PURPOSES, device, 60.0, make=fail)
    found["nccl"] = stepped("nccl", config, rank)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_trials_leave_nothing_behind_that_a_run_would_notice(name: str) -> None:
    config = changed(CONFIGS[name], {"train.microbatches": 4})
    for found in run_ranks(tried, WORLD, config, backend="nccl", timeout=200):
        assert found["first"] == found["again"] == ""
        assert found["left"] == 0
        assert found["failed"] == "a trial failed (RuntimeError: Operation not permitted)"
        assert found["copied"] == pytest.approx(found["nccl"], rel=0.02)
