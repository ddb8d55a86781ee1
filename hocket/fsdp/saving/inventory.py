"""What this rank keeps of a sharded module, by the names that the plain module would use in a checkpoint.

Note: [Which replica writes]
With replicas (HSDP, `no_shard`) several ranks hold the same elements, and one of them writes each. All go through the
parameters in the same order and give each to the replica that has the fewest bytes so far. They need not talk about
it, each writes its share, and an asynchronous save copies only that.

Note: [A range is a few boxes]
A flat shard begins and ends anywhere inside a parameter. DCP describes what a rank holds by boxes, and a range of
elements is a few of them (`layers/slices.py`). So flat shards need no DTensor, no padding and no communication of
their own: DCP cuts the boxes of who saved against the boxes of who loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hocket.fsdp.checks import refuse_newcomers
from hocket.fsdp.members import UNIT, Member
from hocket.fsdp.part import plain
from hocket.fsdp.sharded_parameter import ShardedParameter
from hocket.layers.slices import Box, Span

if TYPE_CHECKING:
    from hocket.fsdp.module_context import ShardContext
    from hocket.fsdp.param_group import ParamGroup


class FlatTensor(Tensor):
    """A tensor of a parameter's whole shape of which this rank holds the elements of a `span`, in the 1-D `flat`.

    DCP refuses what is no Tensor, so this is one; but it supports no operation except what DCP asks for. Loading writes
    into `flat`. With `writes` false another rank holds the same elements and saves them; this one only loads.
    """

    flat: Tensor
    span: Span
    writes: bool

    @staticmethod
    def __new__(cls: type[FlatTensor], flat: Tensor, span: Span, writes: bool = True) -> FlatTensor:
        """A shell with the whole shape; `__init__` gives it the elements."""
        return Tensor._make_wrapper_subclass(cls, span.shape, dtype=flat.dtype, device=flat.device)

    def __init__(self, flat: Tensor, span: Span, writes: bool = True) -> None:
        within = span.shape if span.part is None else span.part.shape
        assert flat.shape == (span.hi - span.lo,), f"elements {span.lo} to {span.hi} in {tuple(flat.shape)}"
        assert 0 <= span.lo <= span.hi <= prod(within), f"elements {span.lo} to {span.hi} of a tensor of shape {within}"
        self.flat, self.span, self.writes = flat.detach(), span, writes

    def __repr__(self) -> str:  # pyrefly: ignore[bad-override]  (Tensor's takes an argument of its own)
        return f"FlatTensor(elements {self.span.lo} to {self.span.hi} of shape {tuple(self.shape)}, {self.dtype})"

    @classmethod
    # pyrefly: ignore[bad-override]  (the stub of torch leaves out `func`)
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.new_empty.default:
            # DCP's own staging makes an empty twin on the CPU and then copies attributes, `flat` among them.
            empty = args[0].flat.new_empty(0, device=(kwargs or {}).get("device"))
            return cls(empty, Span(tuple(args[1]), 0, 0))
        raise TypeError(f"a FlatTensor is a rank's part of a parameter, for checkpoints only; it has no {func}")

    def with_elements(self, flat: Tensor) -> FlatTensor:
        """The same range, with other elements."""
        return FlatTensor(flat, self.span, self.writes)

    def part_of(self, whole: Tensor) -> Tensor:
        """The elements of a tensor of the whole shape that this rank holds, 1-D."""
        return self.span.of(whole)

    def _chunks(self) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
        """Each box, and a view of its elements in `flat`."""
        # A parameter without elements has one box without elements, or no rank would mention it in the checkpoint.
        cut: Iterable[Box] = [((0,) * self.dim(), tuple(self.shape))]
        if self.numel():
            cut = self.span.boxes()
        start = 0
        for offsets, sizes in cut:
            count = prod(sizes)
            view = self.flat[start : start + count].view(sizes)
            yield ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)), view
            start += count

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """DCP: what this rank would write."""
        if not self.writes:
            return []
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk, _view in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """DCP: what this rank wants to read."""
        return [chunk for chunk, _ in self._chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """DCP: the elements of one box, to write from or to read into."""
        return next(view for chunk, view in self._chunks() if chunk.offsets == index.offset)


WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing put into names. Checkpoints have the names without."""


