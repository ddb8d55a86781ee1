"""Models of transformers (5.x), unmodified: `...ForCausalLM` with an embedding, decoder layers, a norm and a head.

What is around the layers the model's own forward computes, in a copy whose layers are probes. A probe sees what the
model hands to that layer (masks, positions, rotary tables), what the embedding's output has become, and can put hidden
states in the place of the last layer's. So neither masks nor scales nor soft caps are written down a second time here.

transformers itself is not imported.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hocket.adapters.cut import Ends, refuse
from hocket.adapters.decoder_layer import PlainLayer, RoutedLayer, Unfit, expert_weights
from hocket.adapters.layer import DenseLayer, ExpertLayer

_DROPS = ("dropout", "pdrop", "jitter", "layerdrop")
"""Words in names of settings that make a forward random."""


def is_one(model: nn.Module) -> bool:
    """Whether a model is one of transformers."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)


class Pretrained:
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
        self.direct = False, False
        """Whether the embedding alone makes what the first layer is given, and norm and projection alone the logits."""

    def _check(self, model: Any) -> None:
        config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        for name, value in vars(config).items():
            if any(word in name for word in _DROPS) and isinstance(value, int | float) and value > 0:
                raise refuse(
                    model, f"config.{name} = {value}, and a planned step makes no random numbers", f"config.{name} = 0"
                )
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout) and module.p > 0:
                raise refuse(
                    model, f"{name} drops with p = {module.p}, and a planned step makes no random numbers", "p = 0"
                )
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

    def ends(self, memo: dict[int, Any]) -> Ends:
        """The computation around the layers."""
        probes = [_Probe(layer) for layer in self.layers]
        memo[id(self.model.get_submodule(self._list))] = nn.ModuleList(probes)
        copied: Any = copy.deepcopy(self.model, memo)
        _fill(copied, self.model)
        around = _Around(self.model, copied, copied.get_submodule(self._base), probes)
        embed, *behind = (copied.get_submodule(name) for name in (*self.embed_modules, *self.head_modules))
        norm, head = behind
        return Ends(
            embed if self.direct[0] else around.embed,
            (lambda x_BSD: head(norm(x_BSD))) if self.direct[1] else around.logits,
            around.contexts,
        )

    def settle(self, memo: dict[int, Any], x_BSD: Tensor, ids_BS: Tensor) -> None:
        """Find out whether embedding and head compute more than their modules, by a trial with some parameters."""
        slow = self.ends(dict(memo))
        self.direct = True, True
        fast = self.ends(dict(memo))
        same = torch.equal(slow.embed(ids_BS), fast.embed(ids_BS)), torch.equal(slow.logits(x_BSD), fast.logits(x_BSD))
        self.direct = same


class _Passed(Exception):
    """Ends a forward after a probe has seen what it needs."""


class _Probe(nn.Module):
    """In the place of a layer. Has the layer's plain attributes, for models that look at them."""

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


class _Around:
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
    """Where the original is on the meta device, fill in buffers that are not saved, such as rotary tables.

    They are the model's own first values.
    """
    for name, module in original.named_modules():
        if any(
            b.is_meta and key in module._non_persistent_buffers_set
            for key, b in module._buffers.items()
            if b is not None
        ):
            model._init_weights(model.get_submodule(name))
