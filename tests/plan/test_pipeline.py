"""Orders of microbatches: the published tables, the closed formulas, and legality by exhaustion."""

import itertools

import pytest

from hocket.program.pipeline import Order, groups, in_flight, one_f_one_b, sequential, warmup
from tests.helpers.plans import merged_share

PP2 = """
F0.0 F1.0 F0.1 F1.1 F2.0 (F3.0|B0.1) (F2.1|B1.1) (F3.1|B0.0) (F4.0|B1.0) (F5.0|B2.1) (F4.1|B3.1) (F5.1|B2.0) (F6.0|B3.0) (F7.0|B4.1) (F6.1|B5.1) (F7.1|B4.0) [B5.0] [B6.1] [B7.1] [B6.0] [B7.0]
F0.0 F1.0 F0.1 (F1.1|B0.1) (F2.0|B1.1) (F3.0|B0.0) (F2.1|B1.0) (F3.1|B2.1) (F4.0|B3.1) (F5.0|B2.0) (F4.1|B3.0) (F5.1|B4.1) (F6.0|B5.1) (F7.0|B4.0) (F6.1|B5.0) (F7.1|B6.1) [B7.1] [B6.0] [B7.0]
"""  # noqa: E501
PP4 = """
F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 F3.1 F4.0 F5.0 F6.0 (F7.0|B0.1) (F4.1|B1.1) (F5.1|B2.1) (F6.1|B3.1) (F7.1|B0.0) [B1.0] [B2.0] [B3.0] [B4.1] [B5.1] [B6.1] [B7.1] [B4.0] [B5.0] [B6.0] [B7.0]
F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 F3.1 F4.0 (F5.0|B0.1) (F6.0|B1.1) (F7.0|B2.1) (F4.1|B3.1) (F5.1|B0.0) (F6.1|B1.0) (F7.1|B2.0) [B3.0] [B4.1] [B5.1] [B6.1] [B7.1] [B4.0] [B5.0] [B6.0] [B7.0]
F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 (F3.1|B0.1) (F4.0|B1.1) (F5.0|B2.1) (F6.0|B3.1) (F7.0|B0.0) (F4.1|B1.0) (F5.1|B2.0) (F6.1|B3.0) (F7.1|B4.1) [B5.1] [B6.1] [B7.1] [B4.0] [B5.0] [B6.0] [B7.0]
F0.0 F1.0 F2.0 F3.0 F0.1 (F1.1|B0.1) (F2.1|B1.1) (F3.1|B2.1) (F4.0|B3.1) (F5.0|B0.0) (F6.0|B1.0) (F7.0|B2.0) (F4.1|B3.0) (F5.1|B4.1) (F6.1|B5.1) (F7.1|B6.1) [B7.1] [B4.0] [B5.0] [B6.0] [B7.0]
"""  # noqa: E501


def text(order: Order) -> str:
    return "\n" + "\n".join(" ".join(map(str, steps)) for steps in order) + "\n"


def length(order: Order, chunks: int) -> int | None:
    """Chunk steps until all is done if every step is atomic and takes one; None if the order deadlocks."""
    pp = len(order)
    done: dict[tuple, int] = {}
    clock, at = [0] * pp, [0] * pp
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(order):
            while at[rank] < len(steps):
                step = steps[at[rank]]
                needs = []
                if step.fwd:
                    m, c = step.fwd
                    if (rank, c) != (0, 0):
                        needs.append(("F", (rank - 1) % pp, m, c if rank else c - 1))
                if step.bwd:
                    m, c = step.bwd
                    needs.append(("F", rank, m, c))
                    if (rank, c) != (pp - 1, chunks - 1):
                        needs.append(("B", (rank + 1) % pp, m, c if rank < pp - 1 else c + 1))
                if any(need not in done for need in needs):
                    break
                clock[rank] = max([clock[rank], *(done[need] for need in needs)]) + 1
                if step.fwd:
                    done["F", rank, *step.fwd] = clock[rank]
                if step.bwd:
                    done["B", rank, *step.bwd] = clock[rank]
                at[rank] += 1
                moved = True
    return max(clock) if all(at[r] == len(order[r]) for r in range(pp)) else None


