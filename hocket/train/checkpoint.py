"""Checkpoints: written whole or not at all, readable on any number of ranks and any mesh.

    runs/<name>/checkpoints/
        step-00000100/       tensors in DCP's format (`*.distcp`, `.metadata`) and meta.json
        latest               link to the newest one

A checkpoint is written into `step-....tmp`, described by `meta.json` (settings, position of the stream, size and
checksum of every file), synced to disk and renamed. So a folder with its final name is complete, and one that was
damaged later is recognised by its checksums.

All functions here are collective: every rank calls them with the same arguments. An error of one rank is raised
on all.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hocket.config import LABELS
from hocket.explain.explanation import digest
from hocket.fsdp.saving.dcp import sync_names
from hocket.fsdp.saving.flat_tensor import FlatTensor
from hocket.resolve import Settings
from hocket.settings.leaves import problem
from hocket.train.changes import changes, stored, told
from hocket.train.pieces import Piece

T = TypeVar("T")

FORMAT = 1
"""Changes whenever what is saved changes its meaning."""

Groups = Mapping[str, Sequence[Piece]]
"""This rank's part of the state by kind: `weight`, `exp_avg`, `exp_avg_sq`, ... Replicas may be given by every rank."""


@dataclass(frozen=True)
class Restored:
    """What a checkpoint says besides its tensors."""

    path: Path
    step: int
    """Steps done."""
    position: int
    """Sequences consumed."""
    notes: tuple[str, ...]
    """Remarks for the user: checkpoints passed over, settings that have changed since."""


def checkpoints_of(settings: Settings) -> Path:
    """Folder of a run's checkpoints."""
    return Path(settings.run.folder) / "checkpoints"


def save(settings: Settings, step: int, position: int, groups: Groups, text: str = "") -> Path:
    """Write a checkpoint of `step` steps done, then delete all but the newest `train.keep`.

    `text` says what the stream is of: `position` means another place in another text. Raises ValueError if the folder
    cannot be written or the ranks' hosts do not share it.
    """
    folder = checkpoints_of(settings)
    final = folder / f"step-{step:08d}"
    temporary = final.with_suffix(".tmp")
    rank = _rank()
    _together(lambda: _prepare(temporary, settings) if rank == 0 else None)
    _together(lambda: _require_shared(temporary, settings))
    writer = dcp.FileSystemWriter(temporary, single_file_per_rank=True, sync_files=True)
    _together(lambda: _quietly(dcp.save, _state(groups), storage_writer=writer), settings)
    mine: dict[str, list[int]] = {}
    _together(lambda: mine.update(_checksums(temporary)), settings)
    sums = {name: entry for part in _gather(mine) for name, entry in part.items()}
    meta = {
        "format": FORMAT, "step": step, "position": position, "text": text,
        "world": settings.world, "digest": digest(settings),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "network": LABELS.get(settings.train.transport, "real"), "config": stored(settings), "files": sums,
    }  # fmt: skip
    _together(lambda: _publish(temporary, final, meta, settings.train.keep) if rank == 0 else None, settings)
    return final


def restore(settings: Settings, groups: Groups, text: str = "") -> Restored | None:
    """Load the checkpoint that `run.resume` asks for into the tensors of `groups`; None if there is none to load.

    `auto` takes the newest checkpoint of the run that is not damaged. Whatever the run does not continue from is
    renamed, so that it is neither taken for this run's nor deleted. Raises ValueError if the checkpoint is missing or
    damaged, or belongs to another model.
    """
    _together(lambda: _remove_unfinished(checkpoints_of(settings)) if _rank() == 0 else None)
    restored = None if settings.run.resume == "off" else _find_and_load(settings, groups, text)
    _together(lambda: _set_others_aside(settings, restored) if _rank() == 0 else None)
    return restored


def _find_and_load(settings: Settings, groups: Groups, text: str) -> Restored | None:
    resume, notes = settings.run.resume, list[str]()
    if resume == "auto":
        candidates = _gather(_newest_first(checkpoints_of(settings)))[0]
    else:
        candidates = [Path(resume)]
    for path in candidates:
        damage = damage_of(path)
        if not damage:
            return _load(path, settings, groups, text, notes)
        if resume != "auto":
            fix = "name a complete checkpoint, such as runs/<name>/checkpoints/latest"
            raise ValueError(problem("run.resume", resume, settings.origins, damage, fix))
        notes.append(f"checkpoint {path} is damaged ({damage}) and was passed over")
    if candidates:
        reason = "; ".join(notes)
        fix = f"delete {checkpoints_of(settings)} or set run.resume = off to start over"
        raise ValueError(problem("run.resume", resume, settings.origins, reason, fix))
    return None


