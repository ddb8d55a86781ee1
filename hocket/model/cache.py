"""What layers remember of the tokens that were read before, which lets generation run one token at a time.

Shapes: S new tokens, T all tokens so far, H query heads, K key and value heads, N width of a key, V of a value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class DeltaCache:
    """What one layer's gated delta net remembers of one sequence. Remembers no gradient."""

    inputs_1WC: Tensor | None = None
    """The last inputs of its convolution."""
    state_1HKV: Tensor | None = None
    """Its memory: of each value head, which values keys mean, fp32."""


class KeyValueCache:
    """Keys, after norms and rotation, and values of one layer and one sequence. Remembers no gradient."""

    def __init__(self) -> None:
        self._k_TKN: Tensor | None = None
        self._v_TKV: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens whose keys are here."""
        return 0 if self._k_TKN is None else len(self._k_TKN)

    def attend(
        self,
        q_SHN: Tensor,
        k_SKN: Tensor,
        v_SKV: Tensor,
        *,
        scale: float = 0.0,
        window: int = 0,
        sink_H: Tensor | None = None,
    ) -> Tensor:
        """Add the keys and values of new tokens, and return their causal attention to all: [S, H, V].

        Scores are multiplied by `scale`, or with 0 by N ** -0.5. `window` and `sink_H` are those of
        `documents.attend` and `sinks.attend_with_sinks`. Scores and softmax are fp32.
        """
        first = self.length
        if self._k_TKN is not None and self._v_TKV is not None:
            k_SKN, v_SKV = torch.cat([self._k_TKN, k_SKN]), torch.cat([self._v_TKV, v_SKV])
        self._k_TKN, self._v_TKV = k_SKN.detach(), v_SKV.detach()
        group = q_SHN.shape[1] // k_SKN.shape[1]
        k_HNT = k_SKN.repeat_interleave(group, 1).permute(1, 2, 0).float()
        v_HTV = v_SKV.repeat_interleave(group, 1).transpose(0, 1).float()
        score_HST = q_SHN.transpose(0, 1).float() @ k_HNT * (scale or q_SHN.shape[-1] ** -0.5)
        behind_ST = torch.arange(first, len(k_SKN), device=q_SHN.device).unsqueeze(1) - torch.arange(
            len(k_SKN), device=q_SHN.device
        )
        unseen_ST = (behind_ST < 0) | (behind_ST >= window) if window else behind_ST < 0
        score_HST = score_HST.masked_fill(unseen_ST, -torch.inf)
        if sink_H is not None:
            sink_HS1 = sink_H.float().view(-1, 1, 1).expand(-1, score_HST.shape[1], 1)
            score_HST = torch.cat([score_HST, sink_HS1], -1)
        weight_HST = score_HST.softmax(-1)[..., : len(k_SKN)]
        return (weight_HST @ v_HTV).transpose(0, 1).to(q_SHN.dtype)
