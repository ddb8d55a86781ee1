"""Parameters as modules make them: without values."""

from __future__ import annotations

import torch
from torch import nn


def new_weight(*shape: int) -> nn.Parameter:
    """A parameter without a value, on the meta device; `model/source.py` says what to put in it."""
    return nn.Parameter(torch.empty(shape, device="meta"))
