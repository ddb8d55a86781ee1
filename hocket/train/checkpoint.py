"""Checkpoints of a run: written whole or not at all, readable on any number of ranks and any mesh.

    runs/<name>/checkpoints/
        step-00000100/       tensors in DCP's format (`*.distcp`, `.metadata`) and meta.json
        latest               link to the newest one

`meta.json` has the settings and the position of the stream; `.metadata` has a checksum of each range of elements, which
is compared before anything is loaded (`CheckpointReader`). How a folder appears whole is Note: [A checkpoint is there
or it is not].

All functions here are collective: every rank calls them with the same arguments. An error of one rank is raised
on all.
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
from hocket.train.runs import changes, stored, told

if TYPE_CHECKING:
    from hocket.train.metrics import Metrics

# -- What a checkpoint says about itself -------------------------------------------------------------------------------

FORMAT = 2
"""Number of the format. It changes whenever saved data changes its meaning."""

META = "meta.json"
"""The file that hocket adds to those of DCP."""

CHECK = "check"
"""The key in `meta.json` of the checksum of all else that it says."""


def damage_of(path: Path) -> str:
    """What is wrong with what a checkpoint says about itself, in words; empty if nothing is. The same on all ranks.

    Damaged tensors are found when they are read.
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
    """What `meta.json` says, with the checksum of all else that it says."""
    said = {name: value for name, value in meta.items() if name != CHECK}
    read_back = json.loads(json.dumps(said))  # keys that are numbers are text in a file
    return {**said, CHECK: zlib.crc32(json.dumps(read_back, sort_keys=True).encode())}


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
    """Delete the checkpoints that are not to be kept, after a save that went well. Runs on rank 0.

    What the file system refuses is no error: the next save tries again.
    """
    with contextlib.suppress(OSError):
        kept = train.kept
        for old in newest_first(checkpoints)[kept["newest"] :]:
            if not kept["every"] or step_of(old) % kept["every"]:
                remove(old)


def step_of(path: Path) -> int:
    """How many steps a checkpoint has by its name."""
    digits = path.name.rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0


def newest_of(run: Path) -> Path:
    """The newest checkpoint in the folder of a run; the folder itself if it has none, for it may be a checkpoint."""
    checkpoints = run / "checkpoints"
    return next((path for path in (*newest_first(checkpoints), checkpoints / "latest") if path.exists()), run)


def link(path: Path) -> None:
    """Have `latest` stand for a checkpoint.

    A link is for people: runs and commands go by the names of checkpoints. So a file system that refuses one fails no
    save, but no link stays that stands for an earlier checkpoint.
    """
    latest, own = path.with_name("latest"), path.with_name("latest.tmp")
    if latest.resolve() == path.resolve():
        return
    try:
        if latest.is_dir() and not latest.is_symlink():
            set_aside(latest)  # what a copy of the run's folder without links has made of it
        own.unlink(missing_ok=True)
        own.symlink_to(path.name)
        own.replace(latest)
    except OSError:
        with contextlib.suppress(OSError):
            latest.unlink()


# -- checkpoint --------------------------------------------------------------------------------------------------------

TextUpTo = Callable[[int], str]
"""What the stream is of, up to a position."""

OfRanks = dist.ProcessGroup | None
"""The ranks that talk to each other; None is all of them."""

State = dict[str, Any]
"""This rank's part of the state, by key such as `model.embed.weight`. Ranks may give the same elements."""


class SaveFailed(ValueError):
    """The file system has refused a checkpoint. Nothing of it is left. Earlier checkpoints are unchanged."""


class DamageError(Exception):
    """What a checkpoint has lost, found on all ranks before or while it is loaded."""


@dataclass(frozen=True)
class Restored:
    """The content of a checkpoint beside its tensors."""

    path: Path
    step: int
    """Steps done."""
    position: int
    """Sequences consumed."""
    more: Mapping[str, Any]
    """What else was given to be saved."""
    notes: tuple[str, ...]
    """Remarks for the user: checkpoints passed over, settings that have changed since."""


