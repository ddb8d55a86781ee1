"""The training run of one rank: data in, planned steps, metrics and checkpoints out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from hocket.collector import collect_after, no_collection
from hocket.config import TrainConfig
from hocket.config.rule import problem
from hocket.engine import Engine
from hocket.engine.engine import blame
from hocket.environment import available_memory
from hocket.fsdp.saving.background import copied_bytes
from hocket.model.context import imbalance_of
from hocket.model.documents import Microbatch, documents_of, to_device
from hocket.model.transformer import parameter_counts
from hocket.predict.arrivals import overflow_note
from hocket.predict.part_sizes import attending
from hocket.program.documents import Dealt, as_read, deals, dealt, lengths_of, works_of
from hocket.resolve import Settings
from hocket.runtime.hangs import Watchdog
from hocket.runtime.world import everyone
from hocket.step import resume_from, state_of
from hocket.train.checkpoint import (
    Moment,
    Restored,
    Saves,
    State,
    make_place,
    require_memory,
    restore,
    resumes,
)
from hocket.train.data import Mix, Stream, make_streams
from hocket.train.metrics import Metrics, StepRecord
from hocket.train.profiling import ProfileWindow
from hocket.train.signals import StopRequest
from hocket.train.sources import open_text

# -- The learning rate of every step: it depends on the step and settings alone, so a resumed run repeats it -----------

SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda share: 1 - share,
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
    "1-sqrt": lambda share: 1 - math.sqrt(share),
}
"""Share of the decay that has passed -> remaining share of the difference between highest and lowest rate.

