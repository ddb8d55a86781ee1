"""Cross-entropy that reads logits once in forward and overwrites them with their gradient in backward.

torch's operations need six times the memory and traffic of bf16 logits: an fp32 copy, its log-softmax, and three
gradients. This keeps one number per token.

Shapes: T tokens, V vocabulary.
"""

# pyrefly: ignore-errors
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hocket.kernels import IGNORED, refuse_graph

BLOCK = 4096
"""Columns of a program at a time; with 256 threads, each loads 32 bytes of bf16."""


def cross_entropy(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Mean cross-entropy over the tokens whose target is not `IGNORED`, fp32; 0 if there is none, NaN for a target
    outside [0, V).

    Consumes the logits: backward overwrites them with their gradient, so they may not be read then. A second backward
    is refused.
    """
    return _CrossEntropy.apply(logits_TV, targets_T)


@triton.jit
def _cross_entropy_forward(
    logits, targets, losses, sums, width: tl.constexpr, block: tl.constexpr, ignored: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    top, total = -float("inf"), 0.0
    for start in range(0, width, block):
        column = start + tl.arange(0, block)
        value = tl.load(logits + column, mask=column < width, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(value, 0))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(value - shift), 0)
        top = higher
    log_sum = top + tl.log(total)
    tl.store(sums + row, log_sum)

    target = tl.load(targets + row)
    known = (target >= 0) & (target < width)
    loss = log_sum - tl.load(logits + target, mask=known, other=float("nan")).to(tl.float32)
    tl.store(losses + row, tl.where(target == ignored, 0.0, loss))


@triton.jit
def _cross_entropy_backward(logits, targets, sums, g, width: tl.constexpr, block: tl.constexpr, ignored: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    at = logits + row * width + column
    target = tl.load(targets + row)
    factor = tl.where(target == ignored, 0.0, tl.load(g))
    value = tl.load(at, mask=column < width).to(tl.float32)
    chance = tl.exp(value - tl.load(sums + row))
    tl.store(at, (chance - tl.where(column == target, 1.0, 0.0)) * factor, mask=column < width)


def losses_and_sums(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Each token's loss and log-sum-exp: fp32 [2, T]."""
    tokens, width = logits_TV.shape
    found_2T = torch.empty(2, tokens, dtype=torch.float32, device=logits_TV.device)
    if tokens:
        _cross_entropy_forward[tokens,](
            logits_TV, targets_T, *found_2T, width, BLOCK, IGNORED, num_warps=8, enable_fp_fusion=False
        )
    return found_2T


def log_sums(logits_TV: Tensor) -> Tensor:
    """Each token's log-sum-exp: fp32 [T]."""
    ignored_T = torch.full(logits_TV.shape[:1], IGNORED, device=logits_TV.device)
    return losses_and_sums(logits_TV, ignored_T)[1]


def turn_into_gradient(logits_TV: Tensor, targets_T: Tensor, sums_T: Tensor, factor: Tensor) -> Tensor:
    """Overwrite logits with their gradient, `factor * (softmax - target)`, and return it.

    `sums` may include logits of other ranks; a target of -1 belongs to one of them.
    """
    tokens, width = logits_TV.shape
    if tokens:
        # Makes torch refuse to return the saved logits again.
        torch.autograd.graph.increment_version(logits_TV)
        grid = (tokens, triton.cdiv(width, BLOCK))
        _cross_entropy_backward[grid](
            logits_TV, targets_T, sums_T, factor, width, BLOCK, IGNORED, num_warps=8, enable_fp_fusion=False
        )
    return logits_TV.detach()  # the saved tensor refers to its graph


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        logits_TV, targets_T = logits_TV.contiguous(), targets_T.contiguous()
        losses_T, sums_T = losses_and_sums(logits_TV, targets_T)
        count = (targets_T != IGNORED).sum().clamp(min=1)
        ctx.save_for_backward(logits_TV, targets_T, sums_T, count)
        return losses_T.sum() / count

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        refuse_graph()
        logits_TV, targets_T, sums_T, count = ctx.saved_tensors
        return turn_into_gradient(logits_TV, targets_T, sums_T, g.float() / count), None
