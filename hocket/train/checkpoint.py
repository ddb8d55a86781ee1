"""Checkpoints of a run: written whole or not at all, readable on any number of ranks and any mesh.

    runs/<name>/checkpoints/
        step-00000100/       tensors in DCP's format (`*.distcp`, `.metadata`) and meta.json
        latest               link to the newest one

`meta.json` has the settings and the position of the stream. `.metadata` has a checksum of each range of elements, which
`CheckpointReader` compares before it loads anything. Note: [A checkpoint is there or it is not] explains how a folder
appears atomically.

All functions here are collective: every rank calls them with the same arguments. An error of one rank is raised on all.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hocket.config import LABELS, TrainConfig
from hocket.config.rule import problem
from hocket.config.schema import digest
from hocket.files import set_aside
from hocket.fsdp.saving.atomic_folder import clean_up, free, remove, shown
from hocket.fsdp.saving.background import Saving, saved, thread, wait_for_thread
from hocket.fsdp.saving.storage import METADATA, CheckpointReader, CheckpointWriter, write
from hocket.resolve import Settings
from hocket.runtime.world import by_first, everyone, rank_and_world, together
from hocket.step import STEP
from hocket.train.runs import changes, reported_changes, stored

if TYPE_CHECKING:
    from hocket.train.metrics import Metrics

# -- What a checkpoint says about itself -------------------------------------------------------------------------------

FORMAT = 2
"""Version of the format. Increase it whenever saved data changes its meaning."""

META = "meta.json"
"""The file that hocket adds to DCP's files."""

CHECK = "check"
"""Key of the checksum in `meta.json`, which covers all other keys."""


def damage_of(path: Path) -> str:
    """Why a checkpoint's metadata is damaged, in words; empty if it is not. The same on all ranks.

    Damage of tensors is found when they are read.
    """
    return next((text for text in everyone(_damage_seen(path)) if text), "")


def _damage_seen(path: Path) -> str:
    try:
        meta = json.loads((path / META).read_text())
        numbers = all(isinstance(meta[name], int) and meta[name] >= 0 for name in ("step", "position"))
        if not numbers or not meta["config"].keys():
            return f"{path / META} cannot be read"
        if meta["format"] != FORMAT:
            return f"it has format {meta['format']}, and this version of hocket reads format {FORMAT}"
        if meta[CHECK] != sealed(meta)[CHECK]:
            return f"the checksum of {path / META} is wrong"
    except FileNotFoundError:
        return f"{path} is not a checkpoint: it has no {META}" if path.exists() else f"{path} does not exist"
    except OSError as error:
        return f"{error.filename or path} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return f"{path / META} cannot be read"
    return "" if (path / METADATA).exists() else f"{path / METADATA} is missing"


