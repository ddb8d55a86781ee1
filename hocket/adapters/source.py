"""An adapted model as the source of an engine's chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hocket.adapters.chunk import AdaptedChunk, DenseParts, ExpertParts
from hocket.adapters.cut import Cut, Ends, Values
from hocket.adapters.layer import ExpertLayer
from hocket.adapters.shareable import windows_of
from hocket.adapters.shared_layers import Places, SharedAttention, shared_parts, without_masks
from hocket.config import Config
from hocket.layers.standin import StandIn
from hocket.model.source import ChunkLike, ChunkPlace
from hocket.program.ops import Layout
from hocket.program.stages import layout_of


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
