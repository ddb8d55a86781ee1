"""The first passes over a rank's ops, which keep a list per step: parts, sends and receives, deferred ops.

Note: [Gradients of head and embedding alternate]
The gradients of head and embedding have one slot each. Between the two weight gradients that write it the template puts
other compute, which overlaps with the first one's reduction: the other half's backward of the head, or the rest of the
last layer.
"""

from __future__ import annotations

from typing import Literal

from hocket.program.layer import BACKWARDS, FORWARDS, FULL, LATE, Token, pair_undeferred
from hocket.program.ops import Lane, Layout, Op, Verb
from hocket.program.parts import Part
from hocket.program.pipeline import Item, Step
from hocket.program.transformer import EMBED, HEAD

StepOps = list[Op]
"""The ops of one step, in host order."""


def expand(
    step: Step, layout: Layout, rank: int, merged: tuple[Token, ...], alone: tuple[Token, ...], defer: bool = True
) -> StepOps:
    """The parts of one step in host order, with dispatch and combine where experts are on other ranks.

    Pairs forward layer i with backward layer L - 1 - i; if one chunk is longer, its remaining layers run alone. Two
    forwards, or two backwards, run through the same layers, and one gather serves both. The head's backward comes
    first, its forward and the embedding's backward last: they hide the sends. A step of weight gradients has those of
    all layers, in backward order. Without `defer` those of two backwards come right after their input gradients.
    """
    if step.wgrad:
        return [
            op_of("wgrad", part, step.wgrad, layer)
            for layer in reversed(layout.layers(rank, step.wgrad[1]))
            for part in reversed(layout.type_of(layer).weighted)
            if part.deferrable
        ]
    forward, backward = ([*layout.layers(rank, item[1])] if item else [] for item in (step.fwd, step.bwd))
    sequences, items = (forward, backward[::-1]), (step.fwd, step.bwd)
    both, single = ([(int(token[0] != "fwd"), token) for token in tokens] for tokens in (merged, alone))
    if step.also:
        items = (step.fwd or step.bwd, step.also)
        sequences = (sequences[0] or sequences[1],) * 2
        both = [*(FORWARDS if step.fwd else BACKWARDS if defer else pair_undeferred(BACKWARDS))]
    ops: StepOps = []
    for item in step.backwards:
        head = layout.is_last(rank, item[1])
        ops += [op_of("bwd", HEAD, item)] if head else []
        ops += _early_ops(item, backward[-1], layout) if backward else []
        ops += [op_of("wgrad", HEAD, item)] if head else []
    ops += [op_of("fwd", EMBED, item) for item in step.forwards if layout.is_first(rank, item[1])]
    for n in range(max(map(len, sequences))):
        there = [n < len(layers) for layers in sequences]
        for half, token in both if all(there) else single:
            item, layers = items[half], sequences[half]
            at = n - 1 if (half, token) == LATE else n + 1 if _is_early(token, layout) else n
            if item and there[half] and 0 <= at < len(layers):
                ops += ops_of(token, item, layers[at], layout)
            elif (
                item and step.also and at == len(layers) and half == 0
            ):  # see Note: [Gradients of head and embedding alternate]
                ops += _embedding(item, layout, rank)
    for half, item in enumerate(step.forwards):
        ops += ops_of(LATE[1], item, forward[-1], layout) if half and forward else []
        ops += [op_of("fwd", HEAD, item)] if layout.is_last(rank, item[1]) else []
    for half, item in enumerate(step.backwards):
        ops += _embedding(item, layout, rank) if half or not (step.also and backward) else []
    return ops


def _embedding(item: Item, layout: Layout, rank: int) -> StepOps:
    """The backward of a chunk's embedding, if it has one."""
    first = layout.is_first(rank, item[1])
    return [op_of("bwd", EMBED, item), op_of("wgrad", EMBED, item)] if first else []


def op_of(verb: Verb, part: Part, item: Item, layer: int = -1) -> Op:
    """A part of one item's forward or backward."""
    return Op(verb, part.name, item[0], item[1], layer, part.lane)


