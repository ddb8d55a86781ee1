"""What hocket adds to `torch.distributed.checkpoint` (DCP): whole folders, and words for what doesn't fit."""

from __future__ import annotations

import contextlib
import io
import warnings
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.optim import Optimizer

from hocket.fsdp.saving.archives import CRC, FILES, checksum, write_archives
from hocket.fsdp.saving.harmless import METADATA, HarmlessPlanner, HarmlessReader, seal
from hocket.fsdp.saving.kept import Inventory
from hocket.fsdp.saving.optimizer_state import optimizer_state_like, put, room_for, split
from hocket.fsdp.saving.state import EXTRA, differences, entries, listed
from hocket.fsdp.saving.whole import WholeFolder
from hocket.runtime.world import together

if TYPE_CHECKING:
    from hocket.fsdp.module_context import ShardContext

MODEL, OPTIMIZER = "model", "optimizer"
"""The keys of a checkpoint."""


class CheckpointWriter(dcp.FileSystemWriter):
    """Writes a folder in DCP's format. See Note: [A checkpoint is there or it is not].

    The folder gets its name when DCP is done; with `publishes` false the caller has more to write, and does that.
    `others` are further names of parameters of the key `model`: they get entries that point to the same bytes, so that
    a plain module finds every name of a shared parameter.
    """

    def __init__(
        self,
        folder: WholeFolder,
        others: Mapping[str, str] | None = None,
        *,
        publishes: bool = True,
    ) -> None:
        self.folder, self.others, self.publishes = folder, dict(others or {}), publishes
        self.sums: dict[str, list[int]] = {}
        """Bytes and CRC-32 of each file that this rank has written."""
        self._begun = False
        super().__init__(folder.temporary, sync_files=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Every rank, before the coordinator has made room: nothing yet."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The coordinator: make the folder."""
        self.folder.begin()
        self._begun = True
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Every rank: write its files and wait until they are on disk. Raises OSError."""
        self._begun = True
        self.folder.temporary.mkdir(parents=True, exist_ok=True)  # on a host that does not share it: see `_check`
        files = write_archives(self.folder.temporary / plan.storage_data.prefix, plan.items, planner)
        self.sums = {file.path.name: [file.size, file.crc] for file, _ in files}
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for _, results in files for result in results])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The coordinator, when all ranks have written."""
        self._check(results)
        self._add_other_names(metadata, results)
        super().finish(metadata, results)
        seal(self.folder.temporary / METADATA)
        self.sums[METADATA] = list(checksum(self.folder.temporary / METADATA))
        if self.publishes:
            self.folder.publish()

    def give_up(self) -> None:
        """Every rank, after an error of any: what has been written takes no room any more."""
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


class CheckpointReader(HarmlessReader):
    """Tells a folder that is no checkpoint by metadata without entries, on every rank alike.

    No rank loads anything before all have found what they want whole. `group` has the ranks that load; None is all.
    """

    def __init__(self, folder: Path, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(folder)
        self._group = group

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        if not (Path(self.path) / METADATA).is_file():
            return Metadata({})
        return super().read_metadata(*args, **options)

    def require_metadata(self) -> None:
        """Every rank, ahead of DCP, which logs tracebacks: raise ValueError or OSError on all for damaged metadata."""
        together(self._require_metadata, self._group)

    def _require_metadata(self) -> None:
        try:
            self.read_metadata()
        except ValueError as error:
            raise ValueError(f"checkpoint {self.path} is damaged: {error}; load another one") from None

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Every rank: read what it wants, if all ranks find that whole. Raises ValueError or OSError on all alike."""
        together(lambda: self._check(plan), self._group)
        return super().read_data(plan, planner)

    def _check(self, plan: LoadPlan) -> None:
        """Raise ValueError if something is damaged that this rank wants."""
        wanted = {item.storage_index: self.storage_data[item.storage_index] for item in plan.items}
        folder = Path(self.path)
        with ThreadPoolExecutor(FILES) as pool:
            whole = list(pool.map(lambda stored: _whole(folder / stored.relative_path, stored), wanted.values()))
        for (index, stored), ok in zip(wanted.items(), whole, strict=True):
            if not ok:
                file = folder / stored.relative_path
                fix = "load another one"
                if CRC not in vars(stored):
                    fix += ". If it was saved under torch.serialization.set_crc32_options(False), load it so, too"
                raise ValueError(
                    f"checkpoint {folder} is damaged: the checksum of {index.fqn} in {file} is wrong; {fix}"
                )


def _whole(file: Path, stored: Any) -> bool:
    """Whether a range of a file is what was written, by the checksum in the metadata.

    Checkpoints of before there was one have those of torch's archives, at which torch itself does not look.
    """
    if (crc := vars(stored).get(CRC)) is not None:
        return checksum(file, stored.offset, stored.length) == (stored.length, crc)
    if stored.transform_descriptors or not torch.serialization.get_crc32_options():  # else they were not written
        return True
    with file.open("rb") as stream:
        stream.seek(stored.offset)
        content = stream.read(stored.length)
    if not content.startswith(b"PK"):  # what else DCP can write, or somebody's damage, is for torch to read
        return True
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return archive.testzip() is None
    except Exception:  # a damaged archive may raise anything
        return False


class FittingPlanner(HarmlessPlanner):
    """Loads a checkpoint into a sharded model, after checking that they fit each other.

    What is loaded is in `found`: the model's live tensors, and what `load_optimizer_state` takes.
    """

    def __init__(self, context: ShardContext | nn.Module, optimizer: Optimizer | None, folder: Path) -> None:
        super().__init__()
        self.context, self.optimizer, self.folder = context, optimizer, folder
        self.own = Inventory(context)
        self.found: dict[str, Any] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Every rank: lay out what is to be loaded, by the checkpoint's names."""
        assert metadata is not None
        stored = metadata.state_dict_metadata
        if not stored:
            raise ValueError(f"{self.folder} is no complete checkpoint: it has no .metadata")
        wanted = entries(self.own)
        for other, name in self.own.others.items():
            if name in wanted and f"{MODEL}.{name}" not in stored and f"{MODEL}.{other}" in stored:
                wanted[other] = wanted.pop(name)
        extra: dict[str, Any] = {}  # in the form that it had when it was saved
        for key, path in (metadata.planner_data or {}).items():
            if key.startswith(f"{MODEL}.") and str(path[1]).endswith(EXTRA) and path[1] in wanted:
                put(extra, path[1:], room_for(stored[key]))
        wanted |= extra
        self.found = {MODEL: wanted}
        if self.optimizer is not None:
            if not any(key.startswith(f"{OPTIMIZER}.") for key in stored):
                raise ValueError(
                    f"checkpoint {self.folder} has no state of an optimizer: load the weights alone, optimizer=None"
                )
            self.found[OPTIMIZER] = optimizer_state_like(self.context, self.optimizer, metadata, OPTIMIZER)
        super().set_up_planner(self.found, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """Every rank: check names and shapes of what it wants, and plan to read it."""
        assert self.metadata is not None
        stored, wanted = self._stored(), self.found[MODEL]
        self._refuse(differences({name: stored[name] for name in wanted if name in stored}, wanted))
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        params = {self.own.name_of[id(param)] for group in groups for param in group["params"]}
        known = {*self.own.kept, *self.own.others, *self.own.plain}, {*params, *self.own.others}
        return replace(create_default_local_load_plan(self.state_dict, self.metadata), planner_data=known)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The coordinator: check that some rank wants everything that the checkpoint has."""
        assert self.metadata is not None
        known, params = (set().union(*sets) for sets in zip(*(plan.planner_data for plan in global_plan), strict=True))
        unknown = [name for name in self._stored() if name not in known]
        self._refuse(listed("it has {}, which the module lacks", unknown))
        if self.optimizer is not None:
            state = [key for key in self.metadata.state_dict_metadata if key.startswith(f"{OPTIMIZER}.state.")]
            unknown = [key for key in state if not split(key.removeprefix(f"{OPTIMIZER}."), params)[0]]
            self._refuse(listed("it has {}, which are of no parameter of the optimizer", unknown))
        return super().create_global_plan(global_plan)

    def _stored(self) -> dict[str, Any]:
        """The checkpoint's weights and buffers: name -> shape, or something without one."""
        assert self.metadata is not None
        paths = self.metadata.planner_data or {}
        found: dict[str, Any] = {}
        for key, entry in self.metadata.state_dict_metadata.items():
            if key.startswith(f"{MODEL}."):
                path = paths.get(key, (MODEL, ""))
                name = str(path[1]) if str(path[1]).endswith(EXTRA) else key.removeprefix(f"{MODEL}.")
                found[name] = torch.Size(entry.size) if isinstance(entry, TensorStorageMetadata) else entry
        return found

    def _refuse(self, wrong: str) -> None:
        if wrong:
            raise ValueError(f"checkpoint {self.folder} doesn't fit the {self.own.kind}: {wrong}")


def run_dcp(failed: str, call: Callable[..., object], *args: object, **options: object) -> None:
    """Call DCP. An error of any rank is raised on all, as what it is: the one of the lowest rank.

    Raises: ValueError, or OSError (with its `errno`) where the file system refused: the words of what was called if
        they are a ValueError, else what the rank says, behind `failed`.
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
