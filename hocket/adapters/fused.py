"""hocket's kernels in place of what a model computes with many small ones: norms, and experts' gates.

A copied layer's modules keep their code; if one kernel computes the same result, the module gets its forward instead.
Numerical results decide, not names: `fuse` runs a module on fixed values and compares it with the kernel's formula. So
a norm that adds one to its weight, or a gate that clamps, keeps its own code.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hocket.layers.norms import rms_norm
from hocket.model.layers import swiglu

_EPS = ("variance_epsilon", "eps")
"""Attribute names of a norm's epsilon."""
_CLOSE = 1e-6
"""Largest difference of fp32 results, around 1, that differ only in the order of sums."""


def fuse(layer: nn.Module) -> int:
    """Give a layer's RMS norms the forward of one kernel. Returns how many there are."""
    norms: list[tuple[Any, float]] = [
        (module, eps) for module in layer.modules() if (eps := _norm_epsilon(module)) is not None
    ]
    for module, eps in norms:
        module.forward = lambda x, module=module, eps=eps: rms_norm(x, module.weight, eps)
    return len(norms)


def gate_of(experts: Any) -> Any:
    """The gate of stacked experts: `swiglu` if it computes the same, else the experts' own."""
    y_RF = torch.linspace(-9, 9, 64).view(4, 16)
    try:
        same = torch.allclose(experts._apply_gate(y_RF), swiglu(y_RF), atol=_CLOSE, rtol=_CLOSE)
    except (RuntimeError, TypeError, AttributeError):
        same = False
    return swiglu if same else experts._apply_gate


def _norm_epsilon(module: nn.Module) -> float | None:
    """The epsilon of a module that is `weight * x / rms(x)` over the last dimension; None for any other module."""
    params = dict(module.named_parameters(recurse=False))
    eps = next((getattr(module, name) for name in _EPS if isinstance(getattr(module, name, None), float)), None)
    if eps is None or params.keys() != {"weight"} or [*module.children()] or params["weight"].dim() != 1:
        return None
    weight = nn.Parameter(torch.linspace(0.5, 1.5, params["weight"].numel()))
    alone: Any = copy.deepcopy(module, {id(params["weight"]): weight})
    x = torch.linspace(-2, 3, 3 * weight.numel()).view(3, -1)
    expected = F.rms_norm(x, weight.shape, weight, eps)
    try:
        with torch.no_grad():
            same = torch.allclose(alone(x), expected, atol=10 * _CLOSE, rtol=10 * _CLOSE)
            return eps if same and alone.bfloat16()(x.bfloat16()).dtype is torch.bfloat16 else None
    except (RuntimeError, TypeError, AttributeError):
        return None
