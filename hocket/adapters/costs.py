"""Costs of the ops of an adapted model: FLOPs from torch's counter on the meta device, bytes from shapes.

Communication goes by the sizes of parameters and hidden states. Of a part that computes, torch counts the FLOPs of its
forward, and what it saves for backward. Torch counts all pairs of a query and a key. Of these the causal ones count,
and in layers with a window those within it, as in the cost model (`program/documents.py`). Experts of others do not
apply the weights of choices, so what they make is saved too. The seconds of its ops are those that the cost model gives
to a part of hocket's transformer with as many weights, times the ratio of the two counts of FLOPs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from hocket.adapters.cut import Cut
from hocket.adapters.transformers import LAYERS, windows_of
from hocket.config import Config, ModelConfig
from hocket.predict.cost import CostTable, costs_of
from hocket.predict.hardware import hardware_of
from hocket.program.documents import keys
from hocket.runtime.weights import DTYPES
from hocket.tune.trials import Price

_OF_PAIRS = ("aten.bmm", "aten._scaled_dot_product")
"""Operations that multiply queries and keys, and their weights and values, by the beginnings of their names."""


@dataclass(frozen=True)
class Counted:
    """Counts of one part's forward over one microbatch."""

    flops: int
    saved_bytes: int
    """Bytes of activations; 0: not counted."""


def sizes_of(cut: Cut, top_k: int, shared: bool = False) -> ModelConfig:
    """The sizes by which settings are checked and chosen: hocket's transformer with as many weights in each part.

    With `shared` heads are the model's own, by which keys and values travel between ranks that share sequences.
    """
    d, kinds = cut.adapter.hidden, cut.kinds()
    numbers = {kind: kinds.index(kind) for kind in set(kinds)}

    def count(number: int, wanted: Callable[[str], bool]) -> int:
        prefix = f"layers.{number}."
        names = (name for name in cut.params if name.startswith(prefix))
        return sum(cut.params[name].numel() for name in names if wanted(name.removeprefix(prefix)))

    def multiple(number: float) -> int:
        return max(8, 8 * round(number / 8))

    block = ("mlp.", "block_sparse_moe.", "feed_forward.")
    ffn, expert_ffn, attention = 8, 8, 0
    if "dense" in numbers:
        ffn = multiple(count(numbers["dense"], lambda name: name.startswith(block)) / (3 * d))
        attention = count(numbers["dense"], lambda name: not name.startswith(block))
    if "moe" in numbers:
        expert_ffn = multiple(count(numbers["moe"], lambda name: name.startswith("experts.")) / (3 * d * cut.experts))
        attention = count(numbers["moe"], lambda name: not name.startswith("experts.")) - d * cut.experts
    heads, kv_heads, width = 1, 1, multiple(attention / (4 * d))
    if shared:
        theirs: Any = cut.adapter.layers[0].get_submodule("self_attn")
        width = theirs.head_dim
        heads, kv_heads = theirs.q_proj.out_features // width, theirs.k_proj.out_features // width
    return ModelConfig(
        vocab=cut.adapter.vocab,
        hidden=d,
        layers=len(kinds),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        ffn=ffn,
        dense_layers=tuple(i for i, kind in enumerate(kinds) if kind == "dense") if cut.experts else (),
        experts=cut.experts,
        top_k=max(1, top_k),
        expert_ffn=expert_ffn,
        tied=cut.tied,
    )


def price_of(cut: Cut) -> Price:
    """Costs of ops in a configuration with this model."""
    known: dict[tuple[int, int, int, str], Mapping[tuple[str, str], Counted]] = {}

    def price(config: Config) -> CostTable:
        key = config.train.sequences, config.data.sequence_length, config.mesh.cp, config.precision.compute
        if key not in known:
            known[key] = count_parts(cut, config)
        costs = costs_of(config, hardware_of(config))
        table, away = dict(costs.table), config.mesh.ep > 1 and config.overlap.ep.copies != "per_rank"
        outputs = 0 if away else config.tokens * config.model.top_k * config.model.hidden * config.element_bytes
        for (part, kind), counted in known[key].items():
            modelled = table["fwd", part, kind].flops
            for verb in ("fwd", "recompute", "bwd", "wgrad"):
                if counted.flops and modelled and (cost := table.get((verb, part, kind))):
                    ratio = counted.flops / modelled
                    saved = counted.saved_bytes if verb in ("fwd", "recompute") else 0
                    if part == "experts" and verb in ("fwd", "recompute"):
                        saved = cost.saved_bytes + outputs
                    changed = replace(cost, seconds=cost.seconds * ratio, flops=cost.flops * ratio)
                    table[verb, part, kind] = replace(changed, saved_bytes=saved or cost.saved_bytes)
        return replace(costs, table=table)

    return price