def checkpoints_of(settings: Settings) -> Path:
    """Folder of a run's checkpoints."""
    return Path(settings.run.folder) / "checkpoints"


# -- save --------------------------------------------------------------------------------------------------------------


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
    """JSON."""


def save(settings: Settings, moment: Moment, state: State, behind: bool = False) -> Saving:
    """Write a checkpoint, then delete those that `train.keep` does not keep; `behind`, from a copy, while training goes
    on (Note: [Saving while training goes on]).

    Raises, or what is returned raises on every rank: SaveFailed if the file system refuses, or if there is one of that
    step; what it has written is removed then, for on a full disk nothing else would find room. ValueError if it takes
    some rank much longer than others.
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

    saving = saved(path, state, write_it, behind, settings.train.hang_timeout)
    if rank_and_world()[0] == 0:
        thread().submit(lambda: saving.written and delete_old(path.parent, settings.train))
    if not behind:
        with in_time(settings, "delete old checkpoints"):
            by_first(wait_for_thread)
    return saving


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


def meta_of(settings: Settings, moment: Moment) -> dict[str, Any]:
    """What `meta.json` has."""
    return sealed({
        "format": FORMAT, "step": moment.step, "position": moment.position, "text": moment.text,
        "more": dict(moment.more), "world": settings.world, "digest": digest(settings),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "network": LABELS.get(settings.train.transport, "real"), "config": stored(settings),
    })  # fmt: skip


def _refused(settings: Settings, step: int, state: State, error: OSError | ValueError, group: OfRanks) -> str:
    """The message about a save that has failed: what rank 0 sees once all have removed what they wrote."""
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
    """Bytes of a checkpoint, of all ranks."""
    mine = {name: prod(shard.shape) * shard.dtype.itemsize for name, shard in state.items()}
    return sum({name: size for part in everyone(mine, group) for name, size in part.items()}.values())


# -- restore -----------------------------------------------------------------------------------------------------------


def resumes(settings: Settings) -> bool:
    """Whether a run loads a checkpoint, or is refused: then it needs no first values, whatever `model.weights` says."""
    if settings.run.resume == "off" or settings.train.transport == "null":
        return False
    return bool(_candidates(settings))


def restore(settings: Settings, state: State, text: TextUpTo = lambda _: "") -> Restored | None:
    """Load the checkpoint that `run.resume` asks for into the tensors of `state`; None if there is none to load.

    `auto` takes the newest checkpoint of the run that is not damaged. Whatever the run does not continue from is
    renamed, so that it is neither taken for this run's nor deleted. Raises ValueError if the checkpoint is missing or
    damaged, or belongs to another model, or if the folder cannot be written.
    """
    _change_folder(settings, lambda: clean_up(checkpoints_of(settings), STEPS))
    restored = None if settings.run.resume == "off" else _find_and_load(settings, state, text)
    _change_folder(settings, lambda: _set_others_aside(settings, restored))
    return restored


def _change_folder(settings: Settings, action: Callable[[], object]) -> None:
    """Have rank 0 move checkpoints of earlier runs. No other run writes there: a run locks its folder."""
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
    """Checkpoints of which the first whole one is loaded, unless `run.resume` is off."""
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
        if isinstance(error, ValueError) and error.__cause__ is not None:  # no damage: memory was short, for instance
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
    relevant = list(told(meta["config"], settings))
    now = text(meta["position"])
    if meta["text"] != now:
        relevant.append(f"the text was {meta['text']}, and is {now}: some of it will be read again, some never")
    notes += [f"since the checkpoint was written, {change}" for change in relevant]
    return Restored(path, meta["step"], meta["position"], meta["more"], tuple(notes))


def _differences(stored: Mapping[str, Any], state: State) -> list[str]:
    """Tensors that only one side has, or that have different shapes. The same list on every rank.

    What the next step goes by beside weights and averages depends on settings: it begins anew if it is not there.
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
    """Rename the checkpoints of an earlier run in this folder, or those after the one that was loaded."""
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
    latest = folder / "latest"
    if latest.is_symlink() and not latest.exists():
        latest.unlink()


