"""The cost of every op of a plan: FLOPs, bytes and seconds, from the sizes of the model and a few hardware figures.

Letters: T tokens of a microbatch, S tokens of a sequence, D hidden, R = T * top_k routed rows, P weights of a part,
n ranks of a group. "Elements" count numbers, whatever their dtype; bytes are elements times `dtype_bytes`.

    time of a compute op    matmul FLOPs / rate + attention FLOPs / rate + bytes of other kernels / their bandwidth
                            + 2/3 of the bytes of matmuls / the same + start and end of kernels
    rate                    at the full clock, scaled to the clock that power allows (`clock_of` in `hardware.py`)
    matmul FLOPs            2 T P in fwd, in bwd and in wgrad each
    attention core          2 T S w in fwd (causal, so half of the square; w = heads * head_dim), 5/2 of that in bwd
    time of a transfer      latency + wire bytes / bandwidth
    all-gather, reduce      (n - 1) / n * P elements received; twice that if all ranks get the whole sum
    all-to-all              (ep - 1) / ep * R * D elements received: even routing; fewer R with one copy per rank
    pipeline p2p transfer   T * D elements

Sources: 2 T P and the causal half are the counting of Kaplan et al. 2020 (arXiv 2001.08361) and of the PaLM report
(arXiv 2204.02311, appendix B); 5/2 is FlashAttention-2's backward (arXiv 2307.08691), five matmuls against two; wire
bytes are the `busbw` factors of nccl-tests. Elementwise bytes count one read or write per tensor and kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from hocket.config import COPIED, Config, ModelConfig, Purpose
from hocket.predict.arrivals import rows_allowed, rows_evenly
from hocket.predict.hardware import KIND_OF_GROUPS, Hardware, Work, at_clock, clock_of
from hocket.predict.part_sizes import (
    DRAWN,
    ISSUED,
    Fp8,
    PartSize,
    Shapes,
    orthogonal_flops,
    size_of,
)
from hocket.predict.simulate import UPDATES, CostKey, Kind, OpCost, Overheads, Time, cost_key
from hocket.predict.tensor_costs import add_waits, models_of
from hocket.program.documents import Lengths, merged
from hocket.program.mesh import groups_of
from hocket.program.ops import HOST, TIED, Layout, Op, Program
from hocket.program.parts import Part, Unit
from hocket.program.shard import MATRIX_SLOTS, Sharding
from hocket.program.stages import gathered_units, layout_of, sharding_of
from hocket.program.transformer import EMBED, HEAD
from hocket.program.values import lent_to


@dataclass(frozen=True)
class CostTable:
    """Costs of all ops of a program, for `simulate`. Ops that are missing in `table` cost nothing.

    `slot_bytes[rank]` has the sizes of a weight slot and of a gradient slot for each class of units.
    `state_bytes[rank]` counts main weights, compute copies of unsharded ones, and optimizer state. `clock` in Hz is the
    one that power allows; 0: no limit is known.
    """

    kinds: tuple[str, ...]
    table: Mapping[CostKey, OpCost]
    slot_bytes: tuple[Mapping[Unit, tuple[int, int]], ...] = ()
    state_bytes: tuple[int, ...] = ()
    clock: float = 0.0
    recomputed: Collection[tuple[str, int]] = frozenset()
    """(part, layer) whose forward keeps nothing, because it is recomputed."""
    lent: Collection[tuple[str, int]] = frozenset()
    """(part, layer) of readers that do not keep their input, and of the parts that make it again for their backward."""

    @cached_property
    def _found(self) -> dict[tuple[str, str, int], OpCost]:
        return {}

    def of(self, op: Op) -> OpCost:
        """The cost of an op, cached per layer: what it keeps depends on whether its layer is recomputed."""
        key = op.verb, op.part, op.layer
        if (found := self._found.get(key)) is None:
            found = self._found[key] = self._of_layer(op)
        return found

    def _of_layer(self, op: Op) -> OpCost:
        cost, where = self.table.get(cost_key(op, self.kinds), _FREE), (op.part, op.layer)
        if op.verb == "fwd" and where in self.recomputed:
            return replace(cost, output_bytes=cost.output_bytes + cost.handed_bytes, saved_bytes=0)
        if op.verb == "fwd" and where in self.lent:
            return replace(cost, saved_bytes=cost.saved_bytes - cost.lent_bytes)
        if op.verb == "recompute" and where in self.lent:
            return replace(cost, output_bytes=cost.output_bytes + cost.lent_bytes)
        return cost

    def fixed_bytes(self, program: Program, rank: int) -> int:
        if not self.slot_bytes:
            return 0
        return self.state_bytes[rank] + sum(
            program.weight_slots.get(unit, 0) * weight + program.grad_slots.get(unit, 0) * gradient
            for unit, (weight, gradient) in self.slot_bytes[rank].items()
        )


_FREE = OpCost()
_ATTENTION_DRAWN = 0.8
"""Power per FLOP of attention, relative to matmuls. See Note: [Power sets the clock]."""
CORE = {"fwd": 1.0, "bwd": 2.5}
"""Verb -> how often the FLOPs of an attention core are computed."""
_SHOWN = 2 / 3
"""Share of the time of a product's reads and writes that its arithmetic does not hide: 4 of the 6 additional bytes that
accumulation in fp32 moves (`benchmarks.expert_grads` and `benchmarks.weight_grads`, on an H200)."""


# -------------------------------------------------------------------------------------------------------------- pricing

Sizes = Callable[[str, str, PartSize], PartSize]
"""Returns the size of a part, given its name, its layer's kind, and its size by `part_sizes.py`."""


