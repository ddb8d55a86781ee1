"""What every op of a plan costs: FLOPs, bytes and seconds from the sizes of the model and a few hardware figures.

Letters: T tokens of a microbatch, S tokens of a sequence, D hidden, R = T * top_k routed rows, P weights of a part,
n ranks of a group. "Elements" count numbers, whatever their dtype; bytes are elements times `dtype_bytes`.

    time of a compute op    matmul FLOPs / rate + attention FLOPs / rate + bytes of kernels between / their bandwidth
                            + 2/3 of what matmuls read and write / the same + what starts and ends kernels
    rate                    of the full clock, at the clock that power allows (`clock_of` in `hardware.py`)
    matmul FLOPs            2 T P in fwd, in bwd and in wgrad each
    attention core          2 T S w in fwd (causal, so half of the square; w = heads * head_dim), 5/2 of that in bwd
    time of a transfer      latency + wire bytes / bandwidth
    all-gather, reduce      (n - 1) / n * P elements received; twice that where all ranks get the whole sum
    all-to-all              (ep - 1) / ep * R * D elements received: even routing; fewer R with one copy per rank
    pipeline p2p transfer            T * D elements

Sources: 2 T P and the causal half are the counting of Kaplan et al. 2020 (arXiv 2001.08361) and of the PaLM report
(arXiv 2204.02311, appendix B); 5/2 is FlashAttention-2's backward (arXiv 2307.08691), five matmuls against two; wire
bytes are the `busbw` factors of nccl-tests. Elementwise bytes count one read or write per tensor and kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from hocket.config import COPIED, Config, ModelConfig, Purpose
from hocket.program.documents import Lengths
from hocket.program.hardware import KIND_OF_GROUPS, Hardware, Work, at_clock, clock_of
from hocket.program.ops import TIED, Layout, Op, Program
from hocket.program.part_sizes import DRAWN, ISSUED, STOCK, Fp8, PartSize, Shapes, copies_of, orthogonal_flops
from hocket.program.parts import END_UNITS, Part, Unit
from hocket.program.shard import MATRIX_SLOTS, Sharding
from hocket.program.simulate import UPDATES, CostKey, Kind, Overheads, Time, cost_key
from hocket.program.transformer import EMBED, HEAD, standard_types
from hocket.program.values import lent_to


@dataclass(frozen=True, slots=True)
class OpCost:
    """Cost of one op on one rank. `memory_bytes` is traffic outside matmuls; the rest is as in `simulate.Costs`."""

    seconds: Time = 0.0
    flops: float = 0.0
    wire_bytes: int = 0
    memory_bytes: int = 0
    output_bytes: int = 0
    saved_bytes: int = 0
    grad_bytes: int = 0
    handed_bytes: int = 0
    """More of the output, if a forward that runs again keeps nothing else of it."""
    lent_bytes: int = 0
    """Of what is saved: not kept where it is made again. Of what is made again: what its reader makes of it then."""
    inner_seconds: Time = 0.0
    """Of `seconds`: in which the op waits for tensor-parallel peers."""
    inner_bytes: int = 0
    """What it gets from them."""


@dataclass(frozen=True)
class CostTable:
    """Costs of all ops of a program, for `simulate`. What is missing in `table` costs nothing.

    `slot_bytes[rank]` has the sizes of a weight slot and of a gradient slot of each class of units, `state_bytes[rank]`
    is that of main weights, copies of those that are held whole, and optimizer state. `clock` in Hz is that which power
    allows; 0: no limit is known.
    """

    kinds: tuple[str, ...]
    table: Mapping[CostKey, OpCost]
    slot_bytes: tuple[Mapping[Unit, tuple[int, int]], ...] = ()
    state_bytes: tuple[int, ...] = ()
    clock: float = 0.0
    recomputed: Collection[tuple[str, int]] = frozenset()
    """(part, layer) whose forward keeps nothing, because it runs again."""
    lent: Collection[tuple[str, int]] = frozenset()
    """(part, layer) of those who do not keep what they read, and of those who make it again for their backward."""
    timed: Collection[CostKey] = frozenset()
    """Those whose seconds were measured, with the documents that the run had."""

    def of(self, op: Op) -> OpCost:
        return self.table.get(cost_key(op, self.kinds), _FREE)

    def seconds(self, rank: int, op: Op) -> Time:
        return self.of(op).seconds

    def inner_seconds(self, rank: int, op: Op) -> Time:
        return self.of(op).inner_seconds

    def output_bytes(self, rank: int, op: Op) -> int:
        cost = self.of(op)
        lent = op.verb == "recompute" and (op.part, op.layer) in self.lent
        handed = cost.handed_bytes if self._keeps_nothing(op) else 0
        return cost.output_bytes + handed + (cost.lent_bytes if lent else 0)

    def saved_bytes(self, rank: int, op: Op) -> int:
        if self._keeps_nothing(op):
            return 0
        cost, lent = self.of(op), op.verb == "fwd" and (op.part, op.layer) in self.lent
        return cost.saved_bytes - (cost.lent_bytes if lent else 0)

    def _keeps_nothing(self, op: Op) -> bool:
        return op.verb == "fwd" and (op.part, op.layer) in self.recomputed

    def grad_bytes(self, rank: int, op: Op) -> int:
        return self.of(op).grad_bytes

    def fixed_bytes(self, program: Program, rank: int) -> int:
        if not self.slot_bytes:
            return 0
        return self.state_bytes[rank] + sum(
            program.weight_slots.get(unit, 0) * weight + program.grad_slots.get(unit, 0) * gradient
            for unit, (weight, gradient) in self.slot_bytes[rank].items()
        )

    def measured(self, seconds: Mapping[CostKey, Time]) -> CostTable:
        """The same table with measured seconds in place of modelled ones.

        A recomputation that was not measured takes as long as the forward that was. Of what tensor-parallel ranks
        measured, the modelled share waits for peers.
        """
        again = {("recompute", *key[1:]): value for key, value in seconds.items() if key[0] == "fwd"}
        seconds = {**{key: value for key, value in again.items() if key in self.table}, **seconds}
        changed = {key: _lasting(self.table.get(key, _FREE), value) for key, value in seconds.items()}
        return replace(self, table={**self.table, **changed}, timed=frozenset(changed))


def _lasting(cost: OpCost, seconds: Time) -> OpCost:
    """An op's cost if it takes so long."""
    inner = cost.inner_seconds and seconds * cost.inner_seconds / cost.seconds
    return replace(cost, seconds=seconds, inner_seconds=inner)


