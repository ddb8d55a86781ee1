"""Weights of a sharded model in Hugging Face's format: loaded into shards, saved, or yielded in buckets.

    hocket.checkpoint.load_pretrained(context, "models/Qwen3-8B")     # of fully_shard, or a step of plan_model
    hocket.checkpoint.save_pretrained(context, "exported")
    for bucket in hocket.checkpoint.pretrained_buckets(step, 2**30):  # to an inference engine, say
        engine.load_weights(bucket)

These are collective. No rank holds the whole model: only one bucket of whole tensors, or one tensor that is read.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket.adapters.source import AdaptedModel
from hocket.fsdp.members import UNIT
from hocket.fsdp.saving.atomic_folder import AtomicFolder, sync
from hocket.fsdp.saving.checkpoint import EXTRA, Inventory, context_given
from hocket.layers.slices import Span
from hocket.model.source import whole_shapes
from hocket.pretrained.families import FAMILIES, config_for
from hocket.pretrained.folder import LARGEST, write_files
from hocket.pretrained.weights import Group, ModuleFolder, Shape, is_pretrained, of_family, plain, written
from hocket.runtime.weights import DTYPES as COMPUTED
from hocket.step import PlannedStep, reset_optimizer

if TYPE_CHECKING:
    from hocket.fsdp.module_context import ShardContext

Bucket = list[tuple[str, Tensor]]
"""Names and tensors as in the files."""
Parts = Callable[[str, int, int], Tensor]
_WRITTEN = torch.float32, torch.bfloat16, torch.float16, torch.int64
BUCKET = 2**28
"""Bytes of a bucket when saving, unless one tensor needs more."""


@dataclass
class _Live:
    """A model of `fully_shard` or of a planned step: this rank's part of its tensors, by name."""

    model: nn.Module | None
    """None: hocket's own transformer."""
    state: Mapping[str, Shape]
    """Shapes of all whole tensors."""
    buffers: Mapping[str, Tensor]
    """Tensors that every rank has whole."""
    pieces: Mapping[str, list[tuple[Span, Tensor]]]
    """The elements of this rank of the other tensors, 1-D."""
    others: Mapping[str, str]
    """Further names of tensors -> the primary name."""
    device: torch.device
    dtype: torch.dtype
    writes: bool
    """Whether this rank writes files."""
    largest: Callable[[Tensor], object]
    """Reduces each element to its maximum over all ranks."""
    updated: Callable[[], object]
    """Called after weights have changed."""
    groups: Callable[[], list[Group]]
    """The tensors of files, and what they are made of."""
    write_config: Callable[[Path, torch.dtype], object]

    def fill(self, name: str, flat: Tensor) -> None:
        """Copy this rank's elements into a whole tensor."""
        for span, mine in self.pieces.get(name, ()):
            span.put(mine, flat)

    def holds(self, name: str) -> bool:
        """Whether this rank has elements of a tensor."""
        return name in self.buffers or any(span for span, _ in self.pieces.get(name, ()))

    def load(self, name: str, parts: Parts) -> None:
        """Load this rank's elements of a tensor."""
        if name in self.buffers:
            self.buffers[name].copy_(parts(name, 0, self.buffers[name].numel()).view(self.state[name]))
        for span, mine in self.pieces.get(name, ()):
            if span.part is None:
                mine.copy_(parts(name, span.lo, span.hi))
            else:
                mine.copy_(span.of(parts(name, 0, prod(span.shape)).view(span.shape)))


def _of_shards(context: ShardContext) -> _Live:
    own, groups, mesh = Inventory(context), context.groups, context.tensor_mesh
    model = own.root
    buffers: dict[str, Tensor] = {
        name: own.state[original]
        for name, original in own.plain.items()
        if isinstance(own.state[original], Tensor) and not name.endswith(EXTRA)
    }
    state = {name: kept.shape for name, kept in own.shards.items()}
    state |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    return _Live(
        model, state, buffers, {name: [(kept.span, kept.main)] for name, kept in own.shards.items()},
        own.others, context.device, next((group.compute_dtype for group in context.param_groups), torch.float32),
        groups.reduce.rank == groups.outer.rank == 0 and (mesh is None or mesh.get_local_rank() == 0),
        lambda flat: context.over_ranks(flat, "max"), context.weights_updated, lambda: written(model, state),
        lambda folder, dtype: _config_of(model, folder, dtype),
    )  # fmt: skip


