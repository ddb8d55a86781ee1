"""Reentrant checkpoints, whose recomputed forwards make graphs of their own in the middle of a backward.

A unit may be called outside of such a checkpoint and again inside it, in any order, and share weights with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hocket
from tests.fsdp.twin import naming
from tests.helpers.ranks import run_ranks

WIDTH, UNITS, STEPS = 16, 4, 2


class Calls(nn.Module):
    """Calls layers in a given order; a tuple is a checkpoint around the calls in it."""

    def __init__(self, calls: tuple, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)) for _ in range(UNITS)
        )
        self.calls, self.reentrant = calls, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self.calls, x)

    def _run(self, calls: tuple, x: Tensor) -> Tensor:
        for call in calls:
            if isinstance(call, tuple):
                x = x + 0.5 * checkpoint(self._run, call, x, use_reentrant=self.reentrant)
            else:
                x = x + 0.5 * self.layers[call](x)
        return x


def random_calls(rng: Random, depth: int = 2) -> tuple:
    """Two to four calls, of which some are checkpoints around others."""
    return tuple(
        random_calls(rng, depth - 1) if depth and rng.random() < 0.4 else rng.randrange(UNITS)
        for _ in range(rng.randint(2, 4))
    )


def data(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)


def compare(calls: tuple, rank: int, prefetch: int, reentrant: bool = True) -> None:
    """Steps of a sharded model beside those of a whole one, on the data of both ranks."""
    torch.manual_seed(0)
    model, plain = (Calls(calls, reentrant).double() for _ in range(2))  # orders of sums don't show
    plain.load_state_dict(model.state_dict())
    ctx = hocket.fully_shard(model, units=nn.Sequential, options=hocket.ShardOptions(prefetch=prefetch))
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.01, foreach=True) for one in (model, plain))
    for step in range(STEPS):
        for other in range(2):
            (plain(data(step, other).requires_grad_()).square().mean() / 2).backward()
        model(data(step, rank).requires_grad_()).square().mean().backward()
        assert not any(unit.claims for unit in ctx.units), "a unit stays claimed after backward"
        assert not any(unit.open for unit in ctx.units), "a backward is still waited for"
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        with ctx.gathered():
            for name, whole in plain.named_parameters():
                torch.testing.assert_close(model.get_parameter(name), whole, msg=f"{name} after step {step}")


def compare_all(rank: int, seeds: Sequence[int]) -> None:
    for seed in seeds:
        rng = Random(seed)
        calls, prefetch, reentrant = random_calls(rng), rng.choice([0, 0, 1, 2]), rng.random() < 0.8
        with naming(f"{seed}: {calls}, {prefetch=}, {reentrant=}"):
            compare(calls, rank, prefetch, reentrant)


def outside_and_inside(rank: int, prefetch: int) -> None:
    compare((0, 1, (1, 2, 3)), rank, prefetch)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_unit_is_called_outside_of_a_checkpoint_and_inside(prefetch: int) -> None:
    run_ranks(outside_and_inside, 2, prefetch)


@pytest.mark.parametrize("batch", [0, pytest.param(1, marks=pytest.mark.full)])
def test_random_calls(batch: int) -> None:
    run_ranks(compare_all, 2, range(12 * batch, 12 * (batch + 1)))
