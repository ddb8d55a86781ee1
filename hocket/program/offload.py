"""A pass over a rank's ops: saved tensors of parts are copied to host memory, and back for their backward.

Note: [When tensors are offloaded and reloaded]
A pass is the forward or backward of a layer, or of the head. `offload` comes after the forward of its part, and the
first op of the pass after the next waits for the copy. So a rank holds the saved tensors of at most two passes, however
slow the link is; if it is fast enough, nothing waits. `reload` comes one pass before the backward that needs it, and is
not issued earlier. So it has the time of one pass, and the rank holds the reloaded tensors of two.

Note: [Slots in the host's memory]
A part's saved tensors occupy one slot of its kind from their offload to their reload. Slots are assigned in list order:
an offload takes the slot that has been free longest, or a new one, and waits for the reload that last read it. So a
rank needs as many slots as the list has tensors offloaded at once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from hocket.program.ops import HOST, Key, Layout, Op
from hocket.program.shard import insert_ops
from hocket.program.transformer import HEAD

HOST_BLOCK = 1 << 24
"""Size of the pieces of which host-memory slots consist: torch rounds pinned memory up to a power of two."""

ExtraWaits = Mapping[Key, tuple[Key, ...]]
Pass = tuple[bool, int, int, int]
"""(whether forward, microbatch, chunk, layer): one pass over a layer, or over the head with layer -1."""


def offload(ops: Sequence[Op], layout: Layout) -> tuple[tuple[Op, ...], ExtraWaits]:
    """The ops with offloads and reloads, and the ops that wait for others without reading their values.

    See Note: [When tensors are offloaded and reloaded].
    """
    starts = _starts(ops, layout)
    passes = list(starts)
    before, after, waiting = (
        defaultdict[int, list[Op]](list),
        defaultdict[int, list[Op]](list),
        dict[Key, tuple[Key, ...]](),
    )
    for one, later in zip(passes, passes[2:], strict=False):
        parts = _offloaded(layout, one[3])
        if one[0] and parts:
            first = ops[starts[later]].key
            waiting[first] = (*waiting.get(first, ()), ("offload", parts[-1], *one[1:]))
    made: dict[tuple[str, int, int, int], int] = {}
    for i, op in enumerate(ops):
        if op.verb == "fwd" and layout.offloads(op.part, op.layer):
            after[i].append(Op("offload", op.part, op.microbatch, op.chunk, op.layer, HOST[0]))
            made[op.key[1:]] = i
    for n, (forward, microbatch, chunk, layer) in enumerate(passes):
        if forward or layer < 0:
            continue
        ahead = starts[passes[n - 1]]
        for part in reversed(_offloaded(layout, layer)):
            reload, p = Op("reload", part, microbatch, chunk, layer, HOST[1]), made[part, microbatch, chunk, layer]
            if p < ahead:
                before[ahead].append(reload)
            else:
                after[p].append(reload)
    return tuple(_with_slots(insert_ops(ops, before, after))), waiting


def host_slots(ops: Sequence[Op]) -> dict[str, int]:
    """Part -> host-memory slots that a rank's ops need."""
    counts: dict[str, int] = {}
    for op in ops:
        if op.verb == "offload":
            counts[op.part] = max(counts.get(op.part, 0), op.slot + 1)
    return counts


def _is_early(op: Op, layout: Layout) -> bool:
    """Whether an op is at the end of the pass before: see Note: [uB' belongs to the next layer]."""
    return op.verb == "bwd" and layout.part(op.part, op.layer).early


def _starts(ops: Sequence[Op], layout: Layout) -> dict[Pass, int]:
    """Position of the first compute op of each pass over a layer, or over the head, in list order."""
    starts: dict[Pass, int] = {}
    for i, op in enumerate(ops):
        within = op.layer >= 0 or op.part == HEAD.name
        if within and op.lane == "compute" and op.verb in ("fwd", "recompute", "bwd") and not _is_early(op, layout):
            starts.setdefault((op.verb == "fwd", op.microbatch, op.chunk, op.layer), i)
    return starts


def _offloaded(layout: Layout, layer: int) -> list[str]:
    """The parts of a layer that are offloaded, in forward order; none of the head."""
    if layer < 0:
        return []
    return [part for part in layout.forward_parts(layer) if layout.offloads(part, layer)]


def _with_slots(ops: Iterable[Op]) -> Iterator[Op]:
    """See Note: [Slots in the host's memory]."""
    free, made = defaultdict[str, deque[int]](deque), defaultdict[str, int](int)
    used: dict[tuple[str, int, int, int], int] = {}
    for op in ops:
        place = op.key[1:]
        if op.verb == "offload":
            if not free[op.part]:
                free[op.part].append(made[op.part])
                made[op.part] += 1
            used[place] = free[op.part].popleft()
            yield op._replace(slot=used[place])
        elif op.verb == "reload":
            slot = used.pop(place)
            free[op.part].append(slot)
            yield op._replace(slot=slot)
        else:
            yield op