_FREE = OpCost()

_ATTENTION_DRAWN = 0.8
"""Power of a FLOP of attention over that of one of a matmul. See Note: [Power sets the clock]."""
CORE = {"fwd": 1.0, "bwd": 2.5}
"""By verb, how often the FLOPs of an attention core are computed."""
_SHOWN = 2 / 3
"""Share of the time of what a product reads and writes that its arithmetic does not hide: of 6 bytes more that it moves
to add to fp32 those of 4 (`benchmarks.expert_grads` and `benchmarks.weight_grads`, on an H200)."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a run has shown about its ops, to predict plans of the same sizes with (see `measured.py`)."""

    source: str
    """The trace it comes from."""
    seconds: Mapping[CostKey, float]
    """Seconds of an op on its lane, without contention and without waiting for peers."""
    overheads: Overheads
    notes: tuple[str, ...] = ()
    """What the reader must know, such as what could not be measured."""


def size_of(part: Part, shapes: Shapes) -> PartSize:
    """The sizes of a part by its own cost function."""
    if part.size is None:
        raise ValueError(f"part {part.name!r} has no cost function: give its description a `size`")
    return part.size(shapes)


def unit_weights(model: ModelConfig, layout: Layout, unit: Unit, kind: str) -> int:
    """Weights (elements) of one unit of such a layer, whole; of an experts unit those of one expert-parallel rank."""
    shapes = Shapes(model, 1, layout.ep, copies_of(model, layout.ep, False, 1), STOCK, layout.cp, layout.heads)
    parts = (EMBED, HEAD) if unit in END_UNITS else layout.by_kind[kind].parts
    return sum(size_of(part, shapes).weights for part in parts if layout.unit(part.name) == unit)


def model_flops_per_token(model: ModelConfig, seq: int) -> float:
    """FLOPs that training on one token needs, for MFU: `6 N_active + 6 S w` per attention layer.

    N_active are the weights of matmuls that a token meets (its own experts only, the head, not the embedding table).
    Causal attention counts half of the square: `3 * 2 S w` for forward and backward, and a layer with a window what
    lies within it. Recomputation counts nothing.
    """
    shapes, kinds = Shapes(model, seq, 1, copies_of(model, 1, False, 1), STOCK), model.layer_kinds()
    flops = 6.0 * size_of(HEAD, shapes).gemm
    for kind in standard_types(kinds):
        sizes = [size_of(part, shapes) for part in kind.parts]
        flops += kinds.count(kind.name) * sum(6 * (size.gemm + size.grouped) + 3 * size.core for size in sizes)
    return flops


