"""Units, groups and memory of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from hocket.config import Purpose
from hocket.explain.explanation import GroupRow, MemoryRow, OptimizerRow, UnitRow
from hocket.explain.predicted import Step
from hocket.program.cost import unit_weights, units_of
from hocket.program.hardware import hardware_of
from hocket.program.mesh import P2P, PURPOSES, most_sms, mover_of
from hocket.program.ops import UNITS
from hocket.program.shard import ALIGN
from hocket.program.stages import layout_of, mesh_of, sharding_of
from hocket.program.tensor_costs import model_of_rank
from hocket.resolve import Settings
from hocket.settings.arrivals import arrival_bytes, by_pieces
from hocket.settings.rules import has_experts
from hocket.settings.weight_groups import samples, weight_groups

LANES: dict[str, tuple[str, ...]] = {
    "gather_dense": ("gather",), "gather_experts": ("gather",), "reduce_dense": ("reduce",),
    "reduce_experts": ("reduce",), "replicas": ("reduce",), "a2a": ("a2a",), "tp": ("compute",), "cp": ("cp",),
    "pp_fwd": ("send_act", "recv_act"), "pp_bwd": ("send_grad", "recv_grad"), "control": (),
}  # fmt: skip
"""Purpose of a group -> lanes of the plan that use it."""


def units(settings: Settings) -> tuple[UnitRow, ...]:
    """All kinds of units. Layers with and without a window have the same."""
    layout, sharding, model, mesh = layout_of(settings), sharding_of(settings), model_of_rank(settings), settings.mesh
    found = Counter(each for rank in range(layout.pp) for each in units_of(layout, rank))
    rows: list[UnitRow] = []
    for unit, kind in sorted(found, key=lambda key: (UNITS.index(key[0]), key[1])):
        elements, members = unit_weights(model, layout, unit, kind), sharding.size(unit)
        padded = -(-elements // (members * ALIGN)) * members * ALIGN
        others = ", all but its experts" if ("experts", kind) in found else ""
        name = f"layer{others}" if unit == "dense" else unit
        axis = "ep" if unit == "experts" else "tp"
        row = UnitRow(
            unit=f"{name} of one {axis} rank" if getattr(mesh, axis) > 1 else name,
            count=found[unit, kind],
            elements=elements,
            padding=1 - elements / padded if members > 1 else 0.0,
            members=members,
            nbytes=elements * settings.element_bytes,
        )
        if rows and replace(rows[-1], count=row.count) == row:
            rows[-1] = replace(row, count=row.count + rows[-1].count)
        else:
            rows.append(row)
    return tuple(rows)


def optimizer(settings: Settings) -> tuple[OptimizerRow, ...]:
    """All weights, by what the optimizer does with them."""
    from hocket.model.source import parameter_shapes  # imports torch

    return tuple(
        OptimizerRow(
            what=group.why,
            count=len(group.names),
            elements=group.elements,
            decay=group.decay,
            names=" ".join(samples(group.names)),
        )
        for group in weight_groups(settings, parameter_shapes(settings.model))
    )


def groups(settings: Settings) -> tuple[GroupRow, ...]:
    """All process groups with more than one member, by purpose, in the order in which they are made."""
    return tuple(_groups(settings))


def _groups(settings: Settings) -> Iterator[GroupRow]:
    mesh = mesh_of(settings)
    for purpose in PURPOSES:
        members = settings.mesh.members(purpose)
        if members == 1:
            continue
        count = len(mesh.edges) * mesh.data * mesh.tp if purpose in P2P else settings.world // members
        used = has_experts(settings) or not purpose.endswith("_experts")
        moved, lanes = _moved_by(settings, purpose), LANES.get(purpose, ()) if used else ()
        yield GroupRow(purpose=purpose, members=members, count=count, lanes=lanes, moved_by=moved)


def _moved_by(settings: Settings, purpose: Purpose) -> str:
    on_gpu, placed = settings.train.device == "cuda", settings.overlap.ep.splits == "device"
    return {
        "nothing": "nothing: it only pretends to",
        "gloo": "gloo",
        "nccl": f"NCCL, at most {most_sms(purpose)} SMs",
        "copies": "copy engines, no SM",
        "pieces": f"copy engines, piece by piece; else NCCL, at most {most_sms(purpose)} SMs",
        "kernels": "kernels that store into the peers' memory",
    }[mover_of(purpose, settings.train.transport, on_gpu, placed, by_pieces(settings))]


def memory(settings: Settings, step: Step | None) -> tuple[MemoryRow, ...]:
    """What pipeline ranks hold; nothing of a step that was not simulated."""
    if step is None:
        return ()
    room, arrivals = hardware_of(settings).memory, arrival_bytes(settings)
    rows = []
    for rank, peak in enumerate(step.peaks):
        state = step.costs.state_bytes[rank]
        slots = step.costs.fixed_bytes(step.program, rank) - state
        fits = not room or peak + arrivals <= room
        rows.append(MemoryRow(rank=rank, state=state, slots=slots, peak=peak, arrivals=arrivals, fits=fits))
    return tuple(rows)