def damage_of(path: Path) -> str:
    """What is wrong with a checkpoint on disk, in a few words; empty if it is complete."""
    found = ""
    try:
        meta = json.loads((path / "meta.json").read_text())
        files = sorted(meta["files"].items())
        if not (
            _is_whole(meta["step"])
            and _is_whole(meta["position"])
            and meta["config"].keys()
            and ".metadata" in meta["files"]
        ):
            raise ValueError("incomplete")
        if meta["format"] != FORMAT:
            found = f"it has format {meta['format']}, and this version of hocket reads format {FORMAT}"
        # The ranks share the work of reading everything once.
        for name, entry in [] if found else files[_rank() :: _world()]:
            file = path / name
            if not file.exists():
                found = f"{file} is missing"
            elif file.stat().st_size != entry[0]:
                found = f"{file} has {file.stat().st_size:,} bytes instead of {entry[0]:,}"
            elif _checksum(file) != entry:
                found = f"the checksum of {file} is wrong"
    except FileNotFoundError:
        found = f"{path} is not a checkpoint: it has no meta.json" if path.exists() else f"{path} does not exist"
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        found = f"{path / 'meta.json'} cannot be read"
    return next((text for text in _gather(found) if text), "")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and value >= 0


def _set_others_aside(settings: Settings, restored: Restored | None) -> None:
    """Rename the checkpoints of an earlier run in this folder, or those behind the one that was loaded."""
    folder = checkpoints_of(settings)
    if restored is None or restored.path.resolve().parent != folder.resolve():
        set_aside(folder)
        if restored is not None:  # another run's: what was measured here does not belong to it
            set_aside(Path(settings.run.folder) / "metrics.jsonl")
        return
    current = restored.path.resolve()
    for path in _newest_first(folder):
        if path.name > current.name:
            set_aside(path)
    _link_latest(current)


def set_aside(path: Path) -> Path | None:
    """Rename a file or folder of an earlier run to `<name>.old`, `.old2`, ...; None if there is none. One rank only."""
    if not path.exists():
        return None
    names = [path.with_name(f"{path.name}.old{n if n > 1 else ''}") for n in range(1, 1000)]
    target = next(name for name in names if not name.exists())
    path.rename(target)
    return target


def _load(path: Path, settings: Settings, groups: Groups, text: str, notes: list[str]) -> Restored:
    meta = json.loads((path / "meta.json").read_text())
    reader = dcp.FileSystemReader(path)
    differences = _differences(reader, groups)
    if differences:
        sizes = [text for text in changes(meta["config"], settings) if text.startswith("model.")]
        reason = f"{path} belongs to another model: " + "; ".join([*sizes[:5], *differences[:3]])
        more = len(differences) - 3
        reason += f" and {more} more tensors" if more > 0 else ""
        fix = "the same model settings, another run.name, or run.resume = off to start over"
        raise ValueError(problem("run.resume", settings.run.resume, settings.origins, reason, fix))
    _together(lambda: _quietly(dcp.load, _state(groups), storage_reader=reader))
    relevant = list(told(meta["config"], settings))
    if meta.get("text", text) != text:
        relevant.append(f"the text was {meta['text']}, and is {text}: some of it will be read again, some never")
    notes += [f"since the checkpoint was written, {change}" for change in relevant]
    return Restored(path, meta["step"], meta["position"], tuple(notes))


