"""First values of weights. The same seed gives the same weights on any mesh.

Every parameter is drawn from a generator of its own, seeded by its name in the whole model; every expert of
a stacked weight from one seeded by the name and the expert's global number. So a weight depends neither on
the chunk, nor on the shard, nor on the expert-parallel rank that happens to hold it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from hocket.config import ModelConfig
from hocket.model.moe import Router
from hocket.model.transformer import Chunk
from hocket.settings.first_values import spreads


def init_tensor(
    name: str, shape: Sequence[int], config: ModelConfig, seed: int, *, first_expert: int = 0, device: str = "cpu"
) -> Tensor:
    """First value of the parameter `name`, fp32, drawn on `device`.

    Norms are ones, or zeros where one is added to them, and biases, whose names begin with b, are zeros. Of delta nets
    `dt` is ones, and `a_log` the logarithm of numbers spread evenly from 0.01 to 16, as in Qwen3-Next. Other weights
    are normal, with the standard deviations of `settings/first_values.py`. For experts, `shape` counts the local ones,
    and `first_expert` is the global number of the first. CPU and GPU draw different numbers.
    """
    leaf = name.rsplit(".", 1)[-1]
    if leaf.endswith("norm") or leaf == "dt":
        zeros = config.norm_plus_one and leaf not in ("o_norm", "dt")
        return torch.full(tuple(shape), 0.0 if zeros else 1.0, device=device)
    if leaf.startswith("b"):
        return torch.zeros(tuple(shape), device=device)
    if leaf == "a_log":
        return (
            torch.rand(tuple(shape), generator=_generator(name, seed, device), device=device).mul(15.99).add(0.01).log()
        )
    std, up_std = spreads(name, config)
    if ".experts." in name:
        experts = [_normal(f"{name}.{first_expert + e}", shape[1:], std, seed, device) for e in range(shape[0])]
        value = torch.stack(experts)
    else:
        value = _normal(name, shape, std, seed, device)
    if up_std != std:
        value.chunk(2, -1 if ".experts." in name else 0)[1].mul_(up_std / std)
    return value


def _generator(name: str, seed: int, device: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little"))


def _normal(name: str, shape: Sequence[int], std: float, seed: int, device: str) -> Tensor:
    return torch.randn(tuple(shape), generator=_generator(name, seed, device), device=device) * std


def init_biases(chunk: Chunk, device: torch.device | str) -> None:
    """Put fp32 zeros into the balance biases of a chunk's routers, and even loads, which is all it has beside weights.

    Those that have memory keep it: a recorded step goes on reading it.
    """
    for module in chunk.modules():
        if isinstance(module, Router) and module.bias is not None:
            if module.bias.is_meta:
                module.bias = torch.empty(module.bias.shape, device=device, dtype=torch.float32)
            module.bias.zero_()
        if isinstance(module, Router) and module.over_batch:
            experts = len(module.weight)
            if module.share is None:
                module.share = torch.empty(experts, device=device, dtype=torch.float32)
            module.share.fill_(1 / experts)
