"""Decoder layers of transformers as layers of the protocol: the module's own children, called piece by piece.

Where a layer has its norms says which of three forwards it has; what its MLP is says whether it has experts. Nothing of
this is taken on trust: `verify.py` compares the pieces with the layer's own forward before anything starts.

    norms                                           forward
    input, post_attention                           x += attn(norm(x)); x += mlp(norm(x))               Llama
    post_attention, post_feedforward                x += norm(attn(x)); x += norm(mlp(x))               OLMo 2
    input, post_attention, pre_ and post_feedforward    x += norm(attn(norm(x))); x += norm(mlp(norm(x)))   Gemma 2
    input, post_self_attn, post_attention, post_mlp     likewise                                            GLM-4

Granite multiplies what is added to the stream by `residual_multiplier`.

Shapes: B sequences, S sequence length, T tokens (B * S), D hidden, K experts per token, R rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from hocket.adapters.fused import gate_of
from hocket.adapters.layer import Keep
from hocket.layers.standin import grouped_linear

_INPUT, _ATTENTION = "input_layernorm", "post_attention_layernorm"
_BEFORE, _AFTER = "pre_feedforward_layernorm", "post_feedforward_layernorm"
FORWARDS: Mapping[frozenset[str], tuple[str, str, str, str]] = {
    frozenset({_INPUT, _ATTENTION}): (_INPUT, "", _ATTENTION, ""),
    frozenset({_ATTENTION, _AFTER}): ("", _ATTENTION, "", _AFTER),
    frozenset({_INPUT, _ATTENTION, _BEFORE, _AFTER}): (_INPUT, _ATTENTION, _BEFORE, _AFTER),
    frozenset({_INPUT, "post_self_attn_layernorm", _ATTENTION, "post_mlp_layernorm"}): (
        _INPUT, "post_self_attn_layernorm", _ATTENTION, "post_mlp_layernorm",
    ),
    frozenset({"attention_layernorm", "feedforward_layernorm"}): (
        "attention_layernorm", "", "feedforward_layernorm", "",
    ),
}  # fmt: skip
"""Norms that a layer has -> those before and behind attention, before and behind the MLP."""
BLOCKS = ("mlp", "block_sparse_moe", "feed_forward")
"""What layers call their MLP."""
_GROUPED = ("is_transposed", "has_bias", "has_gate", "has_post_expert_norm")
"""What experts say about themselves that go by transformers' interface of experts."""


class Unfit(Exception):
    """A layer is none that this module knows; the text says why."""


def block_of(layer: nn.Module) -> str:
    """The name of a layer's MLP."""
    found = [name for name, _ in layer.named_children() if name in BLOCKS]
    if len(found) != 1:
        raise Unfit(f"it has no MLP named {', '.join(BLOCKS)}" if not found else f"it has several MLPs: {found}")
    return found[0]


def expert_weights(layer: nn.Module) -> str:
    """The submodule with the experts' parameters; empty if there are no experts."""
    block = block_of(layer)
    module = layer.get_submodule(block)
    experts = getattr(module, "experts", None)
    if experts is None:
        return ""
    if not all(hasattr(experts, name) for name in (*_GROUPED, "_apply_gate")):
        raise Unfit(f"{type(experts).__name__} does not go by transformers' interface of experts, stacked by number")
    return f"{block}.experts"


class PlainLayer:
    """A layer with a dense MLP."""

    def __init__(self, layer: nn.Module) -> None:
        """Takes the layer over. Raises Unfit."""
        self.module, self._parameters = layer, dict(layer.named_parameters())
        self._block = block_of(layer)
        children = {name: child for name, child in layer.named_children() if not isinstance(child, nn.Dropout)}
        norms = {name for name in children if name.endswith("norm")}
        if frozenset(norms) not in FORWARDS:
            raise Unfit(f"its norms are {', '.join(sorted(norms)) or 'none'}")
        if others := children.keys() - norms - {self._block, "self_attn"}:
            raise Unfit(f"it has more than norms, attention and an MLP: {', '.join(sorted(others))}")
        if "self_attn" not in children:
            raise Unfit("it has no self_attn")
        self._norms = [children[name] if name else None for name in FORWARDS[frozenset(norms)]]
        self._attention, self._mlp = children["self_attn"], children[self._block]
        self._factor: float = getattr(layer, "residual_multiplier", 1.0)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As in the layer."""
        return iter(self._parameters.items())

    def forward(self, x_BSD: Tensor, context: Mapping[str, Any]) -> Tensor:
        """The module's own."""
        return _first(self.module(x_BSD, **context))

    def attention(self, x_BSD: Tensor, context: Mapping[str, Any]) -> Any:
        """`x + attn(x)`, with the norms that belong to it."""
        return self.behind(x_BSD, _first(self._attention(hidden_states=self.before(x_BSD), **context)))

    def before(self, x_BSD: Tensor) -> Tensor:
        """What attention reads."""
        return _apply(self._norms[0], x_BSD)

    def behind(self, x_BSD: Tensor, more_BSD: Tensor) -> Tensor:
        """The stream, from what it was and what attention has made."""
        return self._added(x_BSD, _apply(self._norms[1], more_BSD))

    def mlp(self, x_BSD: Tensor) -> Tensor:
        """The same of the MLP."""
        _, _, before, behind = self._norms
        return self._added(x_BSD, _apply(behind, _first(self._mlp(_apply(before, x_BSD)))))

    def _added(self, x_BSD: Tensor, more: Tensor) -> Tensor:
        return x_BSD + (more if self._factor == 1.0 else more * self._factor)


