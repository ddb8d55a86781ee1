"""Reads checkpoints of `torch.distributed.checkpoint` (DCP) without running code that somebody put into them.

DCP keeps its metadata as a pickle, and objects beside tensors too. A pickle may name any function to call. These
readers know the classes of DCP's metadata, and for other objects what `torch.load(weights_only=True)` knows.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import zlib
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as entries
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from hocket.files import inside

METADATA = ".metadata"
"""The file in which DCP says where each tensor is."""

_SEAL = b"hocket"
"""What follows the pickle in that file, with the pickle's CRC-32. Torch reads as far as the pickle's end."""

_KNOWN = {
    entries.__name__: {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}  # fmt: skip
"""Module -> names in it that metadata is made of."""


def _member(kind: object, name: str) -> object:
    """What `getattr` is for in metadata: some releases of Python 3.11 pickle members of an enumeration that way."""
    if kind is not entries._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError("it asks for an attribute, which may run code")
    return entries._MEM_FORMAT_ENCODING[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which may run code")
        return super().find_class(module, name)


def seal(file: Path) -> None:
    """Add the checksum of metadata that DCP has written. Raises OSError."""
    with file.open("r+b") as stream:
        stream.write(_SEAL + _checksum(stream.read()))
        stream.flush()
        os.fsync(stream.fileno())


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(4, "little")


class HarmlessReader(dcp.FileSystemReader):
    """Reads a folder in DCP's format."""

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Raises ValueError for metadata that is damaged or lists only a part of a tensor, that asks for other classes,
        or that names files outside.
        """
        file = Path(self.path) / METADATA
        try:
            content = file.read_bytes()
            if content[-10:-4] == _SEAL and content[-4:] != _checksum(content[:-10]):
                raise ValueError("its checksum is wrong")
            metadata = _Unpickler(io.BytesIO(content)).load()
            names = {str(stored.relative_path) for stored in (metadata.storage_data or {}).values()}
            partial = [name for name, entry in metadata.state_dict_metadata.items() if not _whole(entry)]
        except OSError:
            raise
        except Exception as error:  # a damaged pickle may raise anything
            raise ValueError(f"{file} cannot be read: {error}") from None
        for name in names:
            inside(file, name)
        if partial:
            raise ValueError(f"{file} lists only a part of {partial[0]}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _whole(entry: object) -> bool:
    """Whether the pieces of a tensor have as many elements as it has."""
    if not isinstance(entry, entries.TensorStorageMetadata):
        return True
    return sum(prod(chunk.sizes) for chunk in entry.chunks) >= prod(entry.size)


class HarmlessPlanner(DefaultLoadPlanner):
    """Loads objects beside tensors only if they are harmless too."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raises ValueError, with the way to allow a class, for what `torch.load(weights_only=True)` refuses."""
        names = list[str]()
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError:  # whose words advise to load it all the same
            with contextlib.suppress(ValueError, RuntimeError):
                value.seek(0)
                names = torch.serialization.get_unsafe_globals_in_checkpoint(value)
            named = f" ({', '.join(map(ascii, sorted(names)[:3]))})" if names else ""
            raise ValueError(
                f"{read_item.dest_index.fqn} may run code when it is loaded; fix: "
                f"torch.serialization.add_safe_globals([...]) with its classes{named}, if you trust them"
            ) from None
        value.seek(0)
        super().load_bytes(read_item, value)
