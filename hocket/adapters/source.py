"""An adapted model as the source of an engine's chunks."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hocket.adapters.cut import Cut, Ends, Values
from hocket.adapters.decoder_layer import Unfit, windows_of
from hocket.adapters.layer import AdaptedChunk, DenseParts, ExpertLayer, ExpertParts
from hocket.config import Config
from hocket.layers.routing import Routing
from hocket.layers.standin import StandIn
from hocket.model.context import Context
from hocket.model.context_layers import cut_as
from hocket.model.documents import Documents
from hocket.model.heads import Heads
from hocket.model.moe import Routed
from hocket.model.source import ChunkLike, ChunkPlace
from hocket.program.ops import Layout
from hocket.program.stages import layout_of

# -- shared layers -----------------------------------------------------------------------------------------------------
# Layers of transformers whose sequences ranks or documents share: attention cut where keys and values travel.
#
# hocket calls the projections and norms of the module `self_attn`, and the function by which its file turns queries and
# keys; what heads find is hocket's attention. So keys and values travel on a lane of their own, while queries are made.
# `verify.py` compares these pieces too with the layer's own forward.
#
# Shapes: B sequences, S tokens of each on this rank, T tokens of this rank (B * S), D hidden, H query heads, K key and
# value heads, N width of a head, F features of all heads.

Places = Context | Documents
"""Of tokens of sequences that ranks share, or that documents share."""
Told = Callable[[Tensor, Places], Any]
"""Gives what a layer is told, from hidden states and the places of their tokens."""

MASKLESS = "hocket_plan"
"""The name of an attention that transformers makes no masks for: it knows none of this name."""

_MODULES = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMS = {"q_norm", "k_norm"}


def without_masks(config: Any) -> Any:
    """A copy of a model's configuration, under which layers are told of no masks. These would be [S, S]."""
    alone = copy.deepcopy(config)
    alone._attn_implementation = MASKLESS
    return alone


