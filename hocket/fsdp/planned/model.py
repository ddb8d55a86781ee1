"""The sharded model of one rank under a plan: its units and their slots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from hocket.fsdp.members import Member
from hocket.fsdp.options import Precision
from hocket.fsdp.param_group import ParamGroup
from hocket.fsdp.planned.fp8_weights import Fp8Unit, Fp8Weights
from hocket.fsdp.planned.unit import PlannedUnit, Slots
from hocket.fsdp.shard_groups import ShardGroups
from hocket.layers.slices import TensorRank
from hocket.program.mesh import Mesh
from hocket.program.ops import UNITS, Program
from hocket.program.ops import Unit as UnitKind
from hocket.program.values import UnitName, unit_moved
from hocket.runtime.comm import Group, Groups
from hocket.runtime.transports import Local, local_sum


def unit_of(name: str, chunk: int, tied: bool = False) -> UnitName:
    """The unit of a parameter, by its name in the whole model. Tied, the head is part of `embed`, in chunk 0."""
    first, *rest = name.split(".")
    if tied and first in ("embed", "head"):
        return "embed", 0, -1
    if first == "embed":
        return "embed", chunk, -1
    if first == "head":
        return "head", chunk, -1
    assert first == "layers", f"no unit for parameter {name}"
    return ("experts" if rest[1] == "experts" else "dense"), chunk, int(rest[0])


class PlannedModel:
    """Manages and shards the parameters of a rank's chunks for a program.

    `chunks` are this rank's virtual stages, in order, with parameters named as in the whole model; only shapes are
    used, so the meta device will do. Weights are zero until `load`.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        groups: Groups,
        program: Program,
        dtype: torch.dtype,
        device: torch.device,
        *,
        wire: torch.dtype | None = None,
        in_fp8: Callable[[str], bool] | None = None,
    ) -> None:
        """`dtype` is that of compute, and of gradients on the wire unless `wire` is another.

        `in_fp8` says of a weight, by name, whether it is gathered in fp8.
        """
        self.groups, self._in_fp8 = groups, in_fp8
        self.tensors = TensorRank(groups.tp.rank, mesh.tp, mesh.sharing)
        self.device = device
        self._dtype, self._wire = dtype, wire or dtype
        self.held = False
        """Whether gradients stay in place, since a recorded step writes them again (`engine/graphed.py`)."""
        self._fp8: list[Fp8Weights] = []
        self.weight_slots: dict[UnitKind, Slots] = {}
        self.grad_slots: dict[UnitKind, Slots] = {}
        made: dict[UnitName, PlannedUnit] = {}
        members = _members(chunks, program.layout.tied)
        experts = {name: params for name, params in members.items() if name[0] == "experts"}
        dense = {name: params for name, params in members.items() if name not in experts}
        alone = Group("outer", (0,), 0, Local())
        added = {unit_moved(op) for ops in program.ranks for op in ops if op.verb == "add"}
        replicated = not program.weight_slots  # each rank has all weights
        for units, gather, reduce, part in (
            (dense, groups.gather_dense, groups.reduce_dense, (0, 1)),
            (experts, groups.gather_experts, groups.reduce_experts, (groups.a2a.rank, mesh.ep)),
        ):
            gather = alone if replicated else gather
            where = ShardGroups(gather, reduce, groups.replicas, mesh.data, part)
            formats = Precision(compute=dtype, wire=wire)
            stored = {name: ParamGroup(params, where, formats, device, fine=True) for name, params in units.items()}
            fp8 = self._cast(stored, where)
            self._allocate(stored, where, program, set(fp8))
            for name, group in stored.items():
                kind, _, layer = name
                slots = self.weight_slots.get(kind), self.grad_slots.get(kind)
                tied = kind == "embed" and program.layout.tied
                adds = name in added and not (tied and not program.layout.apart)
                made[name] = PlannedUnit(kind, layer, group, *slots, self.tensors, adds)
                made[name].copies = 2 if tied and program.layout.apart else 1
                if name in fp8:
                    made[name].gather_in_fp8(*fp8[name])
        self.units = {name: unit for kind in UNITS for name, unit in made.items() if name[0] == kind}

    def _cast(
        self, stored: Mapping[UnitName, ParamGroup], where: ShardGroups
    ) -> dict[UnitName, tuple[Fp8Weights, Fp8Unit]]:
        wanted = self._in_fp8
        if wanted is None or where.gather.size == 1:
            return {}
        groups = {name: group for name, group in stored.items() if any(wanted(m.name) for m in group.members)}
        if not groups:
            return {}
        self._fp8.append(Fp8Weights(list(groups.values()), where.gather, wanted))
        return {name: (self._fp8[-1], unit) for name, unit in zip(groups, self._fp8[-1].units, strict=True)}

    def _allocate(
        self, stored: Mapping[UnitName, ParamGroup], where: ShardGroups, program: Program, fp8: Collection[UnitName]
    ) -> None:
        """Allocate the slots of two groups, each as long as the largest unit of its class."""
        gather, reduce = where.gather, where.reduce
        lengths: dict[UnitKind, int] = {}
        gathered: dict[UnitKind, int] = {}  # bytes
        for name, group in stored.items():
            kind, total = name[0], group.layout.total
            lengths[kind] = max(lengths.get(kind, 0), total)
            gathered[kind] = max(gathered.get(kind, 0), total if name in fp8 else group.total_bytes)
        if not lengths:
            return
        if gather.size > 1:
            for kind, nbytes in gathered.items():
                count, length = program.weight_slots.get(kind, 0), -(-nbytes // self._dtype.itemsize)
                assert count, f"the program has no weight slots for {kind} units, which {gather.size} ranks share"
                gathers_fp8 = any(name[0] == kind for name in fp8)
                self.weight_slots[kind] = Slots(f"{kind} weight", count, length, self._dtype, self.device, gathers_fp8)
        if reduce.size == 1:  # Note: [Gradients that are collected]
            meet = program.layout.tied and not program.layout.apart
            lengths = {kind: length for kind, length in lengths.items() if kind == "embed" and meet}
        for kind, length in lengths.items():
            count = program.grad_slots.get(kind, 0)
            self.grad_slots[kind] = Slots(f"{kind} gradient", count, length, self._wire, self.device)

    def unit(self, kind: UnitKind, chunk: int, layer: int = -1) -> PlannedUnit:
        """A unit of a chunk; embed and head have layer -1."""
        return self.units[kind, chunk, layer]

    def load(self, source: Callable[[str], Tensor] | Mapping[str, Tensor]) -> None:
        """Load initial weights by name, one parameter at a time; see `PlannedUnit.load`."""
        find = source.__getitem__ if isinstance(source, Mapping) else source
        for unit in self.units.values():
            unit.load(find)
        self.agree()

    def refresh(self) -> None:
        """After the optimizer: a new version of all weights."""
        for unit in self.units.values():
            unit.refresh()
        self.agree()

    @property
    def casts_agree(self) -> bool:
        """Whether ranks agree on scales of weights, which are gathered in fp8."""
        return bool(self._fp8)

    def agree(self) -> None:
        """Cast weights that are gathered in fp8."""
        for fp8 in self._fp8:
            fp8.refresh()

    def forget_casts(self) -> None:
        """Before a step: a recorded step must make its own casts, since no replay makes those of an earlier step."""
        for unit in self.units.values():
            unit.forget_casts()

    def complete_grads(self) -> None:
        """After all reduces of a step: zero the gradients that no op has written."""
        for unit in self.units.values():
            unit.complete()

    def sum_shared_grads(self) -> None:
        """Sum gradients of parameters shared by tensor-parallel ranks, in rank order, once a step.

        Each rank has the sum over its own tokens or query heads.
        """
        group, at = self.groups.tp, self.tensors
        pieces = [piece for unit in self.units.values() for piece in unit.pieces() if piece.shared > 1]
        if not pieces:
            return
        counts = sorted({piece.shared for piece in pieces})
        grads = [[piece.grad for piece in pieces if piece.shared == count] for count in counts]
        mine = torch.cat([grad for some in grads for grad in some])
        every = mine.new_empty(group.size * mine.numel())
        group.all_gather(every, mine).wait()
        parts = every.view(group.size, -1).split([sum(grad.numel() for grad in some) for some in grads], 1)
        for count, some, part_PN in zip(counts, grads, parts, strict=True):
            first = at.rank // count * count
            total = torch.empty_like(part_PN[0])
            local_sum(part_PN[first : first + count].contiguous(), total, 1.0, add=False)
            torch._foreach_copy_(some, list(total.split([grad.numel() for grad in some])))

    def forget_grads(self) -> None:
        """At the end of a step: free the reduced gradients, unless held."""
        if self.held:
            return
        for unit in self.units.values():
            unit.forget_grads()

    def rest_grads(self) -> None:
        """At the end of a step whose updates run in the next one."""
        for unit in self.units.values():
            unit.rest_grads(self.held)

    def let_grads_go(self) -> None:
        """A recording that held gradients is dropped."""
        self.held = False
        for unit in self.units.values():
            unit.let_grads_go()

    def assert_clean(self) -> None:
        """Assert that a step left no slot in use, no gradient, and nothing in flight."""
        for unit in self.units.values():
            unit.assert_idle()
        for slots in (*self.weight_slots.values(), *self.grad_slots.values()):
            held = {i: str(holder) for i, holder in enumerate(slots.holders) if holder is not None}
            assert not held, f"{slots.name} slots still in use: {held}"

    def abort(self) -> None:
        """After an exception in a step: forget gathered weights and gradients, so that a new step can begin.

        Weights and optimizer state stay. Peers must abort the same step; collectives in flight are not cancelled.
        """
        for unit in self.units.values():
            unit.abort()
        for slots in (*self.weight_slots.values(), *self.grad_slots.values()):
            slots.holders = [None] * len(slots)


def _members(chunks: Sequence[nn.Module], tied: bool) -> dict[UnitName, list[Member]]:
    """The parameters of every unit, in the modules' order, each once."""
    members: dict[UnitName, list[Member]] = {}
    seen = set[int]()
    for chunk, module in enumerate(chunks):
        for name, param in module.named_parameters():
            if id(param) in seen:  # a tied embedding and head
                continue
            seen.add(id(param))
            unit = unit_of(name, chunk, tied)
            members.setdefault(unit, []).append(Member(name, param))
    return members
