"""Checkpoints: bit-exact on any number of ranks, whole or not at all, and clear about what is wrong."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from hocket.config import Config, ModelConfig, RunConfig, TrainConfig
from hocket.config.schema import changed
from hocket.fsdp.piece import Boxes
from hocket.fsdp.saving.atomic_folder import AtomicFolder
from hocket.layers.slices import Span
from hocket.resolve import Settings, resolve
from hocket.train import checkpoint
from hocket.train.checkpoint import Moment
from tests.helpers.ranks import run_ranks

SHAPES = {"embed.weight": (13, 5), "layers.0.w": (3, 4, 5), "layers.0.scale": (7,), "bias": (2,), "count": ()}
REPLICATED = ("bias", "count")


def settings_in(folder: Path, resume: str = "auto", keep: int = 2, hidden: int = 128) -> Settings:
    return resolve(
        Config(
            model=ModelConfig(hidden=hidden),
            run=RunConfig(name="test", folder=str(folder), resume=resume),
            train=TrainConfig(keep=(keep,)),
        )
    )


def value_of(name: str, kind: str, step: int) -> torch.Tensor:
    """Something that differs for every element, tensor, kind and step."""
    shape = SHAPES[name]
    start = 1000 * list(SHAPES).index(name) + (0.5 if kind == "exp_avg" else 0.0) + 0.25 * step
    return torch.arange(math.prod(shape), dtype=torch.float64).float() + start


def pieces(
    rank: int, world: int, kind: str, step: int | None, names: tuple[str, ...] = tuple(SHAPES)
) -> dict[str, Boxes]:
    """One flat buffer of all tensors, cut into equal shares without regard to where tensors end."""
    sharded = [name for name in names if name not in REPLICATED]
    share = -(-sum(math.prod(SHAPES[name]) for name in sharded) // world)
    found, start = dict[str, Boxes](), 0
    for name in names:
        count = math.prod(SHAPES[name])
        lo, hi = 0, count
        if name in sharded:
            lo = min(count, max(0, rank * share - start))
            hi = max(lo, min(count, (rank + 1) * share - start))
            start += count
        full = value_of(name, kind, step) if step is not None else torch.full((count,), float("nan"))
        found[f"{kind}.{name}"] = Boxes(full[lo:hi].clone(), Span(SHAPES[name], lo, hi))
    return found


def groups(step: int | None, names: tuple[str, ...] = tuple(SHAPES)) -> dict[str, Boxes]:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return pieces(rank, world, "weight", step, names) | pieces(rank, world, "exp_avg", step, names)


def save_steps(rank: int, folder: Path, steps: list[int], keep: int = 2) -> None:
    for step in steps:
        checkpoint.save(settings_in(folder, keep=keep), Moment(step, 10 * step), groups(step))


def load_and_compare(rank: int, folder: Path) -> tuple[int, int]:
    empty = groups(None)
    restored = checkpoint.restore(settings_in(folder), empty)
    assert restored is not None
    for key, piece in empty.items():
        kind, _, name = key.partition(".")
        assert torch.equal(piece.flat, value_of(name, kind, restored.step)[piece.span.lo : piece.span.hi]), key
    return restored.step, restored.position


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_what_two_ranks_save_any_number_loads_bit_exactly(tmp_path, world):
    run_ranks(save_steps, 2, tmp_path, [7])
    assert run_ranks(load_and_compare, world, tmp_path) == [(7, 70)] * world


def test_only_the_newest_are_kept_and_latest_points_to_the_last(tmp_path):
    save_steps(0, tmp_path, [1, 2, 3, 4], keep=2)
    folder = tmp_path / "checkpoints"
    assert sorted(os.listdir(folder)) == ["latest", "step-00000003", "step-00000004"]
    assert (folder / "latest").resolve().name == "step-00000004"


def test_a_step_that_is_saved_already_is_refused_and_stays(tmp_path):
    save_steps(0, tmp_path, [1])
    with pytest.raises(
        checkpoint.SaveFailed,
        match=r"step-00000001 is there already, and no .* there is no other one; fix: move it away$",
    ):
        save_steps(0, tmp_path, [1])
    assert load_and_compare(0, tmp_path) == (1, 10)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-00000001"]


def test_no_checkpoint_and_resume_off_start_over(tmp_path):
    assert checkpoint.restore(settings_in(tmp_path), groups(None)) is None
    save_steps(0, tmp_path, [1])
    assert checkpoint.restore(settings_in(tmp_path, resume="off"), groups(None)) is None


def test_a_checkpoint_can_be_named(tmp_path):
    save_steps(0, tmp_path, [1, 2])
    for name, step in (("latest", 2), ("step-00000001", 1), ("latest", 1)):
        restored = checkpoint.restore(settings_in(tmp_path, resume=str(tmp_path / "checkpoints" / name)), groups(None))
        assert restored is not None
        assert restored.step == step


def damage(path: Path, how: str) -> None:
    data = next(path.glob("*.distcp"))
    match how:
        case "truncated":
            data.write_bytes(data.read_bytes()[:-10])
        case "flipped byte":
            content = bytearray(data.read_bytes())
            content[len(content) // 2] ^= 1
            data.write_bytes(content)
        case "file gone":
            data.unlink()
        case "no meta":
            (path / "meta.json").unlink()
        case "broken meta":
            (path / "meta.json").write_text("{")
        case "meta of something else":
            (path / "meta.json").write_text("[1]")
        case "other format":
            meta = json.loads((path / "meta.json").read_text())
            (path / "meta.json").write_text(json.dumps({**meta, "format": 99}))
        case "no step" | "no config":
            meta = json.loads((path / "meta.json").read_text())
            del meta[how.removeprefix("no ")]
            (path / "meta.json").write_text(json.dumps(meta))
        case "other position":
            text = (path / "meta.json").read_text()
            (path / "meta.json").write_text(text.replace('"position": 50', '"position": 58'))
        case "step in words":
            meta = json.loads((path / "meta.json").read_text())
            (path / "meta.json").write_text(json.dumps({**meta, "step": "five"}))
        case "no metadata":
            (path / ".metadata").unlink()


DAMAGES = {
    "truncated": "checksum",
    "flipped byte": "checksum",
    "file gone": "No such file",
    "no meta": "not a checkpoint",
    "broken meta": "cannot be read",
    "meta of something else": "cannot be read",
    "other format": "format 99",
    "other position": "checksum",
    "no step": "cannot be read",
    "no config": "cannot be read",
    "step in words": "cannot be read",
    "no metadata": "is missing",
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_named_with_a_fix(tmp_path, how):
    save_steps(0, tmp_path, [5])
    path = tmp_path / "checkpoints" / "step-00000005"
    damage(path, how)
    for resume in ("auto", str(path)):
        with pytest.raises(ValueError, match=DAMAGES[how]) as caught:
            checkpoint.restore(settings_in(tmp_path, resume=resume), groups(None))
        text = str(caught.value)
        assert "run.resume" in text
        assert str(path) in text
        assert "fix:" in text
        assert "\n" not in text


def restore_after_damage(rank: int, folder: Path) -> tuple[int, str]:
    if rank == 0:
        damage(folder / "checkpoints" / "step-00000009", "flipped byte")
    dist.barrier()
    restored = checkpoint.restore(settings_in(folder), groups(None))
    assert restored is not None
    return restored.step, restored.notes[0]


def test_auto_falls_back_to_the_one_before_and_says_so_on_every_rank(tmp_path):
    run_ranks(save_steps, 2, tmp_path, [8, 9])
    for step, note in run_ranks(restore_after_damage, 2, tmp_path):
        assert step == 8
        assert "step-00000009 is damaged" in note


def test_a_half_written_checkpoint_is_never_seen(tmp_path, monkeypatch):
    save_steps(0, tmp_path, [1])
    unfinished = tmp_path / "checkpoints" / "step-00000002.tmp"
    monkeypatch.setattr(AtomicFolder, "publish", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(ValueError, match=r"run.folder = .*cannot be written: .*No space left.*; fix: make room"):
        save_steps(0, tmp_path, [2])
    assert not unfinished.exists()
    monkeypatch.setattr(AtomicFolder, "publish", lambda _: (_ for _ in ()).throw(SystemExit))
    with pytest.raises(CheckpointException, match="SystemExit"):  # as if it had been killed
        save_steps(0, tmp_path, [2])
    monkeypatch.undo()
    assert unfinished.exists()
    assert load_and_compare(0, tmp_path)[0] == 1
    assert not unfinished.exists()
    save_steps(0, tmp_path, [2])
    assert load_and_compare(0, tmp_path)[0] == 2


def test_a_checkpoint_of_another_model_lists_the_differences(tmp_path, monkeypatch):
    save_steps(0, tmp_path, [1])
    monkeypatch.setitem(SHAPES, "embed.weight", (13, 6))
    with pytest.raises(ValueError, match="another model") as caught:
        checkpoint.restore(settings_in(tmp_path, hidden=192), groups(None))
    text = str(caught.value)
    assert "model.hidden was 128 and is 192" in text
    assert "embed.weight is 13 x 5 in the checkpoint and 13 x 6 here" in text
    with pytest.raises(ValueError, match=r"layers\.0\.w is 3 x 4 x 5 in the checkpoint and missing here"):
        checkpoint.restore(settings_in(tmp_path), groups(None, ("layers.0.scale", "bias", "count")))


def test_settings_that_changed_without_changing_shapes_are_noted(tmp_path):
    save_steps(0, tmp_path, [1])
    settings = settings_in(tmp_path)
    other = resolve(replace(settings, model=replace(settings.model, norm_eps=1e-4)))
    restored = checkpoint.restore(other, groups(None))
    assert restored is not None
    assert any("model.norm_eps was 1e-06 and is 0.0001" in note for note in restored.notes)


def test_another_batch_and_other_steps_of_the_optimizer_are_noted_and_other_machinery_is_not(tmp_path):
    save_steps(0, tmp_path, [1])
    settings = settings_in(tmp_path)

    def notes(**others: object) -> tuple[str, ...]:
        other = changed(settings, {name.replace("__", "."): value for name, value in others.items()})
        restored = checkpoint.restore(other, groups(None))
        assert restored is not None
        return restored.notes

    assert notes(train__microbatches=4, train__sequences=2, train__keep=7, plan__order="1f1b", data__cache="x") == ()
    since = "since the checkpoint was written, "
    assert notes(train__lr=1e-3, train__steps=200, train__eps=1e-6) == (
        f"{since}train.steps was 100 and is 200; train.lr was 0.003 and is 0.001; train.eps was 1e-08 and is 1e-06",
    )
    batch = "mesh.dp x train.microbatches x train.sequences"
    assert notes(mesh__dp=2, train__microbatches=2) == (
        f"{since}the sequences of a step were 8 (1 x 8 x 1) and are 4 (2 x 2 x 1): {batch}",
    )
    others: list[tuple[dict[str, object], str]] = [
        ({"data__sequence_length": 64}, "data.sequence_length"),
        ({"data__sequence_length": 64, "data__packing": "best_fit"}, "data.sequence_length and data.packing"),
    ]
    for given, names in others:
        (note,) = (note for note in notes(**given) if "sequences" in note)
        moved = (
            f"{since}the text is cut into other sequences ({names}), and the run's position is a number of sequences: "
        )
        assert note == f"{moved}some of the text will be read again, some never"
    assert notes(data__packing="on") == (f"{since}data.packing was off and is on",), "sequences begin where they did"


def test_another_text_is_noted(tmp_path):
    checkpoint.save(settings_in(tmp_path), Moment(1, 1, "3 documents"), groups(1))
    for text in ("3 documents", "4 documents"):
        restored = checkpoint.restore(settings_in(tmp_path), groups(None), {1: text}.__getitem__)
        assert restored is not None
        assert [note for note in restored.notes if "the text was 3" in note] == list(restored.notes)
        assert len(restored.notes) == (text == "4 documents")


def test_folders_of_other_names_are_neither_counted_nor_deleted(tmp_path):
    """A copy that somebody has made beside the checkpoints, and one that sorts behind every number."""
    save_steps(0, tmp_path, [10], keep=1)
    folder = tmp_path / "checkpoints"
    others = [folder / "step-00000010-mine", folder / "step-final"]
    for other in others:
        shutil.copytree(folder / "step-00000010", other)
    save_steps(0, tmp_path, [20], keep=1)
    assert {path.name for path in folder.iterdir()} == {"latest", "step-00000020", *(path.name for path in others)}
    assert load_and_compare(0, tmp_path)[0] == 20


def test_a_run_goes_on_in_a_copy_without_links(tmp_path):
    """As `cp -rL` makes one, or a file system that has none."""
    save_steps(0, tmp_path / "run", [10])
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert not (tmp_path / "copy" / "checkpoints" / "latest").is_symlink()
    assert load_and_compare(0, tmp_path / "copy")[0] == 10
    save_steps(0, tmp_path / "copy", [20])
    folder = tmp_path / "copy" / "checkpoints"
    assert (folder / "latest").resolve() == folder / "step-00000020"
    assert (folder / "latest.old" / "meta.json").exists(), "nothing is lost"


def test_a_checkpoint_that_was_moved_and_linked_is_the_runs_own(tmp_path):
    save_steps(0, tmp_path / "run", [10])
    folder = tmp_path / "run" / "checkpoints"
    shutil.move(folder / "step-00000010", tmp_path / "elsewhere")
    (folder / "step-00000010").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run" / "metrics.jsonl").write_text("measured")
    assert load_and_compare(0, tmp_path / "run")[0] == 10
    assert (folder / "latest").readlink() == Path("step-00000010")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "measured"


def test_set_aside_never_overwrites(tmp_path):
    for text in ("a", "b"):
        (tmp_path / "x").write_text(text)
        checkpoint.set_aside(tmp_path / "x")
    assert (tmp_path / "x.old").read_text() == "a"
    assert (tmp_path / "x.old2").read_text() == "b"
    assert checkpoint.set_aside(tmp_path / "x") is None


def test_starting_over_keeps_the_checkpoints_of_the_earlier_run(tmp_path):
    save_steps(0, tmp_path, [5])
    checkpoint.restore(settings_in(tmp_path, resume="off"), groups(None))
    assert (tmp_path / "checkpoints.old" / "step-00000005").is_dir()
    save_steps(0, tmp_path, [1])
    assert load_and_compare(0, tmp_path)[0] == 1


def test_going_on_from_another_run_keeps_what_was_measured_here(tmp_path):
    save_steps(0, tmp_path / "a", [5])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.jsonl").write_text("here\n")
    resume = str(tmp_path / "a" / "checkpoints" / "latest")
    restored = checkpoint.restore(settings_in(tmp_path / "b", resume=resume), groups(None))
    assert restored is not None
    assert (tmp_path / "b" / "metrics.jsonl.old").read_text() == "here\n"
    assert not (tmp_path / "b" / "metrics.jsonl").exists()


def test_going_back_to_an_earlier_step_puts_later_ones_aside(tmp_path):
    save_steps(0, tmp_path, [1, 2])
    earlier = tmp_path / "checkpoints" / "step-00000001"
    checkpoint.restore(settings_in(tmp_path, resume=str(earlier)), groups(None))
    assert sorted(os.listdir(earlier.parent)) == ["latest", "step-00000001", "step-00000002.old"]
    assert load_and_compare(0, tmp_path)[0] == 1