@dataclass(frozen=True)
class _Pricing:
    """What turns sizes into costs."""

    hardware: Hardware
    tokens: int
    dtype_bytes: int
    sharing: int = 1
    """Ranks that share every product."""
    fp8: Fp8 | None = None
    """What runs in fp8."""

    def work(self, size: PartSize, verb: str, collects: bool = False, eight: float = 0.0) -> Work:
        """What fwd, bwd or wgrad of a part does, in a share `eight` of the layers in fp8.

        `collects`: products add weight gradients up in fp32. FLOPs are those that draw as much power in bf16.
        """
        hw, t, b = self.hardware, self.tokens, self.dtype_bytes
        matmul = 2.0 * t * (size.gemm + size.grouped)
        core = CORE.get(verb, 0.0) * t * size.core
        whole = CORE.get(verb, 0.0) * t * (size.core + size.masked)
        rate = hw.attention_fwd_flops if verb == "fwd" else hw.attention_bwd_flops
        clocked, others = matmul / hw.gemm_flops, self._traffic(size, verb) / hw.kernel_bandwidth
        drawn = matmul
        if eight and self.fp8 is not None:
            dense, grouped = (2.0 * t * weights / hw.gemm_flops for weights in (size.gemm, size.grouped))
            clocked += eight * (self.fp8.seconds(dense, grouped, verb) - clocked)
            others += eight * self.fp8.moved(size, t, verb) / hw.kernel_bandwidth
            drawn *= 1 + eight * (DRAWN - 1)
        if matmul:
            operands = t * size.rows * b + (8 if verb == "wgrad" and collects else b) * size.weights // self.sharing
            operands *= 1 - 0.25 * eight  # what is multiplied has half of the bytes, what comes out has all
            moving = operands / hw.kernel_bandwidth
            others += max(_SHOWN * moving, moving - clocked)  # few tokens: reading weights takes longer than arithmetic
        others += hw.gap + (size.routes * hw.routing if verb != "wgrad" else 0.0)
        return Work(clocked + whole / rate, others, drawn + _ATTENTION_DRAWN * core)

    def compute(self, size: PartSize, verb: str, collects: bool = False, eight: float = 0.0) -> OpCost:
        """Cost of fwd, bwd or wgrad of a part; `collects` and `eight` as for its work."""
        work, tokens_bytes = self.work(size, verb, collects, eight), self.tokens * self.dtype_bytes
        output = {"fwd": size.output, "bwd": size.grad}.get(verb, 0) * tokens_bytes
        saved = {"fwd": size.saved, "bwd": size.kept}.get(verb, 0) * tokens_bytes
        traffic = self._traffic(size, verb)
        flops = self.tokens * (2.0 * (size.gemm + size.grouped) + CORE.get(verb, 0.0) * size.core)
        if eight and self.fp8 is not None:
            traffic += round(eight * self.fp8.moved(size, self.tokens, verb))
            saved -= round(eight * self.fp8.saved(size, self.tokens, verb)) if verb != "wgrad" else 0
        lent = size.lent * tokens_bytes if verb == "fwd" else 0
        return OpCost(work.clocked + work.others, flops, 0, traffic, output, saved, lent_bytes=lent)

    def _traffic(self, size: PartSize, verb: str) -> int:
        """Bytes that kernels between matmuls read and write."""
        if verb == "wgrad":  # of a table: clear it, then add up rows
            table = not size.gemm + size.grouped
            return (3 * self.tokens * size.output + size.weights) * self.dtype_bytes if table else 0
        moved = size.traffic if verb == "fwd" else 2 * size.traffic + size.back
        return self.tokens * moved * self.dtype_bytes

    def local(self, memory_bytes: int, flops: float = 0.0) -> OpCost:
        """Cost of a compute op that reads and writes, and multiplies."""
        hw = self.hardware
        seconds = memory_bytes / hw.memory_bandwidth + flops / hw.gemm_flops + hw.gap
        return OpCost(seconds, flops, memory_bytes=memory_bytes)

    def transfer(self, purpose: Purpose, wire_bytes: int, output_bytes: int = 0, local_bytes: int = 0) -> OpCost:
        """Cost of a collective or a p2p transfer, with the local reads and writes that belong to it."""
        seconds = self.hardware.link(purpose).seconds(wire_bytes) + local_bytes / self.hardware.memory_bandwidth
        return OpCost(seconds, 0.0, wire_bytes, local_bytes, output_bytes)


