"""The first passes over a rank's ops, which keep a list per step: parts, sends and receives, what is deferred."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from hocket.program.layer import Token, early_ops, is_early, op_of, ops_of
from hocket.program.ops import Lane, Layout, Op
from hocket.program.pipeline import Item, Step
from hocket.program.transformer import EMBED, HEAD

StepOps = list[Op]
"""The ops of one step, in host order."""


def expand(step: Step, layout: Layout, rank: int, merged: tuple[Token, ...], alone: tuple[Token, ...]) -> StepOps:
    """The parts of one step in host order, with dispatch and combine where experts are on other ranks.

    Pairs forward layer i with backward layer L - 1 - i; where one chunk is longer, its remaining layers run
    alone. The head's backward comes first, its forward and the embedding's backward last:
    they hide the sends. A step of weight gradients has those of all layers, in the order of backward.
    """
    if step.wgrad:
        return [
            op_of("wgrad", part, step.wgrad, layer)
            for layer in reversed(layout.layers(rank, step.wgrad[1]))
            for part in reversed(layout.type_of(layer).weighted)
            if part.deferrable
        ]
    ops: StepOps = []
    forward = list(layout.layers(rank, step.fwd[1])) if step.fwd else []
    backward = list(reversed(layout.layers(rank, step.bwd[1]))) if step.bwd else []
    after = dict(pairwise(backward))

    def emit(token: Token, layer: int | None, item: Item | None) -> None:
        if layer is not None and is_early(token, layout):  # see Note: [uB' belongs to the next layer]
            layer = after.get(layer)
        if layer is not None and item is not None:
            ops.extend(ops_of(token, item, layer, layout))

    def run(tokens: tuple[Token, ...], f: int | None, b: int | None) -> None:
        for token in tokens:
            emit(token, *((f, step.fwd) if token[0] == "fwd" else (b, step.bwd)))

    if step.bwd and layout.is_last(rank, step.bwd[1]):
        ops.append(op_of("bwd", HEAD, step.bwd))
    if step.bwd and backward:
        ops += early_ops(step.bwd, backward[0], layout)
    if step.bwd and layout.is_last(rank, step.bwd[1]):
        ops.append(op_of("wgrad", HEAD, step.bwd))
    if step.fwd and layout.is_first(rank, step.fwd[1]):
        ops.append(op_of("fwd", EMBED, step.fwd))
    pairs = min(len(forward), len(backward))
    for f, b in zip(forward[:pairs], backward[:pairs], strict=True):
        run(merged, f, b)
    for b in backward[pairs:]:
        run(alone, None, b)
    for f in forward[pairs:]:
        run(alone, f, None)
    if step.fwd and layout.is_last(rank, step.fwd[1]):
        ops.append(op_of("fwd", HEAD, step.fwd))
    if step.bwd and layout.is_first(rank, step.bwd[1]):
        ops += [op_of("bwd", EMBED, step.bwd), op_of("wgrad", EMBED, step.bwd)]
    return ops


def insert_p2p(
    per_step: list[StepOps], steps: tuple[Step, ...], layout: Layout, rank: int, ahead: int = 1
) -> list[StepOps]:
    """Insert sends behind the ops that make what is sent, and receives ahead of their readers.

    The receive for an item stands right behind the send of the item before it in its direction, or with `ahead` two
    behind the one before that, as a step of two items needs it; but at most `ahead + 1` steps before its reader. The
    first forward's are at the start, the first backward's behind the last forward before it. Its wait is wherever its
    value is first read: that falls out of the dependencies.
    """
    if layout.pp == 1:
        return per_step
    out = [list(ops) for ops in per_step]
    directions: tuple[Literal["act", "grad"], ...] = ("act", "grad")
    for part in directions:
        forward = part == "act"
        items = [(k, item) for k, step in enumerate(steps) for item in (step.forwards if forward else step.backwards)]
        if not items:
            continue
        for n, (k, item) in enumerate(items):
            inserted = _send(item, part, layout, rank)
            if n + ahead < len(items):
                reader, following = items[n + ahead]
                if reader - k <= ahead + 1:
                    inserted += _receive(following, part, layout, rank)
                else:
                    out[reader - ahead - 1] += _receive(following, part, layout, rank)
            place = _producer(out[k], item, forward) + 1
            out[k][place:place] = inserted
        first = [op for _, item in items[:ahead] for op in _receive(item, part, layout, rank)]
        if forward:
            out[0] = first + out[0]
        else:
            out[items[0][0] - 1] += first
    return out


def _send(item: Item, part: Literal["act", "grad"], layout: Layout, rank: int) -> list[Op]:
    if not layout.sends(rank, item[1], part):
        return []
    back = layout.turns(item[1])
    lanes: dict[str, tuple[Lane, Lane]] = {
        "act": ("send_act", "send_act_back"),
        "grad": ("send_grad", "send_grad_back"),
    }
    return [Op("send", part, *item, lane=lanes[part][back])]


def _receive(item: Item, part: Literal["act", "grad"], layout: Layout, rank: int) -> list[Op]:
    if not layout.receives(rank, item[1], part):
        return []
    return [Op("recv", part, *item, lane="recv_act" if part == "act" else "recv_grad")]


def _producer(ops: StepOps, item: Item, forward: bool) -> int:
    """Position of the last layer op of an item's forward, or of its input gradient; without layers, of the end's."""
    verb = "fwd" if forward else "bwd"
    mine = [i for i, op in enumerate(ops) if op.verb == verb and (op.microbatch, op.chunk) == item]
    return max([i for i in mine if ops[i].layer >= 0] or mine)


def defer_past_send(ops: StepOps, layout: Layout, layers: int, parts: str) -> StepOps:
    """Move the weight gradients of the last `layers` backward layers behind the step's sends, all others ahead of them.

    `parts` is `all` for those of all parts; else it is those of the layers' first parts alone. They then run while
    the gradient travels and the next one is awaited; the head's forward stays behind them, unless it is what reads the
    received activation, because its stage has no layers: what is received next is posted behind it. A step that sends
    nothing is left as it is; an activation alone is a p2p transfer to hide as well.
    """
    if not any(op.verb == "send" for op in ops):
        return ops

    def is_entry(op: Op) -> bool:
        return op.layer >= 0 and op.part == layout.type_of(op.layer).entry.name

    if layers == 0:
        return _ahead_of_send(ops)
    backward = [op.layer for op in ops if op.verb == "bwd" and is_entry(op)]
    late = set(backward[-layers:])

    def is_late(op: Op) -> bool:
        can_wait = op.verb == "wgrad" and op.layer in late and layout.part(op.part, op.layer).deferrable
        return can_wait and (parts == "all" or is_entry(op))

    reads_layer = layout.bounds[-2] < layout.bounds[-1]
    head = [op for op in ops if reads_layer and op.verb == "fwd" and op.part == HEAD.name]
    rest = [op for op in ops if not is_late(op) and op not in head]
    return rest + [op for op in ops if is_late(op)] + head


def _ahead_of_send(ops: StepOps) -> StepOps:
    """The same ops with all of a backward's weight gradients ahead of the send of its input gradient."""
    for send in [op for op in ops if op.verb == "send" and op.part == "grad"]:
        item, sent = (send.microbatch, send.chunk), ops.index(send)
        late = [op for op in ops[sent:] if op.verb == "wgrad" and op.layer >= 0 and (op.microbatch, op.chunk) == item]
        ops = [*ops[:sent], *late, *(op for op in ops[sent:] if op not in late)]
    return ops


def defer_head(per_step: list[StepOps], count: int) -> list[StepOps]:
    """Move the head's weight gradients of the last `count` microbatches, -1 for all, behind everything else of a rank.

    In front of them nobody waits: the gradient that goes back through the pipeline leaves earlier, and the rank, which
    is done before the others, adds up what is left while they finish. The last ones it is, so that gradients are still
    added up in the order of microbatches. Until then inputs and gradients of the logits are kept.
    """
    found = [op for ops in per_step for op in ops if op.verb == "wgrad" and op.part == HEAD.name]
    late = found if count < 0 else found[max(0, len(found) - count) :]
    if not late:
        return per_step
    moved = set(late)
    rest = [[op for op in ops if op not in moved] for ops in per_step]
    return [*rest[:-1], rest[-1] + late]