def problem_of(settings: Settings, reason: str, fix: str) -> str:
    """A line about the place for checkpoints."""
    return problem("run.folder", settings.run.folder, settings.origins, reason, fix)


# -- room --------------------------------------------------------------------------------------------------------------
# Whether there is room for what a run will save, asked before there is anything to lose.


def make_place(settings: Settings, state: State) -> list[str]:
    """Make the folder of a run's checkpoints, before there is anything to lose.

    Returns a remark if there is less room than its checkpoints will need. Raises ValueError if the folder cannot be
    written, or if the ranks' hosts do not share it.
    """
    folder = checkpoints_of(settings)
    # Named like a checkpoint that is being written, so that what is left of it is removed like one.
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
    """Most checkpoints that are there at a time, with the one that is being written."""
    kept = train.kept
    for_good = train.steps // math.lcm(kept["every"], train.save_every or train.steps) if kept["every"] else 0
    return kept["newest"] + for_good + 1


def require_memory(settings: Settings, offloaded: int, copies: int, available: int) -> str:
    """Refuse what a host's ranks have no memory for, of which `available` bytes are left.

    `offloaded` and `copies` are the bytes of this rank: what steps offload, and copies of what is being saved.
    Returns a remark where the host has no memory for the copies, the same on every rank: then there must be none.
    Raises ValueError, on every rank, where it has none for what is offloaded.
    """
    ranks, without = everyone((platform.node(), offloaded, copies, available)), ""
    for host in dict.fromkeys(name for name, *_ in ranks):
        of_host = [rank for rank in ranks if rank[0] == host]
        away, copied = sum(rank[1] for rank in of_host), sum(rank[2] for rank in of_host)
        room = min(rank[3] for rank in of_host)
        left = f"{shown(room)} of its memory are available"
        if away > room:
            reason = f"offloaded tensors of {host}'s ranks take {shown(away)}, and {left}"
            fix = "fewer parts or layers, such as attn:2, or plan.recompute"
            raise ValueError(problem("plan.offload", settings.plan.offload, settings.origins, reason, fix))
        if copied and away + copied > room:
            what = "copies and offloaded tensors" if away else "copies"
            without = (
                f"training waits while checkpoints are written: {what} of {host}'s ranks, with which it would go on, "
                f"take {shown(away + copied)}, and {left}"
            )
    return without


def _require_shared(here: Path) -> None:
    if not here.exists():
        rank, _ = rank_and_world()
        raise ValueError(f"rank {rank} on {platform.node()} does not see {here}, which rank 0 has created")


# -- saves -------------------------------------------------------------------------------------------------------------


class Saves:
    """The checkpoints of one run, which has done `step` steps. Every rank calls its methods alike.

    `state` and `moment` say what there is to save, when they are called. With `behind` it is written from a copy in
    the host's memory while training goes on.

    A full disk is no reason to end the run between two saves: what has been learnt since the last checkpoint would be
    lost at once, and there may be room by the next one. The last save of a run has no next one, and raises.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        step: int,
        state: Callable[[], State],
        moment: Callable[[], Moment],
        behind: bool = True,
    ) -> None:
        self.settings, self._metrics, self._behind = settings, metrics, behind
        self._state, self._moment = state, moment
        self._saved = step
        self._under_way: tuple[int, Saving] | None = None

    def look(self) -> None:
        """Tell of a save that has ended meanwhile. Ranks may see that at different steps."""
        if self._under_way is not None and self._under_way[1].done():
            self._wait_for_checkpoint()

    def wait(self) -> None:
        """Wait until the save that is under way has ended, and tell of it."""
        self._wait_for_checkpoint()
        wait_for_thread()  # which deletes

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
        """With `step` steps done, begin a save that is due, once the one before has ended, or do all of it."""
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
        if self._behind:
            self._under_way = moment.step, save(self.settings, moment, self._state(), behind=True)
            return
        try:
            self._now(moment)
        except SaveFailed as error:
            self._warn(error, moment.step + every)

    def last(self) -> str:
        """Save what is not saved yet, at the end of a run. Returns where, or nothing. Raises SaveFailed."""
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
