"""The merged V: small orders written out, legality, what it holds, and the bubble beside merged interleaved 1F1B."""

from __future__ import annotations

from itertools import product

import pytest

from hocket.predict.simulate import simulate
from hocket.program.check import assert_valid
from hocket.program.lower import build_program
from hocket.program.ops import Layout, Program
from hocket.program.pipeline import TRANSFORMER, in_flight, merged_v
from hocket.program.shard import Sharding
from tests.helpers.costs import Table
from tests.helpers.plans import merged_share, planned

SIZES = tuple((pp, microbatches) for pp in range(2, 9) for microbatches in (2 * pp, 2 * pp + 1, 4 * pp, 5 * pp + 3))
COSTS = {(verb, "mlp"): seconds for verb, seconds in TRANSFORMER._asdict().items()}


def build(pp: int, microbatches: int, order: str, kinds: tuple[str, ...] = ("dense",), ep: int = 1) -> Program:
    turning = order == "merged_v"
    layout = Layout(kinds * (2 * pp), pp=pp, chunks=2, ep=ep, turning=turning)  # type: ignore[arg-type]
    plan = planned(order=order, chunks=2, merge="on", defer_wgrad="on", defer_layers=-1)
    return build_program(layout, microbatches, plan, Sharding(2, 1))


def test_a_small_order_written_out() -> None:
    first, last = (" ".join(map(str, steps)) for steps in merged_v(2, 4))
    assert first.startswith("F0.0 F1.0 F2.0 F0.1 [B0.1] W0.1 F1.1 (F3.0|B1.1) (F2.1|B0.0) [B2.1] (F3.1|B1.0)")
    assert first.endswith("(F3.1|B1.0) [B3.1] [B2.0] W2.0 [B3.0] W3.0")
    assert last.startswith("F0.0 F0.1 F1.0 F1.1 F2.0 [B0.1] (F2.1|B0.0) (F3.0|B1.1) (F3.1|B1.0) [B2.1]")
    assert last.endswith("[B2.1] [B2.0] [B3.1] [B3.0] W3.1 W3.0")


def test_every_size_is_complete_and_in_ascending_order() -> None:
    for pp, microbatches in SIZES:
        for steps in merged_v(pp, microbatches):
            for kind in ("fwd", "bwd"):
                items = [getattr(step, kind) for step in steps if getattr(step, kind)]
                assert sorted(items) == sorted(product(range(microbatches), (0, 1)))
                for chunk in (0, 1):
                    mine = [m for m, c in items if c == chunk]
                    assert mine == sorted(mine)
            apart = [step.wgrad for step in steps if step.wgrad]
            assert len(set(apart)) == len(apart)
            assert all(steps.index(next(s for s in steps if s.bwd == item)) < n for n, s in enumerate(steps)
                       if (item := s.wgrad))  # fmt: skip


@pytest.mark.parametrize(("kinds", "ep"), [(("dense",), 1), (("moe", "dense"), 2)])
def test_programs_are_proved(kinds: tuple[str, ...], ep: int) -> None:
    for pp, microbatches in SIZES:
        if pp < 6:
            assert_valid(build(pp, microbatches, "merged_v", kinds, ep))


def test_every_rank_holds_the_same_and_less_than_interleaved() -> None:
    for pp, microbatches in SIZES:
        order = merged_v(pp, microbatches)
        assert {in_flight(steps) for steps in order} == {2 * pp + 1}
        assert all(merged_share(steps) > 0 for steps in order)
        if microbatches == 4 * pp and pp < 6:
            assert max(build(pp, microbatches, "interleaved").in_flight) == 3 * pp


def test_the_bubble_is_shorter_than_that_of_interleaved_1f1b() -> None:
    for pp, microbatches in ((2, 4), (4, 8), (4, 16), (8, 32)):
        v, usual = (simulate(build(pp, microbatches, order), Table(COSTS)) for order in ("merged_v", "interleaved"))
        work = 2 * sum(TRANSFORMER) * microbatches
        assert work < v.makespan
        assert v.makespan - work < 0.85 * (usual.makespan - work), (pp, microbatches)
