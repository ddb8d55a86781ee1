"""The parts of a layer, whoever wrote it: hocket's own layers have them, and those that adapters make of others'.

A plan calls `forward_<part>` of a layer for each of its parts, and `backward_<part>` of those that communicate.

    without experts     attn -> mlp
    with experts        attn -> (dispatch) -> experts -> (combine) -> unpermute

Shapes: B sequences, S tokens of each on this rank, T tokens (B * S), D hidden, K experts per token, R rows, X elements
that travel, H query heads, N width of one.
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hocket.layers.dispatch import from_experts, rows_of, send_rows, to_experts, unpermute
from hocket.layers.routing import Routing
from hocket.model.context import by_heads, of_heads
from hocket.model.documents import Context, Documents, Told
from hocket.runtime.comm import Pending, RowTable


class LayerParts(metaclass=ABCMeta):  # `ABC` as a base would keep FSDP2 from changing the class of a layer
    """The parts up to the MLP or the dispatch."""

    group: Any = None
    """The ranks that share its sequences; None where each has its own."""
    attn: Any
    """`Heads`, or what has its methods."""

    @abstractmethod
    def normed(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """The input of attention, and the residual stream."""

    @abstractmethod
    def added(self, x_BSD: Tensor, more_BSD: Tensor, told: Told | None, kept: Routing | None = None) -> Any:
        """The next part's input from the residual stream and what attention adds to it; of experts, `Routed`.

        When forward runs once more, `kept` is the first one's routing.
        """

    def forward_attn(self, x_BSD: Tensor, documents: Documents | None = None, kept: Routing | None = None) -> Any:
        """Norm and attention, and what follows before the next part."""
        h_BSD, x_BSD = self.normed(x_BSD)
        return self.added(x_BSD, self.attn(h_BSD, documents), documents, kept)


# -- shared sequences --------------------------------------------------------------------------------------------------
# Layers whose sequences context-parallel ranks share, cut where keys and values are gathered, or heads exchanged.
#
# Keys and values are made first. While they travel, queries are made; attention then has all of its document. In
# backward the gradients of all ranks' keys and values are summed, each rank's part where it belongs, while those of
# queries go on. Where heads are exchanged, queries follow keys and values, and attention has whole sequences of some
# heads. What it finds goes back to the ranks that have the tokens.


class GatheredKeys(LayerParts):
    """The parts before attention, and attention after a gather of keys and values."""

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

    def forward_attn(  # pyrefly: ignore[bad-override]
        self,
        kv_UX: Tensor,
        q_THN: Tensor,
        gate: Tensor | None,
        x_BSD: Tensor,
        context: Context,
        kept: Routing | None = None,
    ) -> Any:
        """What follows from attention of a rank's own queries to keys of all ranks."""
        more_BSD = self.attn.attended(kv_UX, q_THN, gate, context, x_BSD.shape[0])
        return self.added(x_BSD, more_BSD, context, kept)


class ExchangedHeads(GatheredKeys):
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
        self, found_UX: Tensor, gate: Tensor | None, x_BSD: Tensor, context: Context, kept: Routing | None = None
    ) -> Any:
        """What follows from all heads' results of a rank's own tokens."""
        more_BSD = self.attn.projected(of_heads(found_UX, self.group.size), gate, x_BSD.shape[0])
        return self.added(x_BSD, more_BSD, context, kept)


METHODS: dict[str, type[GatheredKeys]] = {"gather": GatheredKeys, "heads": ExchangedHeads}
"""The parts of attention by method."""


def cut_as(method: str, layer: type) -> Any:
    """The class of a layer whose attention is cut for what travels."""
    return type(f"{METHODS[method].__name__}{layer.__name__}", (METHODS[method], layer), {})


# -- experts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertPlace:
    """Which of a layer's experts are here, and how rows get to the others."""

    size: int = 1
    """Expert-parallel ranks."""
    rank: int = 0
    """This one's number among them."""
    per_rank: bool = False
    """Rows are sent once per token and rank, not once per expert (`layers/rows.py`)."""
    later: bool = False
    """Rows are made of tokens when they are moved: `forward_dispatch` does, if all experts are here."""
    stays: bool = False
    """Nobody moves the rows, though experts are missing: what a bound without communication computes."""

    @property
    def weighted(self) -> bool:
        """Whether the weights of choices come with the rows: see Note: [Weights inside the experts]."""
        return self.per_rank or self.stays or self.size == 1


Sent = tuple[Tensor, Tensor | None, Tensor | None, Routing]
"""Rows [R, D] in sent order, their weights [R] for the experts or None, weights [T, K] that stay here or None, and the
routing. Where rows are made later, tokens [T, D] and their weights [T, K] are in place of rows and theirs."""
Routed = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Routing]
"""What a layer has after its router: rows, residual [B, S, D], shared [B, S, D] or None, and the rest of `Sent`."""
ONLY = ExpertPlace()
"""All experts are here."""


class RoutedParts(metaclass=ABCMeta):
    """The parts around the experts of a layer, whoever wrote it: what sends rows, and what gets them back."""

    ep: ExpertPlace
    weighted = False
    """Whether experts are given the weights of rows: see Note: [Weights inside the experts]."""

    @abstractmethod
    def computed(self, rows_RD: Tensor, splits: Any, weights_R: Tensor | None) -> Tensor:
        """The local experts on rows in grouped order."""

    def sent(self, rows_TD: Tensor, probs_TK: Tensor, routing: Routing, kept: Routing | None) -> Sent:
        """Rows for the experts of all ranks: see `Sent`."""
        if self.ep.per_rank and kept is None:
            routing = routing.by_rank(self.ep.size)
        return *send_rows(rows_TD, probs_TK, routing, self.weighted, self.ep.later), routing

    def forward_dispatch(self, x_TD: Tensor, probs_TK: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor | None]:
        """Rows and their weights, of tokens and theirs: see `rows_of`."""
        return rows_of(x_TD, probs_TK, routing)

    def forward_experts(self, rows_RD: Tensor, *told: Any) -> Tensor:
        """The local experts on the rows received, given and returned in received order.

        They are told `Splits | PlacedSplits`; before these, where no rows are moved, the rows' weights [R] or None.
        """
        *weights, splits = told
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
        """Sum of the rows that came back, in sent order, weighted by `probs`, plus shared expert and residual."""
        return unpermute(rows_RD, probs_TK, residual_BSD, shared_BSD, routing)
