"""Checkpoints of a run: written whole or not at all, readable on any number of ranks and any mesh.

    runs/<name>/checkpoints/
        step-00000100/       tensors in DCP's format (`*.distcp`, `.metadata`) and meta.json
        latest               link to the newest one

`meta.json` has the settings, the position of the stream, and size and checksum of every file (`damage_of`). How a
folder appears whole is Note: [A checkpoint is there or it is not].

All functions here are collective: every rank calls them with the same arguments. An error of one rank is raised
on all.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hocket.config import LABELS, TrainConfig
from hocket.files import inside
from hocket.fsdp.saving import background
from hocket.fsdp.saving.atomic_folder import FILES, AtomicFolder, checksum, clean_up, free, remove, shown, sync
from hocket.fsdp.saving.background import Saving
from hocket.fsdp.saving.checkpoint import METADATA, CheckpointWriter, HarmlessPlanner, HarmlessReader, run_dcp
from hocket.fsdp.saving.inventory import FlatTensor
from hocket.layers.slices import Part, Span
from hocket.resolve import Settings
from hocket.runtime.world import by_first, everyone, rank_and_world
from hocket.settings.schema import digest, problem
from hocket.train.runs import changes, identity, stored, told

# -- What a checkpoint of a run is made of: ranges of the elements of named tensors ------------------------------------


@dataclass(frozen=True)
class Range:
    """Elements `[lo, hi)` of a named tensor of the whole model, flattened row by row.

    `tensor` holds them: one dimension, `hi - lo` elements. A scalar's shape is `()` and its one element is `[0, 1)`.
    With a `part`, these are elements of that part of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    lo: int
    hi: int
    tensor: Tensor
    part: Part | None = None


# -- owner -------------------------------------------------------------------------------------------------------------
# Whose a checkpoint is.
#
# Note: [A run has a number]
# A run's folder has a random number, in `about.json`, and so has each checkpoint of the run. A folder of checkpoints
# that somebody has copied from another run's folder would continue that run under this one's name, behind its metrics.
# So `run.resume = auto` refuses a checkpoint with another number. A folder without a number takes that of the
# checkpoint: somebody has moved it there, and the run says so. Checkpoints of before there were numbers have none.

RUN = "run"
"""The key of a run's number in what a checkpoint holds beside tensors."""


def whose(settings: Settings, path: Path, meta: Mapping[str, Any]) -> list[str]:
    """What to say of whose checkpoint `run.resume = auto` has found; `meta` is its `meta.json`.

    Raises ValueError, on every rank, if it is another run's.
    """
    if settings.run.resume != "auto":
        return []
    mine, its = _number(settings), meta.get("more", {}).get(RUN, "")
    there = meta["config"].get("run", {}).get("folder", "")
    if mine and its and mine != its:
        reason = f"{path} is a checkpoint of another run, which wrote it into {there}"
        fix = f"move it away; another run.name and run.resume = {path} begin a new run with it"
        raise ValueError(problem("run.resume", "auto", settings.origins, reason, fix))
    known = bool(mine and its) or there == settings.run.folder
    return [] if known else [f"{path} was written by the run in {there}, and this run continues it"]


def number_for(settings: Settings, found: str) -> str:
    """The number of a run that begins or continues, the same on every rank; `found` is that of what it continues."""
    return _number(settings) or found or everyone(secrets.token_hex(8))[0]


def _number(settings: Settings) -> str:
    return everyone(identity(Path(settings.run.folder)))[0]


# -- What a checkpoint on disk should be, by the sizes and checksums in its `meta.json`, and what is wrong with it -----

FORMAT = 1
"""Number of the format. It changes whenever saved data changes its meaning."""

META = "meta.json"
"""The file that hocket adds to those of DCP."""

CHECK = "check"
"""The key in `meta.json` of the checksum of all else that it says."""


def damage_of(path: Path) -> str:
    """The damage of a checkpoint on disk, in a few words; empty if it is complete. The same on all ranks."""
    return next((text for text in everyone(_damage_seen(path)) if text), "")


def _damage_seen(path: Path) -> str:
    """The damage that this rank sees. The ranks share the work of reading everything once."""
    try:
        meta = json.loads((path / META).read_text())
        if not is_complete(meta):
            return f"{path / META} cannot be read"
        if meta["format"] != FORMAT:
            return f"it has format {meta['format']}, and this version of hocket reads format {FORMAT}"
        if not is_sealed(meta):
            return f"the checksum of {path / META} is wrong"
        rank, world = rank_and_world()
        mine = sorted(meta["files"].items())[rank::world]
        with ThreadPoolExecutor(FILES) as pool:
            return next(
                filter(None, pool.map(lambda each: damage_of_file(inside(path / META, each[0]), each[1]), mine)), ""
            )
    except FileNotFoundError:
        return f"{path} is not a checkpoint: it has no {META}" if path.exists() else f"{path} does not exist"
    except OSError as error:
        return f"{error.filename or path} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return f"{path / META} cannot be read"


