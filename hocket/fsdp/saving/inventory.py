"""What this rank holds of a sharded module, by the plain module's names in a checkpoint.

Note: [Which replica writes]
Replicas (HSDP, `no_shard`) hold the same elements, and one of them writes each. All go through the parameters in the
same order and assign each to the replica with the fewest bytes so far: without communication, and an asynchronous save
copies only this rank's share.

Note: [A range is a few boxes]
DCP describes a rank's data by boxes, and a range of elements is a few of them (`layers/slices.py`). So flat shards need
no DTensor, padding or communication: DCP intersects the boxes of saving and loading ranks.
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
from hocket.layers.slices import Box, Span

if TYPE_CHECKING:
    from hocket.fsdp.module_context import ShardContext
    from hocket.fsdp.param_group import ParamGroup


class FlatTensor(Tensor):
    """A tensor of a parameter's whole shape, of which this rank holds the elements `span` in the 1-D `flat`.

    It is a Tensor because DCP requires one, but supports only what DCP needs. Loading writes into `flat`. With `writes`
    false another rank saves the same elements, and this one only loads.
    """

    flat: Tensor
    span: Span
    writes: bool

    @staticmethod
    def __new__(cls: type[FlatTensor], flat: Tensor, span: Span, writes: bool = True) -> FlatTensor:
        """A wrapper with the whole shape; `__init__` sets the elements."""
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
            # DCP's staging makes an empty copy on the CPU and then copies attributes, `flat` among them.
            empty = args[0].flat.new_empty(0, device=(kwargs or {}).get("device"))
            return cls(empty, Span(tuple(args[1]), 0, 0))
        raise TypeError(f"a FlatTensor is a rank's part of a parameter, for checkpoints only; it has no {func}")

    def with_elements(self, flat: Tensor) -> FlatTensor:
        return FlatTensor(flat, self.span, self.writes)

    def part_of(self, whole: Tensor) -> Tensor:
        """The local elements of a whole tensor, 1-D."""
        return self.span.of(whole)

    def _chunks(self) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
        """(box, view of its elements in `flat`)."""
        # An empty parameter has one empty box, so that the checkpoint mentions it.
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
"""Name parts added by torch.compile and activation checkpointing, removed in checkpoints."""


@dataclass(frozen=True)
class Piece:
    """What this rank has of a parameter of the whole model."""

    name: str
    group: ParamGroup
    position: int
    """Of the member in its group."""
    span: Span
    """Its elements in the whole model's parameter; for experts, with the experts of all ranks."""
    writes: bool = True
    """Whether this rank saves these elements."""
    shared: int = 1
    """Neighbouring tensor-parallel ranks with these elements, each with a gradient of its own tokens or heads."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return self.span.shape

    @property
    def lo(self) -> int:
        return self.span.lo

    @property
    def hi(self) -> int:
        return self.span.hi

    @property
    def main(self) -> Tensor:
        """The main weights, 1-D: live memory."""
        return self.group.locals[self.position]

    @property
    def grad(self) -> Tensor:
        """The reduced gradient, 1-D; between a reduce and the step."""
        grad = self.group.grad_of(self.position)
        assert grad is not None, f"{self.name} has no gradient"
        return grad

    def tensor(self, flat: Tensor) -> FlatTensor:
        """`flat`, 1-D and of the shard's length, as a part of the whole parameter."""
        return FlatTensor(flat, self.span, self.writes)

    def elements(self, value: Tensor) -> Tensor | None:
        """The local elements, 1-D, of a tensor like the parameter; None for other tensors."""
        local = getattr(value, "_local_tensor", value).detach()
        same = value.shape == self.group.members[self.position].shape and local.numel() == len(self.span)
        return local.reshape(-1) if same else None

    def like_parameter(self, flat: Tensor) -> Tensor:
        """Local elements, 1-D, as a tensor like the parameter."""
        return self.group.shards[self.position].like(flat)

    def part_of(self, value: Tensor) -> Tensor:
        """The local elements, 1-D, of a `FlatTensor` with the same span, of a DTensor with the same rows, or of a whole
        tensor.

        Raises: ValueError for a `FlatTensor` of other elements.
        """
        if hasattr(value, "_local_tensor") and (flat := self.elements(value)) is not None:
            return flat
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
        """The module's own `state_dict`, under its own names, with shards."""
        names: dict[int, list[str]] = {}
        for name, value in self.state.items():
            names.setdefault(id(value), []).append(plain_name(name))
        for shard in (shard for group in context.param_groups for shard in group.shards):
            names.setdefault(id(shard), [plain_name(shard.full_name)])  # omitted by a hook of the module
        kept = {id(one.group.shards[one.position]): one for one in _local_shards(context, names)}
        self.shards: dict[str, Piece] = {found[0]: kept[key] for key, found in names.items() if key in kept}
        """By first name, in the module's order."""
        self.others = {other: found[0] for key, found in names.items() if key in kept for other in found[1:]}
        """Further names of shared parameters -> first name."""
        self.plain: dict[str, str] = {
            plain_name(name): name for name, value in self.state.items() if id(value) not in kept
        }
        """Unsharded entries, mostly buffers: name -> the module's own name."""
        self.name_of: dict[int, str] = {key: found[0] for key, found in names.items()}
        """id of an object in the module's state -> its first name."""

    @property
    def kind(self) -> str:
        return type(self.root).__name__