def test_published_tables() -> None:
    assert text(one_f_one_b(2, 2, 8)) == PP2
    assert text(one_f_one_b(4, 2, 8)) == PP4
    assert [in_flight(steps) for steps in one_f_one_b(2, 2, 8)] == [6, 4]
    assert [in_flight(steps) for steps in one_f_one_b(4, 2, 8)] == [12, 10, 8, 6]


def test_no_pipelining_merges_neighbours() -> None:
    assert text(one_f_one_b(1, 1, 4)) == "\nF0.0 (F1.0|B0.0) (F2.0|B1.0) (F3.0|B2.0) [B3.0]\n"


def test_classic_1f1b() -> None:
    assert text(one_f_one_b(2, 1, 3, merge=False)) == (
        "\nF0.0 F1.0 [B0.0] F2.0 [B1.0] [B2.0]\nF0.0 [B0.0] F1.0 [B1.0] F2.0 [B2.0]\n"
    )


def test_sequential_finishes_each_microbatch() -> None:
    for steps in sequential(2, 2, 2):
        assert " ".join(map(str, steps)) == "F0.0 F0.1 [B0.1] [B0.0] F1.0 F1.1 [B1.1] [B1.0]"


@pytest.mark.parametrize(
    ("pp", "chunks", "group", "microbatches"), [(2, 2, 2, 8), (4, 2, 4, 8), (4, 2, 4, 32), (8, 4, 8, 32)]
)
def test_closed_formulas(pp: int, chunks: int, group: int, microbatches: int) -> None:
    order = one_f_one_b(pp, chunks, microbatches, group=group)
    for rank, steps in enumerate(order):
        warm = min(microbatches * chunks, 2 * (pp - 1 - rank) + (chunks - 1) * group + 1)
        assert warm == warmup(pp, chunks, microbatches, group, rank, merge=True)
        merged = sum(step.fwd is not None and step.bwd is not None for step in steps)
        assert (len(steps) - merged) // 2 == warm
        assert merged == microbatches * chunks - warm
        assert in_flight(steps) == warm + (merged > 0)
        assert merged_share(steps) == merged / (microbatches * chunks)
    assert length(order, chunks) == microbatches * chunks + warmup(pp, chunks, microbatches, group, 0, merge=True)


def test_coverage_of_the_first_rank() -> None:
    shares = [round(100 * merged_share(one_f_one_b(4, 2, m)[0])) for m in (8, 16, 32, 64)]
    assert shares == [31, 66, 83, 91]


def test_every_configuration_is_legal() -> None:
    """Any number of microbatches and group that is accepted gives an order without deadlock."""
    checked = 0
    for pp, chunks, merge in itertools.product((1, 2, 3, 4, 6), (1, 2, 3), (True, False)):
        for group in range(pp, 2 * pp + 2):
            for microbatches in range(1, 3 * pp + 2):
                order = one_f_one_b(pp, chunks, microbatches, group=group, merge=merge)
                assert length(order, chunks) is not None, (pp, chunks, group, microbatches, merge)
                for steps in order:
                    expected = {(m, c) for m in range(microbatches) for c in range(chunks)}
                    assert {step.fwd for step in steps if step.fwd} == expected
                    assert {step.bwd for step in steps if step.bwd} == expected
                    for chunk in range(chunks):  # gradients accumulate in ascending order
                        backward = [step.bwd[0] for step in steps if step.bwd and step.bwd[1] == chunk]
                        assert backward == sorted(backward)
                checked += 1
    assert checked > 1000


def test_groups_differ_by_one_at_most() -> None:
    assert groups(8, 4) == [4, 4]
    assert groups(9, 4) == [5, 4]
    assert groups(3, 4) == [3]
