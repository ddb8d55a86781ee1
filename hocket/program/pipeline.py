"""Orders of microbatches over pipeline ranks: which chunk each rank runs forward and backward, step by step.

An order is one list of `Step` per pipeline rank. With two ranks, two chunks and four microbatches, merged
(`m.c` is microbatch.chunk, `(F|B)` one merged step):

    rank 0: F0.0 F1.0 F0.1 F1.1 F2.0 (F3.0|B0.1) (F2.1|B1.1) (F3.1|B0.0) [B1.0] [B2.1] [B3.1] [B2.0] [B3.0]
    rank 1: F0.0 F1.0 F0.1 (F1.1|B0.1) (F2.0|B1.1) (F3.0|B0.0) (F2.1|B1.0) (F3.1|B2.1) [B3.1] [B2.0] [B3.0]

Note: [One more warm-up step on every rank]
In interleaved 1F1B the last rank's first steady step runs the backward of the chunk whose forward it has
just run. A merged step runs both at once, so they must be independent: every rank takes one more forward
before it starts. One more on the last rank alone would be legal too, but would break the stagger between
neighbours and almost double the step.

Note: [Groups of equal size]
Microbatches pass through the chunks in groups of N. When N does not divide M, a short last group can
deadlock the merged order. Splitting M into M // N groups whose sizes differ by at most one, larger groups
first, is legal for every M; where N divides M it is the usual order.

Note: [Pairs at the ends]
What is left of warm-up and cool-down can be merged too, forward with forward and backward with backward, if every rank
takes yet another forward before it starts, so that none is left over:

    F0 (F1|B0) (F2|B1) [B2]   becomes   (F0|F1) (F2|B0) [B1|B2]

Two that run as one step are handed on one step later. Where they go around a ring of ranks, twice as many must be on
their way for no rank to wait, which takes groups of `2 * pp`; and with any number of ranks but one, the first and the
last microbatches come later to the others. So pairs are for one rank, or for all-to-alls that take longer than that.
Only neighbours of one chunk are paired: their layers are the same, and share their gathers.
"""

from __future__ import annotations

from dataclasses import dataclass

Item = tuple[int, int]
"""(microbatch, chunk)."""


@dataclass(frozen=True, slots=True)
class Step:
    """A forward of one item, a backward of one item, or both merged; or the weight gradients of one item.

    `also` is a second item of the same kind, merged with a forward or a backward that has no other half. In an order
    that has steps of weight gradients, backwards are without them.
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
        """Whether two halves run as one."""
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


def smallest_group(pp: int, stride: int) -> int:
    """The fewest microbatches of a group for which there is a legal order."""
    return -(-3 * pp // 2) if stride == 3 else pp


def warmup(pp: int, chunks: int, microbatches: int, group: int, rank: int, merge: bool, stride: int = 2) -> int:
    """Forward-only steps at the start of a rank.

    Merged: `stride * (pp - 1 - rank) + (chunks - 1) * N + 1` with N the size of the first group. Not merged:
    the classic counts, `pp - 1 - rank` for one chunk and `2 * (pp - 1 - rank) + (chunks - 1) * N` for more.
    """
    first = groups(microbatches, group)[0]
    if not merge and chunks == 1:
        stride = 1
    count = stride * (pp - 1 - rank) + (chunks - 1) * first + (1 if merge else 0)
    return min(count, microbatches * chunks)


def one_f_one_b(
    pp: int,
    chunks: int,
    microbatches: int,
    *,
    group: int = 0,
    merge: bool = True,
    stride: int = 2,
    ends: bool = False,
) -> Order:
    """1F1B over `chunks` virtual stages per rank, merged or not.

    One chunk gives plain 1F1B; one rank and one chunk, merged, gives `F0 | F1|B0 | ... | B_last`. `group` is
    the number of microbatches that pass through a chunk before the next chunk starts (0 means `pp`).
    `stride` is the difference in warm-up between neighbours; 3 hides the p2p transfer between ranks at the price of
    more activations in flight and needs `group >= 1.5 * pp`. `ends` merges the two ends too: see
    Note: [Pairs at the ends].

    Raises ValueError for a group or a stride for which no legal order exists.
    """
    group = group or smallest_group(pp, stride)
    if microbatches < 1:
        raise ValueError(f"microbatches must be at least 1, got {microbatches}")
    if group < pp:
        raise ValueError(f"group={group} is smaller than pp={pp}: a microbatch would reach a chunk too late; use >= pp")
    if stride == 3 and (not merge or 2 * group < 3 * pp):
        raise ValueError(
            f"stride=3 needs a merged order and group >= 1.5 * pp = {-(-3 * pp // 2)}, got merge={merge}, group={group}"
        )
    assert merge or not ends, "pairs at the ends belong to merged orders"
    forward = _forward_items(chunks, microbatches, group)
    backward = [(m, chunks - 1 - c) for m, c in forward]
    order: list[tuple[Step, ...]] = []
    for rank in range(pp):
        warm = warmup(pp, chunks, microbatches, group, rank, merge, stride)
        if ends:
            warm = min(warm + 1, len(forward))
        steps = _interleave(forward, backward, warm, merge)
        order.append((*_paired(steps[:warm]), *steps[warm:-warm], *_paired(steps[-warm:])) if ends else tuple(steps))
    return tuple(order)


def forward_only(pp: int, chunks: int, microbatches: int) -> Order:
    """Forwards alone, for validation."""
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
    """Merge neighbours of one chunk; what is left over of forwards comes last, of backwards first, on every rank."""
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


def merged_share(steps: tuple[Step, ...]) -> float:
    """Share of a rank's forwards that run merged."""
    return sum(len(step.forwards) for step in steps if step.merged) / sum(len(step.forwards) for step in steps)