def op_costs(
    model: ModelConfig,
    layout: Layout,
    tokens: int,
    seq: int,
    sharding: Sharding,
    hardware: Hardware,
    dtype_bytes: int,
    documents: Lengths = (),
) -> CostTable:
    """Costs of every op of one microbatch of `tokens` tokens per data-parallel rank, in sequences of `seq`.

    Without `documents` each sequence is one.

    Assumes even routing: every rank gets as many rows as it sends. A p2p transfer's seconds belong to the recv.
    """
    shapes = replace(shapes_of(model, layout, seq, hardware, dtype_bytes), documents=documents)
    parts = parts_of(layout)
    sizes = sizes_of(layout, shapes)
    price = _Pricing(hardware, tokens, dtype_bytes, sharding.tensor, sharding.fp8)
    clock = clock_with(sizes, layout, tokens, sharding, hardware, dtype_bytes)
    price = replace(price, hardware=at_clock(hardware, clock)) if clock else price
    table: dict[CostKey, OpCost] = {}
    p2p = tokens * model.hidden * dtype_bytes
    for described, kind in parts:
        part, size = described.name, sizes[described.name, kind]
        if described.communicates:
            assert described.purpose is not None
            rows, room = (tokens * elements * dtype_bytes for elements in (size.output, size.grad))
            moved = rows * (described.ranks - 1) // described.ranks
            for verb, nbytes, local in (("fwd", rows, size.traffic), ("bwd", room, 2 * size.traffic + size.back)):
                local_bytes = tokens * local * dtype_bytes
                table[verb, part, kind] = price.transfer(described.purpose, moved, nbytes, local_bytes)
            if layout.recomputing(part, kind):
                (reader,) = layout.by_kind[kind].readers[part]
                opened = tokens * (sizes[reader, kind].lent or size.output) * dtype_bytes
                table["recompute", part, kind] = replace(table["fwd", part, kind], lent_bytes=opened)
            continue
        for verb in _verbs(size):
            eight = _eight(price, layout, described, kind, verb)
            table[verb, part, kind] = price.compute(size, verb, _collects(layout, sharding, part), eight)
        if layout.recomputing(part, kind):
            once = table["fwd", part, kind]
            table["fwd", part, kind] = replace(once, handed_bytes=tokens * size.handed * dtype_bytes)
            table["recompute", part, kind] = once if described.lends else replace(once, output_bytes=0)
    table["recv", "act", ""] = table["recv", "grad", ""] = price.transfer("pp_fwd", p2p, p2p)
    slots, state = _add_units(model, layout, sharding, price, table)
    return CostTable(layout.kinds, table, slots, state, clock, layout.recomputed, _lent(layout))