class SharedAttention(Heads):
    """Attention of heads that a module of transformers makes. Raises Unfit if it is none that is known."""

    sinks = None

    def __init__(self, module: Any, window: int, told: Told) -> None:
        children = {name for name, _ in module.named_children()}
        if children - _NORMS != _MODULES or [*module.named_parameters(recurse=False)]:
            raise Unfit(f"its attention has {', '.join(sorted(children))}, and ranks that share sequences cut others")
        self._module, self.window, self._told, self.head_dim = module, window, told, int(module.head_dim)
        self.heads, self.kv_heads = (p.out_features // self.head_dim for p in (module.q_proj, module.k_proj))
        self._turn = sys.modules[type(module).__module__].apply_rotary_pos_emb if _turns(module) else None

    def keys(self, h_BSD: Tensor, context: Places) -> Tensor:
        """Keys and values of a rank's tokens, side by side: [T, 2 * K * N]."""
        k_THN = self._made("k", h_BSD, context)
        return torch.cat([k_THN.flatten(1), self._module.v_proj(h_BSD).flatten(0, 1)], -1)

    def queries(self, h_BSD: Tensor, context: Places) -> tuple[Tensor, None]:
        """Queries of a rank's tokens, [T, H, N]. They have no gates."""
        return self._made("q", h_BSD, context), None

    def out(self, o_BSF: Tensor, gate_BSF: Tensor | None) -> Tensor:
        """What attention adds to the residual stream."""
        return self._module.o_proj(o_BSF)

    def _made(self, name: str, h_BSD: Tensor, context: Places) -> Tensor:
        """Queries `q` or keys `k`, with their norm and positions: [T, H, N]."""
        made: Tensor = getattr(self._module, f"{name}_proj")(h_BSD)
        norm: Any = getattr(self._module, f"{name}_norm", None)
        wide = norm is not None and norm.weight.shape[0] != self.head_dim  # of all heads together
        made = norm(made) if wide else made
        x_BSHN = made.unflatten(-1, (-1, self.head_dim))
        x_BSHN = norm(x_BSHN) if norm is not None and not wide else x_BSHN
        if self._turn is None:
            return x_BSHN.flatten(0, 1)
        x_BHSN, (cos, sin) = x_BSHN.transpose(1, 2), self._told(h_BSD, context)["position_embeddings"]
        turned_BHSN, _ = self._turn(x_BHSN, x_BHSN[:, :0], cos, sin)
        return turned_BHSN.transpose(1, 2).flatten(0, 1)


def _turns(module: Any) -> bool:
    """Whether queries and keys have positions."""
    return bool(getattr(module, "use_rope", True))


class _Shared:
    """What both kinds of layers have in common."""

    layer: Any
    attn: SharedAttention

    def normed(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """The input of attention, and the residual stream."""
        return self.layer.before(x_BSD), x_BSD

    def _stream(self, x_BSD: Tensor, more_BSD: Tensor) -> Tensor:
        return self.layer.behind(x_BSD, more_BSD)


class SharedDense(_Shared, DenseParts):
    """A dense layer."""

    def added(self, x_BSD: Tensor, more_BSD: Tensor, context: Context) -> Tensor:
        """The residual stream behind attention."""
        return self._stream(x_BSD, more_BSD)


class SharedExperts(_Shared, ExpertParts):
    """A layer with experts."""

    def added(self, x_BSD: Tensor, more_BSD: Tensor, context: Context, kept: Routing | None = None) -> Routed:
        """Routed rows of the residual stream behind attention."""
        return self.routed(self._stream(x_BSD, more_BSD), kept)


class _Packed(_Shared):
    """Where a rank has its sequences whole, and documents share them."""

    def attended(self, x_BSD: Tensor, documents: Documents) -> Tensor:
        """The residual stream behind attention."""
        h_BSD, attn, batch = self.layer.before(x_BSD), self.attn, x_BSD.shape[0]
        kv_TX, (q_THN, _) = attn.keys(h_BSD, documents), attn.queries(h_BSD, documents)
        k_TKN, v_TKN = kv_TX.view(len(kv_TX), 2, attn.kv_heads, attn.head_dim).unbind(1)
        found_THN = attn.whole(q_THN, k_TKN, v_TKN, batch, documents)
        return self._stream(x_BSD, attn.projected(found_THN.flatten(1), None, batch))


class PackedDense(_Packed, DenseParts):
    """A dense layer."""

    def forward_attn(self, x_BSD: Tensor, documents: Any = None) -> Tensor:
        """The first piece, inside of documents."""
        return self.attended(x_BSD, documents)


class PackedExperts(_Packed, ExpertParts):
    """A layer with experts."""

    def forward_attn(self, x_BSD: Tensor, documents: Any = None, kept: Routing | None = None) -> Routed:
        """The pieces before the dispatch, inside of documents."""
        return self.routed(self.attended(x_BSD, documents), kept)


WHOLE = "whole"
"""The method of ranks that have their sequences whole."""


def shared_parts(
    layer: Any, attn: SharedAttention, place: ChunkPlace, method: str, experts: int
) -> DenseParts | ExpertParts:
    """The parts of a copied layer; `experts` are those of the whole model, 0 for a dense layer."""
    assert place.groups is not None, "ranks have groups"
    kinds: Any = (PackedDense, PackedExperts)
    if method != WHOLE:
        kinds = cut_as(method, SharedDense), cut_as(method, SharedExperts)
    how = (experts, place.ep) if experts else ()
    parts = kinds[experts > 0](layer, lambda x_BSD: None, *how)
    parts.attn, parts.group = attn, place.groups.cp
    return parts


# -- source ------------------------------------------------------------------------------------------------------------


class AdaptedModel:
    """Chunks of a model that an adapter has cut, with stand-ins for its parameters."""

    def __init__(self, cut: Cut, values: Values | None = None, method: str = "") -> None:
        """`values` for a model on the meta device; otherwise first values are the model's own.

        `method` says what travels between ranks that share sequences; `whole` where documents alone share them.
        """
        self.cut, self._values, self._method = cut, values, method
        self._buffers: dict[int, Any] = {}

    def layout(self, config: Config) -> Layout:
        """That of hocket's own layers, but that weight gradients of the first part read the layer's input too.

        hocket's own begin with a norm. Others may project the input itself, as OLMo 2 does, and then weight gradients
        read what another lane has received: see Note: [Values of communication lanes live longer].
        """
        there = layout_of(config)
        return replace(there, types=tuple(kind.keeping_input() for kind in there.layer_types))

    def buffers(self, device: torch.device) -> Mapping[int, Any]:
        """What all chunks of this rank have in the place of buffers and constants, by the model's own."""
        if not self._buffers:
            self._buffers = self.cut.buffers(device, self._values)
        return self._buffers

    def chunk(self, place: ChunkPlace) -> ChunkLike:
        cut, ep = self.cut, place.ep
        wanted = {f"layers.{number}." for number in place.layers}
        both = cut.tied and (place.first or place.last)
        wanted |= {"embed."} if place.first or both else set()
        wanted |= {"head."} if place.last or both else set()
        parameters: dict[str, nn.Parameter] = {}
        memo = dict(self.buffers(place.device))
        for name, param in cut.params.items():
            first, *rest = param.shape or (1,)
            stand_in = StandIn.of(first // ep.size if ".experts." in name else first, *rest)
            if both and name.startswith(("embed.", "head.")):
                stand_in = place.ends.setdefault(name, stand_in)
            memo[id(param)] = stand_in
            if any(name.startswith(prefix) for prefix in wanted):
                parameters[name] = stand_in
        if self._method:
            config: Any = cut.adapter.model.config
            memo[id(config)] = without_masks(config)
        ends = cut.adapter.ends(dict(memo))
        contexts = _remembered(ends)
        layers: dict[int, DenseParts | ExpertParts] = {}
        for number in place.layers:
            layer: Any = cut.copied(number, dict(memo), fused=place.device.type == "cuda")
            experts = cut.experts if isinstance(layer, ExpertLayer) else 0
            told = _of_layer(contexts, number)
            if self._method:
                window = windows_of(cut.adapter.model.config)[number]
                attn = SharedAttention(layer.module.get_submodule("self_attn"), window, told)
                layers[number] = shared_parts(layer, attn, place, self._method, experts)
            elif experts:
                layers[number] = ExpertParts(layer, told, experts, ep)
            else:
                layers[number] = DenseParts(layer, told)
        return AdaptedChunk(
            ends.embed if place.first else None, layers, ends.logits if place.last else None, parameters
        )

    def value(self, name: str, shape: tuple[int, ...], first_expert: int, device: torch.device) -> Tensor:
        theirs, param = self.cut.theirs[name], self.cut.params[name]
        if self._values is None:
            return param.detach()
        value: Any = self._values(theirs)
        if not isinstance(value, Tensor) or value.is_meta or not value.is_floating_point():
            raise ValueError(
                f"values({theirs!r}): no floating-point tensor with data; fix: return the parameter's value"
            )
        if value.shape != param.shape:
            raise ValueError(
                f"values({theirs!r}) has the shape {tuple(value.shape)}, the parameter {tuple(param.shape)}; "
                "fix: return the whole parameter"
            )
        return value.detach()

    def begin(self, chunk: ChunkLike, device: torch.device) -> None:
        """Buffers have their values already."""

    def own_name(self, name: str) -> str:
        return self.cut.theirs[name]


def _remembered(ends: Ends) -> Callable[..., Any]:
    """What layers are told depends on the shape of hidden states alone, so it is made once for each.

    Where ranks or documents share sequences, also on the places of tokens, and is kept as long as these are.
    """
    known: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

    def contexts(x_BSD: Tensor, places: Places | None = None) -> Any:
        made, key = known.setdefault(ends if places is None else places, {}), (x_BSD.shape, x_BSD.dtype, x_BSD.device)
        if key not in made:
            positions = () if places is None else (places.position_T.view(x_BSD.shape[:2]),)
            with torch.inference_mode(False), torch.no_grad():
                made[key] = ends.contexts(x_BSD.detach(), *positions)
        return made[key]

    return contexts


def _of_layer(contexts: Callable[..., Any], number: int) -> Callable[..., Any]:
    return lambda *given: contexts(*given)[number]