def count_parts(cut: Cut, config: Config) -> dict[tuple[str, str], Counted]:
    """FLOPs and saved bytes of the forward of every part by kind of layer; of experts and head, FLOPs by shapes.

    Where ranks share sequences, attention is hocket's, and goes by its cost model.
    """
    adapter, dtype = cut.adapter, DTYPES[config.precision.dtype]
    shape, whole_sequences = (config.train.sequences, config.tokens // config.train.sequences), config.mesh.cp == 1
    x_BSD = torch.empty((*shape, adapter.hidden), dtype=dtype, device="meta", requires_grad=True)
    state = adapter.model.state_dict()
    memo = cut.buffers(torch.device("cpu"), lambda name: torch.zeros(state[name].shape))
    whole: Any = getattr(adapter.model, "config", None)
    if whole is not None:
        memo[id(whole)] = here = copy.deepcopy(whole)
        if getattr(here, "_attn_implementation", None) not in (None, "sdpa", "eager"):
            here._attn_implementation = "sdpa"
    memo |= {
        id(p): nn.Parameter(torch.empty(p.shape, dtype=dtype, device="meta"), requires_grad=p.requires_grad)
        for p in cut.params.values()
    }
    # What layers are told is made on the CPU: transformers looks at values to see which mask is needed.
    told = adapter.ends(dict(memo)).contexts(torch.empty((), dtype=dtype).expand(x_BSD.shape))
    contexts = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, told)
    memo |= {id(b): memo[id(b)].to("meta") for b in [*adapter.model.buffers(), *cut.constants.values()]}
    found: dict[tuple[str, str], Counted] = {}
    kinds = cut.kinds()
    met = {kind: _met(whole, [n for n, each in enumerate(kinds) if each == kind], shape[1]) for kind in set(kinds)}
    for kind in sorted(set(kinds)):
        number = kinds.index(kind)
        layer: Any = cut.copied(number, dict(memo))

        def attn(x: Tensor, layer: Any = layer, n: int = number, routed: bool = kind == "moe") -> Tensor:
            state = layer.attention(x, contexts[n])
            return layer.route(state)[0] if routed else state

        if whole_sequences:
            found["attn", kind] = _counted(attn, x_BSD, met[kind])
        if kind == "moe":
            rows, prefix = shape[0] * shape[1] * config.model.top_k, f"layers.{number}.experts."
            weights = sum(p.numel() for name, p in cut.params.items() if name.startswith(prefix) and p.dim() > 2)
            found["experts", kind] = Counted(2 * rows * weights // cut.experts, 0)
        else:
            found["mlp", kind] = _counted(layer.mlp, x_BSD)
    weights = sum(p.numel() for name, p in cut.params.items() if name.startswith("head.") and p.dim() > 1)
    found["head", ""] = Counted(2 * shape[0] * shape[1] * (weights or adapter.vocab * adapter.hidden), 0)
    return found


def _met(config: Any, layers: Sequence[int], length: int) -> float:
    """The share of all pairs of a query and a key that count, on average of some layers; 1 where that is not known."""
    types = getattr(config, "layer_types", None)
    if not hasattr(config, "num_hidden_layers") or any(types[n] not in LAYERS for n in layers if types):
        return 1.0
    windows = windows_of(config)
    return sum(keys(((length, length),), windows[n]) for n in layers) / (length * len(layers))


def _counted(forward: Callable[[Tensor], Tensor], x_BSD: Tensor, met: float = 1.0) -> Counted:
    """FLOPs and saved bytes of a forward. Of products of attention the share `met` counts."""
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
    pairs = sum(flops for op, flops in counts.items() if str(op).startswith(_OF_PAIRS))
    return Counted(counter.get_total_flops() - round((1 - met) * pairs), sum(saved.values()))
