"""Checkpoints of sharded models: atomic, readable by any number of ranks and by torch.

A checkpoint is a folder in the format of `torch.distributed.checkpoint` (DCP), with the keys `model` and `optimizer`.
All functions are collective: every rank calls them with the same arguments, and an error of one rank is raised on all.

Note: [Reading runs no code]
DCP pickles its metadata, and objects other than tensors. A pickle may call any function. The readers here allow the
classes of DCP's metadata, and for other objects what `torch.load(weights_only=True)` allows.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import warnings
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
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
from torch.optim import Optimizer

from hocket.files import inside
from hocket.fsdp.saving.atomic_folder import FILES, AtomicFolder, checksum, free, shown, sync
from hocket.fsdp.saving.background import save_behind, tell_all
from hocket.fsdp.saving.inventory import Inventory
from hocket.fsdp.saving.state import (
    EXTRA,
    MODEL,
    OPTIMIZER,
    differences,
    listed,
    load_model_state,
    optimizer_state_like,
    put,
    room_for,
    split,
    state_of_optimizer,
    take_optimizer_state,
)
from hocket.runtime.world import everyone, together

if TYPE_CHECKING:
    from hocket.fsdp.module_context import ShardContext

METADATA = ".metadata"
"""DCP's file that says where each tensor is."""

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


def seal(file: Path) -> None:
    """Append the checksum to metadata written by DCP. Raises OSError."""
    with file.open("r+b") as stream:
        stream.write(_SEAL + _checksum(stream.read()))
        stream.flush()
        os.fsync(stream.fileno())


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(4, "little")


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
            if content[-10:-4] == _SEAL and content[-4:] != _checksum(content[:-10]):
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


LEAST = 1 << 26

CRC = "crc"
"""Attribute with a file range's CRC-32 in DCP's metadata."""


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
        seal(self.folder.temporary / METADATA)
        for name, text in self.beside.items():
            (self.folder.temporary / name).write_text(text)
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


def save(
    context: ShardContext | nn.Module,
    optimizer: Optimizer | None,
    folder: str | os.PathLike[str],
    *,
    asynchronously: bool = False,
    flatten: bool = False,
) -> Future[Path]:
    """Save the main weights, the buffers, and the optimizer's state to a new folder.

    `folder` must not exist, or be empty, on a file system that all ranks share; it appears when complete, see Note: [A
    checkpoint is there or it is not]. With `optimizer` None only weights and buffers are saved.

    With `asynchronously` this returns once weights may change; `result()` of the return value waits for the folder and
    raises errors, which otherwise become warnings, see Note: [No error of a save is lost]. It needs host memory for
    what this rank writes, and first waits for an earlier save. Otherwise the save is complete on return.

    `flatten` saves the optimizer in torch's flat layout, for ranks with different parameters such as pipeline stages.

    Raises: ValueError if the folder is in use or not shared, OSError if it can't be written.
    """
    tell_all()
    own, path = Inventory(context), Path(folder)
    elsewhere = own.written_elsewhere()
    state: dict[str, Any] = {MODEL: {name: value for name, value in own.entries().items() if name not in elsewhere}}
    if optimizer is not None:
        state[OPTIMIZER] = state_of_optimizer(own, optimizer, flatten, without=elsewhere)
    return write_now_or_behind(path, state, own.others, asynchronously)


def write_now_or_behind(path: Path, state: dict[str, Any], others: Mapping[str, str], behind: bool) -> Future[Path]:
    """Write a state dict, with `others` for further names of parameters, now or in the saving thread."""
    writer, failed = CheckpointWriter(path, others), f"checkpoint {path} can't be written: "
    if behind:
        return save_behind(path, state, lambda copied, group: write(copied, writer, group, failed))
    done: Future[Path] = Future()
    done.set_result(write(state, writer, None, failed))
    return done


def write(
    state: Mapping[str, Any], writer: CheckpointWriter, group: dist.ProcessGroup | None, failed: str = ""
) -> Path:
    """Write a folder of tensors by name, on all ranks of the group; returns it. Raises like `save`, with the text
    after `failed`.
    """
    final = writer.folder.final
    try:
        run_dcp(failed, dcp.save, state, storage_writer=writer, process_group=group)
    except (OSError, ValueError) as error:  # raised on all ranks
        writer.give_up()
        if isinstance(error, OSError):
            error.args = (f"{error}; {shown(free(final))} are free there",)
        raise
    return final


