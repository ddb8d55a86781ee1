"""Models with layers of one's own: a module with `embed`, `layers` and `head`.

class Model(nn.Module):
    embed: nn.Module            token ids [B, S] -> hidden states [B, S, D]
    layers: nn.ModuleList       of hocket.adapters.layer.DenseLayer or ExpertLayer
    head: nn.Module             hidden states -> logits [B, S, V]

    def context(self, x): ...   if there is one: what all layers are told, by the shape of hidden states
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hocket.adapters.cut import Ends, refuse
from hocket.adapters.layer import DenseLayer, ExpertLayer

_PIECES = {"expert_weights": ("attention", "route", "experts", "merge"), "": ("attention", "mlp")}


class OwnModel:
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
        for module in model.modules():
            if isinstance(module, nn.Dropout) and module.p > 0:
                raise refuse(
                    model, f"a Dropout has p = {module.p}, and a planned step makes no random numbers", "p = 0"
                )
        self.embed_modules: Mapping[str, nn.Module] = {"embed": model.embed}
        self.head_modules: Mapping[str, nn.Module] = {"head": model.head}
        with torch.no_grad():
            meta: Any = copy.deepcopy(model, {id(p): nn.Parameter(p.detach().to("meta")) for p in model.parameters()})
            x_BSD = meta.to("meta").embed(torch.zeros(1, 2, dtype=torch.int64, device="meta"))
            self.hidden, self.vocab = x_BSD.shape[-1], meta.head(x_BSD).shape[-1]

    def _check(self, layer: nn.Module) -> None:
        pieces = _PIECES["expert_weights" if hasattr(layer, "expert_weights") else ""]
        if missing := [name for name in pieces if not callable(getattr(layer, name, None))]:
            raise refuse(
                self.model,
                f"{type(layer).__name__} has no {', '.join(missing)}",
                "the methods of hocket.adapters.layer.DenseLayer, or with expert_weights those of ExpertLayer",
            )

    def expert_weights(self, layer: Any) -> str:
        """What the layer says."""
        return getattr(layer, "expert_weights", "")

    def layer(self, copied: Any) -> DenseLayer | ExpertLayer:
        """Layers are their own pieces."""
        return copied

    def settle(self, memo: dict[int, Any], x_BSD: Tensor, ids_BS: Tensor) -> None:
        """There is nothing to find out."""

    def ends(self, memo: dict[int, Any]) -> Ends:
        """`embed`, `head` and `context`."""
        memo[id(self.model.get_submodule("layers"))] = nn.ModuleList()
        copied: Any = copy.deepcopy(self.model, memo)
        context = getattr(copied, "context", None)

        def contexts(x_BSD: Tensor) -> list[Any]:
            return [None if context is None else context(x_BSD)] * len(self.layers)

        return Ends(copied.embed, copied.head, contexts)