def ops_of(token: Token, item: Item, layer: int, layout: Layout) -> StepOps:
    """The ops of a template's token for one layer of an item; none if the layer lacks the part.

    A recompute comes right before its backward. It needs no gradient, so it runs while one is in flight. A recompute
    that communicates comes before the layer's first backward, which it overlaps. A recompute for a reader that does not
    save its input comes before that reader's backward. A weight gradient that cannot be deferred comes right after its
    backward.
    """
    (verb, letter), kind = token, layout.type_of(layer)
    part = kind.with_letter(letter)
    if part is None or (verb == "wgrad" and (part.unit is None or not part.deferrable)):
        return []
    again = [p for p in kind.parts if p.communicates] if verb == "bwd" and part is kind.exit else []
    if verb == "bwd" and not part.communicates:
        again += [p for p in kind.parts if p.lends and not p.communicates and p.name in part.sources]
        again += [] if part.lends else [part]
    ops = [op_of("recompute", p, item, layer) for p in again if layout.recomputes(p.name, layer)]
    ops.append(op_of(verb, part, item, layer))
    if verb == "bwd" and part.unit is not None and not part.deferrable:
        ops.append(op_of("wgrad", part, item, layer))
    return ops


def _is_early(token: Token, layout: Layout) -> bool:
    """Whether a token is a backward that runs in the layer step before: see Note: [uB' belongs to the next layer]."""
    there = [part for kind in layout.layer_types if (part := kind.with_letter(token[1]))]
    return token[0] == "bwd" and (any(part.early for part in there) if there else token[1] == FULL.exit.letter)


def _early_ops(item: Item, layer: int, layout: Layout) -> StepOps:
    """The layer's backward that runs in the step before, or at the start."""
    last = layout.type_of(layer).exit
    return ops_of(("bwd", last.letter), item, layer, layout) if last.early else []


def insert_p2p(
    per_step: list[StepOps], steps: tuple[Step, ...], layout: Layout, rank: int, ahead: int = 1
) -> list[StepOps]:
    """Insert sends after the ops that make their tensors, and receives before their readers.

    The receive for an item comes right after the previous item's send in the same direction. With `ahead` two, as a
    step of two items needs it, it comes after the send before that. It is never more than `ahead + 1` steps before its
    reader. The first forward's receives are at the start; the first backward's come after the last forward before it.
    The dependencies make the first reader wait.
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
    """Position of an item's last layer forward or input gradient; in a stage without layers, of its end's."""
    verb = "fwd" if forward else "bwd"
    mine = [i for i, op in enumerate(ops) if op.verb == verb and (op.microbatch, op.chunk) == item]
    return max([i for i in mine if ops[i].layer >= 0] or mine)


def defer_past_send(ops: StepOps, layout: Layout, layers: int, parts: str) -> StepOps:
    """Move the weight gradients of the last `layers` backward layers after the step's sends, all others before them.

    `parts` is `all`, or else only the layers' first parts are moved. Moved ops then run while the gradient travels and
    the next one is awaited. The head's forward comes after them, unless its stage has no layers: then it reads the
    received activation, and the next receive is posted after it. A step that sends nothing is unchanged; an activation
    alone is a p2p transfer to hide as well.
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
    """The same ops with all of a backward's weight gradients before the send of its input gradient."""
    for send in [op for op in ops if op.verb == "send" and op.part == "grad"]:
        item, sent = (send.microbatch, send.chunk), ops.index(send)
        late = [op for op in ops[sent:] if op.verb == "wgrad" and op.layer >= 0 and (op.microbatch, op.chunk) == item]
        ops = [*ops[:sent], *late, *(op for op in ops[sent:] if op not in late)]
    return ops


def defer_head(per_step: list[StepOps], count: int) -> list[StepOps]:
    """Move the head's weight gradients of the last `count` microbatches, -1 for all, to the end of the rank's list.

    No op waits for them: the gradient that goes back through the pipeline leaves earlier, and this rank, which finishes
    before the others, computes them while those finish. Gradients are still summed in the order of microbatches,
    because the last ones move. Inputs and gradients of the logits are kept until then.
    """
    found = [op for ops in per_step for op in ops if op.verb == "wgrad" and op.part == HEAD.name]
    late = found if count < 0 else found[max(0, len(found) - count) :]
    if not late:
        return per_step
    moved = set(late)
    rest = [[op for op in ops if op not in moved] for ops in per_step]
    return [*rest[:-1], rest[-1] + late]