def shapes_of(model: ModelConfig, layout: Layout, seq: int, hardware: Hardware, dtype_bytes: int) -> Shapes:
    """What the sizes of a plan's parts depend on."""
    copies = copies_of(model, layout.ep, layout.per_rank, dtype_bytes)
    ways = layout.cp, layout.heads
    return Shapes(model, seq, layout.ep, copies, hardware.formulas, *ways, exact=4 // dtype_bytes)


def parts_of(layout: Layout) -> list[tuple[Part, str]]:
    """Every part with the kinds of layers that have it."""
    kinds = sorted((kind for kind in layout.layer_types if kind.name in layout.kinds), key=lambda kind: kind.name)
    return [(EMBED, ""), (HEAD, ""), *((part, kind.name) for kind in kinds for part in kind.parts)]


def sizes_of(layout: Layout, shapes: Shapes) -> dict[tuple[str, str], PartSize]:
    """The sizes of `parts_of` a layout, by the names of part and kind."""
    return {(part.name, kind): size_of(part, shapes) for part, kind in parts_of(layout)}


def _lent(layout: Layout) -> frozenset[tuple[str, int]]:
    """(part, layer) of those who read what is made again, and were not made to keep it, and of what makes it."""
    pairs = ((part, lent_to(layout, part, n), n) for n in range(len(layout.kinds)) for part in layout.forward_parts(n))
    return frozenset((name, n) for *names, n in pairs for name in names if names[1])


def _verbs(size: PartSize) -> tuple[str, ...]:
    return ("fwd", "bwd", "wgrad") if size.weights else ("fwd", "bwd")


def _collects(layout: Layout, sharding: Sharding, part: str) -> bool:
    """Whether products of a part's weight gradients add them up in fp32."""
    unit = layout.unit(part)
    return unit is not None and (sharding.size(unit) == 1 or sharding.adds_up(unit))


def _eight(price: _Pricing, layout: Layout, part: Part, kind: str, verb: str) -> float:
    """Share of the layers of a kind in which an op's products run in fp8. Embedding and head have no kind."""
    return price.fp8.share(layout.kinds, kind, verb) if price.fp8 is not None and kind and part.unit else 0.0


def clock_with(
    sizes: Mapping[tuple[str, str], PartSize], layout: Layout, tokens: int, sharding: Sharding, hardware: Hardware,
    dtype_bytes: int,
) -> float:  # fmt: skip
    """The clock of microbatches of such `sizes_of`; 0: no limit is known. See Note: [Power sets the clock]."""
    if not hardware.clock:
        return 0.0
    price = _Pricing(hardware, tokens, dtype_bytes, sharding.tensor, sharding.fp8)
    works: list[Work] = []
    for part, kind in parts_of(layout):
        count, collects = layout.kinds.count(kind) if kind else 1, _collects(layout, sharding, part.name)
        again = layout.recomputing(part.name, kind)
        size = sizes[part.name, kind]
        if not part.communicates:
            eight = {verb: _eight(price, layout, part, kind, verb) for verb in _verbs(size)}
            works += count * [price.work(size, verb, collects, share) for verb, share in eight.items()]
            works += again * [price.work(size, "fwd", collects, eight["fwd"])]
    return clock_of(price.hardware, works)


def _add_units(
    model: ModelConfig, layout: Layout, sharding: Sharding, price: _Pricing, table: dict[CostKey, OpCost]
) -> tuple[tuple[Mapping[Unit, tuple[int, int]], ...], tuple[int, ...]]:
    """Add gather, add, reduce, update and step to the table; return slot sizes and state per pipeline rank.

    A gather casts its shard of the fp32 weights. A reduce adds its shard to the fp32 gradient: 8 bytes read and written
    per element, though the first of a step only writes; that the last one reads what adds have summed up is left out.
    What an add stands for, products of weight gradients do themselves, and in a group of one what a reduce stands for
    too: then there are no slots. An embedding whose head is tied to it has both, unless the two are on two ranks: then
    these exchange their sums, in fp32, and the step adds them up. AdamW reads weight, gradient and both averages and
    writes weight and averages: 28 bytes, or 20 with averages in bf16, and what is held whole once more in the format
    that computes, unless that is fp32; the norm reads the gradients once more. Every rank's step waits for the slowest,
    through the norm's all-reduce. Products in fp8 have casts beside; the step casts some first.
    """
    b, w = price.dtype_bytes, sharding.wire_bytes or price.dtype_bytes
    traffic = normed = summed_up = 0
    slots, state = list[Mapping[Unit, tuple[int, int]]](), list[int]()
    adamw = 12 + 4 * sharding.averages_bytes
    for rank in range(layout.pp):
        largest: dict[Unit, tuple[int, int]] = {}
        shards = copied = casts = agreed = 0
        for (unit, kind), count in Counter(units_of(layout, rank)).items():
            weights = unit_weights(model, layout, unit, kind)
            gathers, reduces = groups_of(unit)
            group = sharding.size(unit)
            whole, tied = not sharding.gathers(unit), layout.tied and unit == EMBED.unit
            twice = tied and not layout.apart
            part = -(-weights // group)
            others = part * (group - 1)
            shard = weights if whole else part
            eight, beside = _in_fp8(price, layout, unit, kind, weights)
            sent, local = others * (eight + b * (1 - eight)), shard * (2 * eight + (4 + b) * (1 - eight))
            table["gather", unit, kind] = price.transfer(gathers, round(sent), local_bytes=round(local))
            summed = price.transfer(reduces, (2 if whole else 1) * others * w, local_bytes=shard * (8 + w))
            slotted = group > 1 or twice
            table["reduce", unit, kind] = summed if slotted else _FREE
            sums = 0 if whole else 4 * weights  # who keeps whole gradients adds up where they stay
            table["add", unit, kind] = replace(price.local(weights * (8 + w)) if twice else _FREE, grad_bytes=sums)
            sizes = weights * (1 if eight == 1 else b) + (0 if whole else beside), weights * w
            largest[unit] = max(largest.get(unit, (0, 0)), sizes if slotted else (0, 0))
            for key in [key for key in table if key[0] == "wgrad" and (layout.unit(key[1]), key[2]) == (unit, kind)]:
                table[key] = replace(table[key], grad_bytes=4 * shard)
            cast = shard if whole and b != 4 else 0
            moved = price.local(adamw * shard + b * cast)
            table["update", unit, kind] = replace(moved, output_bytes=4 * shard)  # gradients that it has read
            if tied and layout.apart:
                table["recv", TIED, ""] = price.transfer("pp_bwd", 4 * shard, 4 * shard)
                summed_up = 12 * shard
            shards += count * shard
            copied += count * cast
            agreed += count * round(shard * eight)
            casts += count * (beside if whole else round(shard * eight))
        slots.append(largest)
        state.append((4 + 2 * sharding.averages_bytes) * shards + b * copied + casts)
        traffic = max(traffic, (adamw + 4) * shards + b * copied + (4 + 2 * b + 1) * agreed)
        normed = max(normed, 4 * shards)
    for part, nbytes in (("all", traffic), ("norm", normed)):
        wire = 8 if layout.pp * sharding.dense > 1 else 0
        table["step", part, ""] = price.transfer("control", wire, local_bytes=nbytes + summed_up)
    return tuple(slots), tuple(state)


def _in_fp8(price: _Pricing, layout: Layout, unit: Unit, kind: str, weights: int) -> tuple[float, int]:
    """(share of a unit's weights that are gathered in fp8, bytes of fp8 beside all of them where they are)."""
    if price.fp8 is None or not kind:
        return 0.0, 0
    beside = price.fp8.beside(layout.kinds, kind, unit)
    return price.fp8.travelling(layout.kinds, kind, unit), round(weights * beside)


def groups_of(unit: str) -> tuple[Purpose, Purpose]:
    """What its groups are for: the one that gathers its weights, and the one that reduces its gradients."""
    return ("gather_experts", "reduce_experts") if unit == "experts" else ("gather_dense", "reduce_dense")


def units_of(layout: Layout, rank: int) -> list[tuple[Unit, str]]:
    """(class, kind of the layer) of every unit of a pipeline rank."""
    units: list[tuple[Unit, str]] = []
    for chunk in range(layout.chunks):
        if layout.is_first(rank, chunk):
            units.append(("embed", ""))
        for layer in layout.layers(rank, chunk):
            kind = layout.type_of(layer)
            units += [(unit, kind.name) for unit in dict.fromkeys(part.unit for part in kind.weighted) if unit]
        if layout.is_last(rank, chunk) and not (layout.tied and ("embed", "") in units):
            units.append(("embed" if layout.tied else "head", ""))
    return units


# ------------------------------------------------------------------------------------------------------------ overheads
#
# What slows a step down beyond the costs of its ops, as far as the kind of hardware says it: contention and the host.
#
# Contention. NCCL's kernels hold processors, copy engines hold none; both move bytes through memory and links, which
# takes of the bandwidth and of the power that compute has. So do updates beside forwards. The host. It issues a step op
# by op, if the step is not replayed as a graph, and waits for the counts of rows that it has to know. Traces of a run
# measure the same (`measured.py`); Note: [What the simulator believes] in `simulate.py` says what the
# simulator makes of it.


_PURPOSES: tuple[Purpose, ...] = ("gather_dense", "reduce_dense", "a2a", "pp_fwd")
"""One group of each kind of communication that runs beside compute."""


def overheads_of(
    config: Config, hardware: Hardware, ops: Iterable[CostKey], measured: Measurement | None = None
) -> Overheads:
    """The overheads of a step of these ops, as it was measured if it was.

    In a replay no op waits for the host, so only contention is left. (Recorded steps were issued op by op.) With the
    null transport nothing is moved beside compute.
    """
    if measured is not None:
        return Overheads(measured.overheads.contention) if config.plan.graphs == "on" else measured.overheads
    issue = dict.fromkeys(ops, seconds) if (seconds := issued(config, hardware)) and config.plan.graphs != "on" else {}
    return Overheads(_contention(config, hardware), issue, hardware.counts if issue else None)


def issued(config: Config, hardware: Hardware) -> float:
    """Seconds in which the host issues one op."""
    return hardware.issue * (ISSUED if config.precision.compute == "fp8" else 1)


def _contention(config: Config, hardware: Hardware) -> Mapping[Kind, float]:
    factors: dict[Kind, float] = {
        KIND_OF_GROUPS[purpose]: hardware.beside_copies if _copied(config, purpose) else hardware.beside_kernels
        for purpose in (_PURPOSES if config.train.transport != "null" else ())
    }
    if config.overlap.dp.update == "next_step":
        factors[UPDATES] = hardware.beside_updates
    return {kind: factor for kind, factor in factors.items() if factor}


def _copied(config: Config, purpose: Purpose) -> bool:
    """Whether copy engines move the bytes of these groups. Rows that devices place are stored by kernels."""
    stored = purpose == "a2a" and config.overlap.ep.splits == "device"
    return purpose in COPIED.get(config.train.transport, ()) and not stored


# ----------------------------------------------------------------------------------------------------------- muon costs
#
# What Muon's updates cost: averages, iterations, and the exchanges around them, in the place of AdamW's.
#
# A unit's matrices are shared out over the ranks of its group, each as much as the others, and what is sent is bf16. An
# average reads gradient and average and writes the average and what is sent: 14 bytes an element. The update reads the
# result and the weight and writes the weight: 12. Of AdamW's two averages one is left.


def with_muon(
    costs: CostTable, model: ModelConfig, layout: Layout, sharding: Sharding, hardware: Hardware, dtype_bytes: int
) -> CostTable:
    """The costs of a step whose layers Muon updates. The step op has all of it, if no update is left to the next."""
    table, state, price = dict(costs.table), list(costs.state_bytes), _Pricing(hardware, 0, dtype_bytes)
    longest: Time = 0.0
    for rank in range(layout.pp):
        slots: dict[Unit, int] = {}
        longer: Time = 0.0
        for (unit, kind), count in Counter(units_of(layout, rank)).items():
            if not kind:
                continue
            weights, adamw = unit_weights(model, layout, unit, kind), costs.table["update", unit, kind]
            ranks = sharding.size(unit) if sharding.gathers(unit) else 1
            shard = -(-weights // ranks)
            cast = (4 + dtype_bytes) * shard if ranks == 1 and dtype_bytes != 4 else 0
            average, iterate, move = 14 * shard, 10 * weights, 12 * shard + cast
            flops, reduces = _orthogonal_flops(model, layout, unit, kind), groups_of(unit)[1]
            if ranks == 1:
                made = {"update": price.local(average + iterate + move, flops)}
            else:
                wire = 2 * shard * (ranks - 1)
                made = {
                    "collect": price.transfer(reduces, wire, local_bytes=average),
                    "orthogonalise": price.local(iterate, flops / ranks),
                    "scatter": price.transfer(reduces, wire, local_bytes=2 * weights + 4 * shard),
                    "update": price.local(move),
                }
            made["update"] = replace(made["update"], output_bytes=adamw.output_bytes)
            table |= {(verb, unit, kind): cost for verb, cost in made.items()}
            longer += count * (sum(cost.seconds for cost in made.values()) - adamw.seconds)
            state[rank] -= count * shard * sharding.averages_bytes
            held = MATRIX_SLOTS if sharding.collects(unit) else 1
            slots[unit] = max(slots.get(unit, 0), held * (2 * weights + 4 * shard))
        state[rank] += sum(slots.values())
        longest = max(longest, longer)
    step = table["step", "all", ""]
    table["step", "all", ""] = replace(step, seconds=step.seconds + longest)
    return replace(costs, table=table, state_bytes=tuple(state))


def _orthogonal_flops(model: ModelConfig, layout: Layout, unit: Unit, kind: str) -> float:
    """Of the iterations of all matrices of a unit; those of attention are taken as square."""
    shapes = Shapes(model, 1, layout.ep, copies_of(model, layout.ep, False, 1), STOCK)
    widths = {"experts": model.expert_ffn, "mlp": model.ffn}
    return sum(
        orthogonal_flops(size_of(part, shapes).weights, model.hidden, widths.get(part.name, model.hidden))
        for part in layout.by_kind[kind].parts
        if layout.unit(part.name) == unit
    )