def _differences(reader: dcp.FileSystemReader, groups: Groups) -> list[str]:
    """Tensors that only one side has, or that have different shapes. The same list on every rank."""
    saved = {
        name: tuple(entry.size)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    mine = {name: tuple(shard.shape) for name, shard in _state(groups).items()}
    wanted = {name: shape for part in _gather(mine) for name, shape in part.items()}
    return [
        f"{name} is {_shown(saved.get(name))} in the checkpoint and {_shown(wanted.get(name))} here"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]


def _shown(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else " x ".join(map(str, shape)) or "a number"


def _state(groups: Groups) -> dict[str, Any]:
    state = {
        f"{kind}.{piece.name}": FlatTensor(piece.tensor, piece.shape, piece.lo, piece.hi, part=piece.part)
        for kind, pieces in groups.items()
        for piece in pieces
    }
    assert len(state) == sum(map(len, groups.values())), "a rank gives one piece of a tensor"
    return state


def _quietly(call: Callable[..., object], *args: object, **options: object) -> None:
    """Call DCP without its warning that a single process means a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        call(*args, **options, no_dist=not dist.is_initialized())


def _prepare(temporary: Path, settings: Settings) -> None:
    try:
        _remove_unfinished(temporary.parent)
        temporary.mkdir(parents=True)
    except OSError as error:
        reason, fix = f"{temporary} cannot be created ({error.strerror})", "name a folder you can write to"
        raise ValueError(problem("run.folder", settings.run.folder, settings.origins, reason, fix)) from None


def _remove_unfinished(folder: Path) -> None:
    """Give back the room of saves that were interrupted. Nobody else writes here: a run holds its folder.

    What a save was about to replace comes back if nothing has taken its place yet.
    """
    for unfinished in folder.glob("step-*.tmp"):
        shutil.rmtree(unfinished, ignore_errors=True)
    for replaced in folder.glob("step-*.replaced"):
        if replaced.with_suffix("").exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(replaced.with_suffix(""))


def _require_shared(temporary: Path, settings: Settings) -> None:
    if not temporary.is_dir():
        reason = f"rank {_rank()} on {platform.node()} does not see {temporary}, which rank 0 has created"
        fix = "name a folder on a file system that all hosts share"
        raise ValueError(problem("run.folder", settings.run.folder, settings.origins, reason, fix))


def _publish(temporary: Path, final: Path, meta: Mapping[str, Any], keep: int) -> None:
    """Make a written checkpoint the newest one. Runs on rank 0."""
    with (temporary / "meta.json").open("w") as file:
        json.dump(meta, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_names(temporary)
    replaced = final.with_suffix(".replaced")
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    _link_latest(final)
    sync_names(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    for old in _newest_first(final.parent)[keep:]:
        shutil.rmtree(old, ignore_errors=True)


def _link_latest(path: Path) -> None:
    link = path.with_name("latest.tmp")
    link.unlink(missing_ok=True)
    link.symlink_to(path.name)
    link.replace(path.with_name("latest"))


def _newest_first(folder: Path) -> list[Path]:
    """Folders of checkpoints with their final names, by step."""
    return sorted((p for p in folder.glob("step-*") if p.is_dir() and not p.suffix), reverse=True)


def _checksums(folder: Path) -> dict[str, list[int]]:
    """Those of the files that this rank has written."""
    files = [folder / ".metadata"] if _rank() == 0 else []
    return {file.name: _checksum(file) for file in [*files, *sorted(folder.glob(f"__{_rank()}_*"))]}


def _checksum(file: Path) -> list[int]:
    """[size in bytes, CRC-32]."""
    size = total = 0
    with file.open("rb") as source:
        while block := source.read(1 << 24):
            size, total = size + len(block), zlib.crc32(block, total)
    return [size, total]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _gather(value: T) -> list[T]:
    """Every rank's value, in rank order."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * _world()
    dist.all_gather_object(values, value)
    return values


def _cause(error: BaseException) -> str:
    """Why DCP failed. Of a full disk torch's archives say only that what they had written is not there."""
    cut = isinstance(error, RuntimeError) and "inline_container" in str(error)
    return f"{'a file was cut short, ' if cut else ''}{type(error).__name__}: {error}"


def _failed(what: str, writing: Settings | None) -> str:
    if writing is None:
        return f"checkpoint: {what}"
    reason, fix = f"a checkpoint cannot be written: {what}", "make room there, or name another folder"
    return problem("run.folder", writing.run.folder, writing.origins, reason, fix)


def _together(action: Callable[[], object], writing: Settings | None = None) -> None:
    """Run an action on every rank; an error of any rank is raised on all of them, so that none waits in vain.

    `writing` are the settings of the run whose checkpoint the action writes, for the message. What it has written is
    removed then: on a full disk nothing else would find room, not even the next start of the run.
    """
    failure = ""
    try:
        action()
    except ValueError as error:
        failure = str(error)
    except CheckpointException as error:
        failure = _failed(_cause(next(iter(error.failures.values()))[0]), writing)
    except OSError as error:
        failure = _failed(str(error), writing)
    # The lowest rank's words, so that all ranks say the same.
    first = next((text for text in _gather(failure) if text), "")
    if first and writing is not None and _rank() == 0:
        _remove_unfinished(checkpoints_of(writing))
    if first:
        raise ValueError(first)
