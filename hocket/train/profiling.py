"""The window of steps of a run that is recorded, read and told about while the run goes on."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from hocket.engine import Engine, graphed
from hocket.engine.graphed import Way
from hocket.resolve import Settings
from hocket.runtime.world import everyone
from hocket.train.metrics import Metrics
from hocket.train.recording import Recording
from hocket.train.signals import StopRequest
from hocket.train.trace_reader import TraceReader

WARM_UP = 3
"""Steps before a window that is to be soon after the start: kernels are loaded, memory is there."""

PATIENCE = 300.0
"""Seconds that the end of a run waits for its traces to be read. The other ranks wait too, so half of
train.hang_timeout is the most."""


UNTIL_REPLAYS = graphed.WARM_UP + 2
"""The same where steps are replayed: one is recorded behind the warm-up, and the profiler is set up in a replay."""


def window_of(profile: tuple[int, ...], done: int, steps: int, warm_up: int = WARM_UP) -> range:
    """The steps that `train.profile` asks for in a run of `steps` steps, `done` of them done before it started."""
    if not profile:
        return range(0)
    first, count = profile
    if first == 0:
        count = min(count, steps - done)
        first = min(done + 1 + warm_up, steps - count + 1)
    return range(first, first + count) if first > done else range(0)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


class ProfileWindow:
    """Records the steps that `train.profile` names, has the traces read, and tells `metrics` what they say.

    Use as a context manager around the loop; call `before` and `after` at every step of every rank. What goes wrong
    with a trace becomes a remark: it is no reason to end a run.
    """

    def __init__(
        self, settings: Settings, rank: int, engine: Engine, metrics: Metrics, stop: StopRequest, done: int
    ) -> None:
        self._settings, self._rank, self._engine, self._metrics, self._stop = settings, rank, engine, metrics, stop
        warm_up = UNTIL_REPLAYS if engine.replays else WARM_UP
        self.steps = window_of(settings.train.profile, done, settings.train.steps, warm_up)
        self._ways: set[Way] = set()
        self._recording: Recording | None = None
        self._step: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        self._reader: TraceReader | None = None
        self._problem = ""
        if settings.train.profile and not self.steps:
            shown = " ".join(map(str, settings.train.profile))
            reason = "all steps of the run are done" if done >= settings.train.steps else "these steps are done"
            metrics.say(
                f"note     train.profile = {shown}: no effect: {reason}; run.name = NAME starts a run of its own"
            )

    def path(self, rank: int) -> Path:
        """The trace of a rank."""
        return Path(self._settings.run.folder) / "traces" / f"rank{rank}.json.gz"

    def __enter__(self) -> ProfileWindow:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._drop():
            self._say("note     the run ended inside the profiled window; there is no trace")
        self._read(1.0)
        if self._reader is not None and kind is None:
            self._say("trace    reading the traces; Ctrl-C ends without")
            deadline = time.monotonic() + min(PATIENCE, self._settings.train.hang_timeout / 2)
            while self._reader is not None and not self._stop and time.monotonic() < deadline:
                self._read(0.1)
        if self._reader is not None:
            self._reader.close()
            self._say("note     the traces were not read before the run ended")

    def before(self, step: int) -> None:
        """Call before step `step`."""
        if not self.steps or not self.steps[0] - 1 <= step <= self.steps[-1]:
            return
        try:
            if self._recording is None and step <= self.steps[0] and not self._problem:
                self._remove_old()
                self._recording = Recording(self._engine, self._rank)
                self._recording.prepare()
            if self._recording is not None and step == self.steps[0]:
                self._recording.start()
            if self._recording is not None and step in self.steps:
                self._step = self._recording.step(step)
                self._step.__enter__()
        except Exception as error:
            self._drop()
            self._problem = f"was not recorded ({_first_line(error)})"  # told behind the window, with other ranks'

    def after(self, step: int, way: Way) -> None:
        """Call after step `step`, which was made in that `way`, once its loss is known."""
        self._step.__exit__(None, None, None)
        self._step = contextlib.nullcontext()
        if step in self.steps:
            self._ways.add(way)
        if self.steps and step == self.steps[-1]:
            self._write()
        self._read()

    def _write(self) -> None:
        """Write this rank's trace; once all ranks have, have them read."""
        recording, self._recording = self._recording, None
        self._engine.executor.annotate(False)
        if recording is not None:
            try:
                recording.stop()
                recording.write(self.path(self._rank))
            except Exception as error:
                self._problem = f"cannot be written ({_first_line(error)})"
        problems = everyone(self._problem)  # a rank that goes on would only wait for the others in the next step
        for rank, text in enumerate(problems):
            if text:
                self._say(f"note     the trace of rank {rank} {text}")
        # Hosts that do not share the folder keep their traces to themselves.
        seen = [self.path(rank) for rank, text in enumerate(problems) if not text and self.path(rank).exists()]
        if self._rank == 0 and seen:
            steps = f"steps {self.steps[0]} to {self.steps[-1]}" if len(self.steps) > 1 else f"step {self.steps[0]}"
            written = problems.count("")
            elsewhere = f"; those of {written - len(seen)} more are on other hosts" if len(seen) < written else ""
            self._say(f"trace    {self.path(0).parent}: {steps} of {len(seen)} ranks{elsewhere}{self._how()}")
            try:
                self._reader = TraceReader(seen)
            except OSError as error:
                self._say(f"note     the traces cannot be read: {error}")

    def _how(self) -> str:
        """What to know of how the recorded steps were made."""
        if self._ways == {"issued"}:
            return ""
        if self._ways == {"replayed"}:
            return ", replayed: kernels carry no names of ops; plan.graphs = off records ops under their names"
        ways = " and ".join(sorted(self._ways))
        return f", {ways}: lines of replayed steps do not tell what is exposed; a later train.profile records those"

    def _read(self, timeout: float = 0.0) -> None:
        """Tell what the traces say, if they have been read."""
        reading = None if self._reader is None else self._reader.poll(timeout)
        if reading is None:
            return
        self._reader = None
        if reading.problem:
            self._say(f"note     the traces cannot be read: {reading.problem}")
            return
        if reading.exposed is not None and len(self._ways) == 1:
            self._metrics.exposed = dict.fromkeys(self._ways, reading.exposed)
        for line in reading.headline.splitlines():
            self._say(f"trace    {line}")
        folder = self._settings.run.folder
        trained = Path(folder.removesuffix("-null"))
        if self._settings.train.transport == "null" and trained != Path(folder) and (trained / "traces").exists():
            self._say(f"trace    what communication costs: hocket trace {trained} --null {folder}")
        else:
            self._say(f"trace    more: hocket trace {folder}")

    def _say(self, text: str) -> None:
        self._metrics.say(text)

    def _remove_old(self) -> None:
        """Traces of an earlier run must not be taken for this one's."""
        folder = self.path(0).parent
        mine = {self.path(self._rank).name}
        if self._rank == 0:
            ranks = {self.path(rank).name for rank in range(self._settings.world)}
            mine |= {path.name for path in folder.glob("rank*.json.gz") if path.name not in ranks}
        for name in mine:
            for path in (folder / name, folder / f"{name}.tmp", folder / f"{name}.text.tmp"):
                path.unlink(missing_ok=True)

    def _drop(self) -> bool:
        """Stop recording without a trace. Returns whether anything was being recorded."""
        recording, self._recording = self._recording, None
        if recording is not None:
            with contextlib.suppress(Exception):
                recording.stop()
        return recording is not None
