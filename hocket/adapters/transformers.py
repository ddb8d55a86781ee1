"""Models of transformers (5.x), unmodified: `...ForCausalLM` with an embedding, decoder layers, a norm and a head.

The model's own forward computes what is around the layers, in a copy whose layers are probes. A probe sees what the
model passes to that layer (masks, positions, rotary tables) and the embedding's final output, and can substitute hidden
states for the last layer's output. So masks, scales and soft caps are not implemented a second time here.

Decoder layers are layers of the protocol: the module's own children, called piece by piece. The positions of a layer's
norms decide which of these forwards it has; its MLP decides whether it has experts. All of this is checked: `verify.py`
compares the pieces with the layer's own forward before anything starts.

    norms                                           forward
    input, post_attention                           x += attn(norm(x)); x += mlp(norm(x))               Llama
    post_attention, post_feedforward                x += norm(attn(x)); x += norm(mlp(x))               OLMo 2
    input, post_attention, pre_ and post_feedforward    x += norm(attn(norm(x))); x += norm(mlp(norm(x)))   Gemma 2
    input, post_self_attn, post_attention, post_mlp     likewise                                            GLM-4

Granite scales what is added to the stream by `residual_multiplier`. transformers itself is not imported.

Shapes: B sequences, S sequence length, T tokens (B * S), D hidden, K experts per token, R rows.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hocket.adapters.fused import gate_of
from hocket.adapters.layer import DenseLayer, ExpertLayer, Keep
from hocket.adapters.source import AdaptedModel, Ends, refuse, refuse_dropout
from hocket.layers.weight_proxy import grouped_linear
from hocket.model.documents import Documents, Packing
from hocket.model.heads import Heads

# -- Models of transformers whose sequences ranks or documents can share -----------------------------------------------

FAMILIES = ("llama", "mistral", "mixtral", "olmo2", "olmo3", "qwen2", "qwen3", "qwen3_moe", "smollm3")
"""Model types whose tokens interact only in attention, each tested against the model on one process."""

ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding that depend only on a token's position."""

LAYERS = ("full_attention", "sliding_attention")


def unshareable(model: nn.Module) -> str:
    """Why ranks with part of the tokens would not compute the same as the model; empty if they would."""
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
"""Norms that a layer has -> those before and after attention, before and after the MLP."""
BLOCKS = ("mlp", "block_sparse_moe", "feed_forward")
"""Attribute names of a layer's MLP."""
_GROUPED = ("is_transposed", "has_bias", "has_gate", "_apply_gate")
"""Attributes of experts that follow transformers' interface of experts."""


class Unfit(ValueError):
    """A layer is not of a known kind; the text says why."""


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
    if not all(hasattr(experts, name) for name in _GROUPED):
        raise Unfit(f"{type(experts).__name__} does not go by transformers' interface of experts, stacked by number")
    return f"{block}.experts"


class PlainLayer:
    """A layer with a dense MLP."""

    def __init__(self, layer: nn.Module) -> None:
        """Takes ownership of the layer. Raises Unfit."""
        self.module = layer
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

    def attention(self, x_BSD: Tensor, context: Mapping[str, Any]) -> Any:
        """`x + attn(x)`, with the norms that belong to it."""
        return self.after(x_BSD, _first(self._attention(hidden_states=self.before(x_BSD), **context)))

    def before(self, x_BSD: Tensor) -> Tensor:
        """The input of attention."""
        return _apply(self._norms[0], x_BSD)

    def after(self, x_BSD: Tensor, more_BSD: Tensor) -> Tensor:
        """The stream after attention, from the stream before and attention's output."""
        return self._added(x_BSD, _apply(self._norms[1], more_BSD))

    def mlp(self, x_BSD: Tensor) -> Tensor:
        """The stream after the MLP."""
        _, _, before, after = self._norms
        return self._added(x_BSD, _apply(after, _first(self._mlp(_apply(before, x_BSD)))))

    def _added(self, x_BSD: Tensor, more: Tensor) -> Tensor:
        return x_BSD + (more if self._factor == 1.0 else more * self._factor)


class _Reached(Exception):
    """The block has called its experts, and nothing after them is needed."""


