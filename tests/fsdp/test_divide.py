"""What summed gradients are divided by."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hocket
from tests.fsdp.elements import local
from tests.helpers.ranks import run_ranks


def gradient(rank: int, divide: float | None) -> list[float]:
    """The gradient of a weight that meets `rank + 1` on each rank."""
    model = nn.Linear(1, 1, bias=False)
    hocket.fully_shard(model, options=hocket.ShardOptions(divide=divide))
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    (shard,) = model.parameters()
    assert shard.grad is not None
    return local(shard.grad).tolist()


@pytest.mark.parametrize(("divide", "expected"), [(None, 2.0), (1, 6.0), (12, 0.5)])
def test_gradients_are_summed_and_divided(divide: float | None, expected: float) -> None:
    assert [number for part in run_ranks(gradient, 3, divide) for number in part] == [expected]


def test_nothing_is_divided_by_nothing() -> None:
    with pytest.raises(ValueError, match="divide=0 must be above 0"):
        hocket.fully_shard(nn.Linear(1, 1), options=hocket.ShardOptions(divide=0))
