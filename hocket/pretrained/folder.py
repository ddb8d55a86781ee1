"""A folder of safetensors files: which tensors it has, and their values, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hocket.files import finite, inside, json_in
from hocket.pretrained.quantised import FP8, SCALES, Blocks, dequantised, scale_name, scales_shape

INDEX = "model.safetensors.index.json"
READ = ("F32", "BF16", "F16")
"""Types of elements that are read."""


@dataclass(frozen=True)
class Entry:
    """Where a tensor is."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class NotFiniteError(ValueError):
    """A tensor has elements that are no number, or infinite."""


class TensorFolder:
    """The tensors of a folder, by name. Only headers are read until one is asked for.

    With `blocks` matrices may be of fp8, which `read` multiplies by their scales (`quantised.py`).

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
                for name in opened.keys():  # noqa: SIM118  (no mapping)
                    if name in self.entries:
                        raise ValueError(f"{name} is in {self.entries[name].file} and in {file}")
                    if indexed and indexed.get(name) != file:
                        raise ValueError(f"{INDEX} does not say that {name} is in {file}")
                    part = opened.get_slice(name)
                    self.entries[name] = Entry(file, tuple(part.get_shape()), part.get_dtype())
        if absent := sorted(indexed.keys() - self.entries.keys()):
            raise ValueError(f"{indexed[absent[0]]} lacks {absent[0]}, which {INDEX} says is there")

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
            with safe_open(finite(self.path / file), framework="pt") as opened:
                yield opened
        except SafetensorError as error:
            raise ValueError(f"{self.path / file} is truncated or damaged ({error})") from None
        except OSError:
            raise ValueError(f"{self.path / file} cannot be read") from None

    def read(self, name: str, first: int = 0, count: int = -1) -> Tensor:
        """A tensor as it is stored, or `count` of its rows from row `first`; one of fp8 in fp32, and by its scales.

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
            raise NotFiniteError(f"{name} in {self.path / entry.file} has elements that are not finite ({broken})")
        return value

    def _stored(self, name: str, first: int, count: int) -> Tensor:
        with self._open(self.entries[name].file) as opened:
            return opened.get_tensor(name) if count < 0 else opened.get_slice(name)[first : first + count]

    def unreadable(self, name: str, read: tuple[str, ...] = READ) -> str:
        """Why a tensor, whose elements must be of a type in `read` or of fp8, cannot be read; empty if it can."""
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
