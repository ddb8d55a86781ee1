"""Orders of microbatches over pipeline ranks: which chunk each rank runs forward and backward, step by step.

An order is one list of `Step` per pipeline rank. With two ranks, two chunks and four microbatches, merged
(`m.c` is microbatch.chunk, `(F|B)` one merged step):

    rank 0: F0.0 F1.0 F0.1 F1.1 F2.0 (F3.0|B0.1) (F2.1|B1.1) (F3.1|B0.0) [B1.0] [B2.1] [B3.1] [B2.0] [B3.0]
    rank 1: F0.0 F1.0 F0.1 (F1.1|B0.1) (F2.0|B1.1) (F3.0|B0.0) (F2.1|B1.0) (F3.1|B2.1) [B3.1] [B2.0] [B3.0]

Note: [One more warm-up step on every rank]
In interleaved 1F1B the last rank's first steady step runs the backward of the chunk whose forward it has just run. A
merged step runs both at once, so they must be independent: every rank runs one more forward before its first merged
step. One more on the last rank alone would be legal too, but would break the stagger between neighbours and almost
double the step.

Note: [Groups of equal size]
Microbatches pass through the chunks in groups of N. When N does not divide M, a short last group can deadlock the
merged order. Splitting M into M // N groups whose sizes differ by at most one, larger groups first, is legal for every
M; where N divides M it is the usual order.

Note: [Pairs at the ends]
The unmerged steps of warm-up and cool-down can be merged too, forward with forward and backward with backward, if every
rank runs yet another forward before its first merged step, so that none is unpaired:

    F0 (F1|B0) (F2|B1) [B2]   becomes   (F0|F1) (F2|B0) [B1|B2]

The outputs of such a pair are sent one step later. Around a ring of ranks, twice as many microbatches must be in flight
for no rank to wait, which takes groups of `2 * pp`. And with more than one rank, the first and the last microbatches
reach the other ranks later. So pairs are for one rank, or for all-to-alls that take longer than that delay. Only
neighbours of one chunk are paired: they run the same layers, and share their gathers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

Item = tuple[int, int]
"""(microbatch, chunk)."""


@dataclass(frozen=True, slots=True)
class Step:
    """A forward of one item, a backward of one item, or both merged; or the weight gradients of one item.

    `also` is a second item, merged with a forward or a backward that has no other half. In orders with separate steps
    for weight gradients, backwards exclude these.
    """

    fwd: Item | None = None
    bwd: Item | None = None
    wgrad: Item | None = None
    also: Item | None = None

    @property
    def forwards(self) -> tuple[Item, ...]:
        """The items that run forward."""
        return tuple(item for item in (self.fwd, self.also if self.fwd else None) if item)

    @property
    def backwards(self) -> tuple[Item, ...]:
        """The items that run backward."""
        return tuple(item for item in (self.bwd, self.also if self.bwd else None) if item)

    @property
    def merged(self) -> bool:
        """Whether the step merges two halves."""
        return len(self.forwards) + len(self.backwards) == 2

    def __str__(self) -> str:
        if self.wgrad:
            return f"W{self.wgrad[0]}.{self.wgrad[1]}"
        f = "|".join(f"F{m}.{c}" for m, c in self.forwards)
        b = "|".join(f"B{m}.{c}" for m, c in self.backwards)
        return f"({f}|{b})" if f and b else f"({f})" if self.also and f else f or f"[{b}]"


Order = tuple[tuple[Step, ...], ...]
"""The steps of every pipeline rank."""


def sequential(pp: int, chunks: int, microbatches: int) -> Order:
    """Gradient accumulation: every microbatch runs forward, then backward, before the next one starts."""
    steps = []
    for m in range(microbatches):
        steps += [Step(fwd=(m, c)) for c in range(chunks)]
        steps += [Step(bwd=(m, c)) for c in reversed(range(chunks))]
    return (tuple(steps),) * pp


def groups(microbatches: int, group: int) -> list[int]:
    """Sizes of the groups. See Note: [Groups of equal size]."""
    count = max(1, microbatches // group)
    share, extra = divmod(microbatches, count)
    return [share + 1] * extra + [share] * (count - extra)


def warmup(pp: int, chunks: int, microbatches: int, group: int, rank: int, merge: bool) -> int:
    """Forward-only steps at the start of a rank.

    Merged: `2 * (pp - 1 - rank) + (chunks - 1) * N + 1` with N the size of the first group. Not merged:
    the classic counts, `pp - 1 - rank` for one chunk and `2 * (pp - 1 - rank) + (chunks - 1) * N` for more.
    """
    first = groups(microbatches, group)[0]
    apart = 2 if merge or chunks > 1 else 1
    count = apart * (pp - 1 - rank) + (chunks - 1) * first + (1 if merge else 0)
    return min(count, microbatches * chunks)


def one_f_one_b(
    pp: int,
    chunks: int,
    microbatches: int,
    *,
    group: int = 0,
    merge: bool = True,
    ends: bool = False,
) -> Order:
    """1F1B over `chunks` virtual stages per rank, merged or not.

    One chunk gives plain 1F1B; one rank and one chunk, merged, gives `F0 | F1|B0 | ... | B_last`. `group` is
    the number of microbatches that pass through a chunk before the next chunk starts (0 means `pp`).
    `ends` merges the two ends too: see Note: [Pairs at the ends].
    """
    group = group or pp
    assert group >= pp, "a microbatch would reach a chunk too late"
    assert merge or not ends, "pairs at the ends belong to merged orders"
    forward = _forward_items(chunks, microbatches, group)
    backward = [(m, chunks - 1 - c) for m, c in forward]
    order: list[tuple[Step, ...]] = []
    for rank in range(pp):
        warm = warmup(pp, chunks, microbatches, group, rank, merge)
        if ends:
            warm = min(warm + 1, len(forward))
        steps = _interleave(forward, backward, warm, merge)
        order.append((*_paired(steps[:warm]), *steps[warm:-warm], *_paired(steps[-warm:])) if ends else tuple(steps))
    return tuple(order)


def forward_only(pp: int, chunks: int, microbatches: int) -> Order:
    """Forward-only steps, for validation."""
    return (tuple(Step(fwd=item) for item in _forward_items(chunks, microbatches, pp)),) * pp


def _forward_items(chunks: int, microbatches: int, group: int) -> list[Item]:
    """Forwards in order: group by group, and inside a group chunk by chunk."""
    items: list[Item] = []
    first = 0
    for size in groups(microbatches, group):
        items += [(m, c) for c in range(chunks) for m in range(first, first + size)]
        first += size
    return items


def _interleave(forward: list[Item], backward: list[Item], warm: int, merge: bool) -> list[Step]:
    steps = [Step(fwd=item) for item in forward[:warm]]
    for f, b in zip(forward[warm:], backward, strict=False):
        steps += [Step(f, b)] if merge else [Step(fwd=f), Step(bwd=b)]
    return steps + [Step(bwd=item) for item in backward[len(forward) - warm :]]


def _paired(steps: list[Step]) -> list[Step]:
    """Merge neighbours of one chunk. An unpaired forward comes last, an unpaired backward first, on every rank."""
    out: list[Step] = []
    backwards = bool(steps) and steps[0].bwd is not None
    for step in reversed(steps) if backwards else steps:
        last = out[-1] if out and not out[-1].also else None
        if last and last.fwd and step.fwd and last.fwd[1] == step.fwd[1]:
            out[-1] = Step(fwd=last.fwd, also=step.fwd)
        elif last and last.bwd and step.bwd and last.bwd[1] == step.bwd[1]:
            out[-1] = Step(bwd=step.bwd, also=last.bwd)
        else:
            out.append(step)
    return out[::-1] if backwards else out


def in_flight(steps: tuple[Step, ...]) -> int:
    """Most chunk activations that a rank holds at once. A merged step holds both of its halves."""
    live = peak = 0
    for step in steps:
        live += len(step.forwards)
        peak = max(peak, live)
        live -= len(step.backwards)
    return peak


# ---------------------------------------------------------------------------------------------------------- zero bubble
#
# Orders with separate steps for weight gradients, which run where a rank would otherwise be idle.
#
# ZB-H1 has one chunk per rank and holds as many activations as 1F1B. The V has two chunks per rank, the second half of
# the stages in reverse: rank r has stages r and 2 * pp - 1 - r. So the last rank sends to itself, and the rank of the
# embedding computes the loss. With two ranks and three microbatches (`m.c` is microbatch.chunk):
#
#     zb_h1   F0.0 F1.0 [B0.0] W0.0 F2.0 [B1.0] W1.0 [B2.0] W2.0
#             F0.0 [B0.0] F1.0 [B1.0] W0.0 F2.0 [B2.0] W1.0 W2.0
#     zb_v    F0.0 F1.0 F2.0 F0.1 [B0.1] F1.1 [B1.1] W0.1 W1.1 [B0.0] W0.0 [B1.0] F2.1 [B2.1] W1.0 W2.1 [B2.0] W2.0
#             F0.0 F0.1 F1.0 F1.1 F2.0 [B0.1] [B0.0] [B1.1] [B1.0] F2.1 W0.0 W0.1 W1.0 W1.1 [B2.1] [B2.0] W2.0 W2.1
#
# Sources: Qi et al. 2024, Zero Bubble Pipeline Parallelism (arXiv 2401.10241) and Pipeline Parallelism with
# Controllable Memory (arXiv 2405.15362).
#
# Note: [The remaining bubble]
# Where F, B and W take one unit each, 1F1B idles for 3 * (pp - 1) units, since the first microbatch must reach the last
# rank and its gradient must return. Here ranks fill that time with W. Only the pp - 1 units remain until the first
# microbatch has reached the last rank.
#
# Note: [The V is filled step by step]
# A free rank runs the backward of its oldest microbatch if that is ready, else a forward, of the later chunk first,
# else a weight gradient. A chunk's activation counts from its forward to its weight gradient, and no forward may raise
# the count above 2 * pp plus a few spare ones; 2 * pp of half as many layers are what the first rank of 1F1B holds.
# Where F, B and W take equally long, pp - 1 units of bubble remain, and up to three more where the count blocks a
# forward. Real F, B and W differ, and an order filled as if they were equal makes all ranks wait for each other, so it
# is filled with their ratio in a transformer. The spare activations keep a rank busy during a p2p transfer.


class Times(NamedTuple):
    """Durations of a forward, its input gradients and its weight gradients, in any unit."""

    fwd: int
    bwd: int
    wgrad: int


TRANSFORMER = Times(10, 13, 8)
"""A layer of Llama-3 8B with sequences of 4,096 tokens: attention has no weight gradient of its own."""


def zb_h1(pp: int, microbatches: int) -> Order:
    """One chunk per rank. Rank r starts like 1F1B, and defers the weight gradients of r microbatches."""
    return tuple(_h1_rank(pp - 1 - rank, rank, microbatches) for rank in range(pp))


def _h1_rank(warm: int, late: int, microbatches: int) -> tuple[Step, ...]:
    warm = min(warm, microbatches)
    steps = [Step(fwd=(m, 0)) for m in range(warm)]
    for m in range(microbatches):
        if warm + m < microbatches:
            steps.append(Step(fwd=(warm + m, 0)))
        steps.append(Step(bwd=(m, 0)))
        if m >= late:
            steps.append(Step(wgrad=(m - late, 0)))
    return (*steps, *(Step(wgrad=(m, 0)) for m in range(max(0, microbatches - late), microbatches)))


@dataclass
class _Filling:
    """Progress of a rank: its steps, the count of each verb and chunk, and when the last one ends."""

    done: dict[str, list[int]] = field(default_factory=lambda: {verb: [0, 0] for verb in Times._fields})
    steps: list[Step] = field(default_factory=list)
    end: int = 0

    @property
    def held(self) -> int:
        """Chunk activations whose weight gradients have not run."""
        return sum(self.done["fwd"]) - sum(self.done["wgrad"])


def zb_v(pp: int, microbatches: int, times: Times = TRANSFORMER, spare: int = 2) -> Order:
    """Two chunks per rank, placed as a V, which hold 2 * pp + spare activations at most.

    See Note: [The V is filled step by step].
    """
    ranks = [_Filling() for _ in range(pp)]
    ends: dict[tuple[str, int, int], int] = {}  # (verb, microbatch, stage) -> when it ends
    now = 0
    while any(sum(rank.done["wgrad"]) < 2 * microbatches for rank in ranks):

        def done(verb: str, microbatch: int, stage: int, now: int = now) -> bool:
            return ends.get((verb, microbatch, stage), now + 1) <= now

        for r, rank in enumerate(ranks):
            chosen = _choose(rank, r, pp, microbatches, 2 * pp + spare, done) if rank.end <= now else None
            if chosen is not None:
                verb, (m, chunk) = chosen
                rank.steps.append(Step(**{verb: (m, chunk)}))
                rank.done[verb][chunk] += 1
                rank.end = ends[verb, m, _stage(r, chunk, pp)] = now + getattr(times, verb)
        later = [rank.end for rank in ranks if rank.end > now]
        assert later, "an order that is stuck"
        now = min(later)
    return tuple(tuple(rank.steps) for rank in ranks)


def _stage(rank: int, chunk: int, pp: int) -> int:
    return 2 * pp - 1 - rank if chunk else rank


def _choose(
    rank: _Filling, r: int, pp: int, microbatches: int, most: int, done: Callable[[str, int, int], bool]
) -> tuple[str, Item] | None:
    """What a rank runs next; None if nothing is ready. `done` says whether (verb, microbatch, stage) has ended."""
    forwards, backwards, wgrads = rank.done.values()
    ready: list[Item] = []
    for chunk in (0, 1):
        m, stage = backwards[chunk], _stage(r, chunk, pp)
        if done("fwd", m, stage) and (stage == 2 * pp - 1 or done("bwd", m, stage + 1)):
            ready.append((m, chunk))
    if ready:
        return "bwd", min(ready)
    for chunk in (1, 0):
        m, stage = forwards[chunk], _stage(r, chunk, pp)
        room = rank.held < most - (chunk == 0)  # the last place is for the later chunk, whose backward comes first
        if m < microbatches and room and (stage == 0 or done("fwd", m, stage - 1)):
            return "fwd", (m, chunk)
    left = [(wgrads[chunk], chunk) for chunk in (0, 1) if wgrads[chunk] < backwards[chunk]]
    return ("wgrad", min(left)) if left else None


# ------------------------------------------------------------------------------------------------------------- merged v
#
# An order over a V of merged forwards and backwards: one half moves down the ranks while the other moves up.
#
# Rank r has stages r and 2 * pp - 1 - r, as in `zb_v`. Forwards of its first chunk are merged with backwards of the
# second one, and vice versa. With two ranks and five microbatches (`m.c` is microbatch.chunk, W a step of weight
# gradients alone):
#
#     F0.0 F1.0 F2.0 F0.1 [B0.1] W0.1 F1.1 (F3.0|B1.1) (F2.1|B0.0) (F4.0|B2.1) (F3.1|B1.0) [B3.1] (F4.1|B2.0) ...
#     F0.0 F0.1 F1.0 F1.1 F2.0 [B0.1] (F2.1|B0.0) (F3.0|B1.1) (F3.1|B1.0) (F4.0|B2.1) (F4.1|B2.0) [B3.1] W3.1 ...
#
# Source: DeepSeek, DualPipeV (github.com/deepseek-ai/DualPipe), the cut-in-half form of DualPipe.
#
# Note: [Memory and bubble of a merged V]
# A microbatch takes 2 * pp steps forward and as many backward. A rank begins one every other step, so every rank holds
# at most 2 * pp + 1 chunk activations; merged interleaved 1F1B with two chunks holds 3 * pp on its first rank. Warm-up
# and cool-down are shorter than there, since forwards and backwards of both chunks share them, and weight gradients
# fill part of the rest. benchmarks/bubbles.py compares the bubble with that of other orders.


def merged_v(pp: int, microbatches: int) -> Order:
    """Two chunks per rank, placed as a V, which hold 2 * pp + 1 activations at most."""
    assert microbatches >= 2 * pp, "a forward and a backward that could be merged do not meet"
    return tuple(_merged_rank(pp, rank, microbatches) for rank in range(pp))


def _merged_rank(pp: int, rank: int, count: int) -> tuple[Step, ...]:
    """All steps of one rank; every chunk's microbatches come in ascending order."""
    steps: list[Step] = []
    done: dict[tuple[str, int], int] = defaultdict(int)
    late: list[Item] = []  # items whose weight gradients are deferred

    def item(verb: str, chunk: int | None) -> Item | None:
        if chunk is None:
            return None
        done[verb, chunk] += 1
        return done[verb, chunk] - 1, chunk

    def run(forward: int | None = None, backward: int | None = None, apart: bool = False) -> None:
        """A forward of a chunk, a backward, or both merged; `apart`: its weight gradients have a separate step."""
        step = Step(item("fwd", forward), item("bwd", backward))
        steps.append(step)
        late.extend([step.bwd] if apart and step.bwd else [])

    def weights() -> None:
        steps.append(Step(wgrad=late.pop(0)))

    after = pp - 1 - rank
    # 1. Warm-up: forwards of the first chunk, then of both.
    for _ in range(2 * after):
        run(0)
    for _ in range(rank + 1):
        run(0)
        run(1)
    # 2. The first backwards, one by one.
    for _ in range(after):
        run(backward=1, apart=True)
        weights()
        run(1)
    # 3. Merged steps.
    for n in range(count - 2 * pp + rank + 1):
        if n == 0 and after == 0:  # this backward needs the forward right before it, so they cannot merge
            run(0)
            run(backward=1)
        else:
            run(0, 1)
        run(1, 0)
    # 4. The last forwards are merged with backwards of the first chunk.
    for _ in range(after):
        run(backward=1)
        run(1, 0)
    # 5. Backwards alone; in the second half their weight gradients are deferred to where the rank would idle.
    for n in range(2 * (rank + 1)):
        run(backward=1 - n % 2, apart=n > rank)
    for _ in range(after):
        weights()
        run(backward=0, apart=True)
    while late:
        weights()
    return tuple(steps)
