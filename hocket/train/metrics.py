"""What a run reports: every step to metrics.jsonl, and to the console a live line or plain lines.

Only rank 0 reports. Speeds count the tokens of all ranks; FLOPs are those of the model (no recomputation, no padding).
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hocket.config import LABELS, TrainConfig
from hocket.config.rule import problem
from hocket.engine.graphed import Way
from hocket.explain.explanation import FILE
from hocket.files import set_aside
from hocket.gpus import peak_flops
from hocket.model.context import TOLERANCE
from hocket.predict.part_sizes import model_flops_per_token
from hocket.program.mesh import described
from hocket.resolve import Settings
from hocket.sizes import counted
from hocket.train.runs import json_of
from hocket.train.writers import Writers

# -- A file of lines that loses none while the disk is full ------------------------------------------------------------


class Lines:
    """Appends lines to a file. Lines that the disk has no room for wait in memory, and are written before the next."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be opened."""
        self._file = path.open("ab", buffering=0)
        self._waiting = b""

    def add(self, line: str) -> str:
        """Write a line. Returns why it has to wait, in a few words; empty if it is written."""
        self._waiting += f"{line}\n".encode()
        try:
            while self._waiting:  # an almost full disk accepts part of a write
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            return error.strerror or str(error)
        return ""

    @property
    def missing(self) -> int:
        """Number of waiting lines."""
        return self._waiting.count(b"\n")

    def close(self) -> None:
        """Close the file. Lines that still wait are lost."""
        self._file.close()


# -- metrics -----------------------------------------------------------------------------------------------------------

REMARKS = 4
"""Most remarks at the start of a run on settings that lack the wanted effect."""

MEANINGLESS = ("loss", "grad_norm", "lr", "skipped")
"""Fields of a step's record that mean nothing with the null transport."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, which may pass."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, over all ranks."""

    step: int
    """Steps done, so the first one is 1."""
    loss: float
    """Mean cross-entropy, in nats per token."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    lr: float
    """Learning rate of the step."""
    seconds: float
    """Duration, without validation and checkpoints."""
    load: float = 0.0
    """Tokens of the busiest expert over the mean of all experts, in the worst layer. 1 is even, 0 means no experts."""
    skipped: int = 0
    """Steps of the run skipped so far."""
    loads: Mapping[int, float] = field(default_factory=dict)
    """The same per MoE layer."""
    rows: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Rows of each expert by layer, in steps with a validation."""
    epochs: Mapping[str, float] = field(default_factory=dict)
    """How many epochs of each source have been read, if there are several."""
    way: Way = "issued"
    """How the host ran the step."""
    imbalance: float | None = None
    """With context parallelism over documents: by how much the attention of the busiest rank exceeds the mean. 0.05 is
    5 %. That of the data-parallel rank where it is largest."""
    waits: float | None = None
    """With packed documents: by how much the attention of the busiest data-parallel rank of each microbatch exceeds the
    mean, over all microbatches. 0.05 is 5 %."""


