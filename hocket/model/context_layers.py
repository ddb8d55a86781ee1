"""Layers whose sequences context-parallel ranks share, cut where keys and values are gathered, or heads exchanged.

Keys and values are made first. While they travel, queries are made; attention then has all of its document. In backward
the gradients of all ranks' keys and values are summed, each rank's part where it belongs, while those of queries go on.
Where heads are exchanged, queries follow keys and values, and attention has whole sequences of some heads. What it
finds goes back to the ranks that have the tokens.

Shapes: B sequences, S tokens of each on this rank, T tokens of this rank (B * S), U tokens of all ranks, D hidden,
X elements that travel, H query heads, N width of one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hocket.layers.routing import Routing
from hocket.model.context import by_heads, of_heads
from hocket.model.documents import Context
from hocket.model.moe import Routed
from hocket.runtime.comm import Group, Pending, RowTable


class _Cut:
    """The parts before attention, and attention behind a gather, of either kind of layer."""

    group: Group
    attn: Any
    normed: Any
    """The input of attention, and the residual stream, from a layer's input."""
    added: Any
    """The next part's input, or routed rows, from the residual stream and what attention adds to it."""

    def forward_keys(self, x_BSD: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """What travels, [T, X], the input of attention and the residual stream, [B, S, D]."""
        h_BSD, x_BSD = self.normed(x_BSD)
        return self.attn.keys(h_BSD, context), h_BSD, x_BSD

    def forward_kv(self, kv_TX: Tensor) -> tuple[Tensor, Pending]:
        """Those of all ranks, rank after rank: [U, X]."""
        out_UX = kv_TX.new_empty(self.group.size * kv_TX.shape[0], kv_TX.shape[1])
        return out_UX, self.group.all_gather(out_UX.view(-1), kv_TX.view(-1))

    def backward_kv(self, grad_UX: Tensor) -> tuple[Tensor, Pending]:
        """The sum over ranks of this rank's part: [T, X]."""
        out_TX = grad_UX.new_empty(grad_UX.shape[0] // self.group.size, grad_UX.shape[1])
        return out_TX, self.group.sum_parts(grad_UX, out_TX)

    def forward_queries(self, h_BSD: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Queries [T, H, N], and their gates or None."""
        return self.attn.queries(h_BSD, context)

    def forward_attn(
        self, kv_UX: Tensor, q_THN: Tensor, gate: Tensor | None, x_BSD: Tensor, context: Context, *kept: Routing
    ) -> Tensor | Routed:
        """What follows from attention of a rank's own queries to keys of all ranks."""
        more_BSD = self.attn.attended(kv_UX, q_THN, gate, context, x_BSD.shape[0])
        return self.added(x_BSD, more_BSD, context, *kept)


class _ByHeads(_Cut):
    """The same where ranks exchange heads. What travels has rows for each rank, one rank after the other."""

    def forward_keys(self, x_BSD: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of each rank's heads, [U, X], and the rest as it is where they are gathered."""
        kv_TX, h_BSD, x_BSD = super().forward_keys(x_BSD, context)
        return by_heads(self.attn.by_head(kv_TX), self.group.size), h_BSD, x_BSD

    def forward_queries(self, h_BSD: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Queries of each rank's heads, [U, X], and the gates of all heads or None."""
        q_THN, gate = super().forward_queries(h_BSD, context)
        return by_heads(q_THN, self.group.size), gate

    def forward_spread(self, rows_UX: Tensor) -> tuple[Tensor, Pending]:
        """Each rank's rows to it: [U, X]. Exchanged once more they are where they were."""
        ranks, out_UX = self.group.size, rows_UX.new_empty(rows_UX.shape)
        table = RowTable([[len(rows_UX) // ranks] * ranks] * ranks, self.group.rank)
        return out_UX, self.group.all_to_all(out_UX, rows_UX.contiguous(), table)

    forward_results = backward_spread = backward_results = forward_spread
    forward_kv = backward_kv = forward_spread  # pyrefly: ignore[bad-override-param-name]

    def forward_core(self, kv_UX: Tensor, q_UX: Tensor, context: Context) -> Tensor:
        """What this rank's heads find in all tokens, [U, X]."""
        return self.attn.of_own_heads(kv_UX, q_UX, context)

    def forward_attn(  # pyrefly: ignore[bad-override]
        self, found_UX: Tensor, gate: Tensor | None, x_BSD: Tensor, context: Context, *kept: Routing
    ) -> Tensor | Routed:
        """What follows from all heads' results of a rank's own tokens."""
        more_BSD = self.attn.projected(of_heads(found_UX, self.group.size), gate, x_BSD.shape[0])
        return self.added(x_BSD, more_BSD, context, *kept)


METHODS: dict[str, type[_Cut]] = {"gather": _Cut, "heads": _ByHeads}
"""By method: the parts of attention, which a layer with `group`, `attn`, `normed` and `added` is made with."""


def cut_as(method: str, layer: type) -> Any:
    """The class of a layer whose attention is cut for what travels."""
    return type(f"{METHODS[method].__name__}{layer.__name__}", (METHODS[method], layer), {})
