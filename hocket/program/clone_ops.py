"""The pass of cloned experts: where the weights of clones come from their owners, and their gradients go back.

Each rank has room for `Layout.clones` clones behind its own experts, in the slots of their weights and gradients. Which
experts are cloned is no matter of the plan: it changes from step to step (`cloning.py`), and ops stay.

Note: [Clones are gathered behind their owners]
A `clone` stands right behind each gather of a layer's experts, on the same lane. So it finds the owners' weights, and
its slot is safe: readers wait for the clone, the release waits for them, and the slot's next gather for the release.
Where experts are held whole there are no gathers, and one clone serves a step. It stands one layer ahead of its first
reader, behind the unit's update if there is one.

Note: [Gradients come home before they are reduced]
A `home` sends the gradients of clones to the owners of the experts, who add them to their own. It stands right in front
of the reduce, on the same lane. Where each rank has its own experts, gradients of all microbatches are added up at
rest, and one home serves a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hocket.program.ops import Layout, Op
from hocket.program.shard import Inserted, Sharding, put_in
from hocket.program.values import UnitName, meanings, unit_moved

CLONED = "experts"
"""The class of units that has clones."""


def with_clones(ops: Sequence[Op], layout: Layout, rank: int, sharding: Sharding) -> tuple[Op, ...]:
    """A rank's ops with a clone for each residency of a layer's experts, and homes in front of reduces."""
    before: Inserted = defaultdict(list)
    behind: Inserted = defaultdict(list)
    if sharding.gathers(CLONED):
        for i, op in enumerate(ops):
            if (op.verb, op.part) == ("gather", CLONED):
                behind[i].append(Op("clone", CLONED, op.microbatch, op.chunk, op.layer, "gather", op.slot))
    else:
        _once(ops, layout, rank, before, behind)
    reduces = {i: unit_moved(op) for i, op in enumerate(ops) if (op.verb, op.part) == ("reduce", CLONED)}
    if sharding.size(CLONED) == 1:
        reduces = {i: unit for unit, i in {unit: i for i, unit in reduces.items()}.items()}  # the last of each unit
    for i in reduces:
        before[i].append(ops[i]._replace(verb="home"))
    return tuple(put_in(ops, before, behind))


def _once(ops: Sequence[Op], layout: Layout, rank: int, before: Inserted, behind: Inserted) -> None:
    """One clone for each unit that is held whole: see Note: [Clones are gathered behind their owners]."""
    known = meanings(layout, rank)
    first: dict[UnitName, int] = {}
    for i, op in enumerate(ops):
        unit = known.of(op).unit_read
        if unit is not None and unit[0] == CLONED:
            first.setdefault(unit, i)
    updates = {unit_moved(op): i for i, op in enumerate(ops) if op.verb == "update"}
    ahead = 0
    for unit, reader in first.items():
        clone = Op("clone", CLONED, 0, *unit[1:], "gather")
        if unit in updates:
            behind[updates[unit]].append(clone)
        else:
            before[ahead].append(clone)
        ahead = reader
