"""The parts of a layer, for hocket's own layers and those that adapters make.

A plan calls `forward_<part>` of a layer for each of its parts, and `backward_<part>` of those that communicate.

    without experts     attn -> mlp
    with experts        attn -> (dispatch) -> experts -> (combine) -> unpermute

Shapes: B sequences, S tokens of each on this rank, T tokens (B * S), D hidden, K experts per token, R rows, X elements
of an exchanged row, H query heads, N width of one.
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hocket.layers.dispatch import from_experts, rows_of, send_rows, to_experts, unpermute
from hocket.layers.routing import Routing
from hocket.model.context import by_heads, of_heads
from hocket.model.documents import Context, Documents, Packing
from hocket.runtime.comm import Pending, RowTable


class LayerParts(metaclass=ABCMeta):  # `ABC` as a base would keep FSDP2 from changing the class of a layer
    """The parts up to the MLP or the dispatch."""

    group: Any = None
    """The context-parallel ranks; None without context parallelism."""
    attn: Any
    """`Heads`, or a class with its methods."""

    @abstractmethod
    def normed(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """The input of attention, and the residual stream."""

    @abstractmethod
    def added(self, x_BSD: Tensor, more_BSD: Tensor, documents: Packing | None, kept: Routing | None = None) -> Any:
        """The next part's input, from the residual stream and attention's output; before experts, `Routed`.

        If forward runs again, `kept` is the first one's routing.
        """

    def forward_attn(self, x_BSD: Tensor, documents: Documents | None = None, kept: Routing | None = None) -> Any:
        """Norm, attention, and what precedes the next part."""
        h_BSD, x_BSD = self.normed(x_BSD)
        return self.added(x_BSD, self.attn(h_BSD, documents), documents, kept)


# -- context parallelism -----------------------------------------------------------------------------------------------
# Layers of context-parallel ranks, split where keys and values are gathered, or heads exchanged.
#
# Keys and values are made first. While they travel, queries are made; attention then has all keys of its documents. In
# backward the gradients of keys and values are reduce-scattered over ranks, while the backward of queries runs. With
# exchanged heads, queries follow keys and values, and attention has whole sequences of some heads. Its results return
# to the ranks of the tokens.


class GatheredKeys(LayerParts):
    """The parts before attention, and attention after a gather of keys and values."""

    def forward_keys(self, x_BSD: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """The tensor to exchange, [T, X], the input of attention and the residual stream, [B, S, D]."""
        h_BSD, x_BSD = self.normed(x_BSD)
        return self.attn.keys(h_BSD, context), h_BSD, x_BSD

    def forward_kv(self, kv_TX: Tensor) -> tuple[Tensor, Pending]:
        """Keys and values of all ranks, sorted by rank: [U, X]."""
        out_UX = kv_TX.new_empty(self.group.size * kv_TX.shape[0], kv_TX.shape[1])
        return out_UX, self.group.all_gather(out_UX.view(-1), kv_TX.view(-1))

    def backward_kv(self, grad_UX: Tensor) -> tuple[Tensor, Pending]:
        """The sum over ranks of this rank's part of their gradients: [T, X]."""
        out_TX = grad_UX.new_empty(grad_UX.shape[0] // self.group.size, grad_UX.shape[1])
        return out_TX, self.group.sum_parts(grad_UX, out_TX)

    def forward_queries(self, h_BSD: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Queries [T, H, N], and their gates or None."""
        return self.attn.queries(h_BSD, context)

    def forward_attn(  # pyrefly: ignore[bad-override]
        self,
        kv_UX: Tensor,
        q_THN: Tensor,
        gate: Tensor | None,
        x_BSD: Tensor,
        context: Context,
        kept: Routing | None = None,
    ) -> Any:
        """Attention of a rank's own queries to keys of all ranks, and what follows."""
        more_BSD = self.attn.attended(kv_UX, q_THN, gate, context, x_BSD.shape[0])
        return self.added(x_BSD, more_BSD, context, kept)


class ExchangedHeads(GatheredKeys):
    """The same with an exchange of heads. Exchanged tensors have rows for each rank, sorted by rank."""

    def forward_keys(self, x_BSD: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of each rank's heads, [U, X]; the rest as in `GatheredKeys`."""
        kv_TX, h_BSD, x_BSD = super().forward_keys(x_BSD, context)
        return by_heads(self.attn.by_head(kv_TX), self.group.size), h_BSD, x_BSD

    def forward_queries(self, h_BSD: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Queries of each rank's heads, [U, X], and the gates of all heads or None."""
        q_THN, gate = super().forward_queries(h_BSD, context)
        return by_heads(q_THN, self.group.size), gate

    def forward_spread(self, rows_UX: Tensor) -> tuple[Tensor, Pending]:
        """All-to-all of rows [U, X]. A second exchange restores them."""
        ranks, out_UX = self.group.size, rows_UX.new_empty(rows_UX.shape)
        table = RowTable([[len(rows_UX) // ranks] * ranks] * ranks, self.group.rank)
        return out_UX, self.group.all_to_all(out_UX, rows_UX.contiguous(), table)

    forward_results = backward_spread = backward_results = forward_spread
    forward_kv = backward_kv = forward_spread  # pyrefly: ignore[bad-override-param-name]

    def forward_core(self, kv_UX: Tensor, q_UX: Tensor, context: Context) -> Tensor:
        """Attention of this rank's heads over all tokens, [U, X]."""
        return self.attn.of_own_heads(kv_UX, q_UX, context)

    def forward_attn(  # pyrefly: ignore[bad-override]
        self, found_UX: Tensor, gate: Tensor | None, x_BSD: Tensor, context: Context, kept: Routing | None = None
    ) -> Any:
        """The output projection of all heads' results for a rank's own tokens, and what follows."""
        more_BSD = self.attn.projected(of_heads(found_UX, self.group.size), gate, x_BSD.shape[0])
        return self.added(x_BSD, more_BSD, context, kept)


METHODS: dict[str, type[GatheredKeys]] = {"gather": GatheredKeys, "heads": ExchangedHeads}
"""The classes of attention parts by method."""


def cut_as(method: str, layer: type) -> Any:
    """A subclass of a layer whose attention is split for the exchange."""
    return type(f"{METHODS[method].__name__}{layer.__name__}", (METHODS[method], layer), {})


# -- experts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertPlace:
    """Which of a layer's experts are on this rank, and how rows are exchanged."""

    size: int = 1
    """Number of expert-parallel ranks."""
    rank: int = 0
    """Index of this rank among them."""
    per_rank: bool = False
    """Rows are sent once per token and rank, not once per expert (`layers/rows.py`)."""
    later: bool = False
    """Rows are made from tokens at dispatch: by `forward_dispatch`, if all experts are on this rank."""
    stays: bool = False
    """Rows are not exchanged although other ranks have experts: the bound without communication."""

    @property
    def weighted(self) -> bool:
        """Whether rows carry the weights of choices: see Note: [Weights inside the experts]."""
        return self.per_rank or self.stays or self.size == 1


Sent = tuple[Tensor, Tensor | None, Tensor | None, Routing]
"""Rows [R, D] in sent order, their weights [R] for the experts or None, weights [T, K] that stay here or None, and the
routing. With `later`, tokens [T, D] and their weights [T, K] instead of rows and theirs."""
Routed = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Routing]
"""Results of the router part: rows, residual [B, S, D], shared [B, S, D] or None, and the rest of `Sent`."""
ONLY = ExpertPlace()
"""All experts on one rank."""


class RoutedParts(metaclass=ABCMeta):
    """The parts around a layer's experts: those before the rows are sent, and after they return."""

    ep: ExpertPlace
    weighted = False
    """Whether experts get the weights of rows: see Note: [Weights inside the experts]."""

    @abstractmethod
    def computed(self, rows_RD: Tensor, splits: Any, weights_R: Tensor | None) -> Tensor:
        """The local experts on rows in grouped order."""

    def sent(self, rows_TD: Tensor, probs_TK: Tensor, routing: Routing, kept: Routing | None) -> Sent:
        """Rows for the experts of all ranks: see `Sent`."""
        if self.ep.per_rank and kept is None:
            routing = routing.by_rank(self.ep.size)
        return *send_rows(rows_TD, probs_TK, routing, self.weighted, self.ep.later), routing

    def forward_dispatch(self, x_TD: Tensor, probs_TK: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor | None]:
        """Rows and their weights, from tokens and theirs: see `rows_of`."""
        return rows_of(x_TD, probs_TK, routing)

    def forward_experts(self, rows_RD: Tensor, *state: Any) -> Tensor:
        """The local experts on received rows; rows and result are in received order.

        `state` is `Splits | PlacedSplits`; if rows are not exchanged, after the rows' weights [R] or None.
        """
        *weights, splits = state
        grouped_RD, weights_R, opened = to_experts(rows_RD, splits, *weights, weighted=self.weighted)
        return from_experts(self.computed(grouped_RD, splits, weights_R), opened, splits)

    def forward_unpermute(
        self,
        rows_RD: Tensor,
        residual_BSD: Tensor,
        shared_BSD: Tensor | None,
        probs_TK: Tensor | None,
        routing: Routing,
    ) -> Tensor:
        """Sum of the returned rows, in sent order, weighted by `probs`, plus shared expert and residual."""
        return unpermute(rows_RD, probs_TK, residual_BSD, shared_BSD, routing)