def sealed(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `meta.json`, with a checksum of all its other keys."""
    said = {name: value for name, value in meta.items() if name != CHECK}
    read_back = json.loads(json.dumps(said))  # JSON turns numeric keys into text
    return {**said, CHECK: zlib.crc32(json.dumps(read_back, sort_keys=True).encode())}


# -- The folders of a run's checkpoints: their names, the newest one, and which are deleted ----------------------------

STEPS = "step-*"
"""Pattern of checkpoint folder names."""


def name_of(step: int) -> str:
    """Folder name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def newest_first(folder: Path) -> list[Path]:
    """Checkpoint folders with their final names, newest first. Other names are the user's: copies are not deleted."""
    found = (path for path in folder.glob(STEPS) if path.is_dir() and path == path.with_name(name_of(step_of(path))))
    return sorted(found, key=step_of, reverse=True)


def delete_old(checkpoints: Path, train: TrainConfig) -> None:
    """After a successful save, delete the checkpoints that `train.keep` does not keep. Runs on rank 0.

    Errors of the file system are ignored: the next save tries again.
    """
    with contextlib.suppress(OSError):
        kept = train.kept
        for old in newest_first(checkpoints)[kept["newest"] :]:
            if not kept["every"] or step_of(old) % kept["every"]:
                remove(old)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    digits = path.name.rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0


def newest_of(run: Path) -> Path:
    """The newest checkpoint in a run's folder; the folder itself if it has none, since it may be a checkpoint."""
    checkpoints = run / "checkpoints"
    return next((path for path in (*newest_first(checkpoints), checkpoints / "latest") if path.exists()), run)


def link(path: Path) -> None:
    """Point the link `latest` at a checkpoint.

    The link is for people: runs and commands go by the names of checkpoints. So a save succeeds even if the file system
    refuses links, but a link to an earlier checkpoint is removed.
    """
    latest, own = path.with_name("latest"), path.with_name("latest.tmp")
    if latest.resolve() == path.resolve():
        return
    try:
        if latest.is_dir() and not latest.is_symlink():
            set_aside(latest)  # copying a run's folder without links makes a folder of it
        own.unlink(missing_ok=True)
        own.symlink_to(path.name)
        own.replace(latest)
    except OSError:
        with contextlib.suppress(OSError):
            latest.unlink()


# -- checkpoint --------------------------------------------------------------------------------------------------------

TextUpTo = Callable[[int], str]
"""Describes the text that the stream reads, up to a position."""

OfRanks = dist.ProcessGroup | None
"""The process group of the ranks that communicate; None is all ranks."""

State = dict[str, Any]
"""This rank's part of the state, by key such as `model.embed.weight`. Several ranks may hold the same elements."""


class SaveFailed(ValueError):
    """The file system refused a checkpoint. Its files are removed, and earlier checkpoints are unchanged."""


class DamageError(Exception):
    """Damage of a checkpoint, found on all ranks before or while it is loaded."""


@dataclass(frozen=True)
class Restored:
    """The content of a checkpoint apart from its tensors."""

    path: Path
    step: int
    """Steps done."""
    position: int
    """Sequences consumed."""
    more: Mapping[str, Any]
    """Further values that the trainer saved."""
    notes: tuple[str, ...]
    """Remarks for the user: checkpoints skipped, settings changed since."""


def checkpoints_of(settings: Settings) -> Path:
    """Folder of a run's checkpoints."""
    return Path(settings.run.folder) / "checkpoints"


# -- save --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """What a checkpoint holds apart from tensors, the same on every rank."""

    step: int
    """Steps done."""
    position: int
    """Sequences consumed."""
    text: str = ""
    """Describes the stream's text up to `position`: in another text a position is another place."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further values, as JSON."""


def save(settings: Settings, moment: Moment, state: State, background: bool = False) -> Saving:
    """Write a checkpoint, then delete those that `train.keep` does not keep.

    With `background` it is written from a copy while training goes on (Note: [Saving while training goes on]).

    This function, or its `Saving`, raises on every rank. SaveFailed: the file system refuses, or has a checkpoint of
    that step; what was written is removed, to free a full disk. ValueError: one rank takes much longer than others.
    """
    path = checkpoints_of(settings) / name_of(moment.step)
    writer = CheckpointWriter(path, beside={META: json.dumps(meta_of(settings, moment), indent=1)})

    def write_it(state: State, group: OfRanks) -> Path:
        with in_time(settings, f"write the checkpoint of step {moment.step}"):
            try:
                write(state, writer, group)
            except (OSError, ValueError) as error:
                raise SaveFailed(_refused(settings, moment.step, state, error, group)) from None
            by_first(lambda: link(path), group)
        return path

    saving = saved(path, state, write_it, background, settings.train.hang_timeout)
    if rank_and_world()[0] == 0:
        thread().submit(lambda: saving.written and delete_old(path.parent, settings.train))
    if not background:
        with in_time(settings, "delete old checkpoints"):
            by_first(wait_for_thread)
    return saving


@contextlib.contextmanager
def in_time(settings: Settings, task: str) -> Iterator[None]:
    """Turn a rank's timeout while it waits for the others to do a task into a ValueError that names the setting."""
    try:
        yield
    except RuntimeError as error:  # from gloo: the other ranks may still be working
        if "Timed out" not in str(error):
            raise
        limit = settings.train.hang_timeout
        reason = f"a rank has waited longer than that for the others to {task}"
        raise ValueError(problem("train.hang_timeout", limit, settings.origins, reason, "a longer one")) from None


def meta_of(settings: Settings, moment: Moment) -> dict[str, Any]:
    """The content of `meta.json`."""
    return sealed({
        "format": FORMAT, "step": moment.step, "position": moment.position, "text": moment.text,
        "more": dict(moment.more), "world": settings.world, "digest": digest(settings),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "network": LABELS.get(settings.train.transport, "real"), "config": stored(settings),
    })  # fmt: skip


def _refused(settings: Settings, step: int, state: State, error: OSError | ValueError, group: OfRanks) -> str:
    """The message about a failed save: as rank 0 sees it after all ranks have removed their files."""
    size, folder = shown(size_of(state, group)), checkpoints_of(settings)
    place, reason, fix = folder / name_of(step), str(error), "a folder on a file system that all ranks share"
    if isinstance(error, OSError):
        fix = "make room there, or make it writable"
    elif place.exists():
        reason, fix = f"{place} is there already, and no checkpoint takes the place of another", "move it away"
    last = next((f"the last one is {path}" for path in newest_first(folder) if path != place), "there is no other one")
    reason = f"the checkpoint of step {step} ({size}) cannot be written: {reason}, and {last}"
    return everyone(problem_of(settings, reason, fix), group)[0]


def size_of(state: State, group: OfRanks = None) -> int:
    """Bytes of a checkpoint, over all ranks."""
    mine = {name: prod(shard.shape) * shard.dtype.itemsize for name, shard in state.items()}
    return sum({name: size for part in everyone(mine, group) for name, size in part.items()}.values())


# -- restore -----------------------------------------------------------------------------------------------------------


def resumes(settings: Settings) -> bool:
    """Whether a run loads a checkpoint (or is refused). Weights are then not initialised, even from `model.weights`."""
    if settings.run.resume == "off" or settings.train.transport == "null":
        return False
    return bool(_candidates(settings))


def restore(settings: Settings, state: State, text: TextUpTo = lambda _: "") -> Restored | None:
    """Load the checkpoint that `run.resume` asks for into the tensors of `state`. Returns None if there is none.

    `auto` takes the run's newest checkpoint that is not damaged. Checkpoints and metrics that the run does not continue
    from are renamed: they are not deleted, and later runs do not take them for this run's. Raises ValueError if the
    checkpoint is missing, damaged or of another model, or if the folder cannot be written.
    """
    _change_folder(settings, lambda: clean_up(checkpoints_of(settings), STEPS))
    restored = None if settings.run.resume == "off" else _find_and_load(settings, state, text)
    _change_folder(settings, lambda: _set_others_aside(settings, restored))
    return restored


def _change_folder(settings: Settings, action: Callable[[], object]) -> None:
    """Have rank 0 move checkpoints of earlier runs. The run holds the folder's lock, so no other run writes there."""
    try:
        by_first(action)
    except OSError as error:
        reason = f"the checkpoints of an earlier run there cannot be moved ({error})"
        raise ValueError(problem_of(settings, reason, "make it writable, or name another folder")) from None


def _find_and_load(settings: Settings, state: State, text: TextUpTo) -> Restored | None:
    resume, notes, candidates = settings.run.resume, list[str](), _candidates(settings)
    for path in candidates:
        damage = damage_of(path)
        if not damage:
            try:
                return _load(path, settings, state, text, notes)
            except DamageError as error:
                damage = str(error)
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
    """Checkpoints to try in order: the first undamaged one is loaded, unless `run.resume` is off."""
    resume = settings.run.resume
    return everyone(newest_first(checkpoints_of(settings)))[0] if resume == "auto" else [Path(resume)]


def _load(path: Path, settings: Settings, state: State, text: TextUpTo, notes: list[str]) -> Restored:
    meta, reader = json.loads((path / META).read_text()), CheckpointReader(path)
    try:
        stored = reader.shapes()
        differences = _differences(stored, state)
        if not differences:
            reader.load({name: value for name, value in state.items() if name in stored}, f"{path}: ")
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) and error.__cause__ is not None:  # not damaged: memory was short, for instance
            fix = "name another checkpoint, or start again if this may pass"
            raise ValueError(problem("run.resume", settings.run.resume, settings.origins, str(error), fix)) from error
        raise DamageError(" ".join(str(error).split())) from None
    if differences:
        sizes = [each for each in changes(meta["config"], settings) if each.startswith(("model.", "optimizer.name"))]
        reason = f"{path} belongs to another model or optimizer: " + "; ".join([*sizes[:5], *differences[:3]])
        more = len(differences) - 3
        reason += f" and {more} more tensors" if more > 0 else ""
        fix = "the same model settings, another run.name, or run.resume = off to start over"
        raise ValueError(problem("run.resume", settings.run.resume, settings.origins, reason, fix))
    wrote = meta["config"].get("run", {}).get("folder", "")
    if settings.run.resume == "auto" and wrote != settings.run.folder:
        notes.append(f"{path} was written by the run in {wrote}, and this run continues it")
    relevant = list(reported_changes(meta["config"], settings))
    now = text(meta["position"])
    if meta["text"] != now:
        relevant.append(f"the text was {meta['text']}, and is {now}: some of it will be read again, some never")
    notes += [f"since the checkpoint was written, {change}" for change in relevant]
    return Restored(path, meta["step"], meta["position"], meta["more"], tuple(notes))


