"""Programs for tests: random ones over all settings, and ways to break one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from hypothesis import strategies as st

from hocket.config import Config
from hocket.predict.simulate import Time, Timeline
from hocket.program.lower import build_program
from hocket.program.ops import Layout, Op, Program
from hocket.program.shard import Sharding
from tests.helpers.plans import planned


@dataclass(frozen=True)
class Case:
    """Everything that a program is made from."""

    layout: Layout
    microbatches: int
    config: Config
    sharding: Sharding

    def build(self) -> Program:
        return build_program(self.layout, self.microbatches, self.config, self.sharding)


def toy(*ranks: list[Op]) -> Program:
    """A program of hand-made ops."""
    layout = Layout(kinds=("moe",) * len(ranks), pp=len(ranks), ep=2)
    return Program(layout, 1, tuple(tuple(ops) for ops in ranks))


def times(timeline: Timeline, rank: int = 0) -> list[tuple[Time, Time]]:
    """Starts and ends of a rank's ops."""
    return [(span.start, span.end) for span in timeline.spans[rank]]


class _Random:
    """Draws from a random.Random with the few calls that `_case` needs."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def among(self, values: Sequence[Any]) -> Any:
        return self._random.choice(values)


class _Drawn:
    """The same from hypothesis."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw

    def among(self, values: Sequence[Any]) -> Any:
        return self._draw(st.sampled_from(values))


def _case(source: Any, most_ranks: int) -> Case:
    among = source.among
    pp, chunks = among(range(1, most_ranks + 1)), among((1, 2, 3))
    sizes = [among((1, 1, 2, 3)) for _ in range(pp * chunks)]
    if pp * chunks > 1:
        sizes[0], sizes[-1] = (among((0, size, size)) for size in (sizes[0], sizes[-1]))
        sizes[0] += not any(sizes)
    layout = Layout(
        kinds=tuple(among(("dense", "moe", "moe")) for _ in range(sum(sizes))),
        pp=pp,
        chunks=chunks,
        ep=among((1, 2)),
        bounds=tuple(sum(sizes[:n]) for n in range(len(sizes) + 1)),
        tied=among((False, True)),
        per_rank=among((False, True)),
        recompute=among(
            (
                (),
                ("attn",),
                ("experts", "mlp"),
                ("attn:1", "experts:2", "mlp"),
                ("dispatch",),
                ("attn", "dispatch:2", "experts:1"),
            )
        ),
    )
    away = among(((), ("attn",), ("attn:2", "experts"), ("experts:1", "mlp")))
    if not {part[:4] for part in away} & {part[:4] for part in layout.recompute} and "dispatch" not in str(layout):
        layout = replace(layout, offload=away)
    layout = replace(layout, placed=not layout.per_rank and among((False, True)))
    layout = replace(layout, uncounted=layout.placed and among((False, True)))
    apart = {1: ("zb_h1",), 2: ("zb_v", "merged_v")}.get(chunks, ())
    order = among(("auto", "sequential", "interleaved", *(("1f1b",) if chunks == 1 else ()), *apart))
    merged_v = order == "merged_v"
    layout = replace(layout, turning=order == "zb_v" or merged_v)
    merge = "auto" if merged_v else "off" if order in apart else among(("auto", "off"))
    ends = among(("off", "on")) if merge == "auto" and not merged_v else "off"
    config = planned(
        order=order,
        chunks=chunks,
        merge=merge,
        merge_ends=ends,
        group=among((0, 2 * pp, 2 * pp + 1, pp)),
        layer_order=among(("literature", "early_release", "wgrad_last", "cB eB aF dB aB dF eF cF uB eW aW uF")),
        defer_wgrad="auto" if order in apart else among(("auto", "off")),
        defer_layers=among((0, 1, 2, -1, "attn:1", "attn:2", "attn")),
        defer_head=among((0, 1, 2, -1)),
        prefetch=among((0, 1, 2, 4)),
    )
    strategy = among(("no_shard", "optim", "optim_grads", "optim_grads_params"))
    fewest = 2 * pp if merged_v else 1
    microbatches, sharding = among(range(fewest, fewest + 8)), Sharding(among((1, 2)), among((1, 2)), strategy)
    sharding = replace(sharding, muon=len(layout.kinds) % 2 == 1)
    updates = among(("end", "next_step"))
    return Case(layout, microbatches, planned(config, update=updates), sharding)


@st.composite
def cases(draw: Any, most_ranks: int = 4) -> Case:
    """Every setting of a plan, over small layouts."""
    return _case(_Drawn(draw), most_ranks)


def sample(count: int, seed: int, most_ranks: int = 4) -> list[Case]:
    """Random cases, the same for the same seed."""
    return [_case(_Random(seed * 10_000 + n), most_ranks) for n in range(count)]


@cache
def short_programs() -> list[tuple[Case, Program]]:
    """The shortest of a sample: short ones have all that long ones have."""
    return sorted(((case, case.build()) for case in sample(16, seed=5)), key=lambda found: len(found[1]))[:8]


def find(program: Program, rank: int, name: str) -> int:
    """Position of the first op whose short name starts with `name`."""
    return next(p for p, op in enumerate(program.ranks[rank]) if str(op).startswith(name))


def with_rank(program: Program, rank: int, ops: Sequence[Op]) -> Program:
    return replace(program, ranks=(*program.ranks[:rank], tuple(ops), *program.ranks[rank + 1 :]))


def with_op(program: Program, rank: int, position: int, **changes: Any) -> Program:
    """The program with some fields of one op changed."""
    ops = list(program.ranks[rank])
    ops[position] = ops[position]._replace(**changes)
    return with_rank(program, rank, ops)


def reordered(program: Program, rank: int, order: Sequence[int]) -> Program:
    """The program with a rank's ops in a new order, some perhaps left out; positions in deps and frees follow."""
    new = {old: position for position, old in enumerate(order)}
    ops = [
        program.ranks[rank][old]._replace(
            deps=tuple(new[p] for p in program.ranks[rank][old].deps if p in new),
            frees=tuple(new[p] for p in program.ranks[rank][old].frees if p in new),
            trims=tuple(new[p] for p in program.ranks[rank][old].trims if p in new),
        )
        for old in order
    ]
    return with_rank(program, rank, ops)


def without(program: Program, rank: int, position: int) -> Program:
    return reordered(program, rank, [p for p in range(len(program.ranks[rank])) if p != position])


def moved(program: Program, rank: int, position: int, to: int) -> Program:
    """The program with the op at `position` moved right before the op that is at `to` now."""
    order = [p for p in range(len(program.ranks[rank])) if p != position]
    order.insert(order.index(to), position)
    return reordered(program, rank, order)


def swapped(program: Program, rank: int, a: int, b: int) -> Program:
    """The program with two ops in each other's place; deps and frees stay with the places."""
    ops = list(program.ranks[rank])
    first, second = ops[a], ops[b]
    ops[a] = second._replace(deps=first.deps, frees=first.frees, trims=first.trims)
    ops[b] = first._replace(deps=second.deps, frees=second.frees, trims=second.trims)
    return with_rank(program, rank, ops)
