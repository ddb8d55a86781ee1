"""The learning rate, against the schedulers of torch and of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim import SGD, lr_scheduler
from transformers import get_cosine_with_min_lr_schedule_with_warmup, get_wsd_schedule

from hocket.config import TrainConfig
from hocket.config.schema import changed
from hocket.recipes import RECIPES
from hocket.train.trainer import SHAPES, learning_rate

STEPS, WARMUP, LR, FLOOR = 110, 10, 0.4, 0.05
OF = TrainConfig(steps=STEPS, warmup=WARMUP, lr=LR, min_lr=FLOOR)


def rates(**changes: Any) -> list[float]:
    train = replace(OF, **changes)
    return [learning_rate(step, train) for step in range(STEPS)]


def of(scheduler: Callable[[SGD], lr_scheduler.LRScheduler], steps: int = STEPS) -> Iterator[float]:
    """The rates of a scheduler of torch, step by step."""
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    made = scheduler(optimizer)
    for _ in range(steps):
        yield float(made.get_last_lr()[0])
        optimizer.step()
        made.step()


def after_warmup(optimizer: SGD, way: Callable[[SGD, int], lr_scheduler.LRScheduler]) -> lr_scheduler.SequentialLR:
    """torch's linear rise from 1 / warmup, then a way down whose last rate is the last step's."""
    rise = lr_scheduler.LinearLR(optimizer, start_factor=1 / WARMUP, total_iters=WARMUP - 1)
    return lr_scheduler.SequentialLR(optimizer, [rise, way(optimizer, STEPS - 1 - WARMUP)], [WARMUP])


@pytest.mark.parametrize(
    ("schedule", "way"),
    [
        ("cosine", lambda optimizer, span: lr_scheduler.CosineAnnealingLR(optimizer, span, eta_min=FLOOR)),
        ("linear", lambda optimizer, span: lr_scheduler.LinearLR(optimizer, 1.0, FLOOR / LR, span)),
        ("constant", lambda optimizer, span: lr_scheduler.ConstantLR(optimizer, 1.0)),
    ],
)
def test_a_schedule_is_torchs(schedule: str, way: Callable[[SGD, int], lr_scheduler.LRScheduler]) -> None:
    assert rates(schedule=schedule) == pytest.approx(list(of(lambda optimizer: after_warmup(optimizer, way))), rel=1e-9)


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize(("decay", "span"), [(0.2, 22), (30, 30), (1, 1), (100, 100)])
def test_wsd_is_that_of_transformers(shape: str, decay: float, span: int) -> None:
    """Theirs counts steps of the warm-up from 0 and never sees its lowest rate: ours is one step ahead."""
    mine = rates(schedule=f"wsd:{decay}:{shape}", min_lr=0.1 * LR)
    whole = STEPS - span - WARMUP
    theirs = of(lambda o: get_wsd_schedule(o, WARMUP, span, num_stable_steps=whole, decay_type=shape, min_lr_ratio=0.1))
    _, *expected = (*theirs, 0.1 * LR)
    assert mine[WARMUP - 1 :] == pytest.approx(expected[WARMUP - 1 :], rel=1e-9)
    assert mine[:WARMUP] == pytest.approx([LR * (n + 1) / WARMUP for n in range(WARMUP)])  # theirs begins at the floor
    assert mine.count(LR) == STEPS - WARMUP - span + 1
    assert mine[-1] == pytest.approx(0.1 * LR)


def test_cosine_with_a_floor_is_that_of_transformers() -> None:
    def theirs(optimizer: SGD) -> lr_scheduler.LRScheduler:
        return get_cosine_with_min_lr_schedule_with_warmup(optimizer, WARMUP, STEPS - 1, min_lr_rate=0.125)

    assert rates(min_lr="12.5%")[WARMUP:] == pytest.approx(list(of(theirs))[WARMUP:], rel=1e-9)


def test_the_lowest_rate_is_a_share_of_the_highest_or_a_number() -> None:
    assert rates(min_lr="12.5%") == rates(min_lr=0.125 * LR)
    assert rates(min_lr="100%")[WARMUP:] == [LR] * (STEPS - WARMUP)
    assert rates(min_lr=0.0)[-1] == 0.0


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_any_rate_may_be_chosen_without_its_lowest(recipe: str) -> None:
    config = changed(RECIPES[recipe](), {"train.lr": 1e-6})
    assert config.train.lowest_lr == pytest.approx(1e-7)


def test_the_whole_rate_of_wsd_does_not_depend_on_the_end() -> None:
    """So a checkpoint of the stable part is one of a longer run."""
    longer = replace(OF, schedule="wsd", steps=1000)
    assert rates(schedule="wsd") == rates(schedule="wsd:0.2:linear")
    assert rates(schedule="wsd")[:88] == [learning_rate(step, longer) for step in range(88)]


def test_runs_of_one_step_and_steps_behind_the_end() -> None:
    for schedule in ("cosine", "linear", "wsd", "constant"):
        one = TrainConfig(steps=1, warmup=0, lr=1.0, min_lr=0.1, schedule=schedule)
        assert learning_rate(0, one) == (0.1 if schedule == "wsd" else 1.0)
        last = 1.0 if schedule == "constant" else 0.1
        assert learning_rate(10, one) == pytest.approx(last)
