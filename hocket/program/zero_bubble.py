"""Orders in which weight gradients have steps of their own, and run where a rank would otherwise have nothing to do.

ZB-H1 has one chunk per rank and holds as many activations as 1F1B. The V has two chunks per rank, the second half of
the stages in reverse: rank r has stages r and 2 * pp - 1 - r, so the last rank hands on to itself, and the loss is on
the rank that has the embedding. With two ranks and three microbatches (`m.c` is microbatch.chunk):

    zb_h1   F0.0 F1.0 [B0.0] W0.0 F2.0 [B1.0] W1.0 [B2.0] W2.0
            F0.0 [B0.0] F1.0 [B1.0] W0.0 F2.0 [B2.0] W1.0 W2.0
    zb_v    F0.0 F1.0 F2.0 F0.1 [B0.1] F1.1 [B1.1] W0.1 W1.1 [B0.0] W0.0 [B1.0] F2.1 [B2.1] W1.0 W2.1 [B2.0] W2.0
            F0.0 F0.1 F1.0 F1.1 F2.0 [B0.1] [B0.0] [B1.1] [B1.0] F2.1 W0.0 W0.1 W1.0 W1.1 [B2.1] [B2.0] W2.0 W2.1

Sources: Qi et al. 2024, Zero Bubble Pipeline Parallelism (arXiv 2401.10241) and Pipeline Parallelism with Controllable
Memory (arXiv 2405.15362).

Note: [The bubble that is left]
Where F, B and W take a unit each, 1F1B rests for 3 * (pp - 1) of them, since the first microbatch must come to the last
rank and its gradient back. Here the last rank catches up with W: it has nothing to wait for, and all that is left is
the pp - 1 units until the first microbatch has come to it.

Note: [The V is filled step by step]
Whenever a rank is free it takes the backward of its oldest microbatch if that can run, else a forward, of the later
chunk first, else a weight gradient. A chunk's activation counts from its forward to its weight gradient, and no forward
starts that would make them more than 2 * pp and a few to spare; 2 * pp of half as many layers are what the first rank
of 1F1B holds. Where F, B and W take equally long, the pp - 1 units are left, and up to three more where the count
stands in the way. Real ones don't, and an order that was filled as if they did makes everybody wait for everybody; so
it is filled with their ratio in a transformer. The spare ones give a rank something to do while a p2p transfer is on
its way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from hocket.program.pipeline import Item, Order, Step

ZERO_BUBBLE = ("zb_h1", "zb_v")
"""Names of the orders of this file."""


class Times(NamedTuple):
    """How long a forward, its input gradients and its weight gradients take, in any unit."""

    fwd: int
    bwd: int
    wgrad: int


TRANSFORMER = Times(10, 13, 8)
"""A layer of Llama-3 8B with sequences of 4,096 tokens: attention has no weight gradient of its own."""


def zb_h1(pp: int, microbatches: int) -> Order:
    """One chunk per rank. Rank r starts like 1F1B, and lets r microbatches pass before it turns to weight gradients."""
    return tuple(_h1_rank(pp - 1 - rank, rank, microbatches) for rank in range(pp))


def _h1_rank(warm: int, behind: int, microbatches: int) -> tuple[Step, ...]:
    warm = min(warm, microbatches)
    steps = [Step(fwd=(m, 0)) for m in range(warm)]
    for m in range(microbatches):
        if warm + m < microbatches:
            steps.append(Step(fwd=(warm + m, 0)))
        steps.append(Step(bwd=(m, 0)))
        if m >= behind:
            steps.append(Step(wgrad=(m - behind, 0)))
    return (*steps, *(Step(wgrad=(m, 0)) for m in range(max(0, microbatches - behind), microbatches)))


@dataclass
class _Rank:
    """What a rank has done so far, per chunk: its steps, and when the last one ends."""

    forwards: list[int] = field(default_factory=lambda: [0, 0])
    backwards: list[int] = field(default_factory=lambda: [0, 0])
    wgrads: list[int] = field(default_factory=lambda: [0, 0])
    steps: list[Step] = field(default_factory=list)
    end: int = 0

    @property
    def held(self) -> int:
        """Chunk activations whose weight gradients are still to come."""
        return sum(self.forwards) - sum(self.wgrads)


def zb_v(pp: int, microbatches: int, times: Times = TRANSFORMER, spare: int = 2) -> Order:
    """Two chunks per rank, placed as a V, which hold 2 * pp + spare activations at most.

    See Note: [The V is filled step by step].
    """
    ranks = [_Rank() for _ in range(pp)]
    ends: dict[tuple[str, int, int], int] = {}  # (verb, microbatch, stage) -> when it ends
    now = 0
    while any(sum(rank.wgrads) < 2 * microbatches for rank in ranks):
        done = partial(_has_ended, ends, now)
        for r, rank in enumerate(ranks):
            step = _choose(rank, r, pp, microbatches, 2 * pp + spare, done) if rank.end <= now else None
            if step is not None:
                verb, (m, chunk) = _note(rank, step)
                rank.end = ends[verb, m, _stage(r, chunk, pp)] = now + getattr(times, verb)
        later = [rank.end for rank in ranks if rank.end > now]
        assert later, "an order that is stuck"
        now = min(later)
    return tuple(tuple(rank.steps) for rank in ranks)


def _note(rank: _Rank, step: Step) -> tuple[str, Item]:
    """Add a step to a rank; what it does to which item."""
    rank.steps.append(step)
    for verb, item, counts in (
        ("fwd", step.fwd, rank.forwards),
        ("bwd", step.bwd, rank.backwards),
        ("wgrad", step.wgrad, rank.wgrads),
    ):
        if item is not None:
            counts[item[1]] += 1
            return verb, item
    raise AssertionError("a step without work")


def _has_ended(ends: Mapping[tuple[str, int, int], int], now: int, verb: str, microbatch: int, stage: int) -> bool:
    return ends.get((verb, microbatch, stage), now + 1) <= now


def _stage(rank: int, chunk: int, pp: int) -> int:
    return 2 * pp - 1 - rank if chunk else rank


def _choose(
    rank: _Rank, r: int, pp: int, microbatches: int, most: int, done: Callable[[str, int, int], bool]
) -> Step | None:
    """What a rank runs next; None if nothing can run. `done` says of (verb, microbatch, stage) whether it has ended."""
    backwards: list[Item] = []
    for chunk in (0, 1):
        m, stage = rank.backwards[chunk], _stage(r, chunk, pp)
        if done("fwd", m, stage) and (stage == 2 * pp - 1 or done("bwd", m, stage + 1)):
            backwards.append((m, chunk))
    if backwards:
        return Step(bwd=min(backwards))
    for chunk in (1, 0):
        m, stage = rank.forwards[chunk], _stage(r, chunk, pp)
        room = rank.held < most - (chunk == 0)  # the last place is for the later chunk: its backward can come first
        if m < microbatches and room and (stage == 0 or done("fwd", m, stage - 1)):
            return Step(fwd=(m, chunk))
    wgrads = [(rank.wgrads[chunk], chunk) for chunk in (0, 1) if rank.wgrads[chunk] < rank.backwards[chunk]]
    return Step(wgrad=min(wgrads)) if wgrads else None