@dataclass(frozen=True)
class LocalShard:
    """What this rank keeps of one parameter."""

    name: str
    shard: ShardedParameter
    span: Span
    """Its elements, of the parameter in the whole model; for experts, with the experts of all ranks."""
    writes: bool
    """Whether it is this rank that saves these elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter in the whole model."""
        return self.span.shape

    def tensor(self, flat: Tensor) -> FlatTensor:
        """`flat`, 1-D and as long as the shard, as a part of the whole parameter."""
        return FlatTensor(plain(flat), self.span, self.writes)

    def part_of(self, value: Tensor) -> Tensor:
        """The elements of this rank, 1-D, of a `FlatTensor` of this rank or of a tensor of the whole shape.

        Raises: ValueError for a `FlatTensor` of other elements.
        """
        if not isinstance(value, FlatTensor):
            return self.span.of(value.detach())
        if value.span != self.span:
            raise ValueError(
                f"{self.name} has elements {value.span.lo} to {value.span.hi}, but this rank keeps {self.span.lo} to "
                f"{self.span.hi}: what was sharded in another way goes through a checkpoint"
            )
        return value.flat


class Inventory:
    """The parameters and buffers of a sharded module by name.

    Raises: ValueError for a parameter of which ranks hold different values under one name.
    """

    def __init__(self, context: ShardContext | nn.Module) -> None:
        self.context = context = context_given(context)
        self.root: nn.Module = context.root
        refuse_newcomers(self.root)
        self.state: dict[str, Any] = dict(self.root.state_dict(keep_vars=True))
        """What the module's own `state_dict` has, under its own names, shards as they are."""
        names: dict[int, list[str]] = {}
        for name, value in self.state.items():
            names.setdefault(id(value), []).append(plain_name(name))
        for shard in (shard for group in context.param_groups for shard in group.shards):
            names.setdefault(id(shard), [plain_name(shard.full_name)])  # what a hook of the module leaves out
        kept = {id(one.shard): one for one in _local_shards(context, names)}
        self.shards: dict[str, LocalShard] = {found[0]: kept[key] for key, found in names.items() if key in kept}
        """By the first name, in the order of the module."""
        self.others = {other: found[0] for key, found in names.items() if key in kept for other in found[1:]}
        """Further names of parameters that several modules share -> the first name."""
        self.plain: dict[str, str] = {
            plain_name(name): name for name, value in self.state.items() if id(value) not in kept
        }
        """What is not sharded, buffers above all: name -> the module's own name for it."""
        self.name_of: dict[int, str] = {key: found[0] for key, found in names.items()}
        """The first name of an object in the module's state, by its id."""

    @property
    def kind(self) -> str:
        """The name of the module's class."""
        return type(self.root).__name__


def context_given(given: ShardContext | nn.Module) -> ShardContext:
    """The context of a sharded model, which may be given itself."""
    unit = given.__dict__.get(UNIT) if isinstance(given, nn.Module) else None
    context: Any = given if unit is None else unit.context
    if not hasattr(context, "units") or (unit is not None and context.root is not given):
        raise ValueError(
            f"{type(given).__name__} is neither a ShardContext nor a whole sharded model: give what "
            f"hocket.fully_shard returned for the model"
        )
    return context


def plain_name(name: str) -> str:
    """A name without what wrappers of modules have added to it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _local_shards(context: ShardContext, names: dict[int, list[str]]) -> list[LocalShard]:
    groups = context.param_groups
    ranks = max((_ranks(group) for group in groups), default=1)
    written: dict[tuple[int, ...], list[int]] = {}
    found, mesh = list[LocalShard](), context.tensor_mesh
    for group in groups:
        parts = min(_parts(group, member) for member in group.members)
        if _ranks(group) * parts < ranks:
            raise ValueError(
                f"{group.members[0].name} is placed on {_ranks(group)} of {ranks} ranks, so others hold different "
                f"values under the same name: say which part of dimension 0 each has, with "
                f"Placement(part=(position, {ranks // _ranks(group)}))"
            )
        for shard in group.shards:
            span, writes = group.span_of(shard), _writes(group, shard, written)
            if mesh is not None and span.part is None and mesh.get_local_rank():
                writes = False  # the first of tensor-parallel ranks does, which have the same
            found.append(LocalShard(names[id(shard)][0], shard, span, writes))
    return found


def _parts(group: ParamGroup, member: Member) -> int:
    """Into how many parts a parameter of the whole model is divided before it is sharded."""
    return group.groups.part[1] if member.dtensor is None or member.dtensor.part is None else member.dtensor.mesh.size()


def _ranks(group: ParamGroup) -> int:
    return group.groups.reduce.size * group.groups.outer.size


def _writes(group: ParamGroup, shard: ShardedParameter, written: dict[tuple[int, ...], list[int]]) -> bool:
    """Whether this rank writes a shard. See Note: [Which replica writes]; `written` has the bytes given out so far."""
    replicas = group.groups.reduce if group.groups.alike > 1 else group.groups.outer
    if group.groups.outer_shards or replicas.size == 1:
        return True
    so_far = written.setdefault(replicas.ranks, [0] * replicas.size)
    writer = so_far.index(min(so_far))
    so_far[writer] += shard.nbytes
    return writer == replicas.rank