class _Reached(Exception):
    """The block came to its experts, and nothing behind them is wanted."""


class _Seam(nn.Module):
    """In the place of a block's experts: takes what they are called with, and returns zeros, or ends the block."""

    def __init__(self, more: bool) -> None:
        super().__init__()
        self._more = more
        self.taken: tuple[Tensor, Tensor, Tensor] | None = None

    def forward(self, rows_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self.taken = rows_TD, ids_TK, weights_TK
        if not self._more:
            raise _Reached
        return rows_TD.new_zeros(()).expand(rows_TD.shape)


class RoutedLayer(PlainLayer):
    """A layer with a router and experts, and perhaps a shared expert.

    What the block does before its experts and beside them, it does itself: it is called with a seam in the place of the
    experts. So whatever it adds to their output, such as a shared expert with a gate, comes out as its result.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.expert_weights = expert_weights(layer)
        experts = self._mlp.get_submodule("experts")
        if set(dict(experts.named_children())) - {"act_fn", "post_expert_norm"}:
            raise Unfit(f"{type(experts).__name__} has modules of its own")
        if self._norms[3] is not None:
            raise Unfit("it has a norm behind its experts, and a plan has no weights there")
        self._experts: Any = experts
        self._gate = gate_of(experts) if experts.has_gate else None
        routers = {"experts", "gate", "router"}
        more = any(name not in routers for name, child in self._mlp.named_children() if [*child.parameters()])
        self._seam = _Seam(more)
        self._mlp.experts = self._seam
        self.plain_merge = self._factor == 1.0

    def route(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor, Keep]:
        """Norm, router and shared expert."""
        h_BSD, more = _apply(self._norms[2], x_BSD), None
        with contextlib.suppress(_Reached):
            more = _first(self._mlp(h_BSD)).view_as(x_BSD)
        taken, self._seam.taken = self._seam.taken, None
        assert taken is not None, "the block did not call its experts"
        rows_TD, ids_TK, weights_TK = taken
        return rows_TD.reshape(-1, rows_TD.shape[-1]), ids_TK, weights_TK, (x_BSD, more)

    def experts(self, rows_RD: Tensor, ends_L: Tensor) -> Tensor:
        """What transformers' `grouped_mm_experts_forward` computes between its sort and its weighted sum."""
        e: Any = self._experts
        into, bias = (e.gate_up_proj, "gate_up_proj_bias") if e.has_gate else (e.up_proj, "up_proj_bias")
        y_RF = grouped_linear(rows_RD, into, ends_L, getattr(e, bias) if e.has_bias else None, e.is_transposed)
        y_RF = e.act_fn(y_RF) if self._gate is None else self._gate(y_RF)
        out_bias = e.down_proj_bias if e.has_bias else None
        y_RD = grouped_linear(y_RF, e.down_proj, ends_L, out_bias, e.is_transposed)
        return e.post_expert_norm(y_RD) if e.has_post_expert_norm else y_RD

    def merge(self, rows_TD: Tensor, keep: Keep) -> Tensor:
        """Experts and shared expert into the stream."""
        x_BSD, more = keep
        y_BSD = rows_TD.view_as(x_BSD)
        y_BSD = y_BSD if more is None else y_BSD + more
        return self._added(x_BSD, y_BSD)


def _apply(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _first(result: Any) -> Tensor:
    """Some modules return their output alone, some with more."""
    return result[0] if isinstance(result, tuple) else result
