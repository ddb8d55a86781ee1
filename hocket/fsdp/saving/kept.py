"""What this rank keeps of a sharded module, by the names that the plain module would use in a checkpoint.

Note: [Which replica writes]
With replicas (HSDP, `no_shard`) several ranks hold the same elements, and one of them writes each. All go through the
parameters in the same order and give each to the replica that has the fewest bytes so far. They need not talk about
it, each writes its share, and an asynchronous save copies only that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hocket.fsdp.checks import refuse_newcomers
from hocket.fsdp.members import UNIT, Member
from hocket.fsdp.part import plain
from hocket.fsdp.saving.flat_tensor import FlatTensor
from hocket.fsdp.sharded_parameter import ShardedParameter
from hocket.layers.slices import Span

if TYPE_CHECKING:
    from hocket.fsdp.module_context import ShardContext
    from hocket.fsdp.param_group import ParamGroup

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing put into names. Checkpoints have the names without."""


@dataclass(frozen=True)
class Kept:
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
        return FlatTensor.of(plain(flat), self.span, self.writes)

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
        kept = {id(one.shard): one for one in _all_kept(context, names)}
        self.kept: dict[str, Kept] = {found[0]: kept[key] for key, found in names.items() if key in kept}
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


def _all_kept(context: ShardContext, names: dict[int, list[str]]) -> list[Kept]:
    groups = context.param_groups
    ranks = max((_ranks(group) for group in groups), default=1)
    written: dict[tuple[int, ...], list[int]] = {}
    found, mesh = list[Kept](), context.tensor_mesh
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
            found.append(Kept(names[id(shard)][0], shard, span, writes))
    return found


def _parts(group: ParamGroup, member: Member) -> int:
    """Into how many parts a parameter of the whole model is divided before it is sharded."""
    return group.groups.part[1] if member.spread is None or member.spread.part is None else member.spread.mesh.size()


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
