"""What a program tells about the ops that it names in its traces.

Any program can: it puts `torch.profiler.record_function("gather block 3")` around an op, and tells once what that is:

    profiler.add_metadata_json("hocket", json.dumps({"plan": {
        "lanes": ["compute", "gather"],
        "computing": ["compute"],
        "ops": {"gather block 3": ["gather", "gather", "dp", 3], "fwd block 3": ["compute", "compute", "", 3]},
    }}))

`lanes` come in the order in which reports show them, and those in `computing` compute. `ops` are those of this rank, by
their whole names: lane, kind (a word of `data.KINDS`), description of the process group, layer (-1: none). The kind of
an op that computes is `compute`, or else that of the communication that goes on inside. The first two words of a name
say what an op does: tables add up ops that agree in them.
"""

from __future__ import annotations

from typing import Any

from hocket_trace.data import KINDS, Plan, PlanOp


def plan_of(told: Any) -> Plan:
    """The plan from what a trace holds of it; an empty one for None. Raises ValueError for anything else."""
    if told is None:
        return Plan()
    try:
        lanes, ops = tuple(told["lanes"]), {name: PlanOp(*row) for name, row in told["ops"].items()}
        plan = Plan(lanes, frozenset(told["computing"]), ops)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__} {error}") from None
    words = [*lanes, *plan.computing, *(word for op in ops.values() for word in (op.lane, op.group))]
    if not all(isinstance(word, str) for word in words) or not plan.computing <= set(lanes):
        raise ValueError("lanes and groups are words, and those that compute are lanes")
    for name, op in ops.items():
        if op.kind not in KINDS or op.lane not in lanes or not isinstance(op.layer, int):
            raise ValueError(f"{name}: {list(op)}")
    return plan