def _differences(stored: Mapping[str, Any], state: State) -> list[str]:
    """Tensors that only one side has, or whose shapes differ. The same list on every rank.

    The state under `STEP` depends on settings: if a checkpoint lacks a part of it, that part starts afresh.
    """
    saved = {name: tuple(shape) for name, shape in stored.items() if isinstance(shape, torch.Size)}
    mine = {name: tuple(shard.shape) for name, shard in state.items()}
    wanted = {name: shape for part in everyone(mine) for name, shape in part.items()}
    names = {name for name in saved.keys() ^ wanted.keys() if not name.startswith(f"{STEP}.")}
    return [
        f"{name} is {_shape(saved.get(name))} in the checkpoint and {_shape(wanted.get(name))} here"
        for name in sorted(names | (saved.keys() & wanted.keys()))
        if saved.get(name) != wanted.get(name)
    ]


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else " x ".join(map(str, shape)) or "a number"


def _set_others_aside(settings: Settings, restored: Restored | None) -> None:
    """Rename the checkpoints of an earlier run in this folder, or those after the step that was loaded."""
    folder = checkpoints_of(settings)
    there = newest_first(folder)
    # A checkpoint of this run may be a link to where the user moved it, and `run.resume` may be such a link.
    loaded = restored.path.resolve() if restored else None
    own = next((path for path in there if path.resolve() == loaded), None)
    if restored is None or not own:
        if folder.exists() and any(folder.iterdir()):
            set_aside(folder)
        if restored is not None:  # loaded from another run: these metrics do not belong to it
            set_aside(Path(settings.run.folder) / "metrics.jsonl")
        return
    for path in there:
        if step_of(path) > restored.step and path != own:
            set_aside(path)
    before = [path for path in there if step_of(path) <= restored.step]
    if before:
        link(own or before[0])
    latest = folder / "latest"
    if latest.is_symlink() and not latest.exists():
        latest.unlink()


