"""The sharded model of one rank: its units and their slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hocket.fsdp.layout import FlatLayout
from hocket.fsdp.storage import Slots
from hocket.fsdp.unit import ShardedUnit, UnitSharding
from hocket.parallel.mesh import Mesh
from hocket.plan.ops import UNITS, Program
from hocket.plan.ops import Unit as UnitKind
from hocket.plan.values import UnitName
from hocket.runtime.comm import Groups
from hocket.runtime.weights import Weight, manage


def unit_of(name: str, chunk: int, tied: bool = False) -> UnitName:
    """The unit to which a parameter belongs, by its name in the whole model. Tied, the head is part of `embed`."""
    first, *rest = name.split(".")
    if first == "embed" or (first == "head" and tied):
        return "embed", chunk, -1
    if first == "head":
        return "head", chunk, -1
    assert first == "layers", f"no unit for parameter {name}"
    return ("experts" if rest[1] == "experts" else "dense"), chunk, int(rest[0])


@dataclass(frozen=True)
class Stats:
    """Counters since the start, and sizes in bytes."""

    gathers: int
    reduces: int
    gathered_bytes: int
    """Sent by this rank; so are `reduced_bytes`."""
    reduced_bytes: int
    weight_slot_bytes: int
    grad_slot_bytes: int
    shard_bytes: int


class ShardedModel:
    """Takes the parameters of a rank's chunks under management and shards them, as a program needs it.

    `chunks` are this rank's virtual stages, in order; their parameters are named as in the whole model, and only their
    shapes are used (the meta device will do). Weights are zero until `load`.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        groups: Groups,
        program: Program,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.groups = groups
        members = _members(chunks, program.layout.tied)
        self.weight_slots: dict[UnitKind, Slots] = {}
        self.grad_slots: dict[UnitKind, Slots] = {}
        self.units: dict[UnitName, ShardedUnit] = {}
        for kind in UNITS:
            alike = {name: weights for name, weights in members.items() if name[0] == kind}
            if not alike:
                continue
            sharding = self._sharding(kind, list(alike.values()), mesh, program, (dtype, device))
            for name, weights in alike.items():
                self.units[name] = ShardedUnit(kind, name[2], weights, sharding)
        self._owners = {weight: unit for unit in self.units.values() for weight in unit.weights}

    def _sharding(
        self,
        kind: UnitKind,
        members: Sequence[Sequence[Weight]],
        mesh: Mesh,
        program: Program,
        numbers: tuple[torch.dtype, torch.device],
    ) -> UnitSharding:
        """Allocate the slots of a class of units, as long as its largest unit on this rank."""
        dtype, device = numbers
        experts = kind == "experts"
        gather = self.groups.gather_experts if experts else self.groups.gather_dense
        reduce = self.groups.reduce_experts if experts else self.groups.reduce_dense
        length = max(FlatLayout.build([(w.name, tuple(w.shape)) for w in ws], gather.size).total for ws in members)
        if gather.size > 1:
            count = program.weight_slots.get(kind, 0)
            assert count, f"the program has no weight slots for {kind} units, which {gather.size} ranks share"
            self.weight_slots[kind] = Slots(f"{kind} weight", count, length, dtype, device)
        self.grad_slots[kind] = Slots(f"{kind} gradient", program.grad_slots.get(kind, 0), length, dtype, device)
        return UnitSharding(
            gather=gather,
            reduce=reduce,
            weight_slots=self.weight_slots.get(kind),
            grad_slots=self.grad_slots[kind],
            dtype=dtype,
            device=device,
            divide=mesh.dp,
            expert_parallel=(self.groups.a2a.rank, mesh.ep) if experts else (0, 1),
        )

    def unit(self, kind: UnitKind, chunk: int, layer: int = -1) -> ShardedUnit:
        """The unit of a class in a chunk; embed and head have layer -1."""
        return self.units[kind, chunk, layer]

    def owner(self, weight: Weight) -> ShardedUnit:
        """The unit that holds a weight."""
        return self._owners[weight]

    def load(self, source: Callable[[str], Tensor] | Mapping[str, Tensor]) -> None:
        """Take the initial weights by name, one parameter at a time; see `ShardedUnit.load`."""
        find = source.__getitem__ if isinstance(source, Mapping) else source
        for unit in self.units.values():
            unit.load(find)

    def refresh(self) -> None:
        """After the optimizer: cast all weights to the compute dtype; their version grows."""
        for unit in self.units.values():
            unit.refresh()

    def drop_grads(self) -> None:
        """Zero the reduced gradients that the optimizer would have read."""
        torch._foreach_zero_([unit.main_grad for unit in self.units.values()])

    def stats(self) -> Stats:
        """What was communicated since the start, and what is allocated."""
        gather = [self.groups.gather_dense, self.groups.gather_experts]
        reduce = [self.groups.reduce_dense, self.groups.reduce_experts]
        return Stats(
            gathers=sum(group.calls["all_gather"] for group in gather),
            reduces=sum(group.calls["reduce_sum"] for group in reduce),
            gathered_bytes=sum(group.sent_bytes for group in gather),
            reduced_bytes=sum(group.sent_bytes for group in reduce),
            weight_slot_bytes=sum(slots.nbytes for slots in self.weight_slots.values()),
            grad_slot_bytes=sum(slots.nbytes for slots in self.grad_slots.values()),
            shard_bytes=sum(unit.nbytes for unit in self.units.values()),
        )

    def assert_clean(self) -> None:
        """Assert that a step left nothing behind: no slot in use, nothing under way."""
        for unit in self.units.values():
            unit.assert_idle()
        for slots in (*self.weight_slots.values(), *self.grad_slots.values()):
            held = {i: str(holder) for i, holder in enumerate(slots.holders) if holder is not None}
            assert not held, f"{slots.name} slots still in use: {held}"

    def abort(self) -> None:
        """After an exception inside a step: forget gathered weights and gradients, so that a new step can begin.

        Weights and optimizer state stay. Peers must abort the same step; collectives under way are not recalled.
        """
        for unit in self.units.values():
            unit.abort()
        for slots in (*self.weight_slots.values(), *self.grad_slots.values()):
            slots.holders = [None] * len(slots)


def _members(chunks: Sequence[nn.Module], tied: bool) -> dict[UnitName, list[Weight]]:
    """The weights of every unit, in the order of the modules' parameters."""
    members: dict[UnitName, list[Weight]] = {}
    for chunk, module in enumerate(chunks):
        for name, param in module.named_parameters():  # once each, also where two modules share one
            members.setdefault(unit_of(name, chunk, tied), []).append(manage(param, name))
    return members