1-sqrt is from Hägele et al. 2024, "Scaling laws and compute-optimal training beyond fixed training durations".
"""


def learning_rate(step: int, train: TrainConfig) -> float:
    """Learning rate of step `step` (from 0): a linear rise over `warmup` steps, then as `train.schedule` says.

    The first step has 1 / warmup of `lr`. The last step of the run has the lowest rate. A decay of n steps begins
    after the last step at the full rate, so n steps are below it.
    """
    if step < train.warmup:
        return train.lr * (step + 1) / train.warmup
    span, shape = train.decay
    if not span:
        return train.lr
    if train.schedule.startswith("wsd"):
        share = (step - (train.steps - 1 - span)) / span
    else:
        share = (step - train.warmup) / span
    return train.lowest_lr + (train.lr - train.lowest_lr) * SHAPES[shape](min(1.0, max(0.0, share)))


# -- trainer -----------------------------------------------------------------------------------------------------------

OTHER_TEXT = (
    "since the checkpoint was written, the text or its order has changed, as its beginning and its end show: "
    "some of it will be read again, some never"
)


MOST_SKIPPED = 5
"""Most steps in a row that may be skipped. The next skipped step ends the run."""


class Trainer:
    """One rank of a run. With more than one rank, the default process group must exist."""

    def __init__(self, settings: Settings, rank: int, device: torch.device) -> None:
        self.settings, self.rank, self.device = settings, rank, device
        self.text = open_text(settings)
        self.train_stream, self.validation_streams = make_streams(self.text, settings)
        self.engine = Engine(settings, rank, device)
        self._require_same_text()
        self.step = self.position = 0
        self._in_a_row = 0  # consecutive skipped steps, up to the last one
        self._remarks = list[str]()
        self._no_copies = ""  # why training waits while checkpoints are written
        self._saved = 0  # step of the checkpoint on disk that the run continues from

    def _require_same_text(self) -> None:
        """Raise ValueError unless all ranks, possibly on several hosts, found the same text."""
        control = self.engine.groups.control
        mine = torch.tensor(self.text.fingerprint, device=self.device)
        least, most = mine.clone(), mine.clone()
        control.all_reduce(least, "min").wait()
        control.all_reduce(most, "max").wait()
        if not torch.equal(least, most):
            reason = f"ranks find different text, or in another order: this one {self.text}"
            fix = "the same files under the same paths on all hosts, and files that do not change"
            raise ValueError(problem("data.paths", self.settings.data.paths, self.settings.origins, reason, fix))

    def begin(self) -> None:
        """Initialise the weights, or load a checkpoint. Raises ValueError for a checkpoint that does not fit."""
        settings, engine = self.settings, self.engine
        if resumes(settings):
            engine.init_buffers()
        else:
            engine.init_weights()
        if self.pretends:
            return
        state = self._state()
        restored = restore(settings, state, self.text.up_to)
        if restored is not None:
            resume_from(engine, state)
        notes = make_place(settings, self._state()) if settings.train.kept["newest"] else []
        between = self.saves and 0 < settings.train.save_every < settings.train.steps
        copies, offloaded = (
            copied_bytes(self._state()) if between else 0,
            engine.host_bytes if settings.plan.offload else 0,
        )
        self._no_copies = require_memory(settings, offloaded, copies, available_memory())
        self._remarks = [*(restored.notes if restored else ()), *notes, *filter(None, [self._no_copies])]
        if restored is not None:
            self._go_on(restored)

    def _go_on(self, restored: Restored) -> None:
        """Take over a checkpoint's values apart from tensors."""
        more = restored.more
        self.step = self._saved = restored.step
        self.position = restored.position
        if more["samples"] != self.text.samples:
            self._remarks.append(OTHER_TEXT)
        self._in_a_row = more["in_a_row"]

    def run(self) -> int:
        """Train until the last step, or until a signal. Returns the signal, 0 for none."""
        settings, engine = self.settings, self.engine
        report, recorder = partial(engine.report, self.rank), lambda: engine.current_recorder
        watchdog = Watchdog(settings.train.hang_timeout, report, recorder)
        try:
            skipped = 0 if self.pretends else int(engine.optimizer.guard.total)
            made = Metrics(settings, self.text.unigram_entropy, self.step, self.rank, skipped=skipped)
            with made as metrics, StopRequest() as stop:
                metrics.header(*parameter_counts(settings.model), str(self.text))
                metrics.sources(self._epochs(self.position), self._epochs(self._end))
                metrics.remarks(*engine.program.notes, *self._remarks, *self._packed)
                with ProfileWindow(settings, self.rank, engine, metrics, stop, self.step) as window, no_collection():
                    signal = self._loop(metrics, stop, window)
                metrics.summary()
            return signal
        finally:
            watchdog.close()

    @property
    def pretends(self) -> bool:
        """Whether the transport moves no data. Such a run does not train: it loads and saves nothing."""
        return self.settings.train.transport == "null"

    @property
    def saves(self) -> bool:
        """Whether the run writes checkpoints."""
        return self.settings.train.kept["newest"] > 0 and not self.pretends

    def _loop(self, metrics: Metrics, stop: StopRequest, window: ProfileWindow) -> int:
        saves = Saves(self.settings, metrics, self._saved, self._state, self._moment, background=not self._no_copies)
        try:
            return self._steps(saves, metrics, stop, window)
        except ValueError:  # raised on all ranks, so no rank waits for one that has ended
            saves.wait()
            raise

    def _steps(self, saves: Saves, metrics: Metrics, stop: StopRequest, window: ProfileWindow) -> int:
        evaluated, train = self.step, self.settings.train
        while self.step < train.steps:
            window.before(self.step + 1)
            result, signal = self._step(metrics, stop)
            metrics.step(result)
            window.after(self.step, result.way)
            collect_after(self.step)
            if not self.pretends:
                self._require_taken(result, metrics)
            if self._evaluates():
                self._validate(metrics)
                evaluated = self.step
            saves.look()
            if self.saves and self.step < train.steps and not signal and not self._in_a_row:
                saves.between(self.step)
            if signal:
                where = saves.last() if self.saves else ""
                metrics.say(f"stopped by signal {signal}; {f'saved in {where}' if where else 'unsaved'}")
                return signal
        if train.eval_batches and evaluated != self.step and not self.pretends:
            self._validate(metrics)
        if self.saves:
            saves.last()
        return 0

    def _require_taken(self, result: StepRecord, metrics: Metrics) -> None:
        """Report a skipped step.

        Raises ValueError on every rank after too many, or if the loss is not finite: a checkpoint with spoiled weights
        must not replace a good one.
        """
        what = f"step {result.step} has loss {result.loss:g} and a gradient of norm {result.grad_norm:g}"
        if self._in_a_row > MOST_SKIPPED:
            raise ValueError(self._too_many(what, math.isfinite(result.grad_norm)))
        if self._in_a_row:
            more = MOST_SKIPPED + 1 - self._in_a_row
            metrics.say(f"WARNING  {what}: it was skipped, weights stay; the run ends after {more} more in a row")
        elif not math.isfinite(result.loss):
            fix = "a lower train.lr or a longer train.warmup; the last checkpoint is from before this step"
            raise ValueError(problem("train.lr", self.settings.train.lr, self.settings.origins, what, fix))

    def _too_many(self, what: str, spike: bool) -> str:
        """The message that ends a run after too many skipped steps. Collective."""
        settings, row = self.settings, f", the last of {MOST_SKIPPED + 1} skipped in a row"
        if spike:
            reason = f"{what}, and the usual norm is {self.engine.optimizer.guard.usual:.3g}{row}"
            fix = "a larger factor or 0, or a lower train.lr; the last checkpoint is from before these steps"
            return problem("optimizer.skip_spikes", settings.optimizer.skip_spikes, settings.origins, reason, fix)
        position = self.position - settings.batch
        where = blame(self.engine, self._microbatches(self.train_stream, position, self._dealt(position)[0]))
        fix = "a lower train.lr or a longer train.warmup; the last checkpoint is from before these steps"
        reason = f"{what}{row}{f'; {where}' if where else ''}"
        return problem("train.lr", settings.train.lr, settings.origins, reason, fix)

    def _step(self, metrics: Metrics, stop: StopRequest) -> tuple[StepRecord, int]:
        """Run one optimizer step. Returns also the signal that any rank received."""
        settings, engine = self.settings, self.engine
        started = time.perf_counter()
        order, waits = self._dealt(self.position)
        microbatches = self._microbatches(self.train_stream, self.position, order)
        lr = learning_rate(self.step, settings.train)
        result = engine.train_step(microbatches, lr)
        if result.lacked:
            metrics.say(f"step {self.step + 1} {overflow_note(settings, result.lacked, result.grown)}")
        agreed = engine.agree(result.loss, result.loads, stop.signal, result.imbalance)
        self.step += 1
        self.position += settings.batch
        seconds = time.perf_counter() - started
        self._in_a_row = self._in_a_row + 1 if agreed.skipped else 0
        rows = self._rows(result.loads) if agreed.loads else {}
        worst, epochs = max(agreed.loads.values(), default=0.0), self._epochs(self.position)
        numbers = agreed.loss, agreed.grad_norm, lr, seconds, worst, agreed.skipped_of_run
        more = agreed.loads, rows, epochs, result.way, agreed.imbalance, waits
        return StepRecord(self.step, *numbers, *more), agreed.signal

    def _evaluates(self) -> bool:
        """Whether a periodic validation is due after the last step."""
        train = self.settings.train
        due = train.eval_batches and train.eval_every and self.step % train.eval_every == 0
        return bool(due) and not self.pretends

    def _rows(self, mine: Mapping[int, Tensor]) -> dict[int, list[int]]:
        """Rows of every expert by layer, over all pipeline ranks, in steps with a validation."""
        if not self._evaluates():
            return {}
        return {
            layer: rows
            for ranks in everyone({n: rows.tolist() for n, rows in mine.items()})
            for layer, rows in ranks.items()
        }

    def _dealt(self, position: int) -> tuple[Dealt, float | None]:
        """Which sequences of the step each rank trains on; and for balanced documents, the imbalance of attention.

        All ranks compute the same. See `hocket/program/documents.py`.
        """
        settings, dp = self.settings, self.settings.mesh.dp
        if not deals(settings):
            return as_read(settings.train.microbatches, dp, settings.train.sequences), None
        attention = attending(settings.model, settings.data.sequence_length)
        lengths = (self.train_stream.lengths(position + n).tolist() for n in range(settings.batch))
        works = [attention.work(lengths_of(each)) for each in lengths]
        order = dealt(works, dp, settings.train.sequences)
        return order, imbalance_of(works_of(order, works)) if dp > 1 else None

    def _microbatches(self, stream: Mix | Stream, position: int, order: Dealt) -> list[Microbatch]:
        batches = []
        for of_ranks in order:
            ids, targets, numbers = stream.batch([position + n for n in of_ranks[self.engine.where.dp]])
            documents = None if numbers is None else documents_of(numbers).to(self.device)
            batches.append(
                Microbatch(to_device(ids, self.device), to_device(targets, self.device), documents=documents)
            )
        return batches

    @property
    def _end(self) -> int:
        """Position at the end of the run."""
        return self.position + (self.settings.train.steps - self.step) * self.settings.batch

    @property
    def _packed(self) -> list[str]:
        """A remark per source packed with whole documents."""
        streams = zip(self.text.sources, self.train_stream.streams, strict=True)
        return [f"packing{s.name and f' of {s.name}'}: {each}" for s, each in streams if str(each)]

    def _epochs(self, position: int) -> dict[str, float]:
        """How many epochs of each source precede a position, if there are several."""
        found = zip(self.text.sources, self.train_stream.epochs(position), strict=True)
        return {source.name: epochs for source, epochs in found if source.name}

    def _validate(self, metrics: Metrics) -> None:
        found = {name: self._evaluate(stream, metrics) for name, stream in self.validation_streams.items()}
        losses = {name: loss for name, (loss, learnt) in found.items() if learnt}
        for name in found.keys() - losses.keys():
            metrics.say(f"WARNING  validation{name and f' of {name}'} has no target that counts, and so no loss")
        if losses:
            metrics.validation(self.step, self.text.mean(losses), losses if "" not in losses else {})

    def _evaluate(self, stream: Stream, metrics: Metrics) -> tuple[float, int]:
        """Mean cross-entropy over the targets of the first `eval_batches` batches, and the number of targets.

        No sequence is read twice.
        """
        total, learnt, train = 0.0, 0, self.settings.train
        order = as_read(train.microbatches, self.settings.mesh.dp, train.sequences)
        for batch in range(min(train.eval_batches, stream.batches(self.settings.batch))):
            loss = self.engine.evaluate(self._microbatches(stream, batch * self.settings.batch, order))
            count = int(self.engine.learnt)
            total, learnt = total + self.engine.agree(loss).loss * count, learnt + count
            room = self.engine.room
            if room.lacked:
                metrics.say(f"validation {batch + 1} {overflow_note(self.settings, room.lacked, room.now is not None)}")
        return total / max(learnt, 1), learnt

    def _state(self) -> State:
        """The part of a checkpoint that this rank writes."""
        sections = state_of(self.engine)
        return {f"{key}.{name}": value for key, values in sections.items() for name, value in values.items()}

    def _moment(self) -> Moment:
        """What a checkpoint taken now holds apart from tensors."""
        more = {"in_a_row": self._in_a_row, "samples": self.text.samples}
        return Moment(self.step, self.position, self.text.up_to(self.position), more)
