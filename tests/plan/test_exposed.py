"""Exposed time of merged 1F1B against the published table, by exact arithmetic on programs of the real lowering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest

from hocket.config import Config
from hocket.predict.simulate import Time, simulate
from hocket.program.connect import connect
from hocket.program.lower import build_program, choose_order
from hocket.program.ops import Layout, Op, Program
from hocket.program.pipeline import Step
from hocket.program.shard import Sharding
from tests.helpers.costs import Table, published
from tests.helpers.plans import planned

MOE = Layout(kinds=("moe",) * 16, pp=4, chunks=2, ep=2)
P2P = ("0.3", "0.6", "1.5", "3.0")
COMPUTE = 12  # of the two layers of a chunk, forward and backward


def tenths(p2p: str, fold: bool = False) -> Table:
    """The published costs, ten times as large: exact and whole, and whole numbers are added up fastest."""
    times = {key: 10 * value for key, value in published(Fraction(p2p), fold).items()}
    assert all(value == int(value) for value in times.values())
    return Table({key: int(value) for key, value in times.items()})


@dataclass(frozen=True)
class Model:
    """What the published model does otherwise than a hocket plan, each a small change of a program.

    `classic` has all-to-alls on the compute lane; otherwise unpermute belongs to them. `joined`: at the start of a
    step all lanes wait for both receives, or with `wait_at_reader` the compute lane for the forward's alone; at its
    end the compute lane waits for the all-to-alls. `early` posts receives long before. `atomic` sends only once the
    whole step is done.
    """

    classic: bool = False
    joined: bool = True
    wait_at_reader: bool = False
    early: bool = False
    atomic: bool = False

    def relane(self, op: Op) -> Op:
        lane = op.lane
        if self.classic and lane == "a2a":
            lane = "compute"
        elif not self.classic and op.part == "unpermute":
            lane = "a2a"
        return op._replace(lane=lane, deps=(), frees=())

    def apply(self, built: Program, order: tuple[tuple[Step, ...], ...]) -> Program:
        """The changed program."""
        kept = [[self.relane(op) for op in ops if op.verb not in ("reduce", "step")] for ops in built.ranks]
        ranks = []
        for rank, ops in enumerate(map(list, connect(kept, built.layout))):
            self.post(ops)
            if self.joined and not self.classic:
                self.join(ops, steps_of(ops, order[rank]))
            ranks.append(tuple(ops))
        return replace(built, ranks=tuple(ranks))

    def post(self, ops: list[Op]) -> None:
        """Post a receive with what is sent before it, whichever lane that is made on."""
        made: dict[str, int] = {}
        for position, op in enumerate(ops):
            if op.verb in ("fwd", "bwd") and op.layer >= 0:
                made["act" if op.verb == "fwd" else "grad"] = position
            elif op.verb == "recv":
                posted = op.part in made and not self.early
                ops[position] = op._replace(deps=(made[op.part],) if posted else ())

    def join(self, ops: list[Op], steps: list[int]) -> None:
        received: dict[int, list[int]] = {}
        last: dict[int, dict[str, int]] = {}
        first: dict[tuple[int, str], int] = {}
        for position, (op, step) in enumerate(zip(ops, steps, strict=True)):
            if op.verb == "recv":
                received.setdefault(step, []).append(position)
            elif op.lane in ("compute", "a2a"):
                last.setdefault(step, {})[op.lane] = position
                first.setdefault((step, op.lane), position)
        for (step, lane), position in first.items():
            extra = list(received.get(step, ()))
            if self.wait_at_reader:
                extra = [p for p in extra if ops[p].part == "act" and lane == "compute"]
            if lane == "compute" and "a2a" in last.get(step - 1, {}):
                extra.append(last[step - 1]["a2a"])
            ops[position] = ops[position]._replace(deps=tuple({*ops[position].deps, *extra}))
        for position, (op, step) in enumerate(zip(ops, steps, strict=True)):
            if self.atomic and op.verb == "send":
                ops[position] = op._replace(deps=tuple({*op.deps, *last[step].values()}))


def steps_of(ops: Sequence[Op], order: tuple[Step, ...]) -> list[int]:
    """The step that each op belongs to; a receive belongs to the step that reads it."""
    forward = {step.fwd: k for k, step in enumerate(order) if step.fwd}
    backward = {step.bwd: k for k, step in enumerate(order) if step.bwd}
    return [
        (forward if op.verb == "fwd" or op.part == "act" else backward)[op.microbatch, op.chunk]
        if op.microbatch >= 0 and op.verb not in ("gather", "release")
        else -1
        for op in ops
    ]


def step_periods(
    layout: Layout, microbatches: int, config: Config, model: Model | None, costs: Sequence[Table]
) -> list[Fraction]:
    """For each cost table: mean time of a merged step of the last rank (classic: of an F and a B) in steady state."""
    order, _ = choose_order(layout, microbatches, config)
    built = build_program(layout, microbatches, config, Sharding())
    if model is not None:
        built = model.apply(built, order)
    ops, mine = built.ranks[-1], order[-1]
    steps = steps_of(ops, mine)
    apart = config.overlap.ep.merge == "off"
    steady = [k for k, step in enumerate(mine) if step.bwd and (step.fwd or (apart and mine[k - 1].fwd))]
    first, final = steady[len(steady) // 3], steady[2 * len(steady) // 3]
    count = steady.index(final) - steady.index(first)
    periods = []
    for table in costs:
        ends: dict[int, Time] = {}
        for span, op, step in zip(simulate(built, table).spans[-1], ops, steps, strict=True):
            if op.lane in ("compute", "a2a"):
                ends[step] = max(ends.get(step, 0), span.end)
        periods.append(Fraction(ends[final] - ends[first]) / count)
    return periods


PLAN = planned(order="interleaved", chunks=2, merge="on", defer_wgrad="on")
READER = Model(wait_at_reader=True)
EARLY = Model(wait_at_reader=True, early=True)
ROWS: list[tuple[str, dict[str, Any], Model, int, tuple[str, ...]]] = [
    ("A", {"merge": "off", "defer_wgrad": "off"}, Model(classic=True), 32, ("5.60", "5.60", "5.60", "5.60")),
    ("B", {"defer_layers": 0}, Model(), 32, ("0.36", "0.67", "1.57", "3.07")),
    ("C", {}, Model(), 32, ("0", "0", "0.83", "2.33")),
    ("F", {"defer_layers": "attn:2"}, Model(), 32, ("0", "0", "0.12", "1.63")),
    ("G", {"defer_layers": 1}, Model(), 32, ("0", "0", "0", "1.33")),
    ("H", {"defer_layers": 2}, Model(), 32, ("0", "0", "0", "0")),
    ("J", {}, READER, 32, ("0", "0", "0.52", "2.02")),
    ("J, no join", {}, Model(joined=False), 32, ("0", "0", "0.52", "2.02")),
    ("K", {"defer_layers": 1}, READER, 32, ("0", "0", "0", "1.02")),
    ("N", {"group": 8}, EARLY, 32, ("0", "0", "0.35", "1.85")),
]
"""Row of the table, changes of the plan, changes of the program, microbatches, exposed time for each p2p transfer."""


@pytest.mark.parametrize(("row", "changes", "model", "microbatches", "expected"), ROWS, ids=[row[0] for row in ROWS])
def test_exposed_time_per_steady_step_is_the_published_one(
    row: str, changes: dict[str, Any], model: Model, microbatches: int, expected: tuple[str, ...]
) -> None:
    costs = [tenths(p2p, fold=row == "B") for p2p in P2P]
    periods = step_periods(MOE, microbatches, planned(PLAN, **changes), model, costs)
    for period, text in zip(periods, expected, strict=True):
        assert abs(period / 10 - COMPUTE - Fraction(text)) <= Fraction(1, 200)  # the table has two decimals


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("0", "0", "0.80", "2.30")),
        ({"defer_layers": 1}, ("0", "0", "0", "1.30")),
        ({"defer_layers": -1}, ("0", "0", "0", "0")),
    ],
)
def test_plans_as_they_are_expose_no_more_than_the_row_they_resemble(
    changes: dict[str, Any], expected: tuple[str, ...]
) -> None:
    """The first reader of a received gradient is unpermute's backward. It heads the step on the compute lane, so these
    programs come out like rows C, G and H; J needs it off that lane."""
    periods = step_periods(MOE, 32, planned(PLAN, **changes), None, [tenths(p2p) for p2p in P2P])
    assert [period / 10 for period in periods] == [COMPUTE + Fraction(text) for text in expected]


@pytest.mark.parametrize(
    ("pp", "chunks", "group", "p2p"),
    [(2, 2, 2, "0.3"), (4, 2, 4, "0.5"), (4, 2, 8, "0.1"), (2, 4, 3, "0.5"), (6, 2, 9, "0.5")],
)
def test_steady_period_is_the_largest_cycle_ratio(pp: int, chunks: int, group: int, p2p: str) -> None:
    """Atomic merged steps of length T with p2p transfers of length c: a ring of dependencies bounds the period."""
    c, t = Fraction(p2p), Fraction(1)
    layout = Layout(kinds=("moe",) * pp * chunks, pp=pp, chunks=chunks, ep=2)
    plan = planned(PLAN, chunks=chunks, group=group, defer_layers=0)
    half = {("fwd", "experts"): t / 2, ("bwd", "experts"): t / 2, ("recv", "act"): c, ("recv", "grad"): c}
    (period,) = step_periods(
        layout, 4 * group + 24 // group * group, plan, Model(early=True, atomic=True), [Table(half)]
    )
    wrap = 2 * group - 2 * (pp - 1)
    bound = max(t, t + c, pp * (t + c) / group, 2 * (t + c) / wrap)
    assert abs(period - bound) <= bound / 50  # the window need not hold whole periods
