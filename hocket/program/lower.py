"""From an order of microbatches to a Program: a chain of passes, each a function `Draft -> Draft`.

    order           pipeline.py        which chunk runs when
    expand          expand.py          the parts of every layer, in host order
    sends           expand.py          sends and receives
    defer_wgrads    expand.py          weight gradients that hide the send
    defer_head      expand.py          the head's weight gradients, until its rank would idle
    shard           shard.py           gather, release, add, reduce; slots
    offload         offload.py         copies to host memory and back; slots there
    connect         connect.py         dependencies
    free            connect.py         where each value is dropped

`PASSES` is the chain. A caller may run another one: `build_program(..., passes=inserted("sends", mine))`. Until `shard`
a pass sees a rank's ops as a list per step, so it can refer to "the end of the step". Whatever a pass does, `check`
tells whether the program still computes what plain training computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from hocket.collector import without_collector
from hocket.config import Config
from hocket.program.connect import connect, free
from hocket.program.expand import StepOps, defer_head, defer_past_send, expand, insert_p2p
from hocket.program.layer import alone_order, merged_order, pairs_problem, undeferred
from hocket.program.offload import offload
from hocket.program.ops import Key, Layout, Op, Program
from hocket.program.pipeline import (
    Order,
    Step,
    forward_only,
    in_flight,
    merged_v,
    one_f_one_b,
    sequential,
    zb_h1,
    zb_v,
)
from hocket.program.shard import Sharding, shard


@dataclass(frozen=True)
class Draft:
    """A program under construction: its inputs, and the ops so far."""

    layout: Layout
    microbatches: int
    config: Config
    """Passes read its sections `plan` and `overlap`."""
    sharding: Sharding
    order: Order
    steps: tuple[tuple[StepOps, ...], ...] = ()
    """The ops of every rank and step, in host order, until `shard` joins them."""
    ranks: tuple[tuple[Op, ...], ...] = ()
    """The ops of every rank, after that."""
    extra_waits: tuple[Mapping[Key, tuple[Key, ...]], ...] = ()
    """Per rank: ops that wait for others whose values they do not read."""
    weight_slots: Mapping[str, int] | None = None
    grad_slots: Mapping[str, int] | None = None

    def each(self, change: Callable[[int, tuple[StepOps, ...]], list[StepOps]]) -> Draft:
        """The draft with other ops: `change` gets a rank and its steps."""
        return replace(self, steps=tuple(tuple(change(rank, steps)) for rank, steps in enumerate(self.steps)))


Pass = Callable[[Draft], Draft]


def expand_steps(draft: Draft) -> Draft:
    """The parts of every layer."""
    plan, defer = draft.config.plan, draft.config.overlap.defer_wgrad != "off"
    ranks = _expanded(draft.order, draft.layout, plan.layer_order, defer)
    return replace(draft, steps=tuple(tuple(map(list, steps)) for steps in ranks))


@lru_cache(maxsize=1)
def _expanded(order: Order, layout: Layout, layer_order: str, defer: bool) -> tuple[tuple[tuple[Op, ...], ...], ...]:
    """The ops of every rank and step. Cached for candidates that differ only in what is deferred past the send."""
    merged, alone = merged_order(layer_order, layout), alone_order(layout)
    if not defer:
        merged, alone = undeferred(merged), undeferred(alone)
    if any(step.also for steps in order for step in steps) and (problem := pairs_problem(layout)):
        raise ValueError(f"overlap.ep.merge_ends=on: {problem}; use overlap.ep.merge_ends=off")
    ranks = []
    for rank, steps in enumerate(order):
        apart = {step.wgrad for step in steps}

        @cache
        def like(step: Step, apart: bool, rank: int = rank) -> StepOps:
            """The ops of a step, shared by all steps of the same chunks."""
            tokens = tuple(token for token in alone if token[0] != "wgrad") if apart else alone  # in separate steps
            return expand(step, layout, rank, merged, tokens, defer)

        ranks.append(tuple(_numbered(step, like(_of_any(step), step.bwd in apart)) for step in steps))
    return tuple(ranks)


def expand_forwards(draft: Draft) -> Draft:
    """The parts of a validation's forwards."""
    layout, alone = draft.layout, alone_order(draft.layout)
    ranks = (tuple(expand(step, layout, r, alone, alone) for step in steps) for r, steps in enumerate(draft.order))
    return replace(draft, steps=tuple(ranks))


