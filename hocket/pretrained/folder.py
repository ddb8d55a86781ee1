"""A folder of safetensors files: the tensors it has, and their values, one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hocket.files import inside, json_in, regular_file
from hocket.typed import is_a

# -- mxfp4 -------------------------------------------------------------------------------------------------------------
# Values of MXFP4 tensors: 4-bit numbers in blocks with a scale each (Open Compute Project, "OCP Microscaling Formats
# (MX) Specification" 1.0, section 5.3).

MXFP4_BLOCK = 32
"""Numbers per block, two in a byte: the first one in its lower half."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = torch.tensor([*_MAGNITUDES, *(-x for x in _MAGNITUDES)])
"""The values of 4 bits: a sign, two bits of exponent, one of mantissa."""
_BIAS = 127
"""A scale is a power of 2; this is added to its exponent."""


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """[rows, columns], fp32, from blocks uint8 [rows, columns / 32, 16] and scales uint8 [rows, columns / 32]."""
    halves = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    exponents = scales.to(torch.int32).unsqueeze(-1) - _BIAS
    return torch.ldexp(_NUMBERS[halves.int()], exponents).flatten(-2)


# -- quantised ---------------------------------------------------------------------------------------------------------
# Weights in fp8 with one scale per block of rows and columns, as DeepSeek-V3 is published.
#
# For a matrix `x` of float8_e4m3fn, `x_scale_inv` has a scale for each block. The block is multiplied by it, in spite
# of the name. Blocks at the edges are smaller. Matrices may be stacked, and so are their scales then.

FP8 = "F8_E4M3"
"""The name of the type in safetensors."""
SCALES = ("F32", "BF16", "F8_E8M0")
"""Types of scales."""
Blocks = tuple[int, int]
"""Rows and columns of a block."""


def scale_name(name: str) -> str:
    """The name of a tensor's scales."""
    return f"{name}_scale_inv"


def blocks_of(config: Mapping[str, Any], read: Literal["fp8", "mxfp4"] = "fp8") -> Blocks | None:
    """The fp8 blocks of a config.json's `quantization_config`; None without one, and for mxfp4, whose blocks have a
    fixed size. `read` is the kind that the family's tensors may have. Raises ValueError for another one.
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


# -- folder ------------------------------------------------------------------------------------------------------------

INDEX = "model.safetensors.index.json"
READ = ("F32", "BF16", "F16")
"""Supported types of elements."""


@dataclass(frozen=True)
class Entry:
    """The location of a tensor."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class TensorFolder:
    """The tensors of a folder, by name. Only headers are read until a tensor is requested.

    With `blocks`, matrices may be fp8; `read` multiplies them by their scales.

    Raises ValueError for files that are missing, truncated, or not those of the index.
    """

    def __init__(self, path: Path, blocks: Blocks | None = None) -> None:
        self.path, self.blocks = path, blocks
        indexed = self._index()
        files = sorted(set(indexed.values())) if indexed else sorted(file.name for file in path.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{path} has no *.safetensors")
        self.entries: dict[str, Entry] = {}
        for file in files:
            with self._open(file) as opened:
                for name in opened.keys():  # noqa: SIM118  (not a mapping)
                    if name in self.entries:
                        raise ValueError(f"{name} is in {self.entries[name].file} and in {file}")
                    if indexed and indexed.get(name) != file:
                        raise ValueError(f"{INDEX} does not say that {name} is in {file}")
                    part = opened.get_slice(name)
                    self.entries[name] = Entry(file, tuple(part.get_shape()), part.get_dtype())
        if missing := sorted(indexed.keys() - self.entries.keys()):
            raise ValueError(f"{indexed[missing[0]]} lacks {missing[0]}, which {INDEX} says is there")

    def _index(self) -> dict[str, str]:
        path = self.path / INDEX
        if not path.exists():
            return {}
        try:
            found = {str(name): str(file) for name, file in json_in(path)["weight_map"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path} cannot be read") from None
        for file in found.values():
            inside(path, file)
        return found

    @contextmanager
    def _open(self, file: str) -> Iterator[Any]:
        try:
            with safe_open(regular_file(self.path / file), framework="pt") as opened:
                yield opened
        except SafetensorError as error:
            raise ValueError(f"{self.path / file} is truncated or damaged ({error})") from None
        except OSError:
            raise ValueError(f"{self.path / file} cannot be read") from None

    def read(self, name: str, first: int = 0, count: int = -1) -> Tensor:
        """A tensor as it is stored, or `count` of its rows from row `first`; fp8 is returned in fp32, scaled.

        Raises ValueError for one that is not finite.
        """
        entry = self.entries[name]
        value = self._stored(name, first, count)
        if entry.dtype == FP8:
            assert self.blocks is not None
            assert count < 0 or len(entry.shape) > 2, "rows of one matrix share scales"
            value = dequantised(value, self._stored(scale_name(name), first, count), self.blocks)
        if value.is_floating_point() and value.numel() and not all(bound.isfinite() for bound in value.aminmax()):
            broken = value.numel() - int(value.isfinite().sum())
            raise ValueError(
                f"{name} in {self.path / entry.file} has elements that are not finite ({broken}); fix: download it "
                "again, or take another folder"
            )
        return value

    def _stored(self, name: str, first: int, count: int) -> Tensor:
        with self._open(self.entries[name].file) as opened:
            return opened.get_tensor(name) if count < 0 else opened.get_slice(name)[first : first + count]

    def unreadable(self, name: str, read: tuple[str, ...] = READ) -> str:
        """Why a tensor cannot be read, if its elements must be of a type in `read` or fp8; empty if it can."""
        entry = self.entries[name]
        if entry.dtype != FP8 or self.blocks is None:
            return "" if entry.dtype in read else f"{name} has elements of {entry.dtype}; {', '.join(read)} are read"
        scales = self.entries.get(scale_name(name))
        if scales is None:
            return f"{name} has elements of {FP8}, and {scale_name(name)} is missing"
        expected = scales_shape(entry.shape, self.blocks)
        if scales.shape != expected:
            return f"{scale_name(name)} has shape {list(scales.shape)}, and {name} needs {list(expected)}"
        return "" if scales.dtype in SCALES else f"{scale_name(name)} has elements of {scales.dtype}"

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors are equal."""
        return torch.equal(self.read(name), self.read(other))


# -- Writing files -----------------------------------------------------------------------------------------------------

LARGEST = 5 * 10**9
"""Default size limit of a file, in bytes."""


def write_files(folder: Path, tensors: Iterable[tuple[str, Tensor]], largest: int = LARGEST) -> None:
    """Write tensors to files of at most `largest` bytes, or of one tensor, and an index if there are several.

    A file's tensors are in memory until it is written. Raises OSError.
    """
    pending, files, total = dict[str, Tensor](), list[list[str]](), 0

    def write() -> None:
        file = folder / f"{len(files)}.tmp"
        file.touch()
        mode = file.stat().st_mode  # the library replaces the file by one that only the user can read
        try:
            save_file(pending, file, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from None
        file.chmod(mode)
        files.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and tensor.nbytes + sum(each.nbytes for each in pending.values()) > largest:
            write()
        pending[name] = tensor.contiguous()
        total += tensor.nbytes
        del tensor  # before the next one is made
    write()
    names = [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    names = names if len(names) > 1 else ["model.safetensors"]
    for number, name in enumerate(names):
        (folder / f"{number}.tmp").rename(folder / name)
    if len(names) > 1:
        where = {tensor: name for name, inside in zip(names, files, strict=True) for tensor in inside}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
