"""Tables of rotary positions. Shapes: S sequence length, N width of a head."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=16)
def rotary_table(seq: int, width: int, theta: float, device: torch.device) -> Tensor:
    """Cosine and sine of every position's angles (Su et al. 2021, "RoFormer"): fp32 [2, S, 1, N / 2]."""
    # The table outlives the call, so it must not become an inference tensor, which autograd cannot save.
    with torch.inference_mode(False), torch.no_grad():
        frequency_N = theta ** -(torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
        angle_SN = torch.outer(torch.arange(seq, device=device, dtype=torch.float32), frequency_N)
        return torch.stack([angle_SN.cos(), angle_SN.sin()]).unsqueeze(2)
