"""Files of archives of tensors, as `torch.save` makes them, written at the speed of the disk.

Note: [Every byte is read once]
DCP stores each tensor as an archive of torch, one behind the other in a file. `torch.save` writes the frame of such an
archive, and skips the place of its elements. They go from the tensor's own memory to the file block by block, or from a
GPU through one pinned block, and a CRC-32 is taken of each block on the way. The archive's own checksum, that of its
range of the file and that of the whole file come from it by arithmetic. A rank writes several files, a thread for each:
a file system lets one file grow at the speed of one core. Files and their order follow from the tensors alone, so the
same state makes the same files.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

try:
    from zlib_ng.zlib_ng import crc32  # some ten times as fast
except ImportError:
    from zlib import crc32

BLOCK = 1 << 23
"""Bytes of elements that are written at a time."""

FILES, LEAST = 8, 1 << 26
"""Files that a rank writes at most, and bytes that are worth one."""

CRC = "crc"
"""The name that the CRC-32 of a range of a file has beside its place in DCP's metadata."""

_DESCRIPTOR, _NAME = b"PK\x07\x08", b"archive/data/0"
"""Of a zip: what begins behind the elements, and how they are called."""


def write_archives(
    prefix: Path, items: Sequence[WriteItem], planner: SavePlanner
) -> list[tuple[ArchiveFile, list[WriteResult]]]:
    """Write a rank's items to files whose names begin so, and wait until all are on disk. Raises OSError."""
    sizes = [_size(item) for item in items]
    values = (planner.resolve_data(item) for item in items if item.type != WriteItemType.BYTE_IO)
    device = next((value.device for value in values if isinstance(value, Tensor) and not value.is_cpu), None)
    parts = _divided(sizes, max(1, min(FILES, sum(sizes) // LEAST)))

    def write(number: int) -> tuple[ArchiveFile, list[WriteResult]]:
        if device is not None:
            torch.cuda.set_device(device)  # that of a new thread is GPU 0
        file, found = ArchiveFile(prefix.with_name(f"{prefix.name}{number}.distcp")), list[WriteResult]()
        try:
            for item in (items[at] for at in parts[number]):
                begin, length, crc = file.add(planner.resolve_data(item))
                place = _StorageInfo(file.path.name, begin, length)
                vars(place)[CRC] = crc  # DCP keeps what it does not know
                found.append(WriteResult(item.index, length, place))
        finally:
            file.close()
        return file, found

    if device is not None:
        torch.zeros(1, device=device).item()  # what is to be saved may still be computed, on this thread's stream
    with ThreadPoolExecutor(len(parts), thread_name_prefix="archives") as pool:
        return list(pool.map(write, range(len(parts))))


def _size(item: WriteItem) -> int:
    """Bytes of a tensor, or of a part of one; none of an object, whose size nobody knows yet."""
    data = item.tensor_data
    return 0 if data is None else prod(data.chunk.sizes) * data.properties.dtype.itemsize


class ArchiveFile:
    """A file that is written from one end to the other. `size` and `crc` are of all of it. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self.path, self.size, self.crc = path, 0, 0
        self._file = path.open("wb", buffering=0)
        self._small = bytearray()
        self._pinned: Tensor | None = None

    def add(self, data: io.BytesIO | Tensor) -> tuple[int, int, int]:
        """Write an object's bytes, or a tensor as an archive: (where it begins, its bytes, its CRC-32)."""
        begin, before, self.crc = self.size, self.crc, 0
        if isinstance(data, Tensor) and is_plain(data):
            self._add_tensor(data.contiguous())
        elif isinstance(data, Tensor):
            whole = io.BytesIO()
            torch.save(data.cpu(), whole)
            self._put(whole.getbuffer())
        else:
            self._put(data.getbuffer())
        crc, length = self.crc, self.size - begin
        self.crc = joined(before, crc, length)
        return begin, length, crc

    def close(self) -> None:
        """Wait until all of it is on disk."""
        with self._file:
            self._flush()
            os.fsync(self._file.fileno())

    def _add_tensor(self, tensor: Tensor) -> None:
        ahead, behind = _frame(tensor.shape, tensor.dtype)
        self._put(ahead)
        if tensor.nbytes:
            before, self.crc = self.crc, 0
            for block in self._blocks(tensor):
                self._put(block)
            crc, self.crc = self.crc, joined(before, self.crc, tensor.nbytes)
            self._put(_with_checksum(behind, crc))

    def _blocks(self, tensor: Tensor) -> Iterator[memoryview]:
        for block in tensor.view(-1).view(torch.uint8).split(BLOCK):
            if not block.is_cpu:
                if self._pinned is None:
                    self._pinned = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True)
                block = self._pinned[: block.numel()].copy_(block)
            yield block.numpy().data

    def _put(self, piece: bytes | bytearray | memoryview) -> None:
        self.crc, self.size = crc32(piece, self.crc), self.size + len(piece)
        if len(piece) + len(self._small) <= BLOCK // 8:
            self._small += piece
        else:
            self._flush()
            self._write(memoryview(piece))

    def _flush(self) -> None:
        small, self._small = self._small, bytearray()
        self._write(memoryview(small))

    def _write(self, rest: memoryview) -> None:
        while rest:  # a file system that is nearly full takes a part
            rest = rest[self._file.write(rest) :]


class _Frame(io.BytesIO):
    """What `torch.save` writes `ahead` of a tensor's elements and `behind` them, with a `hole` of so many bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead, self.hole, self.behind = bytearray(), 0, bytearray()

    def write(self, piece: Any) -> int:
        (self.behind if self.hole else self.ahead).extend(piece)
        return len(piece)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        assert (whence, self.hole) == (os.SEEK_CUR, 0), "torch skips the elements once"
        self.hole = offset
        return offset


@functools.lru_cache(4096)
def _frame(shape: torch.Size, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What an archive of such a tensor has ahead of its elements and behind them, without their checksum."""
    frame, like = _Frame(), torch.empty(shape, dtype=dtype)
    with torch.serialization.skip_data():
        torch.save(like, frame)
    assert frame.hole == like.nbytes, "torch has left another place for the elements"
    return bytes(frame.ahead), bytes(frame.behind)


def _with_checksum(behind: bytes, crc: int) -> bytearray:
    """What comes behind elements that have this CRC-32. A zip has it there, and again in its directory."""
    content = bytearray(behind)
    places = 4, content.rindex(_NAME) - 30
    assert behind.startswith(_DESCRIPTOR), "another kind of archive"
    for at in places:
        assert not any(content[at : at + 4]), "there is a checksum already"
        content[at : at + 4] = crc.to_bytes(4, "little")
    return content


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is its elements, in an order that `contiguous` makes."""
    own = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_quantized
    return own and not tensor.is_conj() and not tensor.is_neg()


def checksum(file: Path, begin: int = 0, length: int | None = None) -> tuple[int, int]:
    """(bytes, CRC-32) of a file, or of as many bytes of it as are there from one on. Raises OSError."""
    size = total = 0
    with file.open("rb", buffering=0) as source:
        source.seek(begin)
        while block := source.read(BLOCK if length is None else min(BLOCK, length - size)):
            size, total = size + len(block), crc32(block, total)
    return size, total


def joined(first: int, second: int, length: int) -> int:
    """The CRC-32 of two texts, one behind the other, by those of each; the second one has `length` bytes.

    As zlib's `crc32_combine`: bytes behind a text multiply its checksum by a power of x, in GF(2), modulo the
    polynomial.
    """
    return _product(_power(length), first) ^ second


@functools.lru_cache(4096)
def _power(nbytes: int) -> int:
    """X to the power of as many bits, modulo the polynomial. The highest bit is the coefficient of 1."""
    power, square = 1 << 31, 1 << 23  # x ** 8
    while nbytes:
        if nbytes & 1:
            power = _product(square, power)
        square, nbytes = _product(square, square), nbytes >> 1
    return power


def _product(a: int, b: int) -> int:
    product = 0
    while a:
        if a & 1 << 31:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (0xEDB88320 if b & 1 else 0)
    return product


def _divided(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Positions of items, in parts of about equal size, in their order."""
    found, filled = [list[int]() for _ in range(parts)], [0] * parts
    for size, at in sorted(((size, at) for at, size in enumerate(sizes)), key=lambda item: (-item[0], item[1])):
        least = filled.index(min(filled))
        found[least].append(at)
        filled[least] += size
    return [sorted(part) for part in found]
