"""Fewer processes than the mesh has ranks: what the resolver makes of them, and a run whose second host is gone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.config import Config
from hocket.environment import find_port
from hocket.recipes import recipe
from hocket.resolve import resolve
from hocket.settings.rule import Host
from hocket.settings.schema import changed
from tests.helpers.command import SMALL, children_of, end_all, finish, start, text_in, wait_for

ELASTIC = {"run.elastic": True}


@pytest.fixture(autouse=True)
def _end_all() -> Iterator[None]:
    yield
    end_all()


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        (dict(dp=8, ep=8), 4, dict(dp=4, ep=4, microbatches=8)),
        (dict(dp=8, ep=2), 4, dict(dp=4, ep=2, microbatches=8)),
        (dict(pp=2, dp=4, ep=4), 4, dict(pp=2, dp=2, ep=2, microbatches=8)),
        (dict(pp=2, dp=1), 1, dict(pp=1, dp=1, microbatches=4)),
        (dict(dp=8, ep=2, shard=4), 4, dict(dp=4, ep=2, shard=4, microbatches=8)),
        (dict(dp=8, ep=4, shard=4), 2, dict(dp=2, ep=2, shard=2, microbatches=16)),
        (dict(dp=4), 2, dict(dp=2, microbatches=8)),
        (dict(dp=4), 4, dict(dp=4, microbatches=4)),
    ],
)
def test_a_smaller_mesh_has_the_same_batch(given: dict[str, int], ranks: int, expected: dict[str, int]) -> None:
    config = mesh_of(**given)
    settings = resolve(config, Host(workers=ranks, local_workers=ranks))
    found = {"microbatches": settings.train.microbatches} | {
        name: getattr(settings.mesh, name) for name in expected if name != "microbatches"
    }
    assert found == expected
    assert settings.world == ranks
    assert settings.batch == config.mesh.dp * config.train.microbatches * config.train.sequences
    changes = {d.setting for d in settings.decisions if d.setting.startswith("mesh.")}
    assert changes == {f"mesh.{name}" for name in given if getattr(settings.mesh, name) != given[name]}
    assert resolve(settings).decisions == settings.decisions


def test_the_choice_is_explained_and_what_has_no_mesh_is_refused() -> None:
    settings = resolve(mesh_of(dp=4), Host(workers=2, local_workers=1), {"mesh.dp": "command line, --mesh.dp"})
    why = "4 ranks, and processes for 2 of them were started: run.elastic takes a smaller mesh"
    told = [str(decision) for decision in settings.decisions if decision.unmet]
    assert told == [
        f"mesh.dp = 2 (asked for 4: command line, --mesh.dp): {why}",
        "train.microbatches = 8 (asked for 4: configuration): the sequences of a step stay as many",
    ]
    with pytest.raises(ValueError, match=r"run.elastic = True.*no mesh of the 3 processes.*fix: another number"):
        resolve(mesh_of(dp=4), Host(workers=3, local_workers=3))
    with pytest.raises(ValueError, match=r"but 2 processes were started; fix: .* or run.elastic = True"):
        resolve(changed(mesh_of(dp=4), {"run.elastic": False}), Host(workers=2, local_workers=2))
    with pytest.raises(ValueError, match="but 8 processes were started"):
        resolve(mesh_of(dp=4), Host(workers=8, local_workers=8))


def mesh_of(**mesh: int) -> Config:
    values: dict[str, Any] = {"mesh.pp": 1, "mesh.dp": 1, "mesh.ep": 1, "train.microbatches": 4, "plan.chunks": 1}
    values |= {"plan.order": "auto", "overlap.ep.merge": "auto", "train.device": "cpu"}
    return changed(recipe("tiny"), values | {f"mesh.{name}": size for name, size in mesh.items()} | ELASTIC)


def test_a_run_goes_on_without_the_host_that_is_lost(tmp_path: Path) -> None:
    """Two agents of torchrun. The second one is killed with its rank, and the first goes on alone, with all of a step's
    sequences."""
    words = [*SMALL, "--mesh.pp", "1", "--mesh.dp", "2", "--mesh.ep", "1", "--overlap.ep.merge", "off"]
    words += ["--train.steps", "120", "--train.save_every", "5", "--run.elastic", "True", "--data.paths"]
    port = str(find_port())
    timing = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2,is_host={}"
    agents = [
        start(
            tmp_path, "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", timing.format(host), "--local-addr", "localhost",
            "-m", "hocket", "train", *words, text_in(tmp_path), module="torch.distributed.run",
        )
        for host in (1, 0)
    ]  # fmt: skip
    wait_for(lambda: (tmp_path / "runs/tiny/checkpoints/latest").exists(), "a checkpoint")
    for process in [*children_of(agents[1].pid), agents[1].pid]:
        os.kill(process, signal.SIGKILL)
    ended = finish(agents[0])
    assert ended.code == 0, ended
    assert "mesh.dp = 1 (asked for 2" in ended.out, ended
    lines = map(json.loads, (tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 121))