class _Seam(nn.Module):
    """Replaces a block's experts: stores their arguments, and returns zeros, or ends the block's forward."""

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

    The block's own code runs everything before and besides its experts, with a seam in their place. So its result is
    whatever it adds to their output, such as a gated shared expert.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.expert_weights = expert_weights(layer)
        experts = self._mlp.get_submodule("experts")
        if set(dict(experts.named_children())) - {"act_fn", "post_expert_norm"}:
            raise Unfit(f"{type(experts).__name__} has modules of its own")
        if self._norms[3] is not None:
            raise Unfit("it has a norm after its experts, and a plan has no weights there")
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
        """The part of transformers' `grouped_mm_experts_forward` between its sort and its weighted sum."""
        e: Any = self._experts
        into, bias = (e.gate_up_proj, "gate_up_proj_bias") if e.has_gate else (e.up_proj, "up_proj_bias")
        y_RF = grouped_linear(rows_RD, into, ends_L, getattr(e, bias) if e.has_bias else None, e.is_transposed)
        y_RF = e.act_fn(y_RF) if self._gate is None else self._gate(y_RF)
        out_bias = e.down_proj_bias if e.has_bias else None
        y_RD = grouped_linear(y_RF, e.down_proj, ends_L, out_bias, e.is_transposed)
        return e.post_expert_norm(y_RD) if getattr(e, "has_post_expert_norm", False) else y_RD  # since 5.20

    def merge(self, rows_TD: Tensor, keep: Keep) -> Tensor:
        """Add experts and shared expert to the stream."""
        x_BSD, more = keep
        y_BSD = rows_TD.view_as(x_BSD)
        y_BSD = y_BSD if more is None else y_BSD + more
        return self._added(x_BSD, y_BSD)


