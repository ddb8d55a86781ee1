"""A model of others as the source of an engine's chunks: its layers, what is around them, and names of parameters.

`AdaptedModel` has what all such models share. `OwnModel` is one with layers of the protocol, and `Pretrained`
(`transformers.py`) one of transformers.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hocket.adapters.fused import fuse
from hocket.adapters.layer import AdaptedChunk, DenseLayer, DenseParts, ExpertLayer, ExpertParts
from hocket.config import Config
from hocket.fsdp.saving.storage import listed
from hocket.layers.weight_proxy import WeightProxy
from hocket.model.documents import Packing
from hocket.model.heads import Heads
from hocket.model.parts import ExpertPlace, cut_as
from hocket.model.source import ChunkPlace, ModelSource
from hocket.program.ops import Layout
from hocket.program.stages import layout_of

WHOLE = "whole"
"""The method of ranks that have their sequences whole, where documents share them."""
Values = Callable[[str], Tensor]
"""The first value of a parameter or buffer by its name in the model, in the shape of the whole model."""

ELSE = "hocket.fully_shard shards any module as it is"
"""What can be done with a model that does not fit into a plan."""
_UNSHARED = "its attention is unknown, so ranks or documents cannot share sequences", "mesh.cp = 1, data.packing = off"


def refuse(model: nn.Module, reason: str, fix: str = ELSE) -> ValueError:
    """The error of a model that cannot be planned."""
    return ValueError(f"model = {type(model).__name__}: {reason}; fix: {fix}")


@dataclass(frozen=True)
class Ends:
    """The computation before and after the layers, in a copy of the model with parameters of its own."""

    embed: Callable[[Tensor], Tensor]
    """Token ids [B, S] to hidden states [B, S, D]."""
    logits: Callable[[Tensor], Tensor]
    """Hidden states to logits [B, S, V]."""
    contexts: Callable[..., Sequence[Any]]
    """Hidden states to the context of each layer. Only shape, dtype and device of the states count. Of transformers
    also takes positions of the tokens, [B, S]; without them sequences are whole."""


class AdaptedModel(ModelSource):
    """A model of others as the source of an engine's chunks, in which stand-ins take the place of its parameters.

    What kind of model it is, a subclass says: it sets the first attributes and calls `claim`.
    """

    model: nn.Module
    layers: Sequence[nn.Module]
    """The model's own layers, in order."""
    embed_modules: Mapping[str, nn.Module]
    """Modules with the parameters before the layers, by name in the model."""
    head_modules: Mapping[str, nn.Module]
    """Modules with the parameters after the layers, by name in the model."""
    vocab: int
    hidden: int

    values: Values | None = None
    """For a model on the meta device; otherwise first values are the model's own."""
    method = ""
    """What travels between ranks that share sequences; `whole` where documents alone share them."""
    theirs: dict[str, str]
    """hocket's name of a parameter -> the model's."""
    params: dict[str, nn.Parameter]
    """Those that a step trains, by hocket's name."""
    constants: dict[str, nn.Parameter]
    """Those that no gradient reaches: torch's optimizers leave them alone, and a step has them as buffers."""
    experts_in: list[str]
    """The submodule of each layer that has its experts; empty for a dense layer."""
    experts: int
    """Experts of a layer; 0: there are none."""
    _buffers: dict[int, Any] | None = None

    # What a kind of model says.

    def layer(self, copied: Any) -> DenseLayer | ExpertLayer:
        """The protocol's view of a copy of a layer. Raises ValueError if it has none."""
        return copied

    def expert_weights(self, layer: Any) -> str:
        """The submodule of a layer that has the experts' parameters, a name; empty for a dense layer."""
        return getattr(layer, "expert_weights", "")

    @abstractmethod
    def ends(self, memo: dict[int, Any]) -> Ends:
        """The computation around the layers, in a copy. `memo` maps tensors of the model to those of the copy."""

    def settle(self, memo: dict[int, Any], x_BSD: Tensor, ids_BS: Tensor) -> None:
        """Examine the model. Called once, before all else, with a `memo` that replaces the model's tensors."""

    def without_masks(self) -> dict[int, Any]:
        """What takes the place of the model's configuration, so that layers are told of no masks: they are [S, S]."""
        raise refuse(self.model, *_UNSHARED)

    def attention(self, number: int, layer: Any, told: Callable[[Tensor, Any], Any]) -> Heads:
        """Attention in sequences that ranks or documents share. `told`: (states, places of tokens) -> the context."""
        raise refuse(self.model, *_UNSHARED)

    # Names of parameters.

    def claim(self) -> None:
        """Name all parameters. Raises ValueError if one has no place, or more than one."""
        self.experts_in = [self.expert_weights(layer) for layer in self.layers]
        self.theirs, self.params, self.constants = {}, {}, {}
        names = {id(p): name for name, p in self.model.named_parameters()}
        for unit, modules in (("embed", self.embed_modules), ("head", self.head_modules)):
            for path, module in modules.items():
                for name, param in module.named_parameters():
                    self._claim(f"{unit}.{path}.{name}", param, names)
        for number, layer in enumerate(self.layers):
            prefix = f"{self.experts_in[number]}."
            for name, param in layer.named_parameters():
                inside = name.removeprefix(prefix) if self.experts_in[number] else name
                kind = "experts." if inside != name else ""
                self._claim(f"layers.{number}.{kind}{inside}", param, names)
        modules = Counter(module for layer in self.layers for module in layer.modules())
        if found := next((module for module, count in modules.items() if count > 1), None):
            raise refuse(
                self.model, f"layers share a module, {type(found).__name__}", f"give each layer its own; {ELSE}"
            )
        claimed = {id(param) for param in self.params.values()}
        if left := [name for known, name in names.items() if known not in claimed]:
            raise refuse(self.model, listed("no part claims the parameters {}", left))
        stacked = {name: param for name, param in self.params.items() if ".experts." in name}
        sizes = {param.shape[0] if param.dim() else 0 for param in stacked.values()}
        if len(sizes) > 1:
            shapes = ", ".join(f"{self.theirs[name]} {tuple(param.shape)}" for name, param in list(stacked.items())[:4])
            raise refuse(self.model, f"experts' parameters are not stacked by the same number: {shapes}")
        self.experts = sizes.pop() if sizes else 0

    @property
    def tied(self) -> bool:
        """Whether the head uses the embedding's parameters."""
        embed, head = (
            {id(p) for module in modules.values() for p in module.parameters()}
            for modules in (self.embed_modules, self.head_modules)
        )
        return bool(embed & head)

    def _claim(self, name: str, param: nn.Parameter, names: Mapping[int, str]) -> None:
        owner = next((ours for ours, known in self.params.items() if known is param), None)
        if owner is not None:
            if owner.startswith("embed.") and name.startswith("head."):
                return  # tied
            raise refuse(
                self.model,
                f"{names[id(param)]} is shared: it is {owner} and {name}, and a plan gathers a parameter in one unit",
                f"give each layer its own parameters; {ELSE}",
            )
        self.params[name], self.theirs[name] = param, names[id(param)]

    def leave(self, names: Collection[str]) -> None:
        """Take parameters, which no gradient reaches, for constants. Raises ValueError if others are frozen."""
        self.constants = {name: self.params.pop(name) for name in names}
        if stacked := [self.theirs[name] for name in names if ".experts." in name]:
            raise refuse(self.model, f"{stacked[0]} is of experts, and no gradient reaches it: ranks have parts of it")
        if frozen := [self.theirs[name] for name, param in self.params.items() if not param.requires_grad]:
            raise refuse(
                self.model,
                listed("requires_grad is False for {}, and a plan trains every parameter that the loss needs", frozen),
                "hocket.fully_shard, which leaves frozen parameters alone; requires_grad_(True) trains them as well",
            )

    def kinds(self) -> tuple[str, ...]:
        """The kind of every layer."""
        return tuple("moe" if name else "dense" for name in self.experts_in)

    def copied(self, number: int, memo: dict[int, Any], fused: bool = False) -> DenseLayer | ExpertLayer:
        """A copy of a layer, as the protocol sees it. `fused`: with hocket's kernels where they compute the same."""
        layer = copy.deepcopy(self.layers[number], memo)
        if fused:
            fuse(layer)
        return self.layer(layer)

    def parts(
        self, number: int, memo: dict[int, Any], told: Any, ep: ExpertPlace, method: str = "", fused: bool = False
    ) -> DenseParts:
        """The part functions of a copy of a layer, which is `told` its context. `method` as of this class."""
        layer, experts = self.copied(number, memo, fused), self.experts_in[number]
        kind: Any = ExpertParts if experts else DenseParts
        kind = kind if method in ("", WHOLE) else cut_as(method, kind)
        parts = kind(layer, told, *((self.experts, ep) if experts else ()))
        parts.attn = self.attention(number, layer, told) if method else None
        return parts

    def copies(self, device: torch.device, values: Values | None) -> dict[int, Any]:
        """What takes the place of the model's buffers and constants, and of its configuration: copies.

        `values` has those that are saved with a model on the meta device; `ends` fills in the others.
        """
        model, memo = self.model, dict[int, Any]()
        saved = {id(b): name for name, b in model.state_dict(keep_vars=True).items()}
        for name, buffer in [*model.named_buffers(), *((self.theirs[n], p) for n, p in self.constants.items())]:
            if not buffer.is_meta:
                memo[id(buffer)] = buffer.detach().to(device, copy=True)
            elif id(buffer) not in saved:
                memo[id(buffer)] = torch.empty_like(buffer, device=device)
            elif values is None:
                raise refuse(model, f"{name} is on the meta device and has no value", "plan_model(..., values=...)")
            else:
                memo[id(buffer)] = values(name).detach().to(device, buffer.dtype, copy=True)
        memo |= {id(p): nn.Parameter(memo[id(p)], requires_grad=False) for p in self.constants.values()}
        config = getattr(model, "config", None)
        return memo if config is None else {**memo, id(config): config}

    def buffers(self, device: torch.device) -> dict[int, Any]:
        """`copies` that all chunks of this rank share."""
        if self._buffers is None:
            self._buffers = self.copies(device, self.values)
        return self._buffers

    def trial(
        self, value: Callable[[str], Tensor], param: Callable[..., nn.Parameter], attention: str
    ) -> dict[int, Any]:
        """What takes the place of all tensors, and of the configuration, where a CPU tries the model.

        `value` gives what is on the meta device, `param` parameters by hocket's name and their own. Where attention is
        for GPUs alone, it is `attention`.
        """
        memo, config = self.copies(torch.device("cpu"), value), getattr(self.model, "config", None)
        if config is not None:
            memo[id(config)] = here = copy.deepcopy(config)
            if getattr(here, "_attn_implementation", None) not in (None, "sdpa", "eager"):
                here._attn_implementation = attention
            here._experts_implementation = "eager"
        return memo | {id(p): param(name, p) for name, p in self.params.items()}

    # What an engine asks.

    def layout(self, config: Config) -> Layout:
        """That of hocket's own layers, but that weight gradients of the first part read the layer's input too.

        hocket's own begin with a norm. Others may project the input itself, as OLMo 2 does, and then weight gradients
        read what another lane has received: see Note: [Values of communication lanes live longer].
        """
        there = layout_of(config)
        return replace(there, types=tuple(kind.keeping_input() for kind in there.layer_types))

    def chunk(self, place: ChunkPlace) -> AdaptedChunk:
        ep = place.ep
        wanted = {f"layers.{number}." for number in place.layers}
        both = self.tied and (place.first or place.last)
        wanted |= {"embed."} if place.first or both else set()
        wanted |= {"head."} if place.last or both else set()
        parameters: dict[str, nn.Parameter] = {}
        memo = dict(self.buffers(place.device))
        for name, param in self.params.items():
            first, *rest = param.shape or (1,)
            stand_in = WeightProxy.of(first // ep.size if ".experts." in name else first, *rest)
            if both and name.startswith(("embed.", "head.")):
                stand_in = place.ends.setdefault(name, stand_in)
            memo[id(param)] = stand_in
            if any(name.startswith(prefix) for prefix in wanted):
                parameters[name] = stand_in
        memo |= self.without_masks() if self.method else {}
        ends = self.ends(dict(memo))
        contexts = _remembered(ends)
        layers: dict[str, DenseParts] = {}
        for number in place.layers:
            told, fused = partial(contexts, number), place.device.type == "cuda"
            layers[str(number)] = parts = self.parts(number, dict(memo), told, ep, self.method, fused)
            parts.group = place.groups.cp if self.method and place.groups is not None else None
        return AdaptedChunk(
            ends.embed if place.first else None, layers, ends.logits if place.last else None, parameters
        )

    def value(self, name: str, shape: tuple[int, ...], first_expert: int, device: torch.device) -> Tensor:
        theirs, param = self.theirs[name], self.params[name]
        if self.values is None:
            return param.detach()
        value: Any = self.values(theirs)
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

    def own_name(self, name: str) -> str:
        return self.theirs[name]


def _remembered(ends: Ends) -> Callable[..., Any]:
    """Gives the context of a layer by its number. It depends on the shape of hidden states alone, so it is made once.

    Where ranks or documents share sequences, also on the places of tokens, and is kept as long as these are.
    """
    known: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

    def context(number: int, x_BSD: Tensor, places: Packing | None = None) -> Any:
        made, key = known.setdefault(ends if places is None else places, {}), (x_BSD.shape, x_BSD.dtype, x_BSD.device)
        if key not in made:
            positions = () if places is None else (places.position_T.view(x_BSD.shape[:2]),)
            with torch.inference_mode(False), torch.no_grad():
                made[key] = ends.contexts(x_BSD.detach(), *positions)
        return made[key][number]

    return context


# -- own ---------------------------------------------------------------------------------------------------------------
# Models with layers of one's own: a module with `embed`, `layers` and `head`.
#
# class Model(nn.Module):
#     embed: nn.Module            token ids [B, S] -> hidden states [B, S, D]
#     layers: nn.ModuleList       of hocket.adapters.layer.DenseLayer or ExpertLayer
#     head: nn.Module             hidden states -> logits [B, S, V]
#
#     def context(self, x): ...   if there is one: what all layers are told, by the shape of hidden states

_PIECES = {"expert_weights": ("attention", "route", "experts", "merge"), "": ("attention", "mlp")}


def refuse_dropout(model: nn.Module) -> None:
    """Raise ValueError for a model that drops elements."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise refuse(
                model, f"{name} drops with p = {module.p}, and a planned step makes no random numbers", "p = 0"
            )


class OwnModel(AdaptedModel):
    """A module with `embed`, `layers` and `head`. Raises ValueError, naming what does not fit."""

    def __init__(self, model: Any) -> None:
        self.model: nn.Module = model
        for name in ("embed", "layers", "head"):
            if not isinstance(getattr(model, name), nn.Module):
                raise refuse(model, f"{name} is no module", f"make {name} a torch.nn.Module")
        if others := [name for name, _ in model.named_children() if name not in ("embed", "layers", "head")]:
            raise refuse(
                model, f"it has more than embed, layers and head: {', '.join(others)}", "put it into one of them"
            )
        self.layers: Sequence[nn.Module] = list(model.layers)
        for layer in self.layers:
            self._check(layer)
        refuse_dropout(model)
        self.embed_modules: Mapping[str, nn.Module] = {"embed": model.embed}
        self.head_modules: Mapping[str, nn.Module] = {"head": model.head}
        with torch.no_grad():
            meta: Any = copy.deepcopy(model, {id(p): nn.Parameter(p.detach().to("meta")) for p in model.parameters()})
            x_BSD = meta.to("meta").embed(torch.zeros(1, 2, dtype=torch.int64, device="meta"))
            self.hidden, self.vocab = x_BSD.shape[-1], meta.head(x_BSD).shape[-1]
        self.claim()

    def _check(self, layer: nn.Module) -> None:
        pieces = _PIECES["expert_weights" if hasattr(layer, "expert_weights") else ""]
        if missing := [name for name in pieces if not callable(getattr(layer, name, None))]:
            raise refuse(
                self.model,
                f"{type(layer).__name__} has no {', '.join(missing)}",
                "the methods of hocket.adapters.layer.DenseLayer, or with expert_weights those of ExpertLayer",
            )

    def ends(self, memo: dict[int, Any]) -> Ends:
        """`embed`, `head` and `context`."""
        memo[id(self.model.get_submodule("layers"))] = nn.ModuleList()
        copied: Any = copy.deepcopy(self.model, memo)
        context = getattr(copied, "context", None)

        def contexts(x_BSD: Tensor) -> list[Any]:
            return [None if context is None else context(x_BSD)] * len(self.layers)

        return Ends(copied.embed, copied.head, contexts)
