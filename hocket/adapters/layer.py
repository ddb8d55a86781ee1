"""The protocol of layers: the methods that your own layer needs for a planned step.

A layer is a module whose forward is cut into pieces. Each piece is a method, which a plan calls separately, with its
own autograd graph. So a piece takes all its inputs as arguments, returns everything that later pieces read, and stores
nothing on the module. hocket moves rows to their experts and back, and computes the weighted sum of their outputs.

A dense layer:

    x ─► attention ─► x1 ─► mlp ─► x2

A layer with experts, which may live on other ranks:

    x ─► attention ─► state ─► route ─► rows, ids, weights, keep
                                         │                    │
                             (dispatch)  ▼                    │
                                      experts                 │
                             (combine)   │                    │
                                         ▼                    ▼
                             (weighted sum of rows) ───────► merge ─► x2

Shapes: B sequences, S sequence length, T tokens (B * S), D hidden, E experts, L of them on this rank, K experts per
token, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from hocket.layers.dispatch import unpermute
from hocket.layers.linears import cross_entropy
from hocket.layers.routing import Routing, placed
from hocket.model.heads import Heads
from hocket.model.parts import ExpertPlace, LayerParts, Routed, RoutedParts

Keep = tuple[Tensor, Tensor | None]
"""Values that the last piece needs from the first: the residual stream [B, S, D], and another [B, S, D] or None."""


class Layer(Protocol):
    """The common part of both kinds of layers. As an `nn.Module` it also has parameters, and `forward(x_BSD, context)`.

    The forward is the plain computation with all experts, which the pieces are compared with.
    """

    def attention(self, x_BSD: Tensor, context: Any) -> Any:
        """The first piece. `context` is made once by the model for all layers, such as rotary tables."""
        ...


class DenseLayer(Layer, Protocol):
    """A layer without experts. `attention` returns one tensor, [B, S, D]."""

    def mlp(self, x_BSD: Tensor) -> Tensor:
        """The second piece, including the residual."""
        ...


class ExpertLayer(Layer, Protocol):
    """A layer whose experts may be spread over ranks."""

    expert_weights: str
    """The submodule that has only the experts' parameters, each stacked by expert: [E, ...]."""

    def route(self, state: Any) -> tuple[Tensor, Tensor, Tensor, Keep]:
        """From `attention`'s result: rows [T, D], ids [T, K] of distinct experts, weights [T, K], and `keep`."""
        ...

    def experts(self, rows_RD: Tensor, ends_L: Tensor) -> Tensor:
        """The experts of this rank, on rows sorted by expert; `ends[e]`, int32, is the end of expert e's rows. [R, D].

        Parameters hold L experts. `hocket.adapters.grouped` has the products. Rows are independent of each other.
        """
        ...

    def merge(self, rows_TD: Tensor, keep: Keep) -> Tensor:
        """The last piece: adds the experts' weighted sums to the stream, [B, S, D]."""
        ...


# -- chunk -------------------------------------------------------------------------------------------------------------
# Chunks for an engine, made of layers of the protocol.
#
# Shapes: B sequences, S sequence length, T tokens (B * S), D hidden, K experts per token, R rows.

Contexts = Callable[[Tensor], Any]
"""Returns the context of a layer's first piece, given hidden states."""


class DenseParts(LayerParts):
    """A dense layer's part functions."""

    attn: Heads | None = None
    """Replaces the layer's own attention if ranks or documents share sequences."""

    def __init__(self, layer: Any, context: Contexts) -> None:
        self.layer, self._context = layer, context

    def forward_attn(self, x_BSD: Tensor, documents: Any = None, kept: Routing | None = None) -> Any:
        """The pieces before the MLP, or before the dispatch."""
        if self.attn is None:
            assert documents is None
            return self.after(self.layer.attention(x_BSD, self._context(x_BSD)), kept)
        return super().forward_attn(x_BSD, documents, kept)

    def normed(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer.before(x_BSD), x_BSD

    def added(self, x_BSD: Tensor, more_BSD: Tensor, documents: Any, kept: Routing | None = None) -> Any:
        return self.after(self.layer.after(x_BSD, more_BSD), kept)

    def after(self, state: Any, kept: Routing | None = None) -> Any:
        """Continues from the result of the first piece up to the next part."""
        return state

    def forward_mlp(self, x_BSD: Tensor) -> Tensor:
        """The second piece."""
        return self.layer.mlp(x_BSD)


class ExpertParts(RoutedParts, DenseParts):
    """The part functions of a layer with `experts` experts in the whole model. They get no weights of rows."""

    def __init__(self, layer: ExpertLayer, context: Contexts, experts: int, ep: ExpertPlace) -> None:
        super().__init__(layer, context)
        self._experts, self.ep = experts, ep
        self._plain = getattr(layer, "plain_merge", False)
        """Whether merging sums rows, residual stream and the other kept tensor: then one kernel does all of it."""

    def after(self, state: Any, kept: Routing | None = None) -> Routed:
        """The router's piece. With `kept`, a routing of the same tokens, rows go to the same places."""
        rows_TD, ids_TK, weights_TK, (residual, other) = self.layer.route(state)
        routing = placed(ids_TK.detach(), self._experts) if kept is None else kept
        rows, *more = self.sent(rows_TD.contiguous(), weights_TK.float().contiguous(), routing, kept)
        return rows, residual, other, *more  # pyrefly: ignore[bad-return]

    def computed(self, rows_RD: Tensor, splits: Any, weights_R: Tensor | None) -> Tensor:
        return self.layer.experts(rows_RD, splits.offsets_L)

    def forward_unpermute(
        self,
        rows_RD: Tensor,
        residual_BSD: Tensor,
        shared_BSD: Tensor | None,
        probs_TK: Tensor | None,
        routing: Routing,
    ) -> Tensor:
        """The last piece, after the weighted sum of the returned rows."""
        if self._plain:
            return super().forward_unpermute(rows_RD, residual_BSD, shared_BSD, probs_TK, routing)
        return self.layer.merge(unpermute(rows_RD, probs_TK, None, None, routing), (residual_BSD, shared_BSD))


@dataclass(eq=False)
class AdaptedChunk:
    """One virtual stage of an adapted model."""

    embed: Callable[[Tensor], Tensor] | None
    layers: Mapping[str, DenseParts]
    logits: Callable[[Tensor], Tensor] | None
    parameters: Mapping[str, nn.Parameter]
    """Stand-ins by name."""

    def layer(self, number: int) -> DenseParts:
        """The layer of a global number."""
        return self.layers[str(number)]

    def loss(self, x_BSD: Tensor, targets_BS: Tensor) -> Tensor:
        """Mean cross-entropy over the targets that are not `IGNORED`, fp32."""
        assert self.logits is not None
        return cross_entropy(self.logits(x_BSD).flatten(0, 1), targets_BS.flatten())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Stand-ins by name."""
        return iter(self.parameters.items())
