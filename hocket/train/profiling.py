"""Profiles a window of steps: records, reads and reports traces while the run goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import platform
import shutil
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hocket.config import LABELS, Config
from hocket.engine import Engine, graphed
from hocket.engine.graphed import Way
from hocket.environment import processes
from hocket.measured import describe as stored
from hocket.measured import trace_summary
from hocket.model.transformer import parameter_counts
from hocket.resolve import Settings
from hocket.runtime.lanes import drain
from hocket.runtime.world import everyone
from hocket.train.metrics import Metrics
from hocket.train.signals import StopRequest

# -- recording ---------------------------------------------------------------------------------------------------------
# A trace has `hocket step 12` around an optimizer step, the ops of the plan under their names (`fwd attn m0 c1 l5`), on
# a CPU also `wait <op>` while the host waits for a collective, and the top-level key `hocket`, which `describe` makes.
# Annotation is switched off after the recorded steps. Steps that replay a CUDA graph issue no named ops: their kernels
# are identified without names.

GZIP_LEVEL = 3
"""This level shrinks a trace to a tenth. The highest takes five times as long to gain a few percent."""


def describe(config: Config, engine: Engine, rank: int) -> dict[str, Any]:
    """A trace's description of its run and rank, as JSON values."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""
    described: dict[str, Any] = {
        **stored(config, engine.program, engine.where.pp),
        "transport": config.train.transport,
        "label": LABELS.get(config.train.transport, ""),
        "rank": rank,
        "pp_rank": engine.where.pp,
        "coordinates": dataclasses.asdict(engine.where),
        "parameters": parameter_counts(config.model)[0],
        "hostname": platform.node(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "nccl": nccl},
    }
    if isinstance(config, Settings):
        described["host"] = dataclasses.asdict(config.host)
    return _plain(described)


def _plain(value: Any) -> Any:
    """The same without quotes, backslashes and control characters in strings, which the profiler does not escape."""
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, str):
        return "".join(c for c in value.replace('"', "'").replace("\\", "/") if c.isprintable())
    return value


class Recording:
    """Records steps of one engine as they run: `start`, then `with step(n)` around each, `stop`, `write`.

    Create it one step before the first recorded step: setting up the profiler lengthens the step it happens in.
    """

    def __init__(self, engine: Engine, rank: int) -> None:
        self._engine = engine
        self._about = json.dumps(describe(engine.config, engine, rank), ensure_ascii=False)
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        # acc_events is off: it would turn every event into a Python object, and the trace needs none of them.
        self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu])
        with warnings.catch_warnings(action="ignore"):  # torch 2.11 warns that a second one would replace this
            self._profiler.prepare_trace()

    def start(self) -> None:
        """Start recording."""
        if not self._engine.replays:
            self._engine.executor.annotate()
        self._profiler.start_trace()
        self._profiler.add_metadata_json("hocket", self._about)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step, until its last kernel ends. Unrecorded steps end while the next one is issued."""
        with record_function(f"hocket step {number}"):
            yield
            if self._engine.device.type == "cuda":
                drain(self._engine.device)

    def stop(self) -> None:
        """Stop recording, and restore the engine."""
        self._engine.executor.annotate(False)
        self._profiler.stop_trace()

    def write(self, path: Path) -> None:
        """Write the trace, whole or not at all. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text, packed = path.with_name(path.name + ".text.tmp"), path.with_name(path.name + ".tmp")
        try:
            self._profiler.export_chrome_trace(str(text))
            with text.open("rb") as source, gzip.open(packed, "wb", GZIP_LEVEL) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            packed.replace(path)
        finally:
            text.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)


# -- profiling ---------------------------------------------------------------------------------------------------------

WARM_UP = 3
"""Steps before a window near the start of a run, in which kernels are loaded and memory is allocated."""

PATIENCE = 300.0
"""Seconds that the end of a run waits for its traces to be read, at most half of train.hang_timeout, because the other
ranks wait too."""


UNTIL_REPLAYS = graphed.WARM_UP + 2
"""The same for replayed steps: the graph is captured after the warm-up, and the profiler is set up during a replay."""


