"""From an order of microbatches to a Program: a chain of pure passes.

    order      pipeline.py                      which chunk runs when
    expand     steps x layer templates          the parts of every layer, in host order
    insert_p2p                                  sends and receives
    defer_past_send                             weight gradients that hide the send
    defer_head                                  those of the head, for when its rank would idle
    shard      shard.py                         gather, release, add, reduce; slots
    connect    connect.py                       dependencies
    free       connect.py                       where each value is dropped

The first passes keep a rank's ops as a list per step, so that a pass can speak of "the end of the step".
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Literal

from hocket.config import Config, OverlapConfig
from hocket.plan.connect import connect, free, latest_per_lane
from hocket.plan.layer import ALONE, Token, at_once, merged_order, without_wgrads
from hocket.plan.merged_v import merged_v
from hocket.plan.ops import Key, Lane, Layout, Op, Program
from hocket.plan.pairs import expand_pair, op_of, ops_of
from hocket.plan.pipeline import Item, Order, Step, forward_only, in_flight, one_f_one_b, sequential
from hocket.plan.shard import Sharding, shard
from hocket.plan.values import reads
from hocket.plan.zero_bubble import ZERO_BUBBLE, zb_h1, zb_v

StepOps = list[Op]
"""The ops of one step, in host order."""


def build_program(layout: Layout, microbatches: int, config: Config, sharding: Sharding, frees: bool = True) -> Program:
    """The whole chain: the Program of one optimizer step. Of `config` it reads the sections `plan` and `overlap`.

    Without `frees` nothing is ever dropped: enough to know times, and made sooner; `free_rank` does the rest. Raises
    ValueError for settings that have no legal order.
    """
    order, notes = choose_order(layout, microbatches, config)
    plan, overlap = config.plan, config.overlap
    merged, alone = merged_order(plan.layer_order), ALONE
    if overlap.defer_wgrad == "off":
        merged, alone = at_once(merged), at_once(alone)
    ranks = []
    for rank, steps in enumerate(order):
        apart = {step.wgrad for step in steps}

        @cache
        def like(step: Step, apart: bool, rank: int = rank) -> StepOps:
            """The ops of a step, for all that have the same chunks."""
            if step.also:
                return expand_pair(step, layout, rank, overlap.defer_wgrad != "off")
            return expand(step, layout, rank, merged, without_wgrads(alone) if apart else alone)

        per_step = [_numbered(step, like(_of_any(step), step.bwd in apart)) for step in steps]
        early = plan.stride == 3 or any(step.also for step in steps)
        per_step = insert_p2p(per_step, steps, layout, rank, 2 if early else 1)
        if overlap.defer_wgrad != "off":
            layers = 1 if overlap.pp.defer_layers == "auto" else overlap.pp.defer_layers
            layers = len(layout.kinds) if layers < 0 else layers
            per_step = [defer_past_send(ops, layers, overlap.pp.defer_parts) for ops in per_step]
        if overlap.defer_wgrad != "off" and layout.pp > 1:
            per_step = defer_head(per_step, 0 if overlap.pp.defer_head == "auto" else overlap.pp.defer_head)
        ranks.append(per_step)
    program = _finish(layout, microbatches, order, ranks, sharding, overlap, frees)
    return replace(program, notes=tuple(notes))


def _of_any(step: Step) -> Step:
    """A step of the same chunks, with numbers of its items in place of microbatches."""
    items = (step.fwd, step.bwd, step.wgrad, step.also)
    return Step(*(item and (number, item[1]) for number, item in enumerate(items)))


def _numbered(step: Step, ops: StepOps) -> StepOps:
    """The ops of a step, from those of `_of_any`."""
    microbatch = [item[0] if item else -1 for item in (step.fwd, step.bwd, step.wgrad, step.also)]
    return [Op(op.verb, op.part, microbatch[op.microbatch], op.chunk, op.layer, op.lane) for op in ops]


def free_rank(program: Program, rank: int) -> Program:
    """A program built without `frees`, but for one rank as if it had been built with them."""
    return replace(program, ranks=free(program.ranks, program.layout, only=rank))


def with_late_heads(program: Program, count: int) -> Program:
    """A program as it would have been built with `overlap.pp.defer_head = count`, -1 for all, from one with 0.

    The head's last weight gradients, and what adds up or reduces them, move in front of the step op. Each still waits
    for the one slot of the head's gradients, and the step for the last of them. `program` is one without `frees`.
    """
    rank, _ = program.layout.owner(program.layout.stages - 1)
    ops, first = program.ranks[rank], program.microbatches - count if count >= 0 else 0
    late = [p for p, op in enumerate(ops) if op.part == "head" and op.verb in ("wgrad", "add", "reduce")]
    late = late[next((i for i, p in enumerate(late) if ops[p].microbatch >= first), len(late)) :]
    if not late:
        return program
    moved, last = set(late), len(ops) - 1
    order = [*(p for p in range(last) if p not in moved), *late, last]
    position = {old: new for new, old in enumerate(order)}
    also = {p: before for before, p in pairwise(late) if ops[p].verb == "wgrad"} | {last: late[-1]}
    lanes = [ops[p].lane for p in order]
    again: list[Op] = []
    for new, old in enumerate(order):
        deps = [position[dep] for dep in ops[old].deps]
        if old in also:
            deps = latest_per_lane(lanes, new, [*deps, position[also[old]]])
        again.append(ops[old]._replace(deps=tuple(sorted(deps))))
    return replace(program, ranks=(*program.ranks[:rank], tuple(again), *program.ranks[rank + 1 :]))


def build_forward(beside: Program, config: Config, sharding: Sharding) -> Program:
    """The Program of a validation: forwards alone, in the weight slots of the training program `beside`.

    Its gathers run ahead as far as these slots allow. Its last op, `step all`, only joins the lanes.
    """
    layout, microbatches, overlap = beside.layout, beside.microbatches, config.overlap
    order = forward_only(layout.pp, layout.chunks, microbatches)
    ranks = []
    for rank, steps in enumerate(order):
        per_step = [expand(step, layout, rank, ALONE, ALONE) for step in steps]
        ranks.append(insert_p2p(per_step, steps, layout, rank))
    for prefetch in reversed(range(overlap.dp.prefetch + 1)):
        nearer = replace(overlap, dp=replace(overlap.dp, prefetch=prefetch, update="end"))
        program = _finish(layout, microbatches, order, ranks, sharding, nearer)
        if all(count <= beside.weight_slots[unit] for unit, count in program.weight_slots.items()):
            return program
    raise AssertionError("without prefetch one slot of each class is enough")


def _finish(
    layout: Layout,
    microbatches: int,
    order: Order,
    ranks: list[list[StepOps]],
    sharding: Sharding,
    overlap: OverlapConfig,
    frees: bool = True,
) -> Program:
    """The last passes: shard, connect, free."""
    flat = [[op for ops in per_step for op in ops] for per_step in ranks]
    on_compute = overlap.pp.backward_lane == "off"
    held = [compute_awaits(per_step, layout, rank) for rank, per_step in enumerate(ranks)] if on_compute else []
    sharded = shard(flat, layout, sharding, overlap.dp.prefetch, updates=overlap.dp.update == "next_step")
    connected = connect(sharded.ranks, layout, held)
    return Program(
        layout=layout,
        microbatches=microbatches,
        ranks=free(connected, layout) if frees else connected,
        weight_slots=sharded.weight_slots,
        grad_slots=sharded.grad_slots,
        in_flight=tuple(in_flight(steps) for steps in order),
    )


def choose_order(layout: Layout, microbatches: int, config: Config) -> tuple[Order, list[str]]:
    """The order of microbatches that a plan's settings ask for, and remarks about it."""
    if microbatches < 1:
        raise ValueError(f"train.microbatches must be at least 1, got {microbatches}")
    plan, ep = config.plan, config.overlap.ep
    merge = ep.merge != "off"
    kind = plan.order
    if kind == "auto":
        kind = "sequential" if layout.stages == 1 and not merge else "interleaved" if layout.chunks > 1 else "1f1b"
    if kind == "sequential" and (layout.stages > 1 or not merge):
        if ep.merge == "on":
            raise ValueError(
                "overlap.ep.merge=on cannot be had with plan.order=sequential and several stages: each microbatch ends "
                "before the next one starts; use plan.order=1f1b or interleaved"
            )
        return sequential(layout.pp, layout.chunks, microbatches), []
    if kind in ZERO_BUBBLE or kind == "merged_v":
        return _with_wgrads(layout, microbatches, config)
    if kind == "1f1b" and layout.chunks > 1:
        raise ValueError(f"plan.order=1f1b has one chunk per rank, got plan.chunks={layout.chunks}; use interleaved")
    order = one_f_one_b(
        layout.pp,
        layout.chunks,
        microbatches,
        group=plan.group,
        merge=merge,
        stride=plan.stride,
        ends=merge and ep.merge_ends == "on",
    )
    return order, _merge_notes(order, microbatches, config) if merge else []


