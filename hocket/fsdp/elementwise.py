"""Whether an optimizer that is not torch's is elementwise: tried on a small weight, whole and in parts.

Note: [A trial of an optimizer]
An optimizer that takes norms or products of whole weights (LARS, Shampoo, Muon, ...) runs on shards without an error,
and does something else on each number of ranks. No list has all of them. So, before its first step, a copy of it with
the same settings updates a small matrix, and two shards of the same one with the same gradients. An elementwise
optimizer gives the same weights. One that fails in the trial, or that draws random numbers, says nothing.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hocket.fsdp.sharded_parameter import ShardedParameter
from hocket.layers.slices import Span

ROWS, COLUMNS, CUT = 48, 32, 481
STEPS = 3
"""Some optimizers only look at the first gradient."""


class _Part:
    """What a shard of the trial asks of its group."""

    keeps_all, splits = False, True
    late = valueless = False

    def __init__(self, local: Tensor, lo: int) -> None:
        self.gradient: Tensor | None = None
        self.shard = ShardedParameter(local, requires_grad=True)
        self.shard.full_name, self.shard.full_shape, self.shard.position = "trial", torch.Size((ROWS, COLUMNS)), 0
        self.shard.span = Span((ROWS, COLUMNS), lo, lo + len(local))
        self.shard.join(self)

    def grad_of(self, index: int) -> Tensor | None:
        return self.gradient

    def span_of(self, shard: ShardedParameter) -> Span:
        return shard.span

    def forget(self, index: int) -> None:
        self.gradient = None

    def set_grad(self, index: int, value: Tensor) -> None:
        self.gradient = value

    def invalidate(self) -> None:
        pass

    def change(self, index: int, trains: bool) -> None:
        pass


def is_elementwise(optimizer: Optimizer, group: int, like: Tensor, keeps_all: bool) -> bool:
    """False if it updates parts of a weight in another way than the whole. See Note: [A trial of an optimizer].

    With the settings of parameter group number `group`. `like` has the dtype and device of its parameters; with
    `keeps_all` a rank has whole weights, flattened.
    """
    cuts = [0, ROWS * COLUMNS] if keeps_all else [0, CUT, ROWS * COLUMNS]
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            first, again, parts = (_trained(optimizer, group, like, where) for where in ([], [], cuts))
    except Exception:
        return True
    if not torch.equal(first, again):
        return True
    moved = (first - _start(first).float()).abs().max()
    return bool((first - parts).abs().max() <= 1e-3 * moved)


def _start(like: Tensor) -> Tensor:
    return torch.linspace(-1, 1, ROWS * COLUMNS).to(like.device, like.dtype)


def _trained(optimizer: Optimizer, group: int, like: Tensor, cuts: Sequence[int]) -> Tensor:
    """The weights after some steps, flat: of the whole matrix, or of parts cut there."""
    weights = _start(like)
    kept = [_Part(weights[lo:hi].clone(), lo) for lo, hi in pairwise(cuts)]
    params: list[nn.Parameter] = [one.shard for one in kept] or [nn.Parameter(weights.view(ROWS, COLUMNS))]
    tried = _copy(optimizer, group, params)
    step = type(optimizer).step
    step = getattr(step, "__wrapped__", step)  # without the hooks that torch puts around it
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        grad = 3 * torch.randn(ROWS * COLUMNS, generator=generator).to(weights)
        for param in params:
            here = grad[param.lo : param.hi] if isinstance(param, ShardedParameter) else grad.view(ROWS, COLUMNS)
            param.grad = here.clone()
        step(tried)
    return torch.cat([_values(param).flatten() for param in params]).float()


def _values(param: nn.Parameter) -> Tensor:
    return param.to_local() if isinstance(param, ShardedParameter) else param.detach()


def _copy(optimizer: Optimizer, group: int, params: list[nn.Parameter]) -> Optimizer:
    """One like it, as it is before its first step, that holds `params`."""
    new = object.__new__(type(optimizer))
    held = [param for group in optimizer.param_groups for param in group["params"]]
    memo: dict[int, Any] = {id(param): None for param in held}
    for name, value in optimizer.__dict__.items():
        if name not in ("state", "param_groups"):
            new.__dict__[name] = copy.deepcopy(value, memo) if isinstance(value, dict | list | Tensor) else value
    settings = {key: value for key, value in optimizer.param_groups[group].items() if key != "params"}
    settings = {**copy.deepcopy(settings), "lr": 0.01}
    new.state, new.param_groups = defaultdict(dict), [{**settings, "params": params}]
    return new