class PatientConsole(Console):
    """A console that survives a closed pipe: the run goes on silently, and metrics.jsonl is complete."""

    def on_broken_pipe(self) -> None:
        """Print nothing from now on."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class Metrics:
    """The report of one run. `entropy` is the corpus's unigram entropy in nats per token.

    When a run is resumed, `done` steps are done, of which `skipped` were skipped.
    Use as a context manager, which ends the live line. Ranks other than 0 report nothing.
    """

    def __init__(
        self,
        settings: Settings,
        entropy: float,
        done: int = 0,
        rank: int = 0,
        console: Console | None = None,
        skipped: int = 0,
    ) -> None:
        self.settings, self.entropy, self.quiet = settings, entropy, rank != 0
        self.console = console or PatientConsole(highlight=False, soft_wrap=True)
        self.tokens_per_step = settings.batch * settings.data.sequence_length
        self.flops_per_token = model_flops_per_token(settings.model, settings.data.sequence_length)
        self.peak = peak_flops(settings.host.gpu) if settings.train.device == "cuda" else 0.0
        """Peak FLOP/s of a rank, for MFU; 0 if unknown, as for CPUs, which have no data sheet."""
        self.validation_loss = math.nan
        self.exposed: Mapping[Way, float] = {}
        """How profiled steps were run -> their exposed share. It holds only for steps that were run in the same way."""
        label = LABELS.get(settings.train.transport)
        self._mark = f"{label}: " if label else ""
        self._started, self._first, self._last = time.monotonic(), done, done
        self._lines: Lines | None = None
        self._skipped = skipped
        self._writers: Writers | None = None
        self._waits = False
        self._live: Progress | None = None
        if not self.quiet:
            try:
                self._open(done)
            except OSError as error:
                raise ValueError(self._unwritten(str(error))) from None
            self._writers = Writers(settings, done, self.say)

    @property
    def path(self) -> Path:
        """The file with a record of every step."""
        return Path(self.settings.run.folder) / "metrics.jsonl"

    def __enter__(self) -> Metrics:
        if not self.quiet and self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(20), TimeRemainingColumn(compact=True))
            self._live = Progress(*columns, console=self.console, transient=True)
            self._live.add_task("starting", total=self.settings.train.steps, completed=self._first)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.stop()
        if self._writers:
            self._writers.close()
        if self._lines:
            if self._lines.missing:
                self.say(f"WARNING  {self._unwritten(f'lines missing at its end: {self._lines.missing}')}")
            self._lines.close()

    def say(self, text: str) -> None:
        """Print a line for the user."""
        if not self.quiet:
            try:
                self.console.print(text, markup=False)
            except OSError as error:  # a full disk may recover, a closed terminal stays silent
                self.console.quiet = error.errno not in NO_ROOM

    def header(self, parameters: int, active: int, corpus: str) -> None:
        """Describe the run before it starts. `parameters` and `active` (per token) count elements."""
        s = self.settings
        steps = counted(s.train.steps, "step") + (f", {self._first} of them done" if self._first else "")
        self.say(f"model    {parameters:,} parameters, {active:,} active per token")
        self.say(f"corpus   {corpus}")
        self.say(f"ranks    {s.world} = {described(s.mesh)}, on {s.train.device}")
        self.say(f"steps    {steps}, {self.tokens_per_step:,} tokens each")
        if s.train.transport == "null":
            self.say("NO COMMUNICATION: the null transport measures time. Losses mean nothing, nothing is saved.")
        if s.train.transport == "slow":
            for (latency, bandwidth), purposes in _same_links(s.train).items():
                limit = f"{bandwidth:.3g} bytes/s" if bandwidth < math.inf else "no limit on bytes/s"
                self.say(f"network  emulated: {latency:g} s per operation, {limit}, for {', '.join(purposes)}")
        if not self.peak:
            what = s.host.gpu or f"{s.train.device} ranks"
            self.say(f"MFU      left out: hocket knows no peak of {what}")
        else:
            over = f"model FLOPs ({self.flops_per_token:.4g} per token) over"
            self.say(f"MFU      {over} {self.peak / 1e12:g} TFLOP/s of one {s.host.gpu} (dense bf16)")

    def remarks(self, *notes: str) -> None:
        """Print settings that are not done as asked or have no effect, `notes`, and where the choices are explained."""
        asked = [decision for decision in self.settings.decisions if decision.unmet or decision.fix]
        asked.sort(key=lambda decision: not decision.unmet)
        for note in (*asked[:REMARKS], *notes):
            self.say(f"note     {note}")
        if len(asked) > REMARKS:
            self.say(f"note     {len(asked) - REMARKS} more settings are not done as asked, or have no effect")
        path = Path(self.settings.run.folder) / FILE
        self.say(f"explain  {path} has what was decided, and why; hocket explain {path.parent} prints it")

    def step(self, result: StepRecord) -> None:
        """Record one step."""
        if self.quiet:
            return
        self._last = result.step
        speed = self.tokens_per_step / result.seconds
        # Drop empty fields: dense models have no loads, most steps no rows, and a single source no epochs.
        record = {name: value for name, value in asdict(result).items() if value is not None and value != {}}
        del record["way"]
        record["tokens_per_second"] = speed
        exposed = self.exposed.get(result.way)
        learnt = f"  loss {result.loss:.4f}  grad {result.grad_norm:.3g}  lr {result.lr:.2e}"
        if self.settings.train.transport == "null":  # these numbers mean nothing: do not log them
            learnt = ""
            record = {name: value for name, value in record.items() if name not in MEANINGLESS}
        width = len(str(self.settings.train.steps))
        text = f"{self._mark}step {result.step:>{width}}{learnt}  {speed:,.0f} tok/s"
        rate = speed * self.flops_per_token / self.settings.world
        if self.settings.train.device == "cuda":
            record["tflops_per_gpu"] = rate / 1e12
            text += f"  {rate / 1e12:.1f} TFLOP/s/GPU"
        if self.peak:
            record["mfu"] = rate / self.peak
            text += f"  MFU {100 * rate / self.peak:.1f} %"
        if learnt:
            text += "  skipped" if result.skipped > self._skipped else ""
            self._skipped = result.skipped
        if result.load:
            text += f"  load {result.load:.2f}"
        if (uneven := max(result.imbalance or 0.0, result.waits or 0.0)) > TOLERANCE:
            text += f"  uneven {100 * uneven:.0f} %"
        if exposed is not None:
            record["exposed"] = exposed
            text += f"  exposed {100 * exposed:.0f} %"
        self._write(record)
        if self._live:
            self._live.update(self._live.task_ids[0], completed=result.step, description=text)
        else:
            self.say(text + self._eta())

    def _eta(self) -> str:
        """Remaining time, by the mean of the steps so far, with validations and checkpoints."""
        left = self.settings.train.steps - self._last
        seconds = (time.monotonic() - self._started) / (self._last - self._first) * left
        return f"  ETA {timedelta(seconds=round(seconds))}" if left > 0 else ""

    def sources(self, now: Mapping[str, float], end: Mapping[str, float]) -> None:
        """Print how many epochs of each source have been read, and will be at the end of the run."""
        for name, epochs in end.items():
            before = f", {now[name]:.2f} of them done" if now[name] else ""
            self.say(f"source   {name}: {epochs:.2f} epochs in this run{before}")

    def validation(self, step: int, loss: float, by_source: Mapping[str, float] | None = None) -> None:
        """Record a validation after `step` steps, in nats per token, also by source if there are several."""
        self.validation_loss = loss
        each = {"validation_losses": dict(by_source)} if by_source else {}
        self._write({"step": step, "validation_loss": loss, **each, "unigram_entropy": self.entropy})
        named = "".join(f"  {name} {value:.4f}" for name, value in (by_source or {}).items())
        self.say(f"{self._mark}step {step}  validation loss {loss:.4f}{named}  (unigram entropy {self.entropy:.4f})")

    def saved(self, step: int, folder: Path, copy_seconds: float, write_seconds: float) -> None:
        """Record a checkpoint of `step` steps, with this rank's times. `copy_seconds` is 0 without a copy."""
        if self.quiet:
            return
        size = sum(file.stat().st_size for file in folder.iterdir()) if folder.is_dir() else 0
        rate = size / write_seconds / 1e9 if write_seconds else 0.0
        seconds = {"copy_seconds": copy_seconds, "write_seconds": write_seconds}
        self._write({"step": self._last or step, "saved": {"step": step, "bytes": size, **seconds, "gb_per_s": rate}})

    def summary(self) -> None:
        """Report the end of a run: the last validation loss, and whether it is below the unigram entropy.

        The comparison shows whether a model from scratch has learnt anything. Imported weights get none.
        """
        seconds, steps = time.monotonic() - self._started, self._last - self._first
        if steps:
            skipped = f", {self._skipped} of the run skipped" if self._skipped else ""
            self.say(f"{self._mark}{counted(steps, 'step')} in {seconds:.1f} s{skipped}; every step is in {self.path}")
            if self.settings.train.transport == "null":
                self.say("This was a bound on speed, no training: nothing was learned, and nothing is saved.")
        else:
            self.say("nothing to do: the run is complete. A larger train.steps goes on, run.resume = off starts over")
        if not math.isnan(self.validation_loss):
            verdict = "below" if self.validation_loss < self.entropy else "NOT below"
            beside = f"{verdict} the corpus's unigram entropy {self.entropy:.4f}"
            if self.settings.model.weights:
                beside = f"with a unigram entropy of {self.entropy:.4f}"
            self.say(f"{self._mark}validation loss {self.validation_loss:.4f} nats per token, {beside}")

    def _open(self, done: int) -> None:
        """Continue the file of a resumed run after step `done`; move aside the file of another run."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if done and (self.path.exists() or self.settings.run.resume == "auto"):
            lines = self.path.read_text(errors="replace").splitlines() if self.path.exists() else []
            kept = [line for line in lines if _step_of(line) <= done]
            there = {_step_of(line) for line in kept if '"loss"' in line}
            if lost := [step for step in range(1, done + 1) if step not in there]:
                what = f"{counted(len(lost), 'step')} of those up to {done}, the first is {lost[0]}"
                self.say(f"WARNING  {self.path} has lost the lines of {what}: weights and later lines are not touched")
            shorter = self.path.with_suffix(".tmp")
            shorter.write_text("".join(f"{line}\n" for line in kept))
            shorter.replace(self.path)
        elif moved := set_aside(self.path):
            self.say(f"the metrics of an earlier run are now in {moved}")
        self._lines = Lines(self.path)

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._lines:
            if label := LABELS.get(self.settings.train.transport):
                record = {**record, "transport": self.settings.train.transport, "label": label}
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
            refused = self._lines.add(json.dumps(finite))  # JSON has no inf or nan
            if refused and not self._waits:
                self.say(f"WARNING  {self._unwritten(refused)}; the run goes on, and its lines wait until they can be")
            self._waits = bool(refused)
            if self._writers:
                self._writers.add(record)

    def _unwritten(self, why: str) -> str:
        run, origins = self.settings.run, self.settings.origins
        reason, fix = f"{self.path} cannot be written: {why}", "make room there, or make it writable"
        return problem("run.folder", run.folder, origins, reason, fix)


def _same_links(train: TrainConfig) -> dict[tuple[float, float], list[str]]:
    """Link (latency, bandwidth) of the emulated network -> purposes that use such a link."""
    found: dict[tuple[float, float], list[str]] = {}
    for purpose, link in train.slow_links().items():
        found.setdefault(link, []).append(purpose)
    return found


def _step_of(line: str) -> float:
    """The step of a line of metrics; infinity for a line that a crash cut off."""
    step = json_of(line).get("step")
    return step if isinstance(step, int) else math.inf