def _with_wgrads(layout: Layout, microbatches: int, config: Config) -> tuple[Order, list[str]]:
    """An order in which weight gradients have steps of their own."""
    plan, overlap = config.plan, config.overlap
    merged, chunks = plan.order == "merged_v", 2 if plan.turning else 1
    if layout.chunks != chunks or layout.turning != plan.turning:
        raise ValueError(f"plan.order={plan.order} has plan.chunks={chunks} chunks per rank, got {layout.chunks}")
    if overlap.ep.merge == ("off" if merged else "on") or overlap.defer_wgrad == "off":
        raise ValueError(
            f"plan.order={plan.order} fills bubbles with weight gradients in steps of their own: it needs overlap.ep."
            f"merge={'on' if merged else 'off'} and overlap.defer_wgrad=on, got {overlap.ep.merge} and "
            f"{overlap.defer_wgrad}"
        )
    make = merged_v if merged else zb_v if plan.turning else zb_h1
    return make(layout.pp, microbatches), []


def _merge_notes(order: Order, microbatches: int, config: Config) -> list[str]:
    bare = [rank for rank, steps in enumerate(order) if not any(step.merged for step in steps)]
    if not bare:
        return []
    text = (
        f"nothing is merged on pipeline rank{'s' if len(bare) > 1 else ''} {', '.join(map(str, bare))}: with "
        f"{microbatches} microbatches all forwards are warm-up; more microbatches, fewer chunks or a smaller group help"
    )
    if config.overlap.ep.merge == "on" and len(bare) == len(order):
        raise ValueError(f"overlap.ep.merge=on, but {text}")
    return [text]


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
            for part in reversed(layout.weighted_parts(layer))
        ]
    ops: StepOps = []
    forward = list(layout.layers(rank, step.fwd[1])) if step.fwd else []
    backward = list(reversed(layout.layers(rank, step.bwd[1]))) if step.bwd else []
    after = dict(pairwise(backward))

    def emit(token: Token, layer: int | None, item: Item | None) -> None:
        if token == ("bwd", "unpermute") and layer is not None:  # see Note: [uB' belongs to the next layer]
            layer = after.get(layer)
        if layer is not None and item is not None:
            ops.extend(ops_of(token, item, layer, layout))

    def run(tokens: tuple[Token, ...], f: int | None, b: int | None) -> None:
        for token in tokens:
            emit(token, *((f, step.fwd) if token[0] == "fwd" else (b, step.bwd)))

    if step.bwd and layout.is_last(rank, step.bwd[1]):
        ops.append(op_of("bwd", "head", step.bwd))
    if step.bwd:
        ops += ops_of(("bwd", "unpermute"), step.bwd, backward[0], layout)
    if step.bwd and layout.is_last(rank, step.bwd[1]):
        ops.append(op_of("wgrad", "head", step.bwd))
    if step.fwd and layout.is_first(rank, step.fwd[1]):
        ops.append(op_of("fwd", "embed", step.fwd))
    pairs = min(len(forward), len(backward))
    for f, b in zip(forward[:pairs], backward[:pairs], strict=True):
        run(merged, f, b)
    for b in backward[pairs:]:
        run(alone, None, b)
    for f in forward[pairs:]:
        run(alone, f, None)
    if step.fwd and layout.is_last(rank, step.fwd[1]):
        ops.append(op_of("fwd", "head", step.fwd))
    if step.bwd and layout.is_first(rank, step.bwd[1]):
        ops += [op_of("bwd", "embed", step.bwd), op_of("wgrad", "embed", step.bwd)]
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
            out[k] = _insert_behind(out[k], _producer(out[k], item, forward), inserted)
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
    """Position of the last layer op of an item's forward, or of its input gradient."""
    verb = "fwd" if forward else "bwd"
    return max(i for i, op in enumerate(ops) if op.verb == verb and op.layer >= 0 and (op.microbatch, op.chunk) == item)


