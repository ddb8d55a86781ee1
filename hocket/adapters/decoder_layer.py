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
import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.adapters.layer import Keep
from hocket.layers.norms import rms_norm
from hocket.layers.standin import grouped_linear
from hocket.model.layers import swiglu

# -- fused -------------------------------------------------------------------------------------------------------------
# hocket's kernels in the place of what a model of transformers composes of many small ones: norms, and experts' gates.
#
# A copied layer's modules keep their code; those whose result one kernel computes get its forward instead. Numbers
# decide which these are, not names: `fuse` runs a module on random values beside the formula that the kernel computes.
# So a norm that adds one to its weight, or a gate that clamps, keeps its own code.

_EPS = ("variance_epsilon", "eps")
"""What norms call their epsilon."""
_CLOSE = 1e-6
"""Largest difference of fp32 results that are the same but for the order of sums, of values around 1."""


def fuse(layer: nn.Module) -> int:
    """Give a layer's RMS norms the forward of one kernel, and return how many there are."""
    norms = [(module, eps) for module in layer.modules() if (eps := _norm_epsilon(module)) is not None]
    for module, eps in norms:
        module.forward = partial(_normed, module, eps)
    return len(norms)


def gate_of(experts: Any) -> Any:
    """The gate of stacked experts: `swiglu` where that computes the same, else the experts' own."""
    y_RF = torch.linspace(-9, 9, 64).view(4, 16)
    try:
        same = torch.allclose(experts._apply_gate(y_RF), swiglu(y_RF), atol=_CLOSE, rtol=_CLOSE)
    except (RuntimeError, TypeError, AttributeError):
        same = False
    return swiglu if same else experts._apply_gate


def _normed(module: Any, eps: float, x: Tensor) -> Tensor:
    return rms_norm(x, module.weight, eps)


def _norm_epsilon(module: nn.Module) -> float | None:
    """The epsilon of a module that is `weight * x / rms(x)` over the last dimension; None for any other module."""
    params = dict(module.named_parameters(recurse=False))
    eps = next((getattr(module, name) for name in _EPS if isinstance(getattr(module, name, None), float)), None)
    if eps is None or params.keys() != {"weight"} or [*module.children()] or params["weight"].dim() != 1:
        return None
    weight = nn.Parameter(torch.linspace(0.5, 1.5, params["weight"].numel()))
    alone: Any = copy.deepcopy(module, {id(params["weight"]): weight})
    x = torch.linspace(-2, 3, 3 * weight.numel()).view(3, -1)
    try:
        with torch.no_grad():
            exact, half = alone(x), alone(x.bfloat16())
    except (RuntimeError, TypeError):
        return None
    expected = weight * F.rms_norm(x, (x.shape[-1],), None, eps)
    widened = half.dtype not in (torch.bfloat16, torch.float32)  # torch's choice for a bf16 input and an fp32 weight
    same = exact.shape == x.shape and torch.allclose(exact, expected, atol=10 * _CLOSE, rtol=10 * _CLOSE)
    return eps if same and not widened else None


# -- Models of transformers whose sequences ranks can share, with a plan and without one -------------------------------

FAMILIES = ("llama", "mistral", "mixtral", "olmo2", "olmo3", "qwen2", "qwen3", "qwen3_moe", "smollm3")
"""Model types whose tokens meet in attention alone, each tested against the model on one process."""

ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding that depend on a token's position alone."""

LAYERS = ("full_attention", "sliding_attention")


def unshareable(model: nn.Module) -> str:
    """Why ranks with a part of the tokens would compute something else than the model; empty if they would not."""
    config: Any = getattr(model, "config", None)
    kind, name = getattr(config, "model_type", None), type(model).__name__
    if kind not in FAMILIES or not any(c.__name__.endswith("ForCausalLM") for c in type(model).__mro__):
        return (
            f"{name} of type {kind} is no causal language model of {', '.join(FAMILIES)}, and its tokens may meet "
            "elsewhere than in attention"
        )
    rope = config.rope_parameters or {}
    kinds = [each.get("rope_type", "default") for each in ([rope] if "rope_type" in rope else rope.values())]
    wrong = {
        "attention_dropout": getattr(config, "attention_dropout", 0),
        "dropout": any(isinstance(m, nn.Dropout) and m.p for m in model.modules()),
        "output_router_logits": getattr(config, "output_router_logits", False),
        "output_attentions": getattr(config, "output_attentions", False),
        "output_hidden_states": getattr(config, "output_hidden_states", False),
        "is_causal=False": not getattr(config, "is_causal", True),
        "rope_type": next((each for each in kinds if each not in ROTARY), None),
        "layer_types": next((t for t in getattr(config, "layer_types", None) or () if t not in LAYERS), None),
        "loss_type": getattr(model, "loss_type", None) != "ForCausalLM",
    }
    return next((f"{what} of {name} is {value}" for what, value in wrong.items() if value), "")


def windows_of(config: Any) -> list[int]:
    """The window of every layer; 0 for none."""
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


# -- decoder layer -----------------------------------------------------------------------------------------------------

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