def _apply(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _first(result: Any) -> Tensor:
    """The output of a module that may return a tuple."""
    return result[0] if isinstance(result, tuple) else result


# -- shared layers -----------------------------------------------------------------------------------------------------
# Layers of transformers with sequences shared by ranks or documents: attention is cut where keys and values are sent.
#
# hocket calls the projections and norms of the module `self_attn`, and its file's function that rotates queries and
# keys; attention itself is hocket's. So keys and values are sent on their own lane, while queries are computed.
# `verify.py` also compares these pieces with the layer's own forward.
#
# Shapes: B sequences, S tokens of each on this rank, T tokens of this rank (B * S), D hidden, H query heads, K key and
# value heads, N width of a head, F features of all heads.

Telling = Callable[[Tensor, Packing], Any]
"""Returns a layer's context, given hidden states and what is known about their tokens."""

MASKLESS = "hocket_plan"
"""The name of an attention that transformers does not know, and therefore makes no masks for."""

_MODULES = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMS = {"q_norm", "k_norm"}


class SharedAttention(Heads):
    """Attention for the heads of a module of transformers. Raises Unfit if the module is of an unknown kind."""

    sinks = None

    def __init__(self, module: Any, window: int, told: Telling) -> None:
        children = {name for name, _ in module.named_children()}
        if children - _NORMS != _MODULES or [*module.named_parameters(recurse=False)]:
            raise Unfit(f"its attention has {', '.join(sorted(children))}, and ranks that share sequences cut others")
        self._module, self.window, self._told, self.head_dim = module, window, told, int(module.head_dim)
        self.heads, self.kv_heads = (p.out_features // self.head_dim for p in (module.q_proj, module.k_proj))
        turns = getattr(module, "use_rope", True)
        self._turn = sys.modules[type(module).__module__].apply_rotary_pos_emb if turns else None

    def __call__(self, h_BSD: Tensor, documents: Documents | None = None) -> Tensor:
        return self.forward(h_BSD, documents)

    def made(self, names: str, h_BSD: Tensor, documents: Any) -> tuple[list[Tensor], None]:
        made = [self._made(name, h_BSD, documents) for name in names]
        return made if documents is None else [x.flatten(0, 1).unsqueeze(0) for x in made], None

    def out(self, o_BSF: Tensor, gate_BSF: Tensor | None) -> Tensor:
        return self._module.o_proj(o_BSF)

    def _made(self, name: str, h_BSD: Tensor, context: Packing) -> Tensor:
        """Queries `q`, keys `k` or values `v`; the first two with their norm and positions: [B, S, heads, N]."""
        made: Tensor = getattr(self._module, f"{name}_proj")(h_BSD)
        norm: Any = getattr(self._module, f"{name}_norm", None)
        wide = norm is not None and norm.weight.shape[0] != self.head_dim  # over all heads together
        made = norm(made) if wide else made
        x_BSHN = made.unflatten(-1, (-1, self.head_dim))
        x_BSHN = norm(x_BSHN) if norm is not None and not wide else x_BSHN
        if self._turn is None or name == "v":
            return x_BSHN
        x_BHSN, (cos, sin) = x_BSHN.transpose(1, 2), self._told(h_BSD, context)["position_embeddings"]
        turned_BHSN, _ = self._turn(x_BHSN, x_BHSN[:, :0], cos, sin)
        return turned_BHSN.transpose(1, 2)


# -- model -------------------------------------------------------------------------------------------------------------

_DROPS = ("dropout", "pdrop", "jitter", "layerdrop")
"""Parts of setting names that make a forward random."""


class Pretrained(AdaptedModel):
    """A causal language model of transformers. Raises ValueError, naming what does not fit."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        base = getattr(model, "base_model", None)
        ask: Any = getattr(model, "get_output_embeddings", None)
        head = None if ask is None else ask()
        names = {id(module): name for name, module in model.named_modules()}
        parts: dict[str, Any] = {name: getattr(base, name, None) for name in ("embed_tokens", "layers", "norm")}
        missing = [name for name, part in parts.items() if not isinstance(part, nn.Module)]
        if base is model or not isinstance(base, nn.Module) or missing or not isinstance(head, nn.Linear):
            lacks = ", ".join(missing) or "a linear head"
            raise refuse(model, f"a plan needs a model for causal language modelling, and this one lacks {lacks}")
        self._check(model)
        self._base, self._head = names[id(base)], names[id(head)]
        self._list = names[id(parts["layers"])]
        self.layers: Sequence[nn.Module] = list(parts["layers"])
        self.embed_modules: Mapping[str, nn.Module] = {names[id(parts["embed_tokens"])]: parts["embed_tokens"]}
        self.head_modules: Mapping[str, nn.Module] = {names[id(parts["norm"])]: parts["norm"], self._head: head}
        self.vocab, self.hidden = head.out_features, head.in_features
        self.claim()
        self.direct = False, False
        """Whether the first layer's input is just the embedding, and the logits just norm and projection."""

    def _check(self, model: Any) -> None:
        config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        for name, value in vars(config).items():
            if any(word in name for word in _DROPS) and isinstance(value, int | float) and value > 0:
                raise refuse(
                    model, f"config.{name} = {value}, and a planned step makes no random numbers", f"config.{name} = 0"
                )
        refuse_dropout(model)
        if getattr(config, "output_router_logits", False):
            raise refuse(
                model,
                "config.output_router_logits adds a loss over all layers' routers, which no part of a plan sees",
                "config.output_router_logits = False",
            )

    def expert_weights(self, layer: nn.Module) -> str:
        """The submodule of a layer that has the experts' parameters."""
        return self._fitting(layer, expert_weights)

    def layer(self, copied: nn.Module) -> DenseLayer | ExpertLayer:
        """A copy of a layer in its pieces."""
        kind = RoutedLayer if self.expert_weights(copied) else PlainLayer
        return self._fitting(copied, kind)

    def _fitting(self, layer: nn.Module, find: Callable[[nn.Module], Any]) -> Any:
        try:
            return find(layer)
        except Unfit as error:
            raise refuse(self.model, f"{type(layer).__name__} has no forward that a plan knows: {error}") from None

    def without_masks(self) -> dict[int, Any]:
        config: Any = self.model.config
        alone = copy.deepcopy(config)
        alone._attn_implementation = MASKLESS
        return {id(config): alone}

    def attention(self, number: int, layer: PlainLayer, told: Telling) -> SharedAttention:
        return SharedAttention(layer.module.get_submodule("self_attn"), windows_of(self.model.config)[number], told)

    def ends(self, memo: dict[int, Any]) -> Ends:
        """The computation around the layers."""
        probes = [_Probe(layer) for layer in self.layers]
        memo[id(self.model.get_submodule(self._list))] = nn.ModuleList(probes)
        copied: Any = copy.deepcopy(self.model, memo)
        _fill(copied, self.model)
        around = _OutsideLayers(self.model, copied, copied.get_submodule(self._base), probes)
        embed, *after = (copied.get_submodule(name) for name in (*self.embed_modules, *self.head_modules))
        norm, head = after
        return Ends(
            embed if self.direct[0] else around.embed,
            (lambda x_BSD: head(norm(x_BSD))) if self.direct[1] else around.logits,
            around.contexts,
        )

    def settle(self, memo: dict[int, Any], x_BSD: Tensor, ids_BS: Tensor) -> None:
        """Find out, by a trial run, whether embedding and head compute more than their modules."""
        slow = self.ends(dict(memo))
        self.direct = True, True
        fast = self.ends(dict(memo))
        same = torch.equal(slow.embed(ids_BS), fast.embed(ids_BS)), torch.equal(slow.logits(x_BSD), fast.logits(x_BSD))
        self.direct = same


class _Passed(Exception):
    """Ends a forward after a probe has seen what it needs."""


class _Probe(nn.Module):
    """Replaces a layer. Has the layer's plain attributes, for models that read them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_") and isinstance(value, str | int | float | None):
                setattr(self, name, value)
        self._signature = inspect.signature(type(layer).forward)
        self.meet: Callable[[Tensor, Mapping[str, Any]], Tensor] = lambda x_BSD, told: x_BSD

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        bound = self._signature.bind(self, *args, **kwargs)
        _, (_, x_BSD), *told = bound.arguments.items()
        known = dict(told)
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                known |= known.pop(name, {})
        return self.meet(x_BSD, known)


class _OutsideLayers:
    """Runs a copy of a model whose layers are probes."""

    def __init__(self, original: nn.Module, model: Any, base: Any, probes: list[_Probe]) -> None:
        self._original, self._model, self._base, self._probes = original, model, base, probes

    def embed(self, ids_BS: Tensor) -> Tensor:
        """The input of the first layer."""
        seen: list[Tensor] = []

        def meet(x_BSD: Tensor, _: Mapping[str, Any]) -> Tensor:
            seen.append(x_BSD)
            raise _Passed

        self._meeting({0: meet}, self._base, input_ids=ids_BS)
        return seen[0]

    def contexts(self, x_BSD: Tensor, position_BS: Tensor | None = None) -> list[dict[str, Any]]:
        """The contexts of all layers."""
        seen: list[dict[str, Any]] = []
        passed: list[Tensor] = []

        def meet(x_BSD: Tensor, told: Mapping[str, Any]) -> Tensor:
            if passed and x_BSD is not passed[-1]:
                raise refuse(self._original, "it computes between its layers, and no part of a plan does that")
            seen.append(dict(told))
            if len(seen) == len(self._probes):
                raise _Passed
            passed.append(x_BSD.view_as(x_BSD))
            return passed[-1]

        meets = dict.fromkeys(range(len(self._probes)), meet)
        nothing = x_BSD.new_zeros(()).expand(x_BSD.shape)
        self._meeting(meets, self._base, inputs_embeds=nothing, position_ids=position_BS)
        return seen

    def logits(self, x_BSD: Tensor) -> Tensor:
        """Logits that the model computes from the last layer's output."""
        last = len(self._probes) - 1
        nothing = x_BSD.detach().new_zeros(()).expand(x_BSD.shape)
        return self._meeting({last: lambda _, told: x_BSD}, self._model, inputs_embeds=nothing).logits

    def _meeting(self, meets: Mapping[int, Any], module: Any, **inputs: Any) -> Any:
        before = {i: self._probes[i].meet for i in meets}
        try:
            for i, meet in meets.items():
                self._probes[i].meet = meet
            return module(use_cache=False, **inputs)
        except _Passed:
            return None
        finally:
            for i, meet in before.items():
                self._probes[i].meet = meet


def _fill(model: Any, original: nn.Module) -> None:
    """Initialise unsaved buffers, such as rotary tables, if the original is on the meta device.

    They get the model's own initial values.
    """
    for name, module in original.named_modules():
        if any(
            b.is_meta and key in module._non_persistent_buffers_set
            for key, b in module._buffers.items()
            if b is not None
        ):
            model._init_weights(model.get_submodule(name))
