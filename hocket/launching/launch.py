"""The common start of `hocket train` and `hocket bench`, as one worker or as the parent of all."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from hocket.config import Config
from hocket.config.rule import problem
from hocket.environment import Worker, find_worker, memory, prepare, probe
from hocket.explain.build import record
from hocket.launching.parent import start_workers
from hocket.launching.worker import FAILED, Job, end_now, run_as_worker, run_folder
from hocket.planned import check_patterns
from hocket.resolve import Settings, resolve
from hocket.train.writers import require_writers
from hocket.tune.rules import lost_copies
from hocket.tune.trials import gib
from hocket.variables import passed, survey

BYTES_OF_A_PARAMETER = 8
"""Lower bound, over all ranks: the parameter and its gradient, in fp32."""


def train(config: Config, origins: Mapping[str, str], restarts: int = 0) -> NoReturn:
    """Train, as one worker or as the parent of all, depending on how this process was started. Ends the process.

    After a failure a parent starts its workers again, up to `restarts` times. Raises ValueError for settings that
    cannot work, before any work starts.
    """
    settings, worker = prepare_and_resolve(config, origins)
    _require_restarts(settings, worker, restarts)
    require_writers(settings)
    check_corpus(settings)
    if settings.train.transport == "null":
        job = Job(train_rank, "nothing is lost: the run was no training", "ending after this step")
    else:
        again = "the same command continues from the last checkpoint, if there is one"
        job = Job(train_rank, again, "saving and ending after this step", "ended without saving")
    run_job(settings, worker, job, restarts)


def _require_restarts(settings: Settings, worker: Worker | None, restarts: int) -> None:
    where = {"restarts": "command line, --restarts"}
    if restarts < 0:
        raise ValueError(problem("restarts", restarts, where, "a number of times", "0 or more"))
    if restarts and worker:
        reason = "torchrun or Slurm starts these workers"
        raise ValueError(problem("restarts", restarts, where, reason, "torchrun --max-restarts, or srun again"))
    if restarts and not settings.train.kept["newest"]:
        reason = "train.keep = 0, so that no start would find a checkpoint"
        raise ValueError(problem("restarts", restarts, where, reason, "train.keep = 1 or more"))
    if restarts and settings.run.resume != "auto":
        reason = f"run.resume = {settings.run.resume}, so that each start would begin at the same step"
        raise ValueError(problem("restarts", restarts, where, reason, "run.resume = auto"))


def prepare_and_resolve(config: Config, origins: Mapping[str, str]) -> tuple[Settings, Worker | None]:
    """Prepare this process, and resolve a configuration for this host. The worker is None in a parent.

    Raises ValueError for settings that cannot work.
    """
    worker = find_worker(os.environ)
    local_world = worker.local_world if worker else config.mesh.world
    now = passed(sys.modules)
    variables = survey(os.environ, now)
    notes = prepare(os.environ, local_world, now)
    settings = resolve(config, probe(config, origins, worker, variables), origins)
    check_weights(settings)
    check_patterns(settings)
    lost = lost_copies(settings.host, settings.decisions)
    if worker is None or worker.rank == 0:
        sys.stderr.writelines(f"hocket: {note}\n" for note in [*notes, *too_few_gpus(settings), *lost])
    return settings, worker


def too_few_gpus(settings: Settings) -> list[str]:
    """Why ranks meant for GPUs run on CPUs. Said before weights are initialised there, which may take long."""
    meant = settings.host.gpus > 0 or settings.precision.dtype == "bf16"
    return [
        str(decision)
        for decision in settings.decisions
        if decision.setting == "train.device" and decision.value == "cpu" and meant
    ]


def run_job(settings: Settings, worker: Worker | None, job: Job, restarts: int = 0) -> NoReturn:
    """Run a job as one worker, or start all workers, wait for them, and restart them on failure. Ends the process.

    Raises ValueError for a model that does not fit into the host's memory.
    """
    ranks = worker.local_world if worker else settings.mesh.world
    check_memory(settings, ranks, memory())
    if worker:
        end_now(run_as_worker(settings, worker, job))
    with run_folder(settings):
        code = start_workers(settings, job)
        for attempt in range(restarts):
            if code != FAILED:
                break
            sys.stderr.write(f"hocket: restart {attempt + 1} of {restarts}, from the last checkpoint\n")
            code = start_workers(settings, job)
    end_now(code)  # torch's own shutdown has nothing to do here, and may hang in a process that has forked


def check_memory(settings: Settings, ranks: int, nbytes: int) -> None:
    """Raise ValueError if weights alone fill the memory that `ranks` CPU ranks of a host or container may use.

    Otherwise the kernel's OOM killer could end any process of the host, not only this run's.
    """
    if settings.train.device != "cpu":
        return
    from hocket.model.transformer import parameter_counts  # imports torch

    parameters, _ = parameter_counts(settings.model)
    least = BYTES_OF_A_PARAMETER * parameters * ranks // settings.mesh.world
    if least > nbytes:
        reason = f"weights and gradients take {gib(least)}, and the host or its container has {gib(nbytes)} of memory"
        fix = "GPUs; hocket plan and hocket explain need none"
        raise ValueError(problem("train.device", "cpu", settings.origins, reason, fix))


def train_rank(settings: Settings, rank: int, device: Any) -> None:
    """The job of training. If the run is refused before its first step, an earlier run's record stays."""
    from hocket.train.trainer import Trainer

    trainer = Trainer(settings, rank, device)
    trainer.begin()
    if rank == 0:
        record(settings, Path(settings.run.folder))
    trainer.run()


def check_corpus(settings: Settings) -> None:
    """Raise ValueError for missing paths and too little text before any worker starts. Tokenises the text if needed."""
    from hocket.train.sources import open_text

    def say(words: str) -> None:
        sys.stderr.write(f"{words}\n")

    text = open_text(settings, say)
    from hocket.train.data import make_streams  # imports torch, only once the files are found

    make_streams(text, settings)


def check_weights(settings: Settings) -> None:
    """Raise ValueError if a folder of weights does not fit the model, before anything is loaded.

    A run that resumes from a checkpoint does not need the folder.
    """
    if folder := settings.model.weights:
        from hocket.model.source import open_weights  # imports torch
        from hocket.train.checkpoint import resumes

        if resumes(settings):
            return
        try:
            open_weights(settings.model)
        except ValueError as error:
            fix = f"hocket import {folder} FILE.toml writes the settings of a model that is there"
            raise ValueError(problem("model.weights", folder, settings.origins, str(error), fix)) from None
