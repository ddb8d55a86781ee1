"""The protocol of layers: what a layer of one's own must say, so that a plan can run it.

A layer is a module whose forward is cut at its seams. The pieces are methods, and a plan calls each of them apart from
the others, as an autograd graph of its own. So a piece takes all that it reads as arguments, returns all that others
read, and keeps nothing on the module. Moving rows to their experts and back, and the weighted sum of what comes back,
are hocket's.

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

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

Keep = tuple[Tensor, Tensor | None]
"""What the last piece needs of the first: the residual stream [B, S, D], and one more tensor [B, S, D] or None."""


class Layer(Protocol):
    """What both kinds of layers have. `nn.Module` has the parameters, and `forward` as the plain computation."""

    def attention(self, x_BSD: Tensor, context: Any) -> Any:
        """The first piece. `context` is what the model makes once for all layers, such as rotary tables."""
        ...

    def forward(self, x_BSD: Tensor, context: Any) -> Tensor:
        """The whole layer without a plan: what the pieces are compared with. All experts are here."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by name."""
        ...


@runtime_checkable
class DenseLayer(Layer, Protocol):
    """A layer without experts. `attention` returns one tensor, [B, S, D]."""

    def mlp(self, x_BSD: Tensor) -> Tensor:
        """The second piece, residual included."""
        ...


@runtime_checkable
class ExpertLayer(Layer, Protocol):
    """A layer whose experts may be spread over ranks."""

    expert_weights: str
    """The submodule that has the experts' parameters, each stacked by expert: [E, ...]. Nothing else is in it."""

    def route(self, state: Any) -> tuple[Tensor, Tensor, Tensor, Keep]:
        """From what `attention` returned: rows [T, D], ids [T, K] of distinct experts, weights [T, K], and `keep`."""
        ...

    def experts(self, rows_RD: Tensor, ends_L: Tensor) -> Tensor:
        """The experts of this rank on rows in the order of experts; `ends[e]`, int32, is where those of e end. [R, D].

        Parameters hold L experts. `hocket.adapters.grouped` has the products. Each row is computed apart from others.
        """
        ...

    def merge(self, rows_TD: Tensor, keep: Keep) -> Tensor:
        """The last piece: the experts' weighted sums back into the stream, [B, S, D]."""
        ...
