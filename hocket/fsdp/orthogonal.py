"""The iteration of Muon, and its factor of the learning rate.

Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks") keeps one average of gradients, and
moves a matrix by the nearest orthogonal one to it, about: five steps of a Newton-Schulz iteration in bf16. Formulas and
numbers are those of `torch.optim.Muon`.

Shapes: N matrices, A rows, B columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS, ITERATIONS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7
"""Of the iteration: those of `torch.optim.Muon`, and of Jordan's."""


def orthogonal(
    x_NAB: Tensor,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    iterations: int = ITERATIONS,
    eps: float = EPS,
) -> Tensor:
    """About the nearest orthogonal matrix to each: singular values between 0.5 and 1.5. bf16, of any dtype."""
    a, b, c = coefficients
    x = x_NAB.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def factor_of(shape: Sequence[int], scale: str | None) -> float:
    """Factor of the learning rate for a matrix of [output, input]: as in `torch.optim.Muon`, where None is `original`.

    match_rms_adamw is that of Liu et al. 2025, "Muon is scalable for LLM training": an update is about as large as one
    of AdamW, and can have its learning rate.
    """
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if scale == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
