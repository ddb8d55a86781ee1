"""An optimizer that holds only some of its parameters for a while: how one is stepped unit by unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer


@contextmanager
def optimizer_holding(optimizer: Optimizer, params: Sequence[list[nn.Parameter]]) -> Iterator[None]:
    """Inside, the optimizer holds these parameters alone, group by group."""
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    for group, some in zip(groups, params, strict=True):
        group["params"] = some
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, before in zip(groups, whole, strict=True):
            group["params"] = before
