"""Optimizers that somebody else wrote: those that are not elementwise are refused before they update anything."""

# pyrefly: ignore-errors
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.optimization import Adafactor

import hocket
from tests.fsdp.twin import naming
from tests.helpers.ranks import run_ranks


class Own(torch.optim.Optimizer):
    """`update(parameter, gradient, state)` is what is subtracted, times lr."""

    def __init__(self, params: Any, update: Callable[[Tensor, Tensor, dict[str, Any]], Tensor]) -> None:
        super().__init__(params, {"lr": 0.1, "decay": 0.01})
        self.update = update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    if group["decay"] and param.ndim >= 2:
                        param.mul_(1 - group["lr"] * group["decay"])
                    param.sub_(self.update(param, param.grad, self.state[param]), alpha=group["lr"])


def lion(param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
    average = state.setdefault("average", torch.zeros_like(grad))
    found = average.lerp(grad, 0.1).sign()
    average.lerp_(grad, 0.01)
    return found


def lars(param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
    return grad * param.norm() / grad.norm()


def clipped(param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
    return grad / max(1.0, float(grad.square().mean().sqrt()))


def shampoo(param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
    if grad.ndim < 2:  # so it runs on shards without a word
        return grad.sign()
    return torch.linalg.solve(grad @ grad.T + torch.eye(len(grad)), grad)


def late(param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
    """Looks at the first gradient only."""
    state["steps"] = state.get("steps", 0) + 1
    return torch.zeros_like(grad) if state["steps"] == 1 else grad / grad.norm()


KINDS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], bool]] = {
    "lion": (lambda params: Own(params, lion), True),
    "lars": (lambda params: Own(params, lars), False),
    "clipped": (lambda params: Own(params, clipped), False),
    "shampoo": (lambda params: Own(params, shampoo), False),
    "late": (lambda params: Own(params, late), False),
    "adafactor": (lambda params: Adafactor(params, lr=0.1, relative_step=False, scale_parameter=False), False),
}


def trials(rank: int) -> None:
    for name, (make, elementwise) in KINDS.items():
        for strategy in ("optim_grads_params", "no_shard"):
            model = nn.Linear(16, 16)
            hocket.fully_shard(model, strategy=strategy)
            optimizer = make(model.parameters())
            before = [param.to_local().clone() for param in model.parameters()]
            model(torch.ones(2, 16)).square().sum().backward()
            with naming(f"{name} {strategy}"):
                if elementwise or (
                    strategy == "no_shard" and name in ("lars", "late", "clipped")
                ):  # the same of 1-D and 2-D
                    optimizer.step()
                    continue
                with pytest.raises(ValueError, match="computes with whole weights"):
                    optimizer.step()
                assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
                assert not optimizer.state


def test_what_is_not_elementwise_is_refused() -> None:
    run_ranks(trials, 2)
