"""Sizes of the parts of an adapted model: FLOPs from torch's counter on the meta device, bytes from shapes.

Communication follows from the sizes of parameters and hidden states. For a part that computes, torch counts the FLOPs
of its forward and the tensors that it saves for backward. Torch counts all pairs of a query and a key; only causal
pairs within a layer's window are used, as in the cost model (`program/documents.py`). Other models' experts do not
apply the routing weights, so their outputs are saved too. Memory traffic between products is that of hocket's
transformer with heads and MLPs of the same widths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from hocket.adapters.source import AdaptedModel, refuse
from hocket.adapters.transformers import BLOCKS, LAYERS, windows_of
from hocket.config import Config, ModelConfig
from hocket.predict.cost import CostTable, costs_of
from hocket.predict.hardware import hardware_of
from hocket.predict.part_sizes import PartSize
from hocket.program.documents import keys
from hocket.runtime.weights import DTYPES
from hocket.tune.trials import Price

_OF_PAIRS = ("aten.bmm", "aten._scaled_dot_product")
"""Prefixes of the operations that multiply queries and keys, or scores and values."""


Counts = Mapping[tuple[str, str], Mapping[str, int]]
"""(part, kind of layer) -> fields of its `PartSize`."""


def weights_of(source: AdaptedModel, part: str, kind: str) -> int:
    """The weights of a part of a layer of a kind, of embedding or head; for experts those of all ranks."""
    if not kind:
        return sum(param.numel() for name, param in source.params.items() if name.startswith(f"{part}."))
    prefix, found = f"layers.{source.kinds().index(kind)}.", {"attn": 0, "mlp": 0, "experts": 0}
    inside = {"experts": "experts"} if kind == "moe" else dict.fromkeys(BLOCKS, "mlp")
    for name, param in source.params.items():
        if name.startswith(prefix):
            found[inside.get(name.removeprefix(prefix).partition(".")[0], "attn")] += param.numel()
    return found[part]


def heads_of(layer: nn.Module) -> tuple[int, int, int] | None:
    """Query heads, key heads, and their width, if attention has transformers' names and sizes that hocket supports."""
    attn: Any = getattr(layer, "self_attn", None)
    width: Any = getattr(attn, "head_dim", None)
    wide = [getattr(getattr(attn, name, None), "out_features", None) for name in ("q_proj", "k_proj")]
    if not all(isinstance(size, int) and size > 0 for size in (width, *wide)):
        return None
    heads, kv_heads = (int(size or 0) // width for size in wide)
    return (heads, kv_heads, width) if kv_heads and heads % kv_heads == 0 and width % 2 == 0 else None


def sizes_of(source: AdaptedModel, top_k: int) -> ModelConfig:
    """The sizes by which settings are checked and chosen. Unknown widths are derived from numbers of weights."""
    if not source.layers:
        raise refuse(source.model, "it has no layers", "a model of one layer at least")
    d, kinds = source.hidden, source.kinds()

    def width(weights: float) -> int:
        return max(8, 8 * round(weights / d / 8))

    routers = d * source.experts if kinds[0] == "moe" else 0
    heads, kv_heads, n = heads_of(source.layers[0]) or (
        1, 1, width((weights_of(source, "attn", kinds[0]) - routers) / 4),
    )  # fmt: skip
    ffn = width(weights_of(source, "mlp", "dense") / 3) if "dense" in kinds else 8
    experts = width(weights_of(source, "experts", "moe") / (3 * source.experts)) if source.experts else 8
    return ModelConfig(
        vocab=source.vocab, hidden=d, layers=len(kinds), heads=heads, kv_heads=kv_heads, head_dim=n, ffn=ffn,
        dense_layers=tuple(i for i, kind in enumerate(kinds) if kind == "dense") if source.experts else (),
        experts=source.experts, top_k=max(1, top_k), expert_ffn=experts, tied=source.tied,
    )  # fmt: skip


def price_of(source: AdaptedModel) -> Price:
    """Costs of ops in a configuration with this model."""
    known: dict[tuple[int, int, int, str], Counts] = {}

    def price(config: Config) -> CostTable:
        key = config.train.sequences, config.data.sequence_length, config.mesh.cp, config.precision.compute
        if key not in known:
            known[key] = count_parts(source, config)

        def sizes(part: str, kind: str, size: PartSize) -> PartSize:
            counts = dict(known[key].get((part, kind), {}))
            if size.weights and (counts or not kind):
                counts["weights"] = weights_of(source, part, kind) // (config.mesh.ep if part == "experts" else 1)
            if "core" in counts and size.core:
                counts["masked"] = size.masked * counts["core"] // size.core
            if part == "experts" and not (config.mesh.ep > 1 and config.overlap.ep.copies != "per_rank"):
                counts["saved"] = size.saved + config.model.top_k * config.model.hidden
            return replace(size, **counts)

        return costs_of(config, hardware_of(config), sizes=sizes)

    return price


def count_parts(source: AdaptedModel, config: Config) -> Counts:
    """What a token needs in the forward of every part, by kind of layer; for experts and head from shapes.

    With context parallelism, attention is hocket's, with its cost model.
    """
    dtype = DTYPES[config.precision.dtype]
    shape, whole_sequences = (config.train.sequences, config.tokens // config.train.sequences), config.mesh.cp == 1
    x_BSD = torch.empty((*shape, source.hidden), dtype=dtype, device="meta", requires_grad=True)
    state, whole = source.model.state_dict(), getattr(source.model, "config", None)

    def param(name: str, p: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(torch.empty(p.shape, dtype=dtype, device="meta"), requires_grad=p.requires_grad)

    memo = source.trial(lambda name: torch.zeros(state[name].shape), param, "sdpa")
    # Contexts are made on the CPU: transformers reads values to decide which mask is needed.
    made = source.ends(dict(memo)).contexts(torch.empty((), dtype=dtype).expand(x_BSD.shape))
    contexts = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, made)
    memo |= {id(b): memo[id(b)].to("meta") for b in [*source.model.buffers(), *source.constants.values()]}
    found: dict[tuple[str, str], Mapping[str, int]] = {}
    kinds = source.kinds()
    met = {kind: _unmasked(whole, [n for n, each in enumerate(kinds) if each == kind], shape[1]) for kind in set(kinds)}
    for kind in sorted(set(kinds)):
        number = kinds.index(kind)
        layer: Any = source.copied(number, dict(memo))

        def attn(x: Tensor, layer: Any = layer, n: int = number, routed: bool = kind == "moe") -> Tensor:
            state = layer.attention(x, contexts[n])
            return layer.route(state)[0] if routed else state

        if whole_sequences:
            found["attn", kind] = _counted(attn, x_BSD, met[kind])
        if kind == "moe":
            prefix = f"layers.{number}.experts."
            weights = sum(p.numel() for name, p in source.params.items() if name.startswith(prefix) and p.dim() > 2)
            found["experts", kind] = {"grouped": config.model.top_k * weights // source.experts}
        else:
            found["mlp", kind] = _counted(layer.mlp, x_BSD)
    weights = sum(p.numel() for name, p in source.params.items() if name.startswith("head.") and p.dim() > 1)
    found["head", ""] = {"gemm": weights or source.vocab * source.hidden}
    return found


def _unmasked(config: Any, layers: Sequence[int], length: int) -> float:
    """The mean share of query-key pairs within the causal mask and window of some layers; 1 if unknown."""
    types = getattr(config, "layer_types", None)
    if not hasattr(config, "num_hidden_layers") or any(types[n] not in LAYERS for n in layers if types):
        return 1.0
    windows = windows_of(config)
    return sum(keys(((length, length),), windows[n]) for n in layers) / (length * len(layers))


def _counted(forward: Callable[[Tensor], Tensor], x_BSD: Tensor, met: float = 1.0) -> dict[str, int]:
    """What a forward needs per token. Of attention's products the share `met` counts."""
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter):
            storage = x.untyped_storage()
            saved[storage._cdata] = storage.nbytes()
            held.append(storage)
        return x

    held: list[Any] = []
    with FlopCounterMode(display=False) as counter, saved_tensors_hooks(pack, lambda x: x):
        forward(x_BSD)
    counts = counter.get_flop_counts().get("Global", {})
    pairs, tokens = sum(n for op, n in counts.items() if str(op).startswith(_OF_PAIRS)), x_BSD.shape[:2].numel()
    elements = sum(saved.values()) // x_BSD.itemsize
    gemm = (counter.get_total_flops() - pairs) // (2 * tokens)
    return {"gemm": gemm, "core": round(met * pairs) // tokens, "saved": elements // tokens}
