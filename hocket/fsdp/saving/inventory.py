"""The parameters and buffers of a sharded module, by the plain module's names in a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hocket.fsdp.checks import refuse_newcomers
from hocket.fsdp.members import UNIT
from hocket.fsdp.piece import Piece

if TYPE_CHECKING:
    from hocket.fsdp.module_context import ShardContext

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Name parts added by torch.compile and activation checkpointing, removed in checkpoints."""


class Inventory:
    """What a sharded module has, by name.

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
        kept: dict[int, Piece] = {}
        for group in context.param_groups:
            for i, shard in enumerate(group.shards):
                first = names.setdefault(id(shard), [plain_name(shard.full_name)])[0]  # a hook may omit it
                kept[id(shard)] = Piece(first, group, i, group.span_of(i))
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
        self._refuse_different_values()

    @property
    def kind(self) -> str:
        return type(self.root).__name__

    def entries(self) -> dict[str, Any]:
        """Main weights as checkpoints describe them, and buffers: live tensors."""
        found: dict[str, Any] = {name: one.saved(one.param) for name, one in self.shards.items()}
        for name, original in self.plain.items():
            value = self.state[original]
            found[name] = value.detach() if isinstance(value, Tensor) else value
        return found

    def written_elsewhere(self) -> set[str]:
        """Parameters that a replica of this rank saves.

        Replicas (HSDP, `no_shard`) hold the same elements. All go through the parameters in the same order and give
        each to the replica with the fewest bytes so far. DCP would choose one too, but after a copy of all.
        """
        given: dict[tuple[int, ...], list[int]] = {}
        found = set()
        for name, one in self.shards.items():
            same = one.group.groups.same
            loads = given.setdefault(same.ranks, [0] * same.size)
            writer = loads.index(min(loads))
            loads[writer] += one.main.nbytes
            if writer != same.rank:
                found.add(name)
        return found

    def _refuse_different_values(self) -> None:
        groups = self.context.param_groups
        sizes = [group.groups.reduce.size * group.groups.outer.size for group in groups]
        for group, size in zip(groups, sizes, strict=True):
            # Parts of each whole parameter before sharding.
            layouts = [member.dtensor for member in group.members]
            tensors = min(1 if layout is None or layout.part is None else layout.mesh.size() for layout in layouts)
            if size * max(group.groups.part[1], tensors) < max(sizes):
                raise ValueError(
                    f"{group.members[0].name} is placed on {size} of {max(sizes)} ranks, so others hold different "
                    f"values under the same name: say which part of dimension 0 each has, with "
                    f"Placement(part=(position, {max(sizes) // size}))"
                )


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
