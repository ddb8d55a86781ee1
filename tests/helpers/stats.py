"""What a planned model has sent and keeps."""

from dataclasses import dataclass

from hocket.fsdp.planned.model import PlannedModel
from hocket.fsdp.planned.unit import PlannedUnit


@dataclass(frozen=True)
class Stats:
    """Counters since the start, and sizes in bytes."""

    gathers: int
    reduces: int
    gathered_bytes: int
    """Sent by this rank, as are `reduced_bytes`."""
    reduced_bytes: int
    weight_slot_bytes: int
    grad_slot_bytes: int
    shard_bytes: int
    """Main weights, copies held whole, current gradients and their sums."""


def sum_bytes(unit: PlannedUnit) -> int:
    """Bytes of a step's whole gradients, if separate from the gradients at rest."""
    return 0 if unit._sum is None or unit._sum is unit.group.grads.flat else unit._sum.nbytes


def stats_of(model: PlannedModel) -> Stats:
    gather = [model.groups.gather_dense, model.groups.gather_experts]
    reduce = [model.groups.reduce_dense, model.groups.reduce_experts]
    return Stats(
        gathers=sum(group.calls["all_gather"] for group in gather),
        reduces=sum(group.calls["reduce_sum"] + group.calls["all_sum"] for group in reduce),
        gathered_bytes=sum(group.sent_bytes for group in gather),
        reduced_bytes=sum(group.sent_bytes for group in (*reduce, model.groups.replicas)),
        weight_slot_bytes=sum(slots.nbytes for slots in model.weight_slots.values()),
        grad_slot_bytes=sum(slots.nbytes for slots in model.grad_slots.values()),
        shard_bytes=sum(unit.group.nbytes + sum_bytes(unit) for unit in model.units.values())
        + sum(fp8.nbytes for fp8 in model._fp8),
    )
