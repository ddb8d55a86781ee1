"""Chunks of a model as ordinary modules, without a plan."""

from __future__ import annotations

import torch

from hocket.model.source import init_biases, init_tensor
from hocket.model.transformer import Chunk


def init_chunk(chunk: Chunk, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Chunk:
    """Turn a chunk without values into an ordinary module with first values. Returns the chunk."""
    chunk.to_empty(device=device)
    chunk.tie()
    for name, param in chunk.named_parameters():
        value = init_tensor(name, param.shape, chunk.config, seed, first_expert=chunk.first_expert)
        param.data = value.to(device, dtype)
    init_biases(chunk, device)
    return chunk
