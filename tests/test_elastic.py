"""Fewer processes than the mesh has ranks: what the resolver makes of them, and a run that goes on so."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.config import Config
from hocket.config.rule import Host, leaf
from hocket.config.schema import changed
from hocket.environment import find_port
from hocket.recipes import recipe
from hocket.resolve import resolve
from tests.helpers.command import SMALL, end_all, hocket, text_in

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
        (dict(dp=2, cp=2), 2, dict(dp=1, cp=2, microbatches=8)),
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


DENSE: dict[str, Any] = {"model.experts": 0}


@pytest.mark.parametrize(
    ("mesh", "ranks", "asked", "setting", "left", "expected"),
    [
        (dict(dp=2), 1, {}, "overlap.dp.prefetch", 3, dict(dp=1)),
        (dict(tp=4, dp=2), 4, DENSE, "overlap.dp.prefetch", 3, dict(tp=4, dp=1)),
        (dict(dp=2), 1, {}, "overlap.dp.strategy", "optim", dict(dp=1)),
        (dict(dp=4, shard=2), 1, {}, "overlap.dp.strategy", "optim_grads", dict(dp=1)),
        (dict(dp=2, ep=2), 1, {}, "overlap.ep.copies", "per_rank", dict(ep=1)),
        (dict(dp=2, ep=2), 1, {}, "overlap.ep.splits", "device", dict(ep=1)),
        (dict(dp=2, ep=2), 1, {}, "overlap.ep.merge_ends", "on", dict(ep=1)),
        (dict(pp=2), 1, {}, "overlap.pp.defer_layers", 2, dict(pp=1)),
        (dict(pp=2), 1, {}, "overlap.pp.defer_head", 1, dict(pp=1)),
        (dict(pp=2), 1, {"plan.chunks": 2, "overlap.ep.merge": "off"}, "plan.order", "zb_v", dict(pp=1)),
        (dict(pp=4), 2, {}, "plan.layers_per_stage", (1, 2, 2, 3), dict(pp=2)),
        (dict(tp=2), 1, {}, "overlap.tp.method", ("bulk",), dict(tp=1)),
        (dict(cp=2), 1, {}, "overlap.cp.method", "heads", dict(cp=1)),
        (dict(cp=2), 1, {}, "plan.recompute", ("attn", "kv"), dict(cp=1)),
        (dict(dp=2, pp=2), 2, {"train.transport": "slow"}, "train.slow",
         ("pp_fwd:1ms", "reduce_dense:1ms", "gather_dense:1ms"), dict(pp=2, dp=1)),
    ],
)  # fmt: skip
def test_what_a_smaller_mesh_has_no_use_for_goes_and_is_told(
    mesh: dict[str, int], ranks: int, asked: dict[str, Any], setting: str, left: Any, expected: dict[str, int]
) -> None:
    config = changed(mesh_of(**mesh), asked | {setting: left})
    origins = {setting: f"command line, --{setting}"}
    assert leaf(resolve(config, Host(), origins), setting) == left
    settings = resolve(config, Host(workers=ranks, local_workers=ranks), origins)
    assert {name: getattr(settings.mesh, name) for name in expected} == expected
    assert settings.world == ranks
    (told,) = (decision for decision in settings.decisions if decision.setting == setting)
    assert (told.asked, told.value, told.given_up) == (left, leaf(settings, setting), True)
    assert told.value != left
    assert re.search(rf"\(asked for .*: command line, --{setting}\): on the smaller mesh: ", str(told))
    if setting in ("plan.recompute", "train.slow"):
        assert told.value == left[:1], "the items that mean something stay"
    again = resolve(settings)
    assert (again, again.decisions) == (settings, settings.decisions)


def test_a_mistake_is_none_of_the_smaller_mesh() -> None:
    """What the whole mesh refuses is refused with its values."""
    config = changed(mesh_of(dp=4), {"overlap.dp.strategy": "no_shard", "overlap.dp.prefetch": 3, "model.heads": 3})
    with pytest.raises(ValueError, match=r"model\.heads = 3 cannot") as error:
        resolve(
            config, Host(workers=1, local_workers=1), {"overlap.dp.prefetch": "command line, --overlap.dp.prefetch"}
        )
    assert "3 (command line, --overlap.dp.prefetch): no effect with overlap.dp.strategy = no_shard" in str(error.value)
    assert "elastic" not in str(error.value)


def test_the_first_mesh_whose_memory_suffices_is_taken() -> None:
    """Experts' weights are gathered one layer at a time where each rank has all of them, and so need less."""
    large = {"model.layers": 8, "model.hidden": 1024, "model.vocab": 32768, "data.sequence_length": 2048}
    found = {}
    for gib in (16, 5, 1):
        host = Host(workers=4, local_workers=4, memory=gib << 30)
        settings = resolve(changed(mesh_of(pp=2, dp=4, ep=4), large), host)
        (reasons,) = (str(d) for d in settings.decisions if d.setting == "mesh.ep")
        found[gib] = settings.mesh.ep, reasons.partition("takes a smaller mesh")[2]
    assert found[16] == (2, "")
    assert found[5][0] == 1
    assert re.fullmatch(r"; a step of pp 2 x dp 2, ep 2 inside dp would need \d+ GiB of \d+ GiB", found[5][1])
    assert found[1][0] == 1
    assert found[1][1].startswith("; none is predicted to fit: a step of pp 2 x dp 2, ep 2 inside dp would need")


def mesh_of(**mesh: int) -> Config:
    values: dict[str, Any] = {"mesh.pp": 1, "mesh.dp": 1, "mesh.ep": 1, "train.microbatches": 4, "plan.chunks": 1}
    values |= {"plan.order": "auto", "overlap.ep.merge": "auto", "train.device": "cpu"}
    return changed(recipe("tiny"), values | {f"mesh.{name}": size for name, size in mesh.items()} | ELASTIC)


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "runs/tiny/metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_one_process_goes_on_with_the_run_of_two(tmp_path: Path) -> None:
    """With the losses of two: a step has the same sequences, whose gradients are summed in another order."""
    words = [*SMALL, "--mesh.pp", "1", "--mesh.dp", "2", "--mesh.ep", "1", "--data.paths", text_in(tmp_path)]
    words += ["--run.elastic", "True", "--train.schedule", "constant"]  # by steps so far, whatever number is to come
    left = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    assert hocket(tmp_path, "train", *words, "--train.steps", "6").code == 0
    whole = losses(tmp_path)
    shutil.rmtree(tmp_path / "runs")
    for steps, variables in (("3", {}), ("6", left | {"MASTER_PORT": str(find_port())})):
        ended = hocket(tmp_path, "train", *words, "--train.steps", steps, fresh=False, **variables)
        assert ended.code == 0, ended
    assert "mesh.dp = 1 (asked for 2" in ended.out, ended
    assert losses(tmp_path)[:3] == whole[:3]
    assert losses(tmp_path) == pytest.approx(whole, rel=1e-5)
