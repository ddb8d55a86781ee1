"""Checkpoints of sharded models on disk: written whole or not at all, readable by any number of ranks and by torch.

A checkpoint is a folder in the format of `torch.distributed.checkpoint` (DCP), with the keys `model` and `optimizer`.
All functions here are collective: every rank calls them with the same arguments. DCP does all the talking there is,
and an error of one rank is raised on all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import Optimizer

from hocket.fsdp.saving.background import save_behind, tell_all
from hocket.fsdp.saving.dcp import MODEL, OPTIMIZER, CheckpointReader, CheckpointWriter, FittingPlanner, run_dcp
from hocket.fsdp.saving.kept import Inventory
from hocket.fsdp.saving.optimizer_state import load_optimizer_state, optimizer_state
from hocket.fsdp.saving.state import entries, load_model_state
from hocket.fsdp.saving.whole import WholeFolder, free, shown

if TYPE_CHECKING:
    from hocket.fsdp.module_context import ShardContext


def save(
    context: ShardContext | nn.Module,
    optimizer: Optimizer | None,
    folder: str | os.PathLike[str],
    *,
    asynchronously: bool = False,
    flatten: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Future[Path]:
    """Save the main weights, the buffers, and the optimizer's state to a new folder.

    `folder` must not exist, or be empty, and must be on a file system that all ranks see; it appears when all of it is
    written, see Note: [A checkpoint is there or it is not]. With `optimizer` None the weights are saved alone.

    With `asynchronously` this returns as soon as weights may change again; `result()` of what is returned waits until
    the folder is there, and raises what went wrong; if nobody asks, a warning tells it, see Note: [No error of a save
    is lost]. It takes host memory for what this rank writes, and waits until an earlier save is written. Otherwise all
    is done on return.

    `flatten` is for ranks that hold different parameters, such as pipeline stages: it saves the optimizer in torch's
    flat layout. `process_group` has the ranks that call this; None is all ranks.

    Raises: ValueError if the folder is in use or not shared, OSError if it can't be written.
    """
    tell_all()
    own, path = Inventory(context), Path(folder)
    state: dict[str, Any] = {MODEL: entries(own)}
    if optimizer is not None:
        state[OPTIMIZER] = optimizer_state(context, optimizer, flatten=flatten)
    return write_now_or_behind(path, state, own.others, asynchronously, process_group)


def write_now_or_behind(
    path: Path, state: dict[str, Any], others: Mapping[str, str], behind: bool, group: dist.ProcessGroup | None = None
) -> Future[Path]:
    """Write a state dict, with `others` for further names of parameters, at once or in the thread that saves."""
    if behind:
        writer = CheckpointWriter(WholeFolder(path), others)
        return save_behind(path, state, lambda copied, own: write(copied, writer, own), group)
    done: Future[Path] = Future()
    done.set_result(write(state, CheckpointWriter(WholeFolder(path), others), group))
    return done


def write(state: dict[str, Any], writer: CheckpointWriter, group: dist.ProcessGroup | None) -> Path:
    """Write a folder of tensors by name, on all ranks of the group; returns it. Raises like `save`."""
    final = writer.folder.final
    try:
        run_dcp(f"checkpoint {final} can't be written: ", dcp.save, state, storage_writer=writer, process_group=group)
    except (OSError, ValueError) as error:  # raised on all ranks, when all have ended
        writer.give_up()
        if isinstance(error, OSError):
            error.args = (f"{error}; {shown(free(final))} are free there",)
        raise
    return final


def load(
    context: ShardContext | nn.Module,
    optimizer: Optimizer | None,
    folder: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Load weights, buffers, and the optimizer's state from a folder that `save` or a plain module has written.

    The number of ranks, the strategy, the mesh and the optimizer's parameter groups may be others than at the time; the
    optimizer need not have made a step. With `optimizer` None the weights are loaded alone. Each rank reads only what
    it keeps.

    Raises: ValueError, on all ranks, if the folder is no complete checkpoint, or if the names or shapes of parameters
        and buffers are not the module's, or if something is damaged that a rank reads; then nothing has changed. Also
        if the optimizer's settings don't fit; then weights may have been loaded.
    """
    path = Path(folder)
    planner = FittingPlanner(context, optimizer, path)
    reader, failed = CheckpointReader(path, process_group), f"checkpoint {path} can't be read: "
    reader.require_metadata()
    run_dcp(failed, dcp.load, {}, storage_reader=reader, planner=planner, process_group=process_group)
    load_model_state(context, planner.found[MODEL])
    if optimizer is not None:
        try:
            load_optimizer_state(context, optimizer, planner.found[OPTIMIZER])
        except ValueError as error:
            raise ValueError(f"checkpoint {path} doesn't fit: {error}") from None