def window_of(profile: tuple[int, ...], done: int, steps: int, warm_up: int = WARM_UP) -> range:
    """The steps that `train.profile` asks for in a run of `steps` steps, which started after step `done`."""
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
    """Records the steps that `train.profile` names, has the traces read, and reports the result to `metrics`.

    Use as a context manager around the loop; every rank calls `before` and `after` at every step. Problems with a trace
    become remarks, and never end the run.
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
        self._reading: Future[tuple[str, float | None]] | None = None
        self._reader = contextlib.ExitStack()
        self._problem = ""
        if settings.train.profile and not self.steps:
            shown = " ".join(map(str, settings.train.profile))
            reason = "all steps of the run are done" if done >= settings.train.steps else "these steps are done"
            metrics.say(
                f"note     train.profile = {shown}: no effect: {reason}; run.name = NAME starts a run of its own"
            )

    def path(self, rank: int) -> Path:
        """The trace file of a rank."""
        return Path(self._settings.run.folder) / "traces" / f"rank{rank}.json.gz"

    def __enter__(self) -> ProfileWindow:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._drop():
            self._metrics.say("note     the run ended inside the profiled window; there is no trace")
        self._read(1.0)
        if self._reading is not None and kind is None:
            self._metrics.say("trace    reading the traces; Ctrl-C ends without")
            deadline = time.monotonic() + min(PATIENCE, self._settings.train.hang_timeout / 2)
            while self._reading is not None and not self._stop and time.monotonic() < deadline:
                self._read(0.1)
        if self._reading is not None:
            self._metrics.say("note     the traces were not read before the run ended")
        self._reader.close()

    def before(self, step: int) -> None:
        """Call before step `step`."""
        if not self.steps or not self.steps[0] - 1 <= step <= self.steps[-1]:
            return
        try:
            if self._recording is None and step <= self.steps[0] and not self._problem:
                self._remove_old()
                self._recording = Recording(self._engine, self._rank)
            if self._recording is not None and step == self.steps[0]:
                self._recording.start()
            if self._recording is not None and step in self.steps:
                self._step = self._recording.step(step)
                self._step.__enter__()
        except Exception as error:
            self._drop()
            self._problem = f"was not recorded ({_first_line(error)})"  # reported after the window

    def after(self, step: int, way: Way) -> None:
        """Call after step `step`, once its loss is known. `way` is how the step was run."""
        self._step.__exit__(None, None, None)
        self._step = contextlib.nullcontext()
        if step in self.steps:
            self._ways.add(way)
        if self.steps and step == self.steps[-1]:
            self._write()
        self._read()

    def _write(self) -> None:
        """Write this rank's trace. Once all ranks have, start reading them."""
        recording, self._recording = self._recording, None
        self._engine.executor.annotate(False)
        if recording is not None:
            try:
                recording.stop()
                recording.write(self.path(self._rank))
            except Exception as error:
                self._problem = f"cannot be written ({_first_line(error)})"
        problems = everyone(self._problem)  # no cost: without it a faster rank would wait in the next step
        for rank, text in enumerate(problems):
            if text:
                self._metrics.say(f"note     the trace of rank {rank} {text}")
        # Traces on hosts that do not share the folder are not visible here.
        seen = [self.path(rank) for rank, text in enumerate(problems) if not text and self.path(rank).exists()]
        if self._rank == 0 and seen:
            steps = f"steps {self.steps[0]} to {self.steps[-1]}" if len(self.steps) > 1 else f"step {self.steps[0]}"
            written = problems.count("")
            elsewhere = f"; those of {written - len(seen)} more are on other hosts" if len(seen) < written else ""
            self._metrics.say(f"trace    {self.path(0).parent}: {steps} of {len(seen)} ranks{elsewhere}{self._how()}")
            try:
                reader = self._reader.enter_context(processes(1, {}))  # in a process: ranks need not wait
                self._reading = reader.submit(trace_summary, seen)
            except OSError as error:
                self._metrics.say(f"note     the traces cannot be read: {_first_line(error)}")

    def _how(self) -> str:
        """A remark on how the recorded steps were run."""
        if self._ways == {"issued"}:
            return ""
        if self._ways == {"replayed"}:
            return ", replayed: kernels carry no names of ops; plan.graphs = off records ops under their names"
        ways = " and ".join(sorted(self._ways))
        return f", {ways}: lines of replayed steps do not tell what is exposed; a later train.profile records those"

    def _read(self, timeout: float = 0.0) -> None:
        """Report what the traces show, if they have been read."""
        reading = self._reading
        if reading is None or not wait([reading], timeout).done:
            return
        self._reading = None
        self._reader.close()
        try:
            headline, exposed = reading.result()
        except Exception as error:  # whatever ended the process
            self._metrics.say(f"note     the traces cannot be read: {_first_line(error)}")
            return
        if exposed is not None and len(self._ways) == 1:
            self._metrics.exposed = dict.fromkeys(self._ways, exposed)
        for line in headline.splitlines():
            self._metrics.say(f"trace    {line}")
        folder = self._settings.run.folder
        trained = Path(folder.removesuffix("-null"))
        if self._settings.train.transport == "null" and trained != Path(folder) and (trained / "traces").exists():
            self._metrics.say(f"trace    what communication costs: hocket trace {trained} --null {folder}")
        else:
            self._metrics.say(f"trace    more: hocket trace {folder}")

    def _remove_old(self) -> None:
        """Delete this rank's trace of an earlier run, so that it is not taken for this run's."""
        folder = self.path(0).parent
        mine = {self.path(self._rank).name}
        if self._rank == 0:
            ranks = {self.path(rank).name for rank in range(self._settings.world)}
            mine |= {path.name for path in folder.glob("rank*.json.gz") if path.name not in ranks}
        for name in mine:
            for path in (folder / name, folder / f"{name}.tmp", folder / f"{name}.text.tmp"):
                path.unlink(missing_ok=True)

    def _drop(self) -> bool:
        """Stop recording without a trace. Returns whether a recording was active."""
        recording, self._recording = self._recording, None
        if recording is not None:
            with contextlib.suppress(Exception):
                recording.stop()
        return recording is not None