def _insert_behind(ops: StepOps, position: int, inserted: list[Op]) -> StepOps:
    return ops[: position + 1] + inserted + ops[position + 1 :]


def compute_awaits(per_step: list[StepOps], layout: Layout, rank: int) -> dict[Key, Key]:
    """First compute op of a step -> the received gradient that the step reads, wherever one is not the other's reader.

    With gradients on the compute lane that op waits for the receive, and the whole step behind it, as if compute itself
    received: also the forward that a backward is merged with, which has no use for the gradient.
    """
    held: dict[Key, Key] = {}
    for ops in per_step:
        received = {key for op in ops for key in reads(op, layout, rank) if key[:2] == ("recv", "grad")}
        first = next((op for op in ops if op.lane == "compute" and op.verb != "recompute"), None)
        for key in received:
            if first is not None and first.verb != "wgrad" and key not in reads(first, layout, rank):
                held[first.key] = key
    return held


def defer_past_send(ops: StepOps, layers: int, parts: str) -> StepOps:
    """Move the weight gradients of the last `layers` backward layers behind the step's sends.

    `parts` is `all` for those of MLP and experts too; else attention's alone. They then run while the gradient travels
    and the next one is awaited; the head's forward stays behind them. A step that sends nothing is left as it is; an
    activation alone is a hop to hide as well.
    """
    if layers == 0 or not any(op.verb == "send" for op in ops):
        return ops
    backward = [op.layer for op in ops if op.verb == "bwd" and op.part == "attn"]
    late = set(backward[-layers:])

    def is_late(op: Op) -> bool:
        return op.verb == "wgrad" and op.layer in late and (parts == "all" or op.part == "attn")

    head = [op for op in ops if op.verb == "fwd" and op.part == "head"]
    rest = [op for op in ops if not is_late(op) and op not in head]
    return rest + [op for op in ops if is_late(op)] + head


def defer_head(per_step: list[StepOps], count: int) -> list[StepOps]:
    """Move the head's weight gradients of the last `count` microbatches, -1 for all, behind everything else of a rank.

    In front of them nobody waits: the gradient that goes back through the pipeline leaves earlier, and the rank, which
    is done before the others, adds up what is left while they finish. The last ones it is, so that gradients are still
    added up in the order of microbatches. Until then inputs and gradients of the logits are kept.
    """
    found = [op for ops in per_step for op in ops if op.verb == "wgrad" and op.part == "head"]
    late = found if count < 0 else found[max(0, len(found) - count) :]
    if not late:
        return per_step
    moved = set(late)
    rest = [[op for op in ops if op not in moved] for ops in per_step]
    return [*rest[:-1], rest[-1] + late]
