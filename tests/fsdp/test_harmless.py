"""Checkpoints that somebody else wrote run no code when they are loaded."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

import hocket
from hocket.fsdp.saving.checkpoint import load, save
from hocket.fsdp.saving.storage import CheckpointReader, HarmlessPlanner
from hocket.train import checkpoint
from tests.test_checkpoint import groups, save_steps, settings_in


class Runs:
    """An object whose pickle makes a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


class Reduces:
    """An object that is pickled as a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


class Counts(nn.Linear):
    """A module with state beside tensors."""

    def get_extra_state(self) -> Any:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def whole(metadata: Metadata, made: Path) -> Any:
    return Runs(made)


def in_planner_data(metadata: Metadata, made: Path) -> Any:
    return replace(metadata, planner_data=Runs(made))


def in_an_entry(metadata: Metadata, made: Path) -> Any:
    entries = dict(metadata.state_dict_metadata)
    entries[next(iter(entries))] = Runs(made)  # type: ignore[assignment]
    return replace(metadata, state_dict_metadata=entries)


def by_getattr(metadata: Metadata, made: Path) -> Any:
    return replace(metadata, planner_data=Reduces(getattr, Runs, "__reduce__"))


def outside(metadata: Metadata, made: Path) -> Any:
    assert metadata.storage_data is not None
    stored = {key: replace(entry, relative_path=f"../{made.name}") for key, entry in metadata.storage_data.items()}
    return replace(metadata, storage_data=stored)


def without_pieces(metadata: Metadata, made: Path) -> Any:
    emptied: dict[str, Any] = dict(metadata.state_dict_metadata)
    return replace(metadata, state_dict_metadata={name: replace(entry, chunks=[]) for name, entry in emptied.items()})


Way = Callable[[Metadata, Path], Any]
WAYS = [whole, in_planner_data, in_an_entry, by_getattr, outside, without_pieces]


def poison(folder: Path, way: Way, made: Path) -> None:
    file = folder / ".metadata"
    file.write_bytes(pickle.dumps(way(pickle.loads(file.read_bytes()), made)))


@pytest.mark.parametrize("way", WAYS)
def test_metadata_of_a_sharded_model_runs_nothing(tmp_path: Path, way: Way) -> None:
    context = hocket.fully_shard(nn.Linear(3, 2))
    save(context, None, tmp_path / "saved")
    load(context, None, tmp_path / "saved")
    poison(tmp_path / "saved", way, tmp_path / "made")
    with pytest.raises(
        ValueError, match=r"\.metadata (cannot be read: it asks for|names files that|lists only a part of)"
    ):
        load(context, None, tmp_path / "saved")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("way", WAYS)
def test_metadata_of_a_run_runs_nothing(tmp_path: Path, way: Way) -> None:
    save_steps(0, tmp_path, [1])
    folder = tmp_path / "checkpoints" / "step-00000001"
    poison(folder, way, tmp_path / "made")
    with pytest.raises(
        ValueError, match=r"run\.resume = .*\.metadata (cannot be read: it asks|names files|lists only a part of)"
    ):
        checkpoint.restore(settings_in(tmp_path), groups(None))
    assert not (tmp_path / "made").exists()


def test_objects_beside_tensors_run_nothing(tmp_path: Path) -> None:
    module = Counts(3, 2)
    context = hocket.fully_shard(module, strategy="optim_grads_params")
    save(context, None, tmp_path / "saved")
    load(context, None, tmp_path / "saved")
    assert module.seen == {"seen": 3}
    (file,) = (tmp_path / "saved").glob("*.distcp")
    stored = CheckpointReader(tmp_path / "saved").read_metadata().storage_data
    assert stored is not None
    (entry,) = [entry for index, entry in stored.items() if "extra" in index.fqn]
    harm = io.BytesIO()
    torch.save(Runs(tmp_path / "made"), harm)
    content = file.read_bytes()
    assert len(harm.getvalue()) <= entry.length + 64
    file.write_bytes(content[: entry.offset] + harm.getvalue() + content[entry.offset + entry.length :])
    metadata = pickle.loads((tmp_path / "saved" / ".metadata").read_bytes())
    for index, other in metadata.storage_data.items():
        if "extra" in index.fqn:
            other.length = len(harm.getvalue())
            del other.crc  # as in a checkpoint of before there was any
        elif other.offset > entry.offset:
            other.offset += len(harm.getvalue()) - entry.length
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(metadata))
    fix = r"fix: torch\.serialization\.add_safe_globals\(\[\.\.\.\]\) with its classes \(.*\), if you trust them$"
    with pytest.raises(ValueError, match=rf"may run code when it is loaded; {fix}") as caught:
        load(context, None, tmp_path / "saved")
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "made").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_of_dcp_itself_are_read(tmp_path: Path) -> None:
    """Such as torch's own writer makes, with tensors of other layouts and plain values."""
    state = {"weight": torch.arange(6.0).view(2, 3), "image": torch.ones(1, 2, 3, 3), "lr": 0.1, "names": ["a", None]}
    state["image"] = state["image"].to(memory_format=torch.channels_last)  # type: ignore[union-attr]
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    found = {"weight": torch.zeros(2, 3), "image": torch.zeros(1, 2, 3, 3), "lr": 0.0, "names": ["", ""]}
    reader = CheckpointReader(tmp_path / "saved")
    dcp.load(found, storage_reader=reader, planner=HarmlessPlanner(), no_dist=True)
    assert torch.equal(found["weight"], torch.arange(6.0).view(2, 3))  # type: ignore[arg-type]
    assert (found["lr"], found["names"]) == (0.1, ["a", None])


def test_members_of_enumerations_are_read_as_older_pythons_write_them(tmp_path: Path) -> None:
    save_steps(0, tmp_path, [1])
    folder = tmp_path / "checkpoints" / "step-00000001"
    metadata = CheckpointReader(folder).read_metadata()
    for named in ("TORCH_CONTIGUOUS_FORMAT", "TORCH_PRESERVE_FORMAT"):
        member = Reduces(getattr, _MEM_FORMAT_ENCODING, named)
        (folder / ".metadata").write_bytes(pickle.dumps(replace(metadata, planner_data=member)))
        assert CheckpointReader(folder).read_metadata().planner_data is _MEM_FORMAT_ENCODING[named]


def test_a_damaged_pickle_is_named(tmp_path: Path) -> None:
    save_steps(0, tmp_path, [1])
    file = tmp_path / "checkpoints" / "step-00000001" / ".metadata"
    for content in (b"", b"\x80\x05.", file.read_bytes()[:-19], pickle.dumps(3)):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"\.metadata cannot be read: "):
            CheckpointReader(file.parent).read_metadata()


def test_nothing_reads_checkpoints_otherwise() -> None:
    files = Path(hocket.__file__).parent.rglob("*.py")
    readers = [file.name for file in files if "FileSystemReader" in file.read_text()]
    assert readers == ["storage.py"]
