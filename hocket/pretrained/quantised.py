"""Weights in fp8 with one scale for each block of rows and columns, as DeepSeek-V3 is published.

Beside a matrix `x` of float8_e4m3fn, `x_scale_inv` has a scale for each block, by which the block is multiplied, in
spite of the name. Blocks at the edges are smaller. Matrices may be stacked, and so are their scales then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from hocket.typed import is_a

FP8 = "F8_E4M3"
"""How safetensors calls the type."""
SCALES = ("F32", "BF16", "F8_E8M0")
"""Types of scales."""
Blocks = tuple[int, int]
"""Rows and columns of a block."""


def scale_name(name: str) -> str:
    """The tensor with the scales of another."""
    return f"{name}_scale_inv"


def blocks_of(config: Mapping[str, Any], read: Literal["fp8", "mxfp4"] = "fp8") -> Blocks | None:
    """The fp8 blocks of a config.json's `quantization_config`; None without one, and for mxfp4, whose blocks are of
    one size (`mxfp4.py`). `read` is the kind that the family's tensors may be. Raises ValueError for another one.
    """
    said = config.get("quantization_config")
    if said is None:
        return None
    if not isinstance(said, dict):
        raise ValueError(f"quantization_config = {said!r}: not a table of keys")
    method = said.get("quant_method")
    if method != read or (read == "fp8" and said.get("fmt", "e4m3") != "e4m3"):
        there = "fp8 blocks of e4m3 are" if read == "fp8" else "mxfp4 is"
        raise ValueError(f"quantization_config has quant_method = {method}: only {there} read")
    if read == "mxfp4":
        return None
    blocks = said.get("weight_block_size")
    if not isinstance(blocks, list) or len(blocks) != 2 or not all(is_a(n, int) and n > 0 for n in blocks):
        raise ValueError(f"quantization_config has weight_block_size = {blocks}: only blocks of two sizes are read")
    return blocks[0], blocks[1]


def scales_shape(shape: tuple[int, ...], blocks: Blocks) -> tuple[int, ...]:
    """The shape of the scales of a matrix, or of stacked ones."""
    return (*shape[:-2], *(-(-size // block) for size, block in zip(shape[-2:], blocks, strict=True)))


def dequantised(values: Tensor, scales: Tensor, blocks: Blocks) -> Tensor:
    """A matrix, or stacked ones, in fp32."""
    rows, columns = blocks
    value = values.float()
    for i, scale in enumerate(scales.float().unbind(-2)):
        wide = scale.repeat_interleave(columns, -1)[..., : value.shape[-1]]
        value[..., i * rows : (i + 1) * rows, :] *= wide.unsqueeze(-2)
    return value