def sealed(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What `meta.json` says, with its own checksum."""
    return {**meta, CHECK: _check(meta)}


def is_sealed(meta: Mapping[str, Any]) -> bool:
    """Whether a `meta.json` says what was written. Those of before there was a checksum are believed."""
    return CHECK not in meta or meta[CHECK] == _check({name: meta[name] for name in meta if name != CHECK})


def _check(meta: Mapping[str, Any]) -> int:
    read_back = json.loads(json.dumps(meta))  # keys that are numbers are text in a file
    return zlib.crc32(json.dumps(read_back, sort_keys=True).encode())


def is_complete(meta: Any) -> bool:
    """Whether a `meta.json` has what a run goes on from. What it lacks altogether raises an error of Python."""
    whole = all(isinstance(meta[name], int) and meta[name] >= 0 for name in ("step", "position"))
    return whole and bool(meta["config"].keys()) and METADATA in meta["files"]


def damage_of_file(file: Path, entry: list[int]) -> str:
    """The same of one file with tensors, which should have this size and checksum. Raises OSError."""
    if not file.exists():
        return f"{file} is missing"
    size = file.stat().st_size
    if size != entry[0]:
        return f"{file} has {size:,} bytes instead of {entry[0]:,}"
    return "" if list(checksum(file)) == entry else f"the checksum of {file} is wrong"


# -- The folders of a run's checkpoints: their names, which is the newest and the best, and which are deleted ----------

STEPS = "step-*"
"""Names of checkpoints, as a pattern."""


def name_of(step: int) -> str:
    """The name of a checkpoint of so many steps."""
    return f"step-{step:08d}"


def newest_first(folder: Path) -> list[Path]:
    """Folders of checkpoints with their final names, by step. Other names are somebody else's: no copy is deleted."""
    found = (path for path in folder.glob(STEPS) if path.is_dir() and path == path.with_name(name_of(step_of(path))))
    return sorted(found, key=step_of, reverse=True)


def delete_old(checkpoints: Path, train: TrainConfig) -> None:
    """Delete the checkpoints that are not to be kept, behind a save that went well. Runs on rank 0.

    What the file system refuses is no error: the next save tries again.
    """
    with contextlib.suppress(OSError):
        there = newest_first(checkpoints)
        kept = train.kept
        best = best_first(there)[: kept["best"]] if kept["best"] else []
        for old in set(there[kept["newest"] :]) - set(best):
            if not kept["every"] or step_of(old) % kept["every"]:
                remove(old)


def best_first(there: Sequence[Path]) -> list[Path]:
    """Checkpoints with a held-out loss, the lowest first, and of equal ones the earliest."""
    losses = {path: _held_out(path) for path in there}
    return sorted((path for path in there if losses[path] < math.inf), key=lambda path: (losses[path], path.name))


def _held_out(path: Path) -> float:
    """The held-out loss of a checkpoint; infinite if it has none, or cannot be read."""
    try:
        loss = json.loads((path / META).read_text())["more"].get("held_out")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return math.inf
    return loss if isinstance(loss, float) and math.isfinite(loss) else math.inf


def step_of(path: Path) -> int:
    """How many steps a checkpoint has by its name."""
    digits = path.name.rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0


def newest_of(run: Path) -> Path:
    """The newest checkpoint in the folder of a run; the folder itself if it has none, for it may be a checkpoint."""
    checkpoints = run / "checkpoints"
    return next((path for path in (*newest_first(checkpoints), checkpoints / "latest") if path.exists()), run)


def link(path: Path, keep_best: int = 0) -> None:
    """Have `latest` stand for a checkpoint, and with `keep_best` the name `best` for the best one beside it.

    A link is for people: runs and commands go by the names of checkpoints. So a file system that refuses one fails no
    save, but no link stays that stands for an earlier checkpoint. `unlinked` says what is missing.
    """
    stands = {"latest": path}
    if keep_best and (best := best_first(newest_first(path.parent))):
        stands["best"] = best[0]
    for name, checkpoint in stands.items():
        if checkpoint.with_name(name).resolve() == checkpoint.resolve():
            continue
        try:
            _link(name, checkpoint)
        except OSError:
            with contextlib.suppress(OSError):
                checkpoint.with_name(name).unlink()


def unlinked(path: Path) -> str:
    """Why the newest checkpoint is not found by its link, in words; nothing if it is."""
    latest = path.with_name("latest")
    if latest.resolve() == path.resolve():
        return ""
    return f"{path} is whole, but the file system takes no link {latest}; give commands the folder of the run"


def _link(name: str, path: Path) -> None:
    if path.with_name(name).is_dir() and not path.with_name(name).is_symlink():
        set_aside(path.with_name(name))  # what a copy of the run's folder without links has made of it
    own = path.with_name(f"{name}.tmp")
    own.unlink(missing_ok=True)
    own.symlink_to(path.name)
    own.replace(path.with_name(name))


def set_aside(path: Path) -> Path | None:
    """Rename a file or folder of an earlier run to `<name>.old`, `.old2`, ...; None if there is none. One rank only."""
    if not path.exists():
        return None
    names = [path.with_name(f"{path.name}.old{n if n > 1 else ''}") for n in range(1, 1000)]
    target = next(name for name in names if not name.exists())
    path.rename(target)
    return target


# -- checkpoint --------------------------------------------------------------------------------------------------------

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


def _folder_of(settings: Settings, moment: Moment) -> AtomicFolder:
    return AtomicFolder(checkpoints_of(settings) / name_of(moment.step))


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


def _publish(folder: AtomicFolder, meta: Mapping[str, Any], keep_best: int) -> None:
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
        f"{kind}.{piece.name}": FlatTensor(piece.tensor, Span(tuple(piece.shape), piece.lo, piece.hi, piece.part))
        for kind, pieces in groups.items()
        for piece in pieces
    }
    assert len(state) == sum(map(len, groups.values())), "a rank gives one piece of a tensor"
    return state


def problem_of(settings: Settings, reason: str, fix: str) -> str:
    return problem("run.folder", settings.run.folder, settings.origins, reason, fix)
