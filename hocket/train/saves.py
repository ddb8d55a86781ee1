"""When a run saves: behind its steps or between them, once more after an error, and for the last time at its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hocket.fsdp.saving.background import Saving, wait_for_thread
from hocket.resolve import Settings
from hocket.train.checkpoint import Groups, Moment, SaveFailed, save, save_behind
from hocket.train.folders import unlinked
from hocket.train.metrics import Metrics


@dataclass(frozen=True)
class _UnderWay:
    step: int
    saving: Saving


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
        self._under_way: _UnderWay | None = None

    def look(self) -> None:
        """Tell of a save that has ended meanwhile. Ranks may see that at different steps."""
        if self._under_way is not None and self._under_way.saving.done():
            self._wait_for_checkpoint()

    def wait(self) -> None:
        """Wait until the save that is under way has ended, and tell of it."""
        self._wait_for_checkpoint()
        wait_for_thread()  # which deletes

    def _wait_for_checkpoint(self) -> None:
        if self._under_way is None:
            return
        step, saving = self._under_way.step, self._under_way.saving
        self._under_way = None
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
        if self._under_way is not None and not self._under_way.saving.done():
            before = self._under_way.step
            self._metrics.say(
                f"note     step {moment.step} waits until the checkpoint of step {before} is written: a longer "
                "train.save_every, or a faster disk, would spare that"
            )
        self._wait_for_checkpoint()
        if self._behind:
            self._under_way = _UnderWay(moment.step, save_behind(self.settings, moment, self._state()))
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