@dataclass(frozen=True)
class Pricing:
    """Everything that the costs of a plan's ops depend on: a microbatch of `tokens` tokens of a data-parallel rank.

    Assumes even routing: every rank gets as many rows as it sends. A p2p transfer's seconds count for the recv.
    """

    model: ModelConfig
    layout: Layout
    tokens: int
    seq: int
    """Tokens of a sequence."""
    sharding: Sharding
    hardware: Hardware
    dtype_bytes: int
    documents: Lengths = ()
    """Lengths of documents that share sequences; empty: each sequence is one document."""
    rank_model: ModelConfig | None = None
    """The model with only the weights that a tensor-parallel rank holds; None: the same."""
    sharing: int = 1
    """Ranks that share every product."""
    wire_bytes: int = 0
    """Bytes of a gradient element in transfers; 0: as in compute."""
    averages_bytes: int = 4
    """Bytes per element of each of the optimizer's two averages."""
    fp8: Fp8 | None = None
    """Which products run in fp8."""
    sizes: Sizes | None = None
    """Sizes of an adapted model's parts."""

    @cached_property
    def parts(self) -> Mapping[tuple[str, str], tuple[Part, PartSize]]:
        """(name, kind of layer) of every part -> the part and its size."""
        shapes = Shapes(self.model, self.layout, self.seq, self.hardware.formulas, self.dtype_bytes, self.documents)
        kinds = sorted({self.layout.by_kind[name] for name in self.layout.kinds}, key=lambda kind: kind.name)
        parts = [(EMBED, ""), (HEAD, ""), *((part, kind.name) for kind in kinds for part in kind.parts)]
        own = {(part.name, kind): (part, size_of(part, shapes)) for part, kind in parts}
        return own if self.sizes is None else {key: (part, self.sizes(*key, size)) for key, (part, size) in own.items()}

    def weights(self, unit: Unit, kind: str) -> int:
        """Weights of one unit of such a layer, unsharded; of an experts unit those of one expert-parallel rank."""
        parts = ((name, size) for (name, its), (_, size) in self.parts.items() if its == kind)
        return sum(size.weights for name, size in parts if self.layout.unit(name) == unit)

    @cached_property
    def clock(self) -> float:
        """The clock that power allows; 0: no limit is known. See Note: [Power sets the clock]."""
        works: list[Work] = []
        for (name, kind), (part, size) in self.parts.items():
            count = self.layout.kinds.count(kind) if kind else 1
            if not part.communicates and self.hardware.clock:
                for verb in _verbs(size):
                    works += count * [self.work(name, kind, verb, self.hardware)]
                works += self.layout.recomputing(name, kind) * [self.work(name, kind, "fwd", self.hardware)]
        return clock_of(self.hardware, works) if works else 0.0

    @cached_property
    def rates(self) -> Hardware:
        """The hardware's rates at that clock."""
        return at_clock(self.hardware, self.clock) if self.clock else self.hardware

    def costs(self) -> CostTable:
        """Costs of every op of one microbatch, and of a step's end."""
        layout = self.layout
        table: dict[CostKey, OpCost] = {}
        for (name, kind), (part, size) in self.parts.items():
            again = layout.recomputing(name, kind)
            if part.communicates:
                table |= {(verb, name, kind): self._exchange(part, size, verb) for verb in ("fwd", "bwd")}
                if again:
                    (reader,) = layout.by_kind[kind].readers[name]
                    opened = self._bytes(self.parts[reader, kind][1].lent or size.output)
                    table["recompute", name, kind] = replace(table["fwd", name, kind], lent_bytes=opened)
                continue
            table |= {(verb, name, kind): self.compute(name, kind, verb) for verb in _verbs(size)}
            if again:
                once = table["fwd", name, kind]
                table["fwd", name, kind] = replace(once, handed_bytes=self._bytes(size.handed))
                table["recompute", name, kind] = once if part.lends else replace(once, output_bytes=0)
        p2p = self._bytes(self.model.hidden)
        table["recv", "act", ""] = table["recv", "grad", ""] = self._transfer("pp_fwd", p2p, p2p)
        slots, state = self._add_units(table)
        return CostTable(layout.kinds, table, slots, state, self.clock, layout.recomputed, _lent(layout))

    def _bytes(self, elements: int) -> int:
        """Bytes of `elements` elements per token."""
        return self.tokens * elements * self.dtype_bytes

    def _fp8_share(self, name: str, kind: str, verb: str) -> float:
        """Share of the layers of a kind in which an op's products run in fp8. Embedding and head have no kind."""
        weights = kind and self.parts[name, kind][0].unit
        return self.fp8.share(self.layout.kinds, kind, verb) if self.fp8 is not None and weights else 0.0

    def work(self, name: str, kind: str, verb: str, hw: Hardware) -> Work:
        """Seconds and FLOPs of fwd, bwd or wgrad of a part, in units of bf16 FLOPs that draw the same power."""
        t, b, (_, size) = self.tokens, self.dtype_bytes, self.parts[name, kind]
        eight, unit = self._fp8_share(name, kind, verb), self.layout.unit(name)
        collects = unit is not None and (self.sharding.size(unit) == 1 or self.sharding.adds_up(unit))
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
        if matmul:  # accumulated weight gradients are fp32
            operands = t * size.rows * b + (8 if verb == "wgrad" and collects else b) * size.weights // self.sharing
            operands *= 1 - 0.25 * eight  # in fp8 operands have half of the bytes, results all
            moving = operands / hw.kernel_bandwidth
            others += max(_SHOWN * moving, moving - clocked)  # with few tokens, reading weights dominates
        others += hw.gap + (size.routes * hw.routing if verb != "wgrad" else 0.0)
        return Work(clocked + whole / rate, others, drawn + _ATTENTION_DRAWN * core)

    def compute(self, name: str, kind: str, verb: str) -> OpCost:
        """Cost of fwd, bwd or wgrad of a part."""
        work, (_, size) = self.work(name, kind, verb, self.rates), self.parts[name, kind]
        eight = self._fp8_share(name, kind, verb)
        output, saved = {"fwd": (size.output, size.saved), "bwd": (size.grad, size.kept)}.get(verb, (0, 0))
        traffic, saved = self._traffic(size, verb), self._bytes(saved)
        flops = self.tokens * (2.0 * (size.gemm + size.grouped) + CORE.get(verb, 0.0) * size.core)
        if eight and self.fp8 is not None:
            traffic += round(eight * self.fp8.moved(size, self.tokens, verb))
            saved -= round(eight * self.fp8.saved(size, self.tokens, verb)) if verb != "wgrad" else 0
        lent = self._bytes(size.lent) if verb == "fwd" else 0
        return OpCost(work.clocked + work.others, flops, 0, traffic, self._bytes(output), saved, lent_bytes=lent)

    def _traffic(self, size: PartSize, verb: str) -> int:
        """Bytes that kernels other than matmuls read and write."""
        if verb == "wgrad":  # of an embedding: clear the table, then add rows
            table = not size.gemm + size.grouped
            return (3 * self.tokens * size.output + size.weights) * self.dtype_bytes if table else 0
        return self._bytes(size.traffic if verb == "fwd" else 2 * size.traffic + size.back)

    def _exchange(self, part: Part, size: PartSize, verb: str) -> OpCost:
        """Cost of fwd or bwd of a part that communicates."""
        assert part.purpose is not None
        moved, output = self._bytes(size.output), self._bytes(size.output if verb == "fwd" else size.grad)
        return self._transfer(part.purpose, moved * (part.ranks - 1) // part.ranks, output, self._traffic(size, verb))

    def _local(self, memory_bytes: int, flops: float = 0.0) -> OpCost:
        """Cost of a compute op by its memory traffic and FLOPs."""
        hw = self.hardware
        seconds = memory_bytes / hw.memory_bandwidth + flops / hw.gemm_flops + hw.gap
        return OpCost(seconds, flops, memory_bytes=memory_bytes)

    def _transfer(self, purpose: Purpose, wire_bytes: int, output_bytes: int = 0, local_bytes: int = 0) -> OpCost:
        """Cost of a collective or a p2p transfer, with the local reads and writes that belong to it."""
        seconds = self.hardware.link(purpose).seconds(wire_bytes) + local_bytes / self.hardware.memory_bandwidth
        return OpCost(seconds, 0.0, wire_bytes, local_bytes, output_bytes)

    def _add_units(
        self, table: dict[CostKey, OpCost]
    ) -> tuple[tuple[Mapping[Unit, tuple[int, int]], ...], tuple[int, ...]]:
        """Add gather, add, reduce, update and step to the table; return slot sizes and state per pipeline rank.

        A gather casts its shard of the fp32 weights. A reduce adds its shard to the fp32 gradient: 8 bytes read and
        written per element, though the first of a step only writes; the last one's read of accumulated sums is left
        out. Adds cost nothing: products of weight gradients accumulate, and in a group of one they also replace the
        reduction, so there are no slots. An embedding with a tied head has both, unless they are on two ranks: these
        exchange their sums in fp32, and the step adds them. AdamW reads weight, gradient and both averages and writes
        weight and averages: 28 bytes, or 20 with averages in bf16, plus the compute copy of unsharded weights, unless
        that is fp32; the norm reads the gradients once more. Every rank's step waits for the slowest, through the
        norm's all-reduce. Products in fp8 also need casts; the step makes some of them first.
        """
        layout, sharding, mine = self.layout, self.sharding, replace(self, model=self.rank_model or self.model)
        b, w = self.dtype_bytes, self.wire_bytes or self.dtype_bytes
        traffic = normed = summed_up = 0
        longest: Time = 0.0
        slots, state = list[Mapping[Unit, tuple[int, int]]](), list[int]()
        adamw = 12 + 4 * self.averages_bytes
        for rank in range(layout.pp):
            largest, matrices = dict[Unit, tuple[int, int]](), dict[Unit, int]()
            shards = copied = casts = agreed = single = 0
            longer: Time = 0.0
            for (unit, kind), count in Counter(layout.units(rank)).items():
                weights = mine.weights(unit, kind)
                gathers, reduces = groups_of(unit)
                group = sharding.size(unit)
                whole, tied = not sharding.gathers(unit), layout.tied and unit == EMBED.unit
                twice = tied and not layout.apart
                part = -(-weights // group)
                others = part * (group - 1)
                shard = weights if whole else part
                eight, beside = self._in_fp8(unit, kind, weights)
                sent, local = others * (eight + b * (1 - eight)), shard * (2 * eight + (4 + b) * (1 - eight))
                table["gather", unit, kind] = self._transfer(gathers, round(sent), local_bytes=round(local))
                summed = self._transfer(reduces, (2 if whole else 1) * others * w, local_bytes=shard * (8 + w))
                slotted = group > 1 or twice
                table["reduce", unit, kind] = summed if slotted else _FREE
                sums = 0 if whole else 4 * weights  # unsharded gradients are summed in place
                add = self._local(weights * (8 + w)) if twice else _FREE
                table["add", unit, kind] = replace(add, grad_bytes=sums)
                sizes = weights * (1 if eight == 1 else b) + (0 if whole else beside), weights * w
                largest[unit] = max(largest.get(unit, (0, 0)), sizes if slotted else (0, 0))
                for key in [
                    key for key in table if key[0] == "wgrad" and (layout.unit(key[1]), key[2]) == (unit, kind)
                ]:
                    table[key] = replace(table[key], grad_bytes=4 * shard)
                cast = shard if whole and b != 4 else 0
                update = self._local(adamw * shard + b * cast)
                updates = {"update": update}
                if sharding.muon and kind:
                    updates = self._muon(unit, kind, weights, shard, cast)
                    longer += count * (sum(cost.seconds for cost in updates.values()) - update.seconds)
                    single += count * shard
                    held = MATRIX_SLOTS if sharding.collects(unit) else 1
                    matrices[unit] = max(matrices.get(unit, 0), held * (2 * weights + 4 * shard))
                updates["update"] = replace(updates["update"], output_bytes=4 * shard)  # the gradients that it reads
                table |= {(verb, unit, kind): cost for verb, cost in updates.items()}
                if tied and layout.apart:
                    table["recv", TIED, ""] = self._transfer("pp_bwd", 4 * shard, 4 * shard)
                    summed_up = 12 * shard
                shards += count * shard
                copied += count * cast
                agreed += count * round(shard * eight)
                casts += count * (beside if whole else round(shard * eight))
            slots.append(largest)
            averages = self.averages_bytes * (2 * shards - single)
            state.append(4 * shards + averages + b * copied + casts + sum(matrices.values()))
            traffic = max(traffic, (adamw + 4) * shards + b * copied + (4 + 2 * b + 1) * agreed)
            normed, longest = max(normed, 4 * shards), max(longest, longer)
        for name, nbytes, more in (("all", traffic, longest), ("norm", normed, 0.0)):
            wire = 8 if layout.pp * sharding.dense > 1 else 0
            step = self._transfer("control", wire, local_bytes=nbytes + summed_up)
            table["step", name, ""] = replace(step, seconds=step.seconds + more)
        return tuple(slots), tuple(state)

    def _muon(self, unit: Unit, kind: str, weights: int, shard: int, cast: int) -> dict[str, OpCost]:
        """Muon's updates of a unit: averages, iterations, and the exchanges around them.

        A unit's matrices are distributed evenly over the ranks of its group, and sent in bf16. An average reads
        gradient and average and writes the average and the sent copy: 14 bytes per element. The update reads the result
        and the weight and writes the weight: 12. Of AdamW's two averages one remains.
        """
        ranks = self.sharding.size(unit) if self.sharding.gathers(unit) else 1
        average, iterate, reduces = 14 * shard, 10 * weights, groups_of(unit)[1]
        move = 12 * shard + ((4 + self.dtype_bytes) * cast if ranks == 1 else 0)
        flops = 0.0
        widths = {"experts": self.model.expert_ffn, "mlp": self.model.ffn}  # attention's matrices count as square
        for part in self.layout.by_kind[kind].parts:
            if self.layout.unit(part.name) == unit:
                size = size_of(part, Shapes(self.model, self.layout))
                width = widths.get(part.name, self.model.hidden)
                flops += orthogonal_flops(size.weights, self.model.hidden, width)
        if ranks == 1:
            return {"update": self._local(average + iterate + move, flops)}
        wire = 2 * shard * (ranks - 1)
        return {
            "collect": self._transfer(reduces, wire, local_bytes=average),
            "orthogonalise": self._local(iterate, flops / ranks),
            "scatter": self._transfer(reduces, wire, local_bytes=2 * weights + 4 * shard),
            "update": self._local(move),
        }

    def _in_fp8(self, unit: Unit, kind: str, weights: int) -> tuple[float, int]:
        """(share of a unit's weights that are gathered in fp8, bytes of additional fp8 copies of a resident unit)."""
        if self.fp8 is None or not kind:
            return 0.0, 0
        beside = self.fp8.beside(self.layout.kinds, kind, unit)
        return self.fp8.travelling(self.layout.kinds, kind, unit), round(weights * beside)


def _verbs(size: PartSize) -> tuple[str, ...]:
    return ("fwd", "bwd", "wgrad") if size.weights else ("fwd", "bwd")


def _lent(layout: Layout) -> frozenset[tuple[str, int]]:
    """(part, layer) of readers that keep no input, because it is made again, and of the parts that make it."""
    pairs = ((part, lent_to(layout, part, n), n) for n in range(len(layout.kinds)) for part in layout.forward_parts(n))
    return frozenset((name, n) for *names, n in pairs for name in names if names[1])


# ---------------------------------------------------------------------------------------------------- costs of settings


def pricing_of(config: Config, hardware: Hardware, documents: Lengths = (), sizes: Sizes | None = None) -> Pricing:
    """What the costs of a configuration's plan depend on. Without `documents` each sequence is one document."""
    model, rank_model, sharing = models_of(config)
    return Pricing(
        model=model,
        layout=layout_of(config),
        tokens=config.tokens,
        seq=config.data.sequence_length,
        sharding=sharding_of(config),
        hardware=hardware,
        dtype_bytes=config.element_bytes,
        documents=documents,
        rank_model=rank_model,
        sharing=sharing,
        wire_bytes=config.wire_bytes,
        averages_bytes=2 if config.precision.averages == "bf16" else 4,
        fp8=fp8_of(config),
        sizes=sizes,
    )


def fp8_of(config: Config) -> Fp8 | None:
    """Which products run in fp8; None: none. Weights are cast whenever they are gathered, or once a step."""
    p, keeps = config.precision, config.overlap.dp.strategy not in ("auto", "optim_grads_params")
    if p.compute != "fp8":
        return None
    casts = 1 / config.train.microbatches if keeps or config.mesh.data == 1 else 2.0
    return Fp8(p.fp8_products, p.fp8_ends, casts, gathered_units(config) if p.gather == "fp8" else ())


def costs_of(config: Config, hardware: Hardware, documents: Lengths = (), sizes: Sizes | None = None) -> CostTable:
    """The costs of every op of a plan on given hardware, and on the emulated network of the slow transport.

    Without `documents` each sequence is one document.
    """
    costs, layout = pricing_of(config, hardware, documents, sizes).costs(), layout_of(config)
    table, rates = dict(costs.table), at_clock(hardware, costs.clock) if costs.clock else hardware
    add_waits(table, config, hardware, layout)
    if config.mesh.replicas > 1:
        _sum_over_replicas(table, config, hardware)
    if layout.placed:
        _place_rows(table, config, layout)
    if config.plan.pieces > 1:
        _cut_loss(table, config, rates)
    for part, layer in layout.offloaded:  # saved tensors go to host memory and back
        saved = table["fwd", part, layout.kinds[layer]].saved_bytes
        transfer = OpCost(hardware.host.seconds(saved), wire_bytes=saved, output_bytes=saved)
        table |= {(verb, part, layout.kinds[layer]): transfer for verb in HOST}
    links = config.train.slow_links() if config.train.transport == "slow" else {}
    for key, cost in table.items():
        if cost.wire_bytes and (purpose := purpose_of(key, layout)) in links:
            latency, bandwidth = links[purpose]
            table[key] = replace(cost, seconds=cost.seconds + latency + cost.wire_bytes / bandwidth)
    return replace(costs, table=table)


def _sum_over_replicas(table: dict[CostKey, OpCost], config: Config, hardware: Hardware) -> None:
    """Add the sum of a step's gradients over replicas of the weights, in fp32.

    It happens once a step: a unit's reduce in the last microbatch includes it.
    """
    link, replicas = hardware.link("replicas"), config.mesh.replicas
    for key, cost in table.items():
        if key[0] == "reduce":
            kept = table["update", *key[1:]].output_bytes  # the rank's gradients of the unit
            moved = 2 * kept * (replicas - 1) / replicas
            table[key] = replace(cost, once_seconds=link.seconds(moved), once_bytes=moved)


def once(cost: OpCost, each: Mapping[Purpose, float]) -> float:
    """Seconds per step that a rank's adapter needs for once-a-step transfers, given seconds per byte by purpose."""
    return cost.once_bytes * each.get("replicas", 0.0)


def _place_rows(table: dict[CostKey, OpCost], config: Config, layout: Layout) -> None:
    """Make rows arrive where products read them, with extra room if no host counts them.

    Experts then keep neither rows nor gradients of rows of their own: the exchange's buffers serve instead. Unfilled
    room takes no time.
    """
    rows = rows_evenly(config) * config.model.hidden * config.element_bytes
    times = rows_allowed(config) / rows_evenly(config) if layout.uncounted else 1.0
    for kind in layout.layer_types:
        kept: dict[tuple[str, str], int] = {}  # op -> copies of the rows that it would have kept
        for part in kind.parts:
            if part.way == "out":
                reader = kind.readers[part.name][0]
                kept |= {("fwd", part.name): 0, ("recompute", part.name): 0}
                kept |= {("fwd", reader): 1, ("recompute", reader): 1, ("bwd", reader): 2}
            elif part.way == "back":
                kept |= {("bwd", part.name): 0}
        for (verb, name), count in kept.items():
            cost = table.get((verb, name, kind.name))
            if cost is not None:
                saved = max(cost.saved_bytes - rows * count, 0) if cost.saved_bytes else 0
                sizes = {"output_bytes": cost.output_bytes, "handed_bytes": cost.handed_bytes, "saved_bytes": saved}
                changed = {what: round(times * nbytes) for what, nbytes in sizes.items()}
                table[verb, name, kind.name] = replace(cost, **changed, lent_bytes=0)


def _cut_loss(table: dict[CostKey, OpCost], config: Config, rates: Hardware) -> None:
    """Run tokens through the head in pieces. See `layers/vocabulary.py`.

    Backward recomputes logits and reads them once more, and includes the product of the weight gradient, which it keeps
    in fp32. A piece's temporary memory counts as saved.
    """
    m = config.model
    logits, weights = config.tokens * m.vocab * config.element_bytes, m.vocab * m.hidden
    piece, flops = logits // config.plan.pieces, 2.0 * config.tokens * weights
    fwd, bwd, wgrad = (table[verb, "head", ""] for verb in ("fwd", "bwd", "wgrad"))
    more = 2 * flops / rates.gemm_flops + (2 * logits + 4 * weights) / rates.kernel_bandwidth
    moved = (4 + config.wire_bytes) * weights
    saved = fwd.saved_bytes - rates.formulas.loss_saved * logits + piece + 4 * config.tokens
    table["fwd", "head", ""] = replace(fwd, saved_bytes=saved)
    saved = bwd.saved_bytes - logits + piece + 4 * weights
    table["bwd", "head", ""] = replace(bwd, seconds=bwd.seconds + more, flops=bwd.flops + 2 * flops, saved_bytes=saved)
    seconds = moved / rates.memory_bandwidth + rates.gap
    table["wgrad", "head", ""] = replace(wgrad, seconds=seconds, flops=0.0, memory_bytes=moved)


def purpose_of(key: CostKey, layout: Layout) -> Purpose | None:
    """The purpose of the group that an op communicates on; None for compute."""
    verb, part, kind = key
    match verb, part:
        case "recv", "act":
            return "pp_fwd"
        case "recv", _:
            return "pp_bwd"
        case (("gather" | "reduce" | "collect" | "scatter"), _):
            return groups_of(part)[verb != "gather"]
    found = layout.by_kind[kind].by_name.get(part) if kind else None
    return found.purpose if found else None


# ------------------------------------------------------------------------------------------------------------ overheads
#
# Overheads slow a step down beyond the costs of its ops, depending on the hardware: contention and the host.
#
# Contention. NCCL's kernels take SMs, copy engines take none; both move bytes through memory and links, which takes
# bandwidth and power from compute. So do updates that overlap forwards. The host. It issues a step op by op, unless
# the step is replayed as a graph, and waits for the counts of rows if it has to know them. Note: [What the simulator
# believes] in `simulate.py` explains how the simulator uses these.


def overheads_of(config: Config, hardware: Hardware, ops: Iterable[CostKey]) -> Overheads:
    """The overheads of a step of these ops.

    In a replay no op waits for the host, so only contention remains. The null transport moves nothing.
    """
    issue = dict.fromkeys(ops, seconds) if (seconds := issued(config, hardware)) and config.plan.graphs != "on" else {}
    return Overheads(_contention(config, hardware), issue, hardware.counts if issue else None)


def issued(config: Config, hardware: Hardware) -> float:
    """Seconds that the host needs to issue one op."""
    return hardware.issue * (ISSUED if config.precision.compute == "fp8" else 1)


def _contention(config: Config, hardware: Hardware) -> Mapping[Kind, float]:
    factors: dict[Kind, float] = {}
    for purpose, kind in KIND_OF_GROUPS.items() if config.train.transport != "null" else ():
        factors.setdefault(kind, hardware.beside_copies if _copied(config, purpose) else hardware.beside_kernels)
    if config.overlap.dp.update == "next_step":
        factors[UPDATES] = hardware.beside_updates
    return {kind: factor for kind, factor in factors.items() if factor}


def _copied(config: Config, purpose: Purpose) -> bool:
    """Whether copy engines move the bytes of these groups. Kernels store rows that devices place."""
    stored = purpose == "a2a" and config.overlap.ep.splits == "device"
    return purpose in COPIED.get(config.train.transport, ()) and not stored


# --------------------------------------------------------------------------------------------------- costs of documents
#
# Costs of ops in packed sequences, where microbatches differ in their attention.


@dataclass(frozen=True)
class PackedCosts(CostTable):
    """Costs in which each microbatch has its own documents. Memory does not depend on them."""

    microbatches: Sequence[CostTable] = ()
    """One table per microbatch."""

    def of(self, op: Op) -> OpCost:
        known = super().of(op)
        if op.verb not in ("fwd", "bwd", "recompute"):
            return known
        return replace(known, seconds=self.microbatches[op.microbatch].of(op).seconds)


def packed_costs(whole: CostTable, config: Config, hardware: Hardware, documents: Sequence[Lengths]) -> PackedCosts:
    """The costs of microbatches with these documents. `whole` has the costs of whole sequences.

    All run at the clock for the average document: see Note: [Power sets the clock].
    """
    clock, base, rates = pricing_of(config, hardware, merged(documents)).clock, whole, hardware
    if clock:
        rates = at_clock(hardware, clock)
        base = replace(costs_of(config, rates), clock=clock)
    each = {lengths: costs_of(config, rates, documents=lengths) for lengths in dict.fromkeys(documents)}
    same: dict[str, Any] = {field.name: getattr(base, field.name) for field in fields(CostTable)}
    return PackedCosts(**same, microbatches=[each[lengths] for lengths in documents])