def insert_sends(draft: Draft) -> Draft:
    """Sends and receives between pipeline ranks."""

    def change(rank: int, steps: tuple[StepOps, ...]) -> list[StepOps]:
        order = draft.order[rank]
        paired = any(step.also for step in order)
        return insert_p2p(list(steps), order, draft.layout, rank, 2 if paired else 1)

    return draft.each(change)


def defer_wgrads(draft: Draft) -> Draft:
    """Moves weight gradients after the send, to hide it."""
    if draft.config.overlap.defer_wgrad == "off":
        return draft
    layers, parts = draft.config.overlap.pp.late
    layers = len(draft.layout.kinds) if layers < 0 else layers
    return draft.each(lambda _, steps: [defer_past_send(ops, draft.layout, layers, parts) for ops in steps])


def defer_heads(draft: Draft) -> Draft:
    """Moves the head's weight gradients to the end."""
    count = draft.config.overlap.pp.defer_head
    meet = draft.layout.tied and not draft.layout.apart  # both gradients share a slot, so none can be deferred
    if draft.config.overlap.defer_wgrad == "off" or draft.layout.pp == 1 or meet:
        return draft
    return draft.each(lambda _, steps: defer_head(list(steps), 0 if count == "auto" else count))


def shard_units(draft: Draft) -> Draft:
    """Gathers, releases, adds, reduces, updates and the step op, with their slots. Joins the steps of a rank."""
    layout, overlap = draft.layout, draft.config.overlap
    flat = [[op for ops in steps for op in ops] for steps in draft.steps]
    sharded = shard(flat, layout, draft.sharding, overlap.dp.prefetch, updates=overlap.dp.update == "next_step")
    ranks = tuple(map(tuple, sharded.ranks))
    return replace(draft, ranks=ranks, weight_slots=sharded.weight_slots, grad_slots=sharded.grad_slots)


def offload_saved(draft: Draft) -> Draft:
    """Copies of saved tensors to host memory, and back."""
    if not draft.layout.offload:
        return draft
    ranks, extra_waits = zip(*(offload(ops, draft.layout) for ops in draft.ranks), strict=True)
    return replace(draft, ranks=ranks, extra_waits=extra_waits)


def connect_lanes(draft: Draft) -> Draft:
    """What each op waits for."""
    return replace(
        draft,
        ranks=connect([list(ops) for ops in draft.ranks], draft.layout, draft.extra_waits or ({},) * len(draft.ranks)),
    )


def free_values(draft: Draft) -> Draft:
    """Which op drops which value."""
    return replace(draft, ranks=free(draft.ranks, draft.layout))


PASSES: Mapping[str, Pass] = {
    "expand": expand_steps,
    "sends": insert_sends,
    "defer_wgrads": defer_wgrads,
    "defer_head": defer_heads,
    "shard": shard_units,
    "offload": offload_saved,
    "connect": connect_lanes,
    "free": free_values,
}
"""The chain of passes of every training step, by name, in order."""
FORWARD_PASSES: Mapping[str, Pass] = {
    "expand": expand_forwards, **{name: PASSES[name] for name in ("sends", "shard", "connect", "free")}
}  # fmt: skip
"""The chain of a validation."""


def inserted(after: str, *more: Pass, passes: Mapping[str, Pass] = PASSES) -> dict[str, Pass]:
    """A chain of passes with others inserted after the one named `after`. Raises ValueError if there is none."""
    if after not in passes:
        raise ValueError(f"there is no pass {after!r}; there are {', '.join(passes)}")
    chain: dict[str, Pass] = {}
    for name, one in passes.items():
        chain[name] = one
        if name == after:
            chain |= {extra.__name__: extra for extra in more}
    return chain


@without_collector()
def build_program(
    layout: Layout,
    microbatches: int,
    config: Config,
    sharding: Sharding,
    frees: bool = True,
    passes: Mapping[str, Pass] = PASSES,
) -> Program:
    """Run the whole chain: the Program of one optimizer step. Reads the sections `plan` and `overlap` of `config`.

    Without `frees` values are never dropped: enough to simulate times, and faster; `free_rank` adds the drops.
    """
    order, notes = choose_order(layout, microbatches, config)
    chain = [one for name, one in passes.items() if frees or name != "free"]
    made = replace(_made(Draft(layout, microbatches, config, sharding, order), chain), notes=tuple(notes))
    if frees:  # not a candidate: don't cache a large program that is built once
        _expanded.cache_clear()
    return made


