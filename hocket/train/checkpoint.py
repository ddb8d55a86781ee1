"""Checkpoints of a run: written whole or not at all, readable on any number of ranks and any mesh.

    runs/<name>/checkpoints/
        step-00000100/       tensors in DCP's format (`*.distcp`, `.metadata`) and meta.json
        latest               link to the newest one

`meta.json` has the settings, the position of the stream, and size and checksum of every file (`train/damage.py`). How a
folder appears whole is Note: [A checkpoint is there or it is not].

All functions here are collective: every rank calls them with the same arguments. An error of one rank is raised
on all.
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hocket.config import LABELS
from hocket.fsdp.saving import background
from hocket.fsdp.saving.background import Saving
from hocket.fsdp.saving.dcp import CheckpointWriter, run_dcp
from hocket.fsdp.saving.flat_tensor import FlatTensor
from hocket.fsdp.saving.harmless import HarmlessPlanner, HarmlessReader
from hocket.fsdp.saving.whole import WholeFolder, clean_up, free, shown, sync
from hocket.resolve import Settings
from hocket.runtime.world import by_first, everyone, rank_and_world
from hocket.settings.schema import digest, problem
from hocket.train.changes import changes, stored, told
from hocket.train.damage import FORMAT, META, damage_of, sealed
from hocket.train.folders import STEPS, delete_old, link, name_of, newest_first, set_aside, step_of
from hocket.train.owner import whose
from hocket.train.pieces import Range

TextUpTo = Callable[[int], str]
"""What the stream is of, up to a position."""

OfRanks = dist.ProcessGroup | None
"""The ranks that talk to each other; None is all of them."""

Groups = Mapping[str, Sequence[Range]]
"""This rank's part of the state by kind: `weight`, `exp_avg`, `exp_avg_sq`, ... Replicas may be given by every rank."""


class SaveFailed(ValueError):
    """The file system has refused a checkpoint. Nothing of it is left. Earlier checkpoints are unchanged."""


@dataclass(frozen=True)
class Restored:
    """The content of a checkpoint beside its tensors."""

    path: Path
    step: int
    """Steps done."""
    position: int
    """Sequences consumed."""
    more: Mapping[str, Any]
    """What else was given to be saved; nothing in checkpoints of before there was any."""
    notes: tuple[str, ...]
    """Remarks for the user: checkpoints passed over, settings that have changed since."""


def checkpoints_of(settings: Settings) -> Path:
    """Folder of a run's checkpoints."""
    return Path(settings.run.folder) / "checkpoints"


# --------------------------------------------------------------------------------------------------------------- save


