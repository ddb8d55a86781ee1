"""What heads find in keys and values: of whole sequences, and of those that ranks share, whoever made the heads.

Shapes: B sequences, S sequence length, T tokens of this rank, U tokens of all ranks, D hidden, H query heads, K key and
value heads, N width of a head, F features of all heads, X elements that travel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.model.context import Context, among, in_order, in_ranks
from hocket.model.documents import Documents, Seen, attend, whole_sequences
from hocket.model.sinks import attend_with_sinks
from hocket.model.stretches import attend_stretch


class Heads(ABC):
    """Causal attention of queries to keys and values that are made already, and what follows from it."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int
    """Tokens that a query meets at most; 0: all before it."""
    sinks: Tensor | None

    @abstractmethod
    def out(self, o_BSF: Tensor, gate_BSF: Tensor | None) -> Tensor:
        """What attention adds to the residual stream, from what heads have found and their gates."""

    def whole(self, q_THN: Tensor, k_TKN: Tensor, v_TKN: Tensor, batch: int, documents: Documents | None) -> Tensor:
        """Attention in `batch` sequences that are all here, of some heads: [T, H, N]."""
        seq = len(q_THN) // batch
        window = self.window if self.window < seq else 0
        if documents is not None or window or self.sinks is not None:
            documents = documents or whole_sequences(batch, seq, q_THN.device)
            return self._attend(q_THN, k_TKN, v_TKN, documents, window)
        q, k, v = (x.unflatten(0, (batch, seq)).transpose(1, 2) for x in (q_THN, k_TKN, v_TKN))
        grouped = self.kv_heads != self.heads
        o_BHSN = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return o_BHSN.transpose(1, 2).flatten(0, 1)

    def by_head(self, kv_TX: Tensor) -> Tensor:
        """What `keys` returns, each head's keys beside its values: [T, K, 2, N]."""
        return kv_TX.unflatten(1, (2, self.kv_heads, -1)).transpose(1, 2)

    def attended(self, kv_UX: Tensor, q_THN: Tensor, gate_BSF: Tensor | None, context: Context, batch: int) -> Tensor:
        """What attention adds to the residual stream of `batch` rows, from the keys and values of all ranks."""
        kv_U2KN = in_order(kv_UX, context).view(-1, 2, self.kv_heads, self.head_dim)
        k_UKN, v_UKN = kv_U2KN.unbind(1)
        window = self.window if self.window < context.length else 0
        found = []
        for span in context.spans:
            q, k, v = among(q_THN, span.queries), among(k_UKN, span.keys), among(v_UKN, span.keys)
            if self.sinks is None:
                found.append(attend_stretch(q, k, v, span, context.of_sequences, window))
            else:
                found.append(self._attend(q, k, v, span, window))
        return self.projected(torch.cat(found).flatten(1), gate_BSF, batch)

    def of_own_heads(self, kv_UX: Tensor, q_UX: Tensor, context: Context) -> Tensor:
        """What some heads find in all tokens, [U, X], from these heads' keys and values, and their queries, [U, X].

        Of all three the tokens of each rank stand together, one rank after the other.
        """
        width = self.head_dim
        k_UKN, v_UKN = in_order(kv_UX, context).view(len(kv_UX), -1, 2, width).unbind(2)
        q_UHN = in_order(q_UX, context).view(len(q_UX), -1, width)
        o_UHN = self.whole(q_UHN, k_UKN, v_UKN, len(q_UHN) // context.length, context.documents)
        return in_ranks(o_UHN.flatten(1), context)

    def projected(self, o_TF: Tensor, gate_BSF: Tensor | None, batch: int) -> Tensor:
        """What attention adds to the residual stream of `batch` rows, from what heads have found."""
        o_BSF = o_TF.unflatten(0, (batch, -1))
        return self.out(o_BSF, gate_BSF if gate_BSF is None else gate_BSF.reshape(o_BSF.shape))

    def _attend(self, q_THN: Tensor, k_TKN: Tensor, v_TKN: Tensor, seen: Seen, window: int) -> Tensor:
        if self.sinks is None:
            return attend(q_THN, k_TKN, v_TKN, seen, window)
        return attend_with_sinks(q_THN, k_TKN, v_TKN, self.sinks, seen, window)