def _made(draft: Draft, chain: list[Pass]) -> Program:
    for one in chain:
        draft = one(draft)
    return Program(
        layout=draft.layout,
        microbatches=draft.microbatches,
        ranks=draft.ranks,
        weight_slots=draft.weight_slots or {},
        grad_slots=draft.grad_slots or {},
        in_flight=tuple(in_flight(steps) for steps in draft.order),
    )


def _of_any(step: Step) -> Step:
    """A step of the same chunks, with its items numbered in place of microbatches."""
    items = (step.fwd, step.bwd, step.wgrad, step.also)
    return Step(*(item and (number, item[1]) for number, item in enumerate(items)))


def _numbered(step: Step, ops: StepOps) -> tuple[Op, ...]:
    """The ops of a step, from those of `_of_any`."""
    microbatch = [item[0] if item else -1 for item in (step.fwd, step.bwd, step.wgrad, step.also)]
    return tuple(Op(op.verb, op.part, microbatch[op.microbatch], op.chunk, op.layer, op.lane) for op in ops)


def free_rank(program: Program, rank: int) -> Program:
    """A program built without `frees`, with the drops added for one rank."""
    return replace(program, ranks=free(program.ranks, program.layout, only=rank))


def build_forward(beside: Program, config: Config, sharding: Sharding) -> Program:
    """The Program of a validation: forwards alone, in the weight slots of the training program `beside`.

    Gathers are prefetched as far as these slots allow. The last op, `step all`, only joins the lanes.
    """
    layout, microbatches, overlap = beside.layout, beside.microbatches, config.overlap
    order = forward_only(layout.pp, layout.chunks, microbatches)
    for prefetch in reversed(range(overlap.dp.prefetch + 1)):
        nearer = replace(overlap, dp=replace(overlap.dp, prefetch=prefetch, update="end"))
        draft = Draft(layout, microbatches, replace(config, overlap=nearer), sharding, order)
        program = _made(draft, list(FORWARD_PASSES.values()))
        if all(count <= beside.weight_slots[unit] for unit, count in program.weight_slots.items()):
            return program
    raise AssertionError("without prefetch one slot of each class is enough")


def choose_order(layout: Layout, microbatches: int, config: Config) -> tuple[Order, list[str]]:
    """The order of microbatches for a plan's settings, and remarks about it. Rules have refused impossible ones."""
    plan, ep = config.plan, config.overlap.ep
    kind, merge = plan.order, ep.merge != "off"
    assert microbatches >= 1
    if kind == "auto":
        kind = "sequential" if layout.stages == 1 and not merge else "interleaved" if layout.chunks > 1 else "1f1b"
    if kind == "sequential" and (layout.stages > 1 or not merge):
        assert ep.merge != "on", "each microbatch ends before the next one starts"
        return sequential(layout.pp, layout.chunks, microbatches), []
    if plan.fills_bubble:
        assert (layout.chunks, layout.turning) == (2 if plan.turning else 1, plan.turning)
        assert config.overlap.defer_wgrad != "off", "weight gradients have steps of their own"
        assert ep.merge != ("off" if kind == "merged_v" else "on")
        make = merged_v if kind == "merged_v" else zb_v if plan.turning else zb_h1
        return make(layout.pp, microbatches), []
    assert kind != "1f1b" or layout.chunks == 1
    ends = merge and ep.merge_ends == "on"
    order = one_f_one_b(layout.pp, layout.chunks, microbatches, group=plan.group, merge=merge, ends=ends)
    return order, _merge_notes(order, microbatches) if merge else []


def _merge_notes(order: Order, microbatches: int) -> list[str]:
    bare = [rank for rank, steps in enumerate(order) if not any(step.merged for step in steps)]
    if not bare:
        return []
    ranks = f"rank{'s' if len(bare) > 1 else ''} {', '.join(map(str, bare))}"
    text = (
        f"nothing is merged on pipeline {ranks}: with {microbatches} microbatches all forwards are warm-up; more "
        "microbatches, fewer chunks or a smaller group help"
    )
    return [text]