@dataclass(frozen=True)
class Moment:
    """What a checkpoint holds beside tensors, the same on every rank."""

    step: int
    """Steps done."""
    position: int
    """Sequences consumed."""
    text: str = ""
    """What the stream is of, up to `position`, which means another place in another text."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """JSON. `held_out` in it is the loss by which `train.keep` finds the best."""


def save(settings: Settings, moment: Moment, groups: Groups) -> Path:
    """Write a checkpoint, then delete those that `train.keep` does not keep.

    Raises SaveFailed if the file system refuses, or if there is one of that step; what it has written is removed then,
    for on a full disk nothing else would find room. ValueError if it takes some rank much longer than others.
    """
    folder = _folder_of(settings, moment)
    path = _write(settings, moment, state_of(groups), CheckpointWriter(folder, publishes=False), None)
    with in_time(settings, "delete old checkpoints"):
        by_first(lambda: delete_old(path.parent, settings.train))
    return path


def save_behind(settings: Settings, moment: Moment, groups: Groups) -> Saving:
    """The same from a copy, while training goes on. See Note: [Saving while training goes on].

    What is returned raises what `save` raises, on every rank. The thread of rank 0 deletes once the folder is there.
    """
    folder = _folder_of(settings, moment)
    writer = CheckpointWriter(folder, publishes=False)
    saving = background.save_behind(
        folder.final,
        state_of(groups),
        lambda copied, group: _write(settings, moment, copied, writer, group),
        timeout=settings.train.hang_timeout,
    )
    if rank_and_world()[0] == 0:
        background.thread().submit(lambda: saving.written and delete_old(folder.final.parent, settings.train))
    return saving


def _folder_of(settings: Settings, moment: Moment) -> WholeFolder:
    return WholeFolder(checkpoints_of(settings) / name_of(moment.step))


def _write(
    settings: Settings, moment: Moment, state: Mapping[str, FlatTensor], writer: CheckpointWriter, group: OfRanks
) -> Path:
    """Write a checkpoint. What ranks send each other goes over a group, or that of all ranks."""
    folder = writer.folder
    with in_time(settings, f"write the checkpoint of step {moment.step}"):
        try:
            run_dcp("", dcp.save, state, storage_writer=writer, process_group=group)
            meta = meta_of(settings, moment, everyone(writer.sums, group))
            by_first(lambda: _publish(folder, meta, settings.train.kept["best"]), group)
        except (OSError, ValueError) as error:
            writer.give_up()
            raise SaveFailed(_refused(settings, moment.step, state, error, group)) from None
    return folder.final


@contextlib.contextmanager
def in_time(settings: Settings, task: str) -> Iterator[None]:
    """Name the setting where a rank gives up to wait until others have done a task. Raises ValueError."""
    try:
        yield
    except RuntimeError as error:  # of gloo: the others may still be at it
        if "Timed out" not in str(error):
            raise
        limit = settings.train.hang_timeout
        reason = f"a rank has waited longer than that for the others to {task}"
        raise ValueError(problem("train.hang_timeout", limit, settings.origins, reason, "a longer one")) from None


def meta_of(settings: Settings, moment: Moment, sums: Iterable[Mapping[str, list[int]]]) -> dict[str, Any]:
    """What `meta.json` has. `sums` are checksums of files, by rank."""
    return sealed({
        "format": FORMAT, "step": moment.step, "position": moment.position, "text": moment.text,
        "more": dict(moment.more), "world": settings.world, "digest": digest(settings),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "network": LABELS.get(settings.train.transport, "real"), "config": stored(settings),
        "files": {name: entry for part in sums for name, entry in part.items()},
    })  # fmt: skip


def _publish(folder: WholeFolder, meta: Mapping[str, Any], keep_best: int) -> None:
    """Make a written checkpoint the newest one, and name the best one. Runs on rank 0."""
    (folder.temporary / META).write_text(json.dumps(meta, indent=1))
    sync(folder.temporary / META)
    folder.publish()
    link(folder.final, keep_best)


def _refused(
    settings: Settings, step: int, state: Mapping[str, FlatTensor], error: OSError | ValueError, group: OfRanks
) -> str:
    """The message about a save that has failed: what rank 0 sees once all have removed what they wrote."""
    size, folder = shown(size_of(state, group)), checkpoints_of(settings)
    place, reason, fix = folder / name_of(step), str(error), "a folder on a file system that all ranks share"
    if isinstance(error, OSError):
        reason, fix = f"{error}; {shown(free(folder))} are free there", "make room there, or make it writable"
    elif place.exists():
        reason, fix = f"{place} is there already, and no checkpoint takes the place of another", "move it away"
    last = next((f"the last one is {path}" for path in newest_first(folder) if path != place), "there is no other one")
    reason = f"the checkpoint of step {step} ({size}) cannot be written: {reason}, and {last}"
    return everyone(problem_of(settings, reason, fix), group)[0]


def size_of(state: Mapping[str, FlatTensor], group: OfRanks = None) -> int:
    """Bytes of a checkpoint, of all ranks."""
    mine = {name: prod(shard.shape) * shard.dtype.itemsize for name, shard in state.items()}
    return sum({name: size for part in everyone(mine, group) for name, size in part.items()}.values())


# ------------------------------------------------------------------------------------------------------------ restore


def resumes(settings: Settings) -> bool:
    """Whether a run loads a checkpoint, or is refused: then it needs no first values, whatever `model.weights` says."""
    if settings.run.resume == "off" or settings.train.transport == "null":
        return False
    return bool(_candidates(settings))


def restore(settings: Settings, groups: Groups, text: TextUpTo = lambda _: "") -> Restored | None:
    """Load the checkpoint that `run.resume` asks for into the tensors of `groups`; None if there is none to load.

    `auto` takes the newest checkpoint of the run that is not damaged. Whatever the run does not continue from is
    renamed, so that it is neither taken for this run's nor deleted. Raises ValueError if the checkpoint is missing or
    damaged, or belongs to another model, or if the folder cannot be written.
    """
    _change_folder(settings, lambda: clean_up(checkpoints_of(settings), STEPS))
    restored = None if settings.run.resume == "off" else _find_and_load(settings, groups, text)
    _change_folder(settings, lambda: _set_others_aside(settings, restored))
    return restored


def _change_folder(settings: Settings, action: Callable[[], object]) -> None:
    """Have rank 0 move checkpoints of earlier runs. No other run writes there: a run locks its folder."""
    try:
        by_first(action)
    except OSError as error:
        reason = f"the checkpoints of an earlier run there cannot be moved ({error})"
        raise ValueError(problem_of(settings, reason, "make it writable, or name another folder")) from None


def _find_and_load(settings: Settings, groups: Groups, text: TextUpTo) -> Restored | None:
    resume, notes, candidates = settings.run.resume, list[str](), _candidates(settings)
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


def _candidates(settings: Settings) -> list[Path]:
    """Checkpoints of which the first whole one is loaded, unless `run.resume` is off."""
    resume = settings.run.resume
    return everyone(newest_first(checkpoints_of(settings)))[0] if resume == "auto" else [Path(resume)]


def _load(path: Path, settings: Settings, groups: Groups, text: TextUpTo, notes: list[str]) -> Restored:
    meta = json.loads((path / META).read_text())
    notes += whose(settings, path, meta)
    reader, planner = HarmlessReader(path), HarmlessPlanner()
    try:
        differences = _differences(reader, groups)
    except ValueError as error:
        fix = "name a checkpoint that hocket wrote"
        raise ValueError(problem("run.resume", settings.run.resume, settings.origins, str(error), fix)) from None
    if differences:
        sizes = [each for each in changes(meta["config"], settings) if each.startswith(("model.", "optimizer.name"))]
        reason = f"{path} belongs to another model or optimizer: " + "; ".join([*sizes[:5], *differences[:3]])
        more = len(differences) - 3
        reason += f" and {more} more tensors" if more > 0 else ""
        fix = "the same model settings, another run.name, or run.resume = off to start over"
        raise ValueError(problem("run.resume", settings.run.resume, settings.origins, reason, fix))
    try:
        run_dcp(f"{path} cannot be read: ", dcp.load, state_of(groups), storage_reader=reader, planner=planner)
    except (OSError, ValueError) as error:
        fix = "name another checkpoint, or start again if this may pass"
        raise ValueError(problem("run.resume", settings.run.resume, settings.origins, str(error), fix)) from error
    relevant = list(told(meta["config"], settings))
    now = text(meta["position"])
    if meta.get("text", now) != now:
        relevant.append(f"the text was {meta['text']}, and is {now}: some of it will be read again, some never")
    notes += [f"since the checkpoint was written, {change}" for change in relevant]
    return Restored(path, meta["step"], meta["position"], meta.get("more", {}), tuple(notes))


def _differences(reader: HarmlessReader, groups: Groups) -> list[str]:
    """Tensors that only one side has, or that have different shapes. The same list on every rank."""
    saved = {
        name: tuple(entry.size)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    mine = {name: tuple(shard.shape) for name, shard in state_of(groups).items()}
    wanted = {name: shape for part in everyone(mine) for name, shape in part.items()}
    return [
        f"{name} is {_shape(saved.get(name))} in the checkpoint and {_shape(wanted.get(name))} here"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else " x ".join(map(str, shape)) or "a number"


def _set_others_aside(settings: Settings, restored: Restored | None) -> None:
    """Rename the checkpoints of an earlier run in this folder, or those behind the one that was loaded."""
    folder = checkpoints_of(settings)
    there = newest_first(folder)
    # A checkpoint of this run may be a link to where somebody has moved it, and `run.resume` may be a link to it.
    loaded = restored.path.resolve() if restored else None
    own = next((path for path in there if path.resolve() == loaded), None)
    if restored is None or not own:
        if folder.exists() and any(folder.iterdir()):
            set_aside(folder)
        if restored is not None:  # another run's: what was measured here does not belong to it
            set_aside(Path(settings.run.folder) / "metrics.jsonl")
        return
    for path in there:
        if step_of(path) > restored.step and path != own:
            set_aside(path)
    before = [path for path in there if step_of(path) <= restored.step]
    if before:
        link(own or before[0])
    for name in ("latest", "best"):
        named = folder / name
        if named.is_symlink() and not named.exists():
            named.unlink()


# --------------------------------------------------------------------------------------------------------------- both


def state_of(groups: Groups) -> dict[str, FlatTensor]:
    """As DCP takes it."""
    state = {
        f"{kind}.{piece.name}": FlatTensor(piece.tensor, piece.shape, piece.lo, piece.hi, part=piece.part)
        for kind, pieces in groups.items()
        for piece in pieces
    }
    assert len(state) == sum(map(len, groups.values())), "a rank gives one piece of a tensor"
    return state


def problem_of(settings: Settings, reason: str, fix: str) -> str:
    return problem("run.folder", settings.run.folder, settings.origins, reason, fix)
