"""A layer of one's own through the planned step, beside its forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.adapters.step import plan_model
from hocket.step import PlannedStep

_VOCAB = 32
_MICROBATCHES = 2
_SMALL = 0.01
"""Share of the whole gradient's norm below which a parameter's is measured by that share."""

Batch = tuple[Tensor, Tensor]
Found = tuple[list[float], dict[str, Tensor]]
"""Losses of microbatches, and gradients of the model's parameters."""


class Between(nn.Module):
    """Two copies of a layer between an embedding and a head."""

    def __init__(self, layer: nn.Module, hidden: int, context: Callable[[Tensor], Any] | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCAB, hidden)
        self.layers = nn.ModuleList([layer, copy.deepcopy(layer)])
        self.head = nn.Linear(hidden, _VOCAB, bias=False)
        self._context = context

    def context(self, x_BSD: Tensor) -> Any:
        """What layers are told."""
        return None if self._context is None else self._context(x_BSD)

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Logits, by the layers' own forward."""
        x_BSD = self.embed(ids_BS)
        context = self.context(x_BSD)
        for layer in self.layers:
            x_BSD = layer(x_BSD, context)
        return self.head(x_BSD)


def check_layer(
    layer: nn.Module,
    hidden: int,
    *,
    context: Callable[[Tensor], Any] | None = None,
    shape: tuple[int, int] = (2, 8),
    tolerance: float = 1e-6,
) -> None:
    """Assert that a planned step over a layer computes what plain autograd computes over its `forward`, on a CPU.

    `layer` is a `DenseLayer` or `ExpertLayer` of hocket.adapters.layer that takes and returns [B, S, hidden] in fp32;
    `context` makes what it is told beside that, from hidden states; `shape` is (sequences, their length). Losses and
    gradients of two copies of the layer are compared: of a dense layer bit for bit, of one with experts, whose sums
    have another order, to a relative `tolerance`.

    Raises AssertionError, naming what differs and how much; ValueError as `plan_model`.
    """
    model = Between(layer, hidden, context).train()
    generator, batches = torch.Generator().manual_seed(1), list[Batch]()
    for _ in range(_MICROBATCHES):
        ids = torch.randint(_VOCAB, (shape[0], shape[1] + 1), generator=generator)
        batches.append((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))
    settings: dict[str, Any] = {
        "train.device": "cpu", "train.sequences": shape[0], "data.sequence_length": shape[1], "train.clip": 0.0,
        "train.microbatches": _MICROBATCHES, "precision.compute": "fp32", "overlap.ep.merge": "off",
    }  # fmt: skip
    found = _planned(plan_model(model, settings), batches)
    _compare(found, _plain(model, batches), tolerance if hasattr(layer, "expert_weights") else 0.0)


def _planned(step: PlannedStep, batches: list[Batch]) -> Found:
    """By a planned step, which also updates the weights."""
    grads: dict[str, Tensor] = {}
    finish = step.engine.optimizer.apply

    def keep(*args: Any, **kwargs: Any) -> None:
        for piece in (piece for unit in step.engine.sharded.units.values() for piece in unit.pieces()):
            theirs, shape = step.parameters[piece.name]
            grads[theirs] = piece.grad.clone().view(shape)
        finish(*args, **kwargs)

    step.engine.optimizer.apply = keep  # type: ignore[method-assign]
    step((torch.cat([ids for ids, _ in batches]), torch.cat([targets for _, targets in batches])))
    return [loss.item() for loss in step.engine.executor.actions.losses], grads


def _plain(model: Between, batches: list[Batch]) -> Found:
    """By plain autograd."""
    params, losses, total = dict(model.named_parameters()), list[float](), dict[str, Tensor]()
    for ids, targets in batches:
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        losses.append(loss.item())
        grads = torch.autograd.grad(loss / len(batches), list(params.values()), allow_unused=True)
        for name, grad in zip(params, grads, strict=True):
            if grad is not None:
                total[name] = total.get(name, 0) + grad
    return losses, total


def _compare(found: Found, expected: Found, tolerance: float) -> None:
    problems = []
    for i, (loss, exact) in enumerate(zip(found[0], expected[0], strict=True)):
        if abs(loss - exact) > tolerance * abs(exact):
            problems.append(f"loss {i} is {loss}, and by forward {exact}")
    least = _SMALL * float(torch.stack([grad.norm() for grad in expected[1].values()]).norm())
    for name, grad in expected[1].items():
        difference = float((found[1][name] - grad).norm() / grad.norm().clamp(min=least))
        if not difference <= tolerance:
            problems.append(f"the gradient of {name} differs by {difference:.2g} of its norm")
    assert not problems, f"beyond {tolerance:g}:\n" + "\n".join(problems)
