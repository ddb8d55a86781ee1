"""Reading and writing folders in the format of `torch.distributed.checkpoint` (DCP), whose planners divide a state.

Note: [Reading runs no code]
DCP pickles its metadata, and objects other than tensors. A pickle may call any function. The readers here allow the
classes of DCP's metadata, and for other objects what `torch.load(weights_only=True)` allows.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata as kinds
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from hocket.files import inside
from hocket.fsdp.saving.atomic_folder import FILES, AtomicFolder, checksum, free, shown, sync
from hocket.fsdp.saving.background import Saving, saved
from hocket.runtime.world import together

MODEL, OPTIMIZER = "model", "optimizer"
"""Keys of checkpoints."""

LEAST = 1 << 26
"""Bytes of a file for which there is another one."""

METADATA = ".metadata"
"""DCP's file that says where each tensor is."""

CRC = "crc"
"""Attribute with a file range's CRC-32 in DCP's metadata."""

SHOWN = 4
"""Most names in a message."""

_SEAL = b"hocket"
"""Follows the pickle in that file, with its CRC-32. Torch reads only up to the pickle's end."""

_KNOWN = {
    kinds.__name__: {
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
"""Module -> allowed names in metadata."""


def _member(kind: object, name: str) -> object:
    """Replaces `getattr` in metadata: some Python 3.11 releases pickle enum members that way."""
    if kind is not kinds._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError("it asks for an attribute, which may run code")
    return kinds._MEM_FORMAT_ENCODING[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which may run code")
        return super().find_class(module, name)


def seal_of(content: bytes) -> bytes:
    """What follows the pickle, with its checksum."""
    return _SEAL + zlib.crc32(content).to_bytes(4, "little")


class CheckpointReader(dcp.FileSystemReader):
    """Reads a folder in DCP's format without running code.

    No rank loads before all have verified what they need.
    """

    def stored(self) -> Metadata:
        """The metadata, on every rank before DCP, which logs tracebacks; without entries if the folder is no
        checkpoint. Raises ValueError or OSError, on all ranks alike, if it is damaged.
        """

        def read() -> None:
            try:
                self.read_metadata()
            except ValueError as error:
                raise ValueError(f"checkpoint {self.path} is damaged: {error}; load another one") from None

        together(read)
        return self.read_metadata()

    def shapes(self) -> dict[str, Any]:
        """What is stored, by key: the shape of a tensor, or the metadata of another object. Raises like `stored`."""
        entries = self.stored().state_dict_metadata
        return {key: torch.Size(e.size) if isinstance(e, TensorStorageMetadata) else e for key, e in entries.items()}

    def load(self, state: dict[str, Any], failed: str | None = None) -> None:
        """Load into tensors by key, on all ranks. Raises ValueError or OSError, with the text after `failed`."""
        said = f"checkpoint {self.path} can't be read: " if failed is None else failed
        run_dcp(said, dcp.load, state, storage_reader=self, planner=HarmlessPlanner())

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Raises ValueError for metadata that is damaged, lists only a part of a tensor, asks for other classes, or
        names files outside of the folder.
        """
        file = Path(self.path) / METADATA
        if not file.is_file():
            return Metadata({})
        try:
            content = file.read_bytes()
            if content[-10:-4] == _SEAL and content[-10:] != seal_of(content[:-10]):
                raise ValueError("its checksum is wrong")
            metadata = _Unpickler(io.BytesIO(content)).load()
            names = {str(stored.relative_path) for stored in (metadata.storage_data or {}).values()}
            partial = [name for name, entry in metadata.state_dict_metadata.items() if not _complete(entry)]
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

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        """Every rank: read, if all ranks find their data whole. Raises ValueError or OSError on all alike."""
        together(lambda: self._check(plan))
        return super().read_data(plan, planner)

    def _check(self, plan: LoadPlan) -> None:
        """Compare with the checksums in the metadata, which other writers than hocket's leave out."""
        places = {item.storage_index: self.storage_data[item.storage_index] for item in plan.items}
        wanted = [(index, place) for index, place in places.items() if CRC in vars(place)]

        def whole(place: Any) -> bool:
            found = checksum(Path(self.path) / place.relative_path, place.offset, place.length)
            return found == (place.length, vars(place)[CRC])

        with ThreadPoolExecutor(FILES) as pool:
            for (index, place), ok in zip(wanted, pool.map(whole, [place for _, place in wanted]), strict=True):
                if not ok:
                    raise ValueError(
                        f"checkpoint {self.path} is damaged: the checksum of {index.fqn} in "
                        f"{Path(self.path) / place.relative_path} is wrong; load another one"
                    )


def _complete(entry: object) -> bool:
    """Whether a tensor's pieces have all of its elements."""
    if not isinstance(entry, kinds.TensorStorageMetadata):
        return True
    return sum(prod(chunk.sizes) for chunk in entry.chunks) >= prod(entry.size)


class HarmlessPlanner(DefaultLoadPlanner):
    """Loads objects other than tensors only if they are harmless."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raises ValueError, with the way to allow a class, for what `torch.load(weights_only=True)` refuses."""
        names = list[str]()
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError:  # its message advises weights_only=False
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


def run_dcp(failed: str, call: Callable[..., object], *args: object, **options: object) -> None:
    """Call DCP. The lowest failing rank's error is raised on all ranks.

    Raises: a ValueError of the callee as it is; other errors as ValueError, or OSError (with its `errno`), with the
    text after `failed`.
    """
    alone = not dist.is_initialized()
    try:
        with warnings.catch_warnings() if alone else contextlib.nullcontext():
            if alone:
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            call(*args, **options, no_dist=alone)
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, ValueError):
            raise ValueError(str(cause)) from None
        if not isinstance(cause, Exception):
            raise
        text = f"{failed}rank {rank} says {type(cause).__name__}: {cause}"
        if not isinstance(cause, OSError):
            raise ValueError(text) from error
        refused = OSError(text)
        refused.errno = cause.errno
        raise refused from error


def entries_of(metadata: Metadata, section: str) -> Iterator[tuple[tuple[str | int, ...], str, Any]]:
    """(path, its words joined, entry) of what a checkpoint has in one of its dicts."""
    for key, entry in metadata.state_dict_metadata.items():
        if key.startswith(f"{section}."):
            name = key.removeprefix(f"{section}.")
            yield (metadata.planner_data or {}).get(key, ())[1:] or (name,), name, entry


def differences(found: Mapping[str, Any], own: Mapping[str, Any], shapeless: str = "\n") -> str:
    """Why `found` can't be loaded, by names, and by shapes but for names that end `shapeless`; empty if it can."""
    both = [name for name in own if name in found and not name.endswith(shapeless)]
    shapes = [(name, _shape(found[name]), _shape(own[name])) for name in both]
    texts = [
        listed("it lacks {}", [name for name in own if name not in found]),
        listed("it has {}, which the module lacks", [name for name in found if name not in own]),
        listed("{}", [f"{name} is {a} in it and {b} in the module" for name, a, b in shapes if a != b]),
    ]
    return "; ".join(filter(None, texts))


def listed(text: str, items: list[str]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return text.format(", ".join(items[:SHOWN]) + more) if items else ""


def _shape(value: Any) -> str:
    shape = value if isinstance(value, torch.Size) else getattr(value, "shape", None)
    return "no tensor" if shape is None else " x ".join(map(str, shape)) or "a single number"


# Writing


class CheckpointWriter(dcp.FileSystemWriter):
    """Writes a folder in DCP's format. See Note: [A checkpoint is there or it is not].

    `others` are further names of parameters of the key `model`, whose entries point to the same bytes, for plain
    modules with shared parameters. `beside` has the text of more files, by name.
    """

    def __init__(
        self, folder: Path, others: Mapping[str, str] | None = None, beside: Mapping[str, str] | None = None
    ) -> None:
        self.folder, self.others, self.beside = AtomicFolder(folder), dict(others or {}), dict(beside or {})
        self._begun = False
        super().__init__(self.folder.temporary, per_thread_copy_ahead=0)  # copying ahead would use another stream

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Every rank, before the coordinator makes the folder: nothing."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The coordinator: make the folder."""
        self.folder.begin()
        self._begun = True
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Every rank: write its files, a thread for each, and sync them. Raises OSError."""
        self._begun = True
        self.folder.temporary.mkdir(parents=True, exist_ok=True)  # for hosts without the shared folder: see `_check`
        values = (planner.resolve_data(item) for item in plan.items if item.type != WriteItemType.BYTE_IO)
        device = next((value.device for value in values if isinstance(value, Tensor) and not value.is_cpu), None)
        if device is not None:
            torch.zeros(1, device=device).item()  # wait for compute on this thread's stream
        items = sorted(plan.items, key=_size, reverse=True)
        count = max(1, min(FILES, sum(map(_size, items)) // LEAST))

        def write(number: int) -> list[WriteResult]:
            if device is not None:
                torch.cuda.set_device(device)  # a new thread starts with GPU 0
            prefix = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
            return self._write(replace(plan, items=items[number::count], storage_data=prefix), planner)

        with ThreadPoolExecutor(count, thread_name_prefix="checkpoint files") as pool:
            results = [result for some in pool.map(write, range(count)) for result in some]
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result(results)
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        try:
            results = super().write_data(plan, planner).value()
        except RuntimeError as error:  # torch's archive writer hides the OSError
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None
        for place in (result.storage_data for result in results):
            file = self.folder.temporary / place.relative_path
            vars(place)[CRC] = checksum(file, place.offset, place.length)[1]  # DCP keeps unknown attributes
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The coordinator, when all ranks have written."""
        self._check(results)
        self._add_other_names(metadata, results)
        super().finish(metadata, results)
        with (self.folder.temporary / METADATA).open("r+b") as file:
            file.write(seal_of(file.read()))
        for name, text in self.beside.items():
            (self.folder.temporary / name).write_text(text)
        for name in (METADATA, *self.beside):
            sync(self.folder.temporary / name)
        self.folder.publish()

    def give_up(self) -> None:
        """Every rank, after an error on any: delete what was written."""
        if self._begun:
            self.folder.give_up()

    def _check(self, results: list[list[WriteResult]]) -> None:
        ends: dict[str, int] = {}
        for stored in (result.storage_data for results_of_rank in results for result in results_of_rank):
            ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
        for name, end in ends.items():
            file = self.folder.temporary / name
            if not file.exists() or file.stat().st_size < end:
                raise ValueError(
                    f"checkpoint {self.folder.final} is not whole: {file} is not to be seen from where rank 0 runs; "
                    f"use a folder on a file system that all ranks share"
                )

    def _add_other_names(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for other, name in self.others.items():
            key, first = f"{MODEL}.{other}", f"{MODEL}.{name}"
            metadata.state_dict_metadata[key] = metadata.state_dict_metadata[first]
            if metadata.planner_data is not None:
                metadata.planner_data[key] = (MODEL, other)
            for of_rank in results:
                same = [result for result in of_rank if result.index.fqn == first]
                of_rank += [replace(result, index=replace(result.index, fqn=key)) for result in same]


def _size(item: WriteItem) -> int:
    """Bytes of a tensor or part; 0 for an object, whose size is unknown."""
    data = item.tensor_data
    return 0 if data is None else prod(data.chunk.sizes) * data.properties.dtype.itemsize


def save_state(
    folder: Path, state: dict[str, Any], others: Mapping[str, str] | None = None, *, asynchronously: bool = False
) -> Saving:
    """Write a state dict to a new folder, with `others` for further names of parameters. See `saved`, `write`."""
    writer, failed = CheckpointWriter(folder, others), f"checkpoint {folder} can't be written: "
    return saved(folder, state, lambda state, group: write(state, writer, group, failed), asynchronously)


def write(state: dict[str, Any], writer: CheckpointWriter, group: dist.ProcessGroup | None, failed: str = "") -> Path:
    """Write a folder of tensors by name, on all ranks of the group; returns it.

    Raises on all ranks, with the text after `failed`: ValueError if the folder is in use or not shared, OSError if it
    can't be written. Then nothing is left of it.
    """
    final = writer.folder.final
    try:
        run_dcp(failed, dcp.save, state, storage_writer=writer, process_group=group)
    except (OSError, ValueError) as error:
        writer.give_up()
        if isinstance(error, OSError):
            error.args = (f"{error}; {shown(free(final))} are free there",)
        raise
    return final