def _of_step(step: PlannedStep) -> _Live:
    engine, settings = step.engine, step.settings
    if settings.train.transport == "null":
        raise ValueError("train.transport = null: ranks hold nothing whole; fix: another train.transport")
    engine.catch_up()
    pieces: dict[str, list[tuple[Span, Tensor]]] = {
        name: [(Span(tuple(bias.shape), 0, bias.numel()), bias)] for name, bias in engine.balance.biases().items()
    }
    for piece in (piece for unit in engine.sharded.units.values() for piece in unit.pieces()):
        pieces.setdefault(step.parameters[piece.name][0], []).append((piece.span, piece.main))
    shapes = [*step.parameters.values(), *((name, buffer.shape) for name, buffer in step.buffers.items())]
    state: dict[str, Shape] = {name: tuple(shape) for name, shape in shapes}
    source = engine.source
    model = source.model if isinstance(source, AdaptedModel) else None
    if model is None:
        state = whole_shapes(settings.model)

    def family() -> tuple[str, dict[str, Any]]:
        return config_for(settings.model, settings.data.sequence_length, settings.precision.dtype)[:2]

    def groups() -> list[Group]:
        if model is not None:
            return written(model, state)
        return list(of_family(FAMILIES[family()[0]], settings.model, state))

    def write_config(folder: Path, dtype: torch.dtype) -> None:
        if model is not None:
            _config_of(model, folder, dtype)
        else:
            named = str(dtype).removeprefix("torch.")
            config = family()[1] | {"torch_dtype": named, "dtype": named}
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    return _Live(
        model, state, dict(step.buffers), pieces, step.others, engine.device, COMPUTED[settings.precision.dtype],
        not dist.is_initialized() or dist.get_rank() == 0,
        lambda flat: engine.groups.control.all_reduce(flat, "max").wait(), lambda: reset_optimizer(engine), groups,
        write_config,
    )  # fmt: skip


def _live(target: Any) -> _Live:
    if isinstance(target, PlannedStep):
        return _of_step(target)
    if UNIT in getattr(target, "__dict__", ()):
        target = context_given(target)
    if not hasattr(target, "units"):
        kind = type(target).__name__
        raise ValueError(f"{kind}: no ShardContext and no step; fix: what fully_shard or plan_model returned")
    return _of_shards(target)


def _agree(live: _Live, error: Exception | None) -> None:
    """Raise one rank's error on all ranks."""
    failed = torch.tensor([0.0 if error is None else 1.0], device=live.device)
    live.largest(failed)
    if error is not None:
        raise error
    if failed.item():
        raise ValueError("another rank has failed, and says why; fix: the same files on all hosts")


@torch.no_grad()
def load_pretrained(target: ShardContext | nn.Module | PlannedStep, folder: str | os.PathLike[str]) -> None:
    """Load the weights of a folder of safetensors into a model of `fully_shard`, or a step of `plan_model`.

    The tensors have the names of the module's `state_dict`; for a model of transformers, those that `from_pretrained`
    reads. Each rank reads only what it keeps, one tensor at a time, or those that make one parameter. A planned step's
    optimizer starts afresh; with `fully_shard`, load before the optimizer's first step.

    Raises ValueError on all ranks, before anything changes, unless each parameter and saved buffer is made once, with
    its shape, and all tensors are used; also for damaged files and quantised weights. OSError if a file cannot be read
    to its end: then some weights have been loaded.
    """
    live, path, error = _live(target), Path(folder), None
    if live.model is None:
        raise ValueError(f"folder = {path}: the step is of hocket's own transformer; fix: model.weights = {path}")
    opened = None
    try:
        opened = ModuleFolder(path, live.model, live.state, live.others, set(live.buffers))
    except ValueError as found:
        error = ValueError(f"folder = {path}: {found}; fix: the folder of such a model")
    _agree(live, error)
    assert opened is not None
    for names, read in opened.each():
        mine = [name for name in names if live.holds(name)]
        parts = read() if mine else None
        for name in mine:
            assert parts is not None
            live.load(name, parts)
    live.updated()


def pretrained_buckets(
    target: ShardContext | nn.Module | PlannedStep, nbytes: int, dtype: torch.dtype | None = None
) -> Iterator[Bucket]:
    """Whole tensors of the current weights, with the names and layouts of Hugging Face's files.

    Yields buckets of at most `nbytes`, one collective each, on all ranks, on the weights' device. Sources count: a
    tensor with another layout in files counts twice. The caller owns a bucket: nothing here writes to it or keeps it.
    If the caller empties it, with `bucket.clear()`, before the next one, only one exists at a time. `dtype` is by
    default the compute dtype; buffers keep theirs.

    Raises ValueError if one parameter alone takes more.
    """
    live = _live(target)
    return _buckets(live, _packed(live, live.groups(), nbytes, dtype or live.dtype), dtype or live.dtype)


