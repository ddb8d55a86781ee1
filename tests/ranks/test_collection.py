"""Steps leave nothing to Python's garbage collector that matters, and it keeps out of them."""

from __future__ import annotations

import gc
from typing import ClassVar

import torch
from torch import Tensor

from hocket.collector import EVERY, collect_after, no_collection
from hocket.config import Config
from hocket.engine import Engine
from hocket.model.documents import Microbatch
from tests.helpers.parity import config
from tests.helpers.ranks import run_ranks
from tests.reference import random_batches


def tensors_left(rank: int, c: Config) -> int:
    """Tensors that two steps have left to the collector."""
    engine = Engine(c, rank, torch.device("cpu"))
    engine.init_weights()
    (batches,) = random_batches(c.model, 1, c.train.microbatches, c.mesh.dp, (2, 8))
    microbatches = [Microbatch(*batch[engine.where.dp]) for batch in batches]
    engine.train_step(microbatches, 1e-2)
    with no_collection():
        gc.set_debug(gc.DEBUG_SAVEALL)
        engine.train_step(microbatches, 1e-2)
        engine.train_step(microbatches, 1e-2)
        gc.collect()
        gc.set_debug(0)
        found = sum(isinstance(each, Tensor) for each in gc.garbage)
        gc.garbage.clear()
    return found


def test_steps_leave_no_tensors_to_the_collector() -> None:
    c = config(dict(layers=4, dense_layers=(0, 2)), dict(dp=2, ep=2), dict(merge="on"), 3, "fp32")
    assert list(run_ranks(tensors_left, 2, c)) == [0, 0]


class Cycle:
    """Refers to itself, so that only the collector can find it."""

    ended: ClassVar[list[int]] = []

    def __init__(self, number: int) -> None:
        self.me, self.number = self, number

    def __del__(self) -> None:
        self.ended.append(self.number)


def test_garbage_waits_for_its_step() -> None:
    Cycle.ended.clear()
    with no_collection():
        for number in range(5000):  # several times what starts the collector
            Cycle(number)
        collect_after(EVERY - 1)
        assert not Cycle.ended
        collect_after(EVERY)
        assert len(Cycle.ended) == 5000
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled(), "it was off before"
    finally:
        gc.enable()


def thaws(rank: int) -> tuple[int, int]:
    """What is frozen afterwards, and how many cycles of before were freed, where something is frozen from the start.

    An interpreter may freeze objects of its own: Python 3.12 does.
    """
    Cycle.ended.clear()
    cycle = Cycle(0)
    gc.freeze()
    with no_collection():
        assert gc.get_freeze_count()
    del cycle
    gc.collect()
    return gc.get_freeze_count(), len(Cycle.ended)


def test_what_existed_before_is_collected_afterwards() -> None:
    assert run_ranks(thaws, 1) == [(0, 1)]
