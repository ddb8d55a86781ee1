"""Ranks that torchrun started, and what they step on."""

from __future__ import annotations

import dataclasses
import os

import torch
import torch.distributed as dist

from benchmarks.bench.measure import Gauge, Timer, slowest
from benchmarks.bench.workload import Workload, batches
from hocket.config import Config
from hocket.engine import Engine
from hocket.environment import prepare
from hocket.model.documents import Microbatch
from hocket.runtime.world import join_world


def join() -> tuple[int, torch.device]:
    """Join the ranks that torchrun started. Returns this one's number and GPU."""
    prepare(os.environ, int(os.environ["LOCAL_WORLD_SIZE"]))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    join_world(True, 600.0)
    return dist.get_rank(), device


def batch(engine: Engine, seed: int) -> list[Microbatch]:
    """Random tokens, the same for all contenders."""
    return batches(Workload(engine.config), engine.mesh.rank(engine.where.pp, engine.where.dp), seed, engine.device)


def timed_block(engine: Engine, microbatches: list[Microbatch], steps: int) -> list[float]:
    """Seconds of each step on the slowest rank, as in a block of `hocket bench`."""
    timer = Timer(engine.device)

    def step() -> None:
        engine.train_step(microbatches, 1e-4)

    (seconds,) = slowest(timer.steps(step, 1))
    return list(timer.block(step, timer.uncounted(seconds), steps, Gauge(None)).seconds)


def for_world(config: Config, world: int) -> Config:
    """A recipe on another number of ranks: fewer or more data-parallel ranks."""
    dp = world // config.mesh.pp
    mesh = dataclasses.replace(config.mesh, dp=dp, ep=min(config.mesh.ep, dp))
    return dataclasses.replace(config, mesh=mesh)