def _packed(live: _Live, groups: Sequence[Group], nbytes: int, dtype: torch.dtype) -> list[list[Group]]:
    """Groups by bucket, in their order."""
    buckets: list[list[Group]] = [[]]
    left = nbytes
    for group in groups:
        size = _size(live, group, dtype)
        if size > nbytes:
            raise ValueError(f"nbytes = {nbytes:,}: {group.sources[0]} takes {size:,}; fix: at least as many")
        if size > left and buckets[-1]:
            buckets.append([])
            left = nbytes
        buckets[-1].append(group)
        left -= size
    return buckets


def _size(live: _Live, group: Group, dtype: torch.dtype) -> int:
    """Bytes of a group, including the tensors that it is made of."""
    sources = sum(prod(live.state[name]) * _dtype(live, name, dtype).itemsize for name in group.sources)
    return sources if group.renames else 2 * sources


def _dtype(live: _Live, name: str, dtype: torch.dtype) -> torch.dtype:
    if name in live.buffers:
        return live.buffers[name].dtype
    return torch.float32 if name.endswith("router.bias") and live.model is None else dtype


def _buckets(live: _Live, packed: Sequence[Sequence[Group]], dtype: torch.dtype) -> Iterator[Bucket]:
    for groups in packed:
        with torch.no_grad():
            values = _whole(live, [name for group in groups for name in group.sources], dtype)
            made = [pair for group in groups for pair in group.make(values.__getitem__).items()]
            bucket = [(name, value.contiguous()) for name, value in made]
        del values, made
        yield bucket
        del bucket


def _whole(live: _Live, names: Sequence[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """Whole tensors of the state. Ranks with the same elements have equal values, so the maximum is the value."""
    found = {name: live.buffers[name].detach().clone() for name in names if name in live.buffers}
    moved = [name for name in names if name not in found]
    for kind in {_dtype(live, name, dtype) for name in moved}:
        mine = [name for name in moved if _dtype(live, name, dtype) == kind]
        sizes = [prod(live.state[name]) for name in mine]
        flat = torch.full((sum(sizes),), -torch.inf, dtype=kind, device=live.device)
        parts = dict(zip(mine, flat.split(sizes), strict=True))
        for name, part in parts.items():
            live.fill(name, part)
        live.largest(flat)
        found |= {name: part.view(live.state[name]) for name, part in parts.items()}
    return found


def save_pretrained(
    target: ShardContext | nn.Module | PlannedStep,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    largest: int = LARGEST,
) -> Path:
    """Write a new folder that `from_pretrained` opens: config.json, and safetensors files of at most `largest` bytes.

    `dtype` is by default the compute dtype; buffers keep theirs. A module that is not a model of transformers gets only
    tensors, with the names of its `state_dict`. One rank writes, and holds one file. The folder appears once it is
    complete.

    Raises ValueError on all ranks for a folder that exists, and for a dtype that files do not support; if the folder
    cannot be written, OSError on the writing rank and ValueError on the others.
    """
    live, path = _live(target), Path(folder)
    dtype = dtype or live.dtype
    groups = live.groups()
    for group in groups:
        if (kind := _dtype(live, group.sources[0], dtype)) not in _WRITTEN:
            raise ValueError(f"dtype = {kind} of {group.sources[0]}: files have {', '.join(map(str, _WRITTEN))}")
    most = max((_size(live, group, dtype) for group in groups), default=0)
    buckets = _buckets(live, _packed(live, groups, max(BUCKET, most), dtype), dtype)
    pairs = _one_by_one(buckets)
    error = None
    target_folder = AtomicFolder(path)
    try:
        if live.writes:
            target_folder.begin()
    except (OSError, ValueError) as found:
        error = found
    _agree(live, error)
    try:
        if live.writes:
            write_files(target_folder.temporary, pairs, largest)
            live.write_config(target_folder.temporary, dtype)
            for file in target_folder.temporary.iterdir():
                sync(file)
            target_folder.publish()
    except OSError as found:
        error = found
        target_folder.give_up()
    for pair in pairs:  # ranks that do not write, or no longer, still take part in every bucket
        del pair  # and hold none
    _agree(live, error)
    return path


def _one_by_one(buckets: Iterator[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """Tensors on the host, from buckets that are emptied before the next one."""
    for bucket in buckets:
        while bucket:
            name, value = bucket.pop(0)
            yield name, value.cpu()
            del value


def _config_of(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write config.json and generation_config.json of a model of transformers."""
    if not is_pretrained(model):
        return
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(plain(model)).__name__], dtype
    config.save_pretrained(folder)
    if (generation := getattr(model, "generation_config", None)) is not None:
        generation.save_pretrained(folder)