def context_given(given: ShardContext | nn.Module) -> ShardContext:
    """The context of a sharded model, or the context itself."""
    unit = given.__dict__.get(UNIT) if isinstance(given, nn.Module) else None
    context: Any = given if unit is None else unit.context
    if not hasattr(context, "units") or (unit is not None and context.root is not given):
        raise ValueError(
            f"{type(given).__name__} is neither a ShardContext nor a whole sharded model: give what "
            f"hocket.fully_shard returned for the model"
        )
    return context


def plain_name(name: str) -> str:
    """A name without the parts that wrappers add."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _local_shards(context: ShardContext, names: dict[int, list[str]]) -> list[Piece]:
    groups = context.param_groups
    ranks = max((_ranks(group) for group in groups), default=1)
    written: dict[tuple[int, ...], list[int]] = {}
    found, mesh = list[Piece](), context.tensor_mesh
    for group in groups:
        parts = min(_parts(group, member) for member in group.members)
        if _ranks(group) * parts < ranks:
            raise ValueError(
                f"{group.members[0].name} is placed on {_ranks(group)} of {ranks} ranks, so others hold different "
                f"values under the same name: say which part of dimension 0 each has, with "
                f"Placement(part=(position, {ranks // _ranks(group)}))"
            )
        for i, shard in enumerate(group.shards):
            span, writes = group.span_of(i), _writes(group, i, written)
            if mesh is not None and span.part is None and mesh.get_local_rank():
                writes = False  # the first tensor-parallel rank writes replicated parameters
            found.append(Piece(names[id(shard)][0], group, i, span, writes))
    return found


def _parts(group: ParamGroup, member: Member) -> int:
    """Number of parts of a whole parameter before sharding."""
    return group.groups.part[1] if member.dtensor is None or member.dtensor.part is None else member.dtensor.mesh.size()


def _ranks(group: ParamGroup) -> int:
    return group.groups.reduce.size * group.groups.outer.size


def _writes(group: ParamGroup, index: int, written: dict[tuple[int, ...], list[int]]) -> bool:
    """Whether this rank writes a member. See Note: [Which replica writes]; `written` has the bytes assigned so far."""
    if group.layout.entries[index].is_kept_by_all and group.position:
        return False
    replicas = group.groups.same
    if replicas.size == 1:
        return True
    so_far = written.setdefault(replicas.ranks, [0] * replicas.size)
    writer = so_far.index(min(so_far))
    so_far[writer] += group.locals[index].nbytes
    return writer == replicas.rank