def problem_of(settings: Settings, reason: str, fix: str) -> str:
    """A message about the run's folder."""
    return problem("run.folder", settings.run.folder, settings.origins, reason, fix)


# -- room --------------------------------------------------------------------------------------------------------------
# Checked before training starts: whether the disk and the hosts' memory have room for what the run will save.


def make_place(settings: Settings, state: State) -> list[str]:
    """Create the folder of a run's checkpoints before training starts.

    Returns a remark if the disk has less room than the checkpoints need. Raises ValueError if the folder cannot be
    written, or if the hosts do not share it.
    """
    folder = checkpoints_of(settings)
    # Named like an unfinished checkpoint, so that a leftover is removed like one.
    here = folder / everyone(f"step-here-{platform.node()}-{time.time_ns()}.tmp")[0]
    try:
        by_first(lambda: here.mkdir(parents=True))
        together(lambda: _require_shared(here))
        by_first(here.rmdir)
    except (OSError, ValueError) as error:
        fix = "name a folder that you can write to, on a file system that all hosts share"
        raise ValueError(problem_of(settings, f"no place for checkpoints: {error}", fix)) from None
    size, there, available = size_of(state), len(newest_first(folder)), free(folder)
    train = settings.train
    saves = -(-train.steps // train.save_every) if train.save_every else 1
    more = max(1, min(_most(train), there + saves) - there)
    if more * size <= available:
        return []
    what = f"{more} more checkpoints" if more > 1 else "a checkpoint"
    text = f"{what} will take {shown(more * size)} there, and {shown(available)} are free"
    return [problem_of(settings, text, "make room before the first one")]


def _most(train: TrainConfig) -> int:
    """Largest number of checkpoints at a time, with the one being written."""
    kept = train.kept
    for_good = train.steps // math.lcm(kept["every"], train.save_every or train.steps) if kept["every"] else 0
    return kept["newest"] + for_good + 1


def require_memory(settings: Settings, offloaded: int, copies: int, available: int) -> str:
    """Check that each host has memory for its ranks, given the `available` bytes.

    `offloaded` and `copies` are bytes of this rank: what steps offload, and copies for saving in the background.
    Returns a remark, the same on every rank, if a host lacks memory for the copies: training then waits during saves.
    Raises ValueError on every rank if it lacks memory for offloading.
    """
    ranks, without = everyone((platform.node(), offloaded, copies, available)), ""
    for host in dict.fromkeys(name for name, *_ in ranks):
        of_host = [rank for rank in ranks if rank[0] == host]
        offload_bytes, copy_bytes = sum(rank[1] for rank in of_host), sum(rank[2] for rank in of_host)
        room = min(rank[3] for rank in of_host)
        left = f"{shown(room)} of its memory are available"
        if offload_bytes > room:
            reason = f"offloaded tensors of {host}'s ranks take {shown(offload_bytes)}, and {left}"
            fix = "fewer parts or layers, such as attn:2, or plan.recompute"
            raise ValueError(problem("plan.offload", settings.plan.offload, settings.origins, reason, fix))
        if copy_bytes and offload_bytes + copy_bytes > room:
            what = "copies and offloaded tensors" if offload_bytes else "copies"
            without = (
                f"training waits while checkpoints are written: {what} of {host}'s ranks, with which it would go on, "
                f"take {shown(offload_bytes + copy_bytes)}, and {left}"
            )
    return without


def _require_shared(here: Path) -> None:
    if not here.exists():
        rank, _ = rank_and_world()
        raise ValueError(f"rank {rank} on {platform.node()} does not see {here}, which rank 0 has created")


# -- saves -------------------------------------------------------------------------------------------------------------


class Saves:
    """The checkpoints of one run, which has done `step` steps. Every rank calls its methods alike.

    `state` and `moment` return what to save at the time of the call. With `background` a checkpoint is written from a
    copy in host memory while training goes on.

    A full disk does not end the run between two saves: that would lose all progress since the last checkpoint, and
    there may be room by the next save. The last save of a run has no next one, so it raises.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        step: int,
        state: Callable[[], State],
        moment: Callable[[], Moment],
        background: bool = True,
    ) -> None:
        self.settings, self._metrics, self._background = settings, metrics, background
        self._state, self._moment = state, moment
        self._saved = step
        self._under_way: tuple[int, Saving] | None = None

    def look(self) -> None:
        """Report a background save that has ended. Ranks may notice at different steps."""
        if self._under_way is not None and self._under_way[1].done():
            self._wait_for_checkpoint()

    def wait(self) -> None:
        """Wait until the background save has ended, and report it."""
        self._wait_for_checkpoint()
        wait_for_thread()  # which deletes old checkpoints

    def _wait_for_checkpoint(self) -> None:
        if self._under_way is None:
            return
        (step, saving), self._under_way = self._under_way, None
        try:
            path = saving.result()
        except SaveFailed as error:
            self._warn(error, step + self.settings.train.save_every)
            return
        self._is_saved(step, path, saving.copy_seconds, saving.write_seconds)

    def _is_saved(self, step: int, path: Path, copy_seconds: float, write_seconds: float) -> None:
        self._saved = step
        self._metrics.saved(step, path, copy_seconds, write_seconds)

    def between(self, step: int) -> None:
        """After step `step`, save if due. Waits for the previous save, and without `background` for this one."""
        every = self.settings.train.save_every
        if not every or step % every:
            return
        moment = self._moment()
        if self._under_way is not None and not self._under_way[1].done():
            before = self._under_way[0]
            self._metrics.say(
                f"note     step {moment.step} waits until the checkpoint of step {before} is written: a longer "
                "train.save_every, or a faster disk, would spare that"
            )
        self._wait_for_checkpoint()
        if self._background:
            self._under_way = moment.step, save(self.settings, moment, self._state(), background=True)
            return
        try:
            self._now(moment)
        except SaveFailed as error:
            self._warn(error, moment.step + every)

    def last(self) -> str:
        """Save at the end of a run what is not saved yet. Returns the path, or an empty string. Raises SaveFailed."""
        self.wait()
        moment = self._moment()
        return str(self._now(moment)) if self._saved != moment.step else ""

    def _now(self, moment: Moment) -> Path:
        begun = time.perf_counter()
        path = save(self.settings, moment, self._state()).result()
        self._is_saved(moment.step, path, 0.0, time.perf_counter() - begun)
        return path

    def _warn(self, error: SaveFailed, step: int) -> None:
        again = min(step, self.settings.train.steps)
        self._metrics.say(f"WARNING  {error}; the run goes on, and saves again after step {again}")
