"""Another author's model as the source of an engine's chunks: its layers, its ends, and names of parameters.

`AdaptedModel` has what all such models share. `OwnModel` has layers of the protocol, and `Pretrained`
(`transformers.py`) is a model of transformers.
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
"""The method for ranks with whole sequences that documents share."""
Values = Callable[[str], Tensor]
"""Returns the initial value of a parameter or buffer, by its name in the model, in its whole shape."""

ELSE = "hocket.fully_shard shards any module as it is"
"""The alternative for a model that cannot be planned."""
_UNSHARED = "its attention is unknown, so ranks or documents cannot share sequences", "mesh.cp = 1, data.packing = off"


def refuse(model: nn.Module, reason: str, fix: str = ELSE) -> ValueError:
    """The error for a model that cannot be planned."""
    return ValueError(f"model = {type(model).__name__}: {reason}; fix: {fix}")


@dataclass(frozen=True)
class Ends:
    """The computation before and after the layers, in a copy of the model with its own parameters."""

    embed: Callable[[Tensor], Tensor]
    """Token ids [B, S] to hidden states [B, S, D]."""
    logits: Callable[[Tensor], Tensor]
    """Hidden states to logits [B, S, V]."""
    contexts: Callable[..., Sequence[Any]]
    """Hidden states to the context of each layer. Only the states' shape, dtype and device matter. Models of
    transformers also take positions of the tokens, [B, S]; without them sequences are whole."""


class AdaptedModel(ModelSource):
    """Another author's model as the source of an engine's chunks; stand-ins replace its parameters.

    A subclass for each kind of model sets the first attributes and calls `claim`.
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
    """Initial values of a model on the meta device; otherwise the model's own values are used."""
    method = ""
    """What ranks that share sequences exchange; `whole` if only documents share them."""
    theirs: dict[str, str]
    """hocket's name of a parameter -> the model's."""
    params: dict[str, nn.Parameter]
    """The trained parameters, by hocket's name."""
    constants: dict[str, nn.Parameter]
    """Parameters without gradients: torch's optimizers skip them, and a step treats them as buffers."""
    experts_in: list[str]
    """The submodule of each layer that has its experts; empty for a dense layer."""
    experts: int
    """Experts of a layer; 0: there are none."""
    _buffers: dict[int, Any] | None = None

    # Overridden for each kind of model.

    def layer(self, copied: Any) -> DenseLayer | ExpertLayer:
        """The protocol's view of a copy of a layer. Raises ValueError if it has none."""
        return copied

    def expert_weights(self, layer: Any) -> str:
        """Name of a layer's submodule with the experts' parameters; empty for a dense layer."""
        return getattr(layer, "expert_weights", "")

    @abstractmethod
    def ends(self, memo: dict[int, Any]) -> Ends:
        """The computation around the layers, in a copy. `memo` maps tensors of the model to those of the copy."""

    def settle(self, memo: dict[int, Any], x_BSD: Tensor, ids_BS: Tensor) -> None:
        """Examine the model. Called once, first, with a `memo` that replaces the model's tensors."""

    def without_masks(self) -> dict[int, Any]:
        """A replacement of the model's configuration with which it makes no masks for layers: they would be [S, S]."""
        raise refuse(self.model, *_UNSHARED)

    def attention(self, number: int, layer: Any, told: Callable[[Tensor, Any], Any]) -> Heads:
        """Attention in shared sequences. `told` returns the context, given (states, places of tokens)."""
        raise refuse(self.model, *_UNSHARED)

    # Names of parameters.

    def claim(self) -> None:
        """Name all parameters. Raises ValueError if one belongs to no part, or to several."""
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

    def make_constants(self, names: Collection[str]) -> None:
        """Turn parameters without gradients into constants. Raises ValueError if others are frozen."""
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
        """A copy of a layer, as the protocol sees it. `fused`: with hocket's kernels if they compute the same."""
        layer = copy.deepcopy(self.layers[number], memo)
        if fused:
            fuse(layer)
        return self.layer(layer)

    def parts(
        self, number: int, memo: dict[int, Any], told: Any, ep: ExpertPlace, method: str = "", fused: bool = False
    ) -> DenseParts:
        """The part functions of a copy of a layer; `told` returns its context. `method` is as in this class."""
        layer, experts = self.copied(number, memo, fused), self.experts_in[number]
        kind: Any = ExpertParts if experts else DenseParts
        kind = kind if method in ("", WHOLE) else cut_as(method, kind)
        parts = kind(layer, told, *((self.experts, ep) if experts else ()))
        parts.attn = self.attention(number, layer, told) if method else None
        return parts

    def copies(self, device: torch.device, values: Values | None) -> dict[int, Any]:
        """Copies that replace the model's buffers and constants, and its configuration.

        `values` returns the saved ones for a model on the meta device; `ends` fills in the others.
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
        """`copies`, shared by all chunks of this rank."""
        if self._buffers is None:
            self._buffers = self.copies(device, self.values)
        return self._buffers

    def trial(
        self, value: Callable[[str], Tensor], param: Callable[..., nn.Parameter], attention: str
    ) -> dict[int, Any]:
        """Replacements of all tensors, and of the configuration, to try the model on a CPU.

        `value` returns tensors that are on the meta device, `param` parameters by hocket's name and their own.
        `attention` replaces an implementation that needs a GPU.
        """
        memo, config = self.copies(torch.device("cpu"), value), getattr(self.model, "config", None)
        if config is not None:
            memo[id(config)] = here = copy.deepcopy(config)
            if getattr(here, "_attn_implementation", None) not in (None, "sdpa", "eager"):
                here._attn_implementation = attention
            here._experts_implementation = "eager"
        return memo | {id(p): param(name, p) for name, p in self.params.items()}

    # The interface to an engine.

    def layout(self, config: Config) -> Layout:
        """The layout of hocket's own layers, but weight gradients of the first part also read the layer's input.

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
        contexts = _cached_contexts(ends)
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


def _cached_contexts(ends: Ends) -> Callable[..., Any]:
    """Returns the context of a layer by its number. It depends only on the shape of hidden states, so it is cached.

    If ranks or documents share sequences, it also depends on the places of tokens, and lives as long as these.
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
# Models with your own layers: a module with `embed`, `layers` and `head`.
#
# class Model(nn.Module):
#     embed: nn.Module            token ids [B, S] -> hidden states [B, S, D]
#     layers: nn.ModuleList       of hocket.adapters.layer.DenseLayer or ExpertLayer
#     head: nn.Module             hidden states -> logits [B, S, V]
#
#     def context(self, x): ...   optional: the context of all layers, given the shape of hidden states

_PIECES = {"expert_weights": ("attention", "route", "experts", "merge"), "": ("attention", "mlp")}


def refuse_dropout(model: nn.Module) -> None:
    """Raise ValueError for a model with dropout."""
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
