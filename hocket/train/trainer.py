"""The training run of one rank: data in, planned steps, metrics and checkpoints out."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hocket.config import TrainConfig
from hocket.engine import Engine
from hocket.fsdp.planned.adamw import PieceState
from hocket.model.documents import documents_of
from hocket.model.microbatch import Microbatch
from hocket.model.transformer import parameter_counts
from hocket.program.capacity import lack
from hocket.resolve import Settings
from hocket.runtime.collection import collect_after, no_collection
from hocket.runtime.recorder import Watchdog
from hocket.settings.schema import problem
from hocket.train.checkpoint import SaveFailed, make_place, restore, save
from hocket.train.corpus import open_corpus
from hocket.train.data import Stream, make_streams
from hocket.train.metrics import Metrics, StepRecord
from hocket.train.pieces import Range
from hocket.train.profiling import ProfileWindow
from hocket.train.signals import StopRequest


class Trainer:
    """One rank of a run. The default process group exists already if the world has more than one rank."""

    def __init__(self, settings: Settings, rank: int, device: torch.device) -> None:
        self.settings, self.rank, self.device = settings, rank, device
        self.corpus = open_corpus(settings.data, settings.origins, without=Path(settings.run.folder))
        self.train_stream, self.validation_stream = make_streams(self.corpus, settings)
        self.engine = Engine(settings, rank, device)
        self._require_same_text()
        self.step = self.position = 0
        self._remarks = list[str]()

    def _require_same_text(self) -> None:
        """Raise ValueError unless all ranks, which may be on several hosts, have found the same text."""
        corpus, control = self.corpus, self.engine.groups.control
        found = [len(corpus.train), len(corpus.validation), corpus.documents, corpus.sample]
        mine = torch.tensor(found, device=self.device)
        least, most = mine.clone(), mine.clone()
        control.all_reduce(least, "min").wait()
        control.all_reduce(most, "max").wait()
        if not torch.equal(least, most):
            reason = f"ranks find different text, or in another order: this one {corpus}"
            fix = "the same files under the same paths on all hosts, and files that do not change"
            raise ValueError(problem("data.paths", self.settings.data.paths, self.settings.origins, reason, fix))

    def begin(self) -> None:
        """Give weights their first values, or those of a checkpoint. Raises ValueError for one that does not fit."""
        settings, engine = self.settings, self.engine
        engine.init_weights()
        if self.pretends:
            return
        restored = restore(settings, self._state(), str(self.corpus))
        notes = make_place(settings, self._state()) if settings.train.keep else []
        self._remarks = [*(restored.notes if restored else ()), *notes]
        if restored is not None:
            self.step, self.position = restored.step, restored.position
            engine.optimizer.steps = restored.step
            engine.sharded.refresh()

    def run(self) -> int:
        """Train until the last step, or until a signal asks to stop. Returns that signal, 0 for none."""
        settings, engine = self.settings, self.engine
        watchdog = Watchdog(settings.train.hang_timeout, self._report, lambda: self.engine.current_recorder)
        try:
            with Metrics(settings, self.corpus.unigram_entropy, self.step, self.rank) as metrics, StopRequest() as stop:
                metrics.header(*parameter_counts(settings.model), str(self.corpus))
                metrics.remarks(*engine.program.notes, *self._remarks)
                with ProfileWindow(settings, self.rank, engine, metrics, stop, self.step) as window, no_collection():
                    signal = self._loop(metrics, stop, window)
                metrics.summary()
            return signal
        finally:
            watchdog.close()

    @property
    def pretends(self) -> bool:
        """Whether the transport moves nothing. Such a run does not train: it loads and saves nothing."""
        return self.settings.train.transport == "null"

    @property
    def saves(self) -> bool:
        """Whether the run writes checkpoints."""
        return self.settings.train.keep > 0 and not self.pretends

    def _loop(self, metrics: Metrics, stop: StopRequest, window: ProfileWindow) -> int:
        train = self.settings.train
        if self.pretends:
            train = dataclasses.replace(train, eval_batches=0)
        if not self.saves:
            train = dataclasses.replace(train, save_every=0)
        saved = evaluated = self.step
        while self.step < train.steps:
            window.before(self.step + 1)
            result, signal = self._step(metrics, stop)
            metrics.step(result)
            if not self.pretends:
                self._require_finite(result)
            window.after(self.step)
            collect_after(self.step)
            if train.eval_batches and train.eval_every and self.step % train.eval_every == 0:
                metrics.validation(self.step, self._evaluate(metrics))
                evaluated = self.step
            if train.save_every and self.step % train.save_every == 0 and not signal and self.step < train.steps:
                saved = self._save_or_warn(metrics, saved)
            if signal:
                if saved != self.step:
                    metrics.say(
                        f"stopped by signal {signal}; {f'saved in {self._save()}' if self.saves else 'unsaved'}"
                    )
                return signal
        if saved != self.step and self.saves:
            self._save()
        if train.eval_batches and evaluated != self.step:
            metrics.validation(self.step, self._evaluate(metrics))
        return 0

    def _require_finite(self, result: StepRecord) -> None:
        """Raise ValueError, on every rank, if the step has spoiled the weights. They must not replace good ones."""
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            lr = self.settings.train.lr
            reason = f"step {result.step} has loss {result.loss:g} and a gradient of norm {result.grad_norm:g}"
            fix = "a lower train.lr or a longer train.warmup; the last checkpoint is from before this step"
            raise ValueError(problem("train.lr", lr, self.settings.origins, reason, fix))

    def _step(self, metrics: Metrics, stop: StopRequest) -> tuple[StepRecord, int]:
        """One optimizer step, and the signal by which some rank was asked to stop."""
        settings, engine = self.settings, self.engine
        started = time.perf_counter()
        microbatches = self._microbatches(self.train_stream, self.position)
        lr = learning_rate(self.step, settings.train)
        result = engine.train_step(microbatches, lr)
        if result.lacked:
            metrics.say(f"step {self.step + 1} {lack(settings, result.lacked, result.grown)}")
        load = 0.0
        if result.loads:  # the worst layer's, with one wait for the GPU
            rows = torch.stack(list(result.loads.values())).float()
            load = float((rows.amax(1) / rows.mean(1)).max())
        loss, worst_load, signal = engine.agree(result.loss, load, stop.signal)
        self.step += 1
        self.position += settings.batch
        seconds = time.perf_counter() - started
        return StepRecord(self.step, loss, float(result.grad_norm), lr, seconds, worst_load), signal

    def _microbatches(self, stream: Stream, position: int) -> list[Microbatch]:
        train, mesh = self.settings.train, self.settings.mesh
        batches = []
        for m in range(train.microbatches):
            ids, targets, numbers = stream.batch(
                position, m, self.engine.where.dp, dp=mesh.dp, sequences=train.sequences
            )
            documents = None if numbers is None else documents_of(numbers).to(self.device)
            batches.append(Microbatch(ids.to(self.device), targets.to(self.device), documents=documents))
        return batches

    def _evaluate(self, metrics: Metrics) -> float:
        """Mean cross-entropy of the first `eval_batches` batches of the validation stream."""
        losses = []
        for batch in range(self.settings.train.eval_batches):
            loss = self.engine.evaluate(self._microbatches(self.validation_stream, batch * self.settings.batch))
            losses.append(self.engine.agree(loss)[0])
            room = self.engine.room
            if room.lacked:
                metrics.say(f"validation {batch + 1} {lack(self.settings, room.lacked, room.now is not None)}")
        return sum(losses) / len(losses)

    def _state(self) -> Mapping[str, list[Range]]:
        """The part of a checkpoint that this rank adds, by kind."""
        states = self.engine.optimizer.state.values()

        def ranges(of: Callable[[PieceState], Tensor]) -> list[Range]:
            pieces = [(s.piece, of(s)) for s in states]
            return [Range(p.name, p.shape, p.lo, p.hi, tensor, p.part) for p, tensor in pieces]

        return {
            "weight": ranges(lambda s: s.piece.main),
            "exp_avg": ranges(lambda s: s.exp_avg),
            "exp_avg_sq": ranges(lambda s: s.exp_avg_sq),
            "bias": [Range(name, tuple(b.shape), 0, b.numel(), b) for name, b in self.engine.balance.biases().items()],
        }

    def _save(self) -> Path:
        return save(self.settings, self.step, self.position, self._state(), str(self.corpus))

    def _save_or_warn(self, metrics: Metrics, saved: int) -> int:
        """Save, between steps. Returns the step that was saved last, before this one or now.

        A full disk is no reason to end the run here: what has been learnt since the last checkpoint would be lost at
        once, and there may be room by the next one. The last save of a run has no next one, and raises.
        """
        try:
            self._save()
        except SaveFailed as error:
            again = min(self.step + self.settings.train.save_every, self.settings.train.steps)
            metrics.say(f"WARNING  {error}; the run goes on, and saves again after step {again}")
            return saved
        return self.step

    def _report(self, device: bool) -> str:
        return self.engine.report(self.rank, device)


def learning_rate(step: int, train: TrainConfig) -> float:
    """Learning rate of step `step` (from 0): a linear rise over `warmup` steps, then half a cosine to `min_lr`.

    The first step already has 1 / warmup of `lr`, and the last step of the run has `min_lr`.
    """
    if step < train.warmup:
        return train.lr * (step + 1) / train.warmup
    span = max(1, train.steps - 1 - train.warmup)
    share = min(1.0, (step - train.warmup) / span)
    return train.min_lr + (train.lr - train.min_lr) * (1 + math.cos(math.pi * share)) / 2