def load(context: ShardContext | nn.Module, optimizer: Optimizer | None, folder: str | os.PathLike[str]) -> None:
    """Load weights, buffers, and the optimizer's state from a folder written by `save` or from a plain module.

    The number of ranks, strategy, mesh and parameter groups may differ from those of the save, and the optimizer need
    not have made a step. With `optimizer` None only weights and buffers are loaded. Each rank reads only what it keeps.

    Raises: ValueError, on all ranks and before anything has changed, if the folder is no complete checkpoint, if names
    or shapes differ from the module's, or if data that a rank reads is damaged. Also if the optimizer's settings don't
    fit; then weights may have been loaded.
    """
    path, own = Path(folder), Inventory(context)
    reader = CheckpointReader(path)
    metadata = reader.stored()
    found: dict[str, Any] = {}
    together(lambda: found.update(_targets(own, optimizer, metadata, path)))
    _refuse_unknown(own, optimizer, metadata, path)
    reader.load(found)
    load_model_state(context, found[MODEL])
    if optimizer is not None:
        try:
            take_optimizer_state(own, optimizer, found[OPTIMIZER])
        except ValueError as error:
            raise ValueError(f"checkpoint {path} doesn't fit: {error}") from None


def _targets(own: Inventory, optimizer: Optimizer | None, metadata: Metadata, folder: Path) -> dict[str, Any]:
    """What this rank loads into, by the checkpoint's names: the model's live tensors, and optimizer state."""
    stored = metadata.state_dict_metadata
    if not stored:
        raise ValueError(f"{folder} is no complete checkpoint: it has no .metadata")
    wanted = own.entries()
    for other, name in own.others.items():
        if name in wanted and f"{MODEL}.{name}" not in stored and f"{MODEL}.{other}" in stored:
            wanted[other] = wanted.pop(name)
    extra: dict[str, Any] = {}  # in its saved form
    for key, path in (metadata.planner_data or {}).items():
        if key.startswith(f"{MODEL}.") and str(path[1]).endswith(EXTRA) and path[1] in wanted:
            put(extra, path[1:], room_for(stored[key]))
    wanted |= extra
    saved = _saved(metadata)
    if wrong := differences({name: saved[name] for name in wanted if name in saved}, wanted):
        raise ValueError(f"checkpoint {folder} doesn't fit the {own.kind}: {wrong}")
    if optimizer is None:
        return {MODEL: wanted}
    if not any(key.startswith(f"{OPTIMIZER}.") for key in stored):
        raise ValueError(f"checkpoint {folder} has no state of an optimizer: load the weights alone, optimizer=None")
    return {MODEL: wanted, OPTIMIZER: optimizer_state_like(own, optimizer, metadata)}


def _saved(metadata: Metadata) -> dict[str, Any]:
    """A checkpoint's weights and buffers: name -> shape, or an entry without one."""
    found: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if key.startswith(f"{MODEL}."):
            path = (metadata.planner_data or {}).get(key, (MODEL, ""))
            name = str(path[1]) if str(path[1]).endswith(EXTRA) else key.removeprefix(f"{MODEL}.")
            found[name] = torch.Size(entry.size) if isinstance(entry, TensorStorageMetadata) else entry
    return found


def _refuse_unknown(own: Inventory, optimizer: Optimizer | None, metadata: Metadata, folder: Path) -> None:
    """Refuse a checkpoint with entries that no rank needs."""
    held = [] if optimizer is None else [param for one in optimizer.param_groups for param in one["params"]]
    mine = {*own.shards, *own.others, *own.plain}, {*own.others, *(own.name_of[id(param)] for param in held)}
    known, params = (set[str]().union(*sets) for sets in zip(*everyone(mine), strict=True))
    wrong = listed("it has {}, which the module lacks", [name for name in _saved(metadata) if name not in known])
    if not wrong and optimizer is not None:
        state = [key for key in metadata.state_dict_metadata if key.startswith(f"{OPTIMIZER}.state.")]
        foreign = [key for key in state if not split(key.removeprefix(f"{OPTIMIZER}."), params)[0]]
        wrong = listed("it has {}, which are of no parameter of the optimizer", foreign)
    if wrong:
        raise ValueError(f"checkpoint {folder} doesn't fit the {own.kind}: {wrong}")
