"""On GPUs of one host a run that asks for no transport copies; trials leave nothing, and NCCL runs where one fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.config import Config
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.program.mesh import Purpose
from hocket.runtime.comm import CommOptions, Group
from hocket.runtime.trial import copied, why_no_copies
from tests.gpu.test_copy_engine import CONFIGS, engine_on
from tests.helpers.command import finish, start
from tests.helpers.ranks import run_ranks

WORLD = 4 if torch.cuda.device_count() >= 4 else 2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]
WORDS = [
    "tiny", "--precision.compute", "bf16", "--model.hidden", "512", "--data.sequence_length", "256",
    "--train.steps", "5", "--train.eval_every", "0", "--train.eval_batches", "1", "--run.name", "open",
]  # fmt: skip
MESHES = {
    "experts": "--mesh.pp 1 --mesh.dp 2 --mesh.ep 2 --plan.chunks 1 --plan.graphs off",
    "experts, recorded": "--mesh.pp 1 --mesh.dp 2 --mesh.ep 2 --plan.chunks 1 --plan.graphs on",
    "a pipeline": "--mesh.pp 2 --mesh.dp 1 --mesh.ep 1 --overlap.ep.merge off",
    "weights": "--mesh.pp 1 --mesh.dp 2 --mesh.ep 1 --plan.chunks 1 --overlap.ep.merge off",
}
PURPOSES: list[Purpose] = ["gather_dense", "a2a"]


def run(folder: Path, mesh: str, **variables: str) -> tuple[dict[str, str], list[str]]:
    """What a run's explanation.json says of its groups, and what it has said of the transport."""
    (folder / "text").mkdir()
    for i in range(60):
        (folder / "text" / f"{i}.txt").write_text(f"this is document {i}. " * 1000)
    given = [*WORDS, *mesh.split(), "--data.paths", str(folder / "text")]
    done = finish(start(folder, "train", *given, fresh=True, **variables), timeout=250)
    assert done.code == 0, done.err
    found = json.loads((folder / "runs" / "open" / "explanation.json").read_text())
    notes = [line for line in f"{done.out}\n{done.err}".splitlines() if "hocket: train.transport" in line]
    return {group["purpose"]: group["moved_by"] for group in found["groups"]}, notes


@pytest.mark.parametrize("name", MESHES)
def test_a_run_that_asks_for_nothing_copies(tmp_path: Path, name: str) -> None:
    groups, notes = run(tmp_path, MESHES[name])
    ways = {"copy engines, no SM"} | ({"kernels that store into the peers' memory"} if "recorded" in name else set())
    assert {moved for purpose, moved in groups.items() if purpose != "control"} == ways
    assert notes == []


def test_a_host_whose_gpus_are_not_to_reach_each_other_is_on_nccl_and_says_so(tmp_path: Path) -> None:
    groups, (note,) = run(tmp_path, MESHES["experts"], NCCL_P2P_DISABLE="1")
    assert "train.transport = nccl: NCCL_P2P_DISABLE = 1 (environment)" in note
    assert all(moved.startswith("NCCL") for moved in groups.values())


def stepped(transport: str, config: Config, rank: int) -> list[float]:
    """Losses of some steps."""
    engine, batch = engine_on(transport, config, rank)
    assert isinstance(engine, Engine)
    return [float(engine.train_step(batch, 1e-3).loss) for _ in range(3)]


def tried(rank: int, config: Config) -> dict[str, Any]:
    """Two trials that succeed, a step on copy engines, a trial that fails behind its groups, and a step on NCCL."""
    device = torch.device("cuda", rank)

    def fail(purpose: Purpose, ranks: tuple[int, ...], on: torch.device, options: CommOptions) -> Group | None:
        assert copied(purpose, ranks, on, options) is not None
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
        assert found["left"] < 1 << 16, "more than a few numbers"
        assert found["failed"] == "a trial failed (RuntimeError: Operation not permitted)"
        assert found["copied"] == pytest.approx(found["nccl"], rel=0.02)
