"""When a run saves: behind its steps or between them, once more after an error, and for the last time at its end."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from pathlib import Path

from hocket.config import TrainConfig
from hocket.fsdp.saving.atomic_folder import free, shown
from hocket.fsdp.saving.background import Saving, copied_bytes, wait_for_thread
from hocket.resolve import Settings
from hocket.runtime.world import by_first, everyone, rank_and_world, together
from hocket.settings.schema import problem
from hocket.train.checkpoint import (
    Groups,
    Moment,
    SaveFailed,
    checkpoints_of,
    newest_first,
    problem_of,
    save,
    save_behind,
    size_of,
    state_of,
    unlinked,
)
from hocket.train.metrics import Metrics

# -- room --------------------------------------------------------------------------------------------------------------
# Whether there is room for what a run will save, asked before there is anything to lose.
#
# All functions here are collective, as those of `train/checkpoint.py`.


def make_place(settings: Settings, groups: Groups) -> list[str]:
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
    size, there, available = size_of(state_of(groups)), len(newest_first(folder)), free(folder)
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
    return kept["newest"] + kept["best"] + for_good + 1


def require_memory(settings: Settings, offloaded: int, copies: int, available: int) -> str:
    """Refuse what a host's ranks have no memory for, of which `available` bytes are left.

    `offloaded` and `copies` are the bytes of this rank: what steps offload, and copies of what is saved behind steps.
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


def copies_of(groups: Groups) -> int:
    """Bytes that this rank's copies take while they are written behind steps."""
    return copied_bytes(state_of(groups))


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
        state: Callable[[], Groups],
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
        if why := unlinked(path):
            self._metrics.say(f"WARNING  {why}")

    def went_back(self, step: int) -> None:
        """The run is at a checkpoint of `step` steps again."""
        self._saved = step

    def between(self, step: int) -> None:
        """What is due between two steps, with `step` of them done."""
        train = self.settings.train
        if train.save_every and step % train.save_every == 0:
            self._save()

    def _save(self) -> None:
        """Begin to save, once the save before has ended, or do all of it."""
        moment = self._moment()
        if self._under_way is not None and not self._under_way[1].done():
            before = self._under_way[0]
            self._metrics.say(
                f"note     step {moment.step} waits until the checkpoint of step {before} is written: a longer "
                "train.save_every, or a faster disk, would spare that"
            )
        self._wait_for_checkpoint()
        if self._behind:
            self._under_way = moment.step, save_behind(self.settings, moment, self._state())
            return
        try:
            self._now(moment)
        except SaveFailed as error:
            self._warn(error, moment.step + self.settings.train.save_every)

    def last(self) -> str:
        """Save what is not saved yet, at the end of a run. Returns where, or nothing. Raises SaveFailed."""
        self.wait()
        moment = self._moment()
        return str(self._now(moment)) if self._saved != moment.step else ""

    def _now(self, moment: Moment) -> Path:
        begun = time.perf_counter()
        path = save(self.settings, moment, self._state())
        self._is_saved(moment.step, path, 0.0, time.perf_counter() - begun)
        return path

    def _warn(self, error: SaveFailed, step: int) -> None:
        again = min(step, self.settings.train.steps)
        self._metrics.say(f"WARNING  {error}; the run goes on, and saves again after step {again}")
