"""Builds the program of a step from settings, predicts its timeline, and reports both. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from textwrap import wrap
from typing import Any

from hocket.config import Config
from hocket.predict.arrivals import arrival_bytes
from hocket.predict.cost import CostTable, costs_of, issued, once, overheads_of, packed_costs, purpose_of
from hocket.predict.hardware import LATENCY, Hardware, across_hosts, adapter_times, hardware_of
from hocket.predict.part_sizes import attending
from hocket.predict.simulate import Timeline, cost_key, ends_step, simulate
from hocket.program.documents import Lengths, as_read, by_documents, deals, dealt, merged, works_of
from hocket.program.lower import build_program
from hocket.program.mesh import described
from hocket.program.ops import Op, Program
from hocket.program.stages import layout_of, sharding_of
from hocket.program.text import to_text
from hocket.resolve import GPU, Settings
from hocket.sizes import duration
from hocket.timeline import summary, text_timeline


def program_of(settings: Settings) -> Program:
    """The program of one optimizer step."""
    return build_program(layout_of(settings), settings.train.microbatches, settings, sharding_of(settings))


def predict(settings: Settings, program: Program, hardware: Hardware) -> Timeline:
    """When every op of the program would run on the given hardware."""
    costs, packed = costs_of(settings, hardware), documents_of(settings)
    if packed:
        costs = packed_costs(costs, settings, hardware, packed)
    return simulate(program, costs, overheads_of(settings, hardware, costs.table))


def documents_of(settings: Settings) -> list[Lengths]:
    """Documents of each microbatch, on the slowest data-parallel rank; empty: each sequence counts as one document.

    If the step whose documents are known has other microbatches, every microbatch gets the documents of the whole step.
    """
    sequences, each = settings.host.documents, settings.mesh.dp * settings.train.sequences
    if not sequences or not by_documents(settings):
        return []
    slowest = slowest_ranks(settings, sequences)
    count = settings.train.microbatches
    return slowest if len(sequences) == count * each else [merged(slowest)] * count


def slowest_ranks(c: Config, sequences: Sequence[Lengths]) -> list[Lengths]:
    """Documents of each microbatch, on the data-parallel rank that the others wait for.

    `sequences` has the documents of each sequence of a step, in stream order.
    """
    attention = attending(c.model, c.data.sequence_length)
    works, dp, each = [attention.work(documents) for documents in sequences], c.mesh.dp, c.train.sequences
    order = dealt(works, dp, each) if deals(c) else as_read(len(works) // (dp * each), dp, each)
    of_ranks = works_of(order, works)
    totals = [sum(all_of) for all_of in zip(*of_ranks, strict=True)]
    meet_once = c.overlap.dp.strategy in ("no_shard", "optim") and not c.rows_travel
    most = [
        totals.index(max(totals)) if meet_once else of_microbatch.index(max(of_microbatch))
        for of_microbatch in of_ranks
    ]
    return [merged(sequences[n] for n in mine[rank]) for mine, rank in zip(order, most, strict=True)]


def documents_note(settings: Settings) -> str:
    """The documents that a prediction assumes, in words; empty without packing, or if they make no difference."""
    if not by_documents(settings):
        return ""
    if not settings.host.documents:
        return (
            "each sequence counts as one document, since hocket has not tokenised this text here; "
            "steps are shorter with shorter ones"
        )
    found = merged(settings.host.documents)
    count, tokens = sum(tokens // length for length, tokens in found), sum(tokens for _, tokens in found)
    longest = found[-1][0]
    return f"those of the first step: {count:,}, {tokens / count:,.0f} tokens long on average, the longest {longest:,}"


def network(settings: Settings, busy: float = 0.0, step: float = 0.0) -> str:
    """The network between hosts that a prediction assumes, which groups cross it, and which of its settings are unset.

    Empty for a single host. Rates count all bytes that a rank receives, from its own host and from others. `busy` are
    the `adapter_seconds` of a step, and `step` its seconds; both are 0 if unknown.
    """
    wide, given = across_hosts(settings), settings.network
    if not wide:
        return ""
    hardware = hardware_of(settings)
    rows: dict[str, list[str]] = {}
    silent = {"control"} if settings.model.experts else {"control", "gather_experts", "reduce_experts"}
    for purpose, spread in wide.items():
        if purpose not in silent:
            rate = hardware.link(purpose).bandwidth / 1e9
            rows.setdefault(f"{spread.ranks} ranks on {spread.hosts} hosts at {rate:.3g} GB/s", []).append(purpose)
    open_ = {decision.setting for decision in settings.decisions if decision.chosen}
    rate, late = given.adapter
    assumed = "not set: network.link" if "network.link" in open_ else "" if late else "no time in network.link"
    each = given.ranks_per_host
    words = f"{each} rank{'' if each == 1 else 's'} on a host, "
    words += f"each sends {rate} to others after {late or LATENCY}"
    words += f" (assumed, {assumed})" if assumed else ""
    parts = [f"network: {words}", *(f"{', '.join(names)}: {way}" for way, names in rows.items())]
    if busy:
        longer = ", longer than the step: lanes share it, which is not simulated" if busy > step else ""
        parts.append(f"a rank's adapter is busy for {duration(busy)}{longer}")
    return "; ".join(parts)


def adapter_seconds(settings: Settings, program: Program, costs: CostTable) -> float:
    """Seconds of a step in which an adapter is busy, on the pipeline rank that receives most from other hosts."""
    each, kinds = adapter_times(settings), program.layout.kinds
    if not each:
        return 0.0
    seconds = {
        key: cost.wire_bytes * each.get(purpose_of(key, program.layout) or "control", 0.0)
        + cost.inner_bytes * each.get("tp", 0.0)
        for key, cost in costs.table.items()
    }
    ending = {key: once(cost, each) for key, cost in costs.table.items()}

    def of(op: Op) -> float:
        key = cost_key(op, kinds)
        return seconds.get(key, 0.0) + (ending.get(key, 0.0) if ends_step(op, program) else 0.0)

    return max(sum(map(of, ops)) for ops in program.ranks)


def report(settings: Settings, program: Program, hardware: Hardware, width: int, ops: int) -> str:
    """Choices, timeline, predicted numbers and the first `ops` lines of the program (-1: all), for a terminal."""
    timeline = predict(settings, program, hardware)
    busy = adapter_seconds(settings, program, costs_of(settings, hardware))
    wide = wrap(network(settings, busy, float(timeline.makespan)), max(width, 80), subsequent_indent="  ")
    text = to_text(program).splitlines()
    cut = len(text) if ops < 0 else ops
    parts = [
        *_heading(settings, program),
        "",
        f"PREDICTED STEP  on {hardware.name}, {settings.precision.compute}"
        + ("; " + origin if (origin := rates(settings, hardware)) else ""),
        text_timeline(timeline, program, width),
        "",
        *_numbers(summary(timeline, program)),
        *_misfits(timeline, hardware, arrival_bytes(settings)),
        *late_host(settings, program, hardware, timeline),
        *wide,
        *([f"documents  {note}"] if (note := documents_note(settings)) else []),
        "",
        "PROGRAM",
        *text[:cut],
    ]
    if cut < len(text):
        parts.append(f"... and {len(text) - cut} more lines: --ops -1 prints them all")
    return "\n".join(parts)


def page_head(settings: Settings, program: Program, hardware: Hardware) -> tuple[str, list[str]]:
    """Title of a page about a predicted step, and lines about it: the recipe, the hardware, the origin of rates."""
    recipe = settings.origins.get("", "").removeprefix("recipe ")
    name = settings.run.name + (f" (recipe {recipe})" if recipe not in ("", "default", settings.run.name) else "")
    on = f"predicted for {hardware.name}, {settings.precision.compute}, {settings.train.transport}"
    note = documents_note(settings)
    lines = [
        *islice(_heading(settings, program), 2),
        "; ".join(filter(None, [on, rates(settings, hardware), note and f"documents: {note}"])),
    ]
    return f"{name}: predicted step", lines


def rates(settings: Settings, hardware: Hardware) -> str:
    """The origin of the hardware's rates; empty if a decision already says it."""
    said = any(decision.setting == GPU and decision.chosen for decision in settings.decisions)
    return "" if said else f"rates {hardware.origin}"


def as_json(settings: Settings, program: Program, hardware: Hardware) -> dict[str, Any]:
    """The same as JSON values, without pictures and without the program's ops."""
    timeline = predict(settings, program, hardware)
    choices = [{"setting": d.setting, "value": d.value, "reason": d.reason} for d in settings.decisions]
    numbers = summary(timeline, program)
    found = {
        "recipe": settings.run.name,
        "hardware": hardware.name,
        "rates": hardware.origin,
        "choices": choices,
        "predicted": numbers,
    }
    busy = adapter_seconds(settings, program, costs_of(settings, hardware))
    if wide := network(settings, busy, float(timeline.makespan)):
        found["network"] = wide
    if note := documents_note(settings):
        found["documents"] = note
    return found


LATE = 0.02
"""Share of the step by which slow hosts must lengthen it to be reported."""


def late_host(settings: Settings, program: Program, hardware: Hardware, timeline: Timeline) -> Iterator[str]:
    """Report by how much issuing ops on the host lengthens the step, if it does."""
    if settings.plan.graphs == "on" or not hardware.issue:
        return
    alone = float(predict(settings, program, replace(hardware, issue=0.0)).makespan)
    longer = float(timeline.makespan) / (alone or 1.0) - 1
    if longer > LATE:
        ops = max(map(len, program.ranks))
        yield (
            f"host  issues {ops:,} ops, {duration(issued(settings, hardware))} each, for which GPUs wait: "
            f"the step is {longer:.0%} longer than they need"
        )


def _heading(settings: Settings, program: Program) -> Iterator[str]:
    layout = program.layout
    tokens = settings.batch * settings.data.sequence_length
    yield f"{settings.run.name}: {settings.world} ranks = {described(settings.mesh)}"
    yield (
        f"{len(layout.kinds)} layers ({layout.kinds.count('dense')} dense, {layout.kinds.count('moe')} MoE) on "
        f"{layout.stages} virtual stages; {program.microbatches} microbatches, {tokens:,} tokens per step"
    )
    yield ""
    yield "CHOICES"
    yield from (f"  {decision}" for decision in settings.decisions)
    yield from (f"  note: {note}" for note in program.notes)


def _misfits(timeline: Timeline, hardware: Hardware, arrivals: int) -> Iterator[str]:
    """Report ranks without memory for a step, including the `arrivals` bytes that other ranks write into."""
    for rank, use in enumerate(timeline.ranks):
        if hardware.memory and use.peak_bytes + arrivals > hardware.memory:
            needed, there = (f"{size / 2**30:.0f}" for size in (use.peak_bytes + arrivals, hardware.memory))
            yield (
                f"DOES NOT FIT: rank {rank} needs {needed} GiB of the {there} "
                f"GiB of one {hardware.name}; shorter sequences, fewer train.sequences or more ranks need less"
            )


def _numbers(numbers: dict[str, Any]) -> Iterator[str]:
    step = numbers["step_seconds"]
    counts = ", ".join(f"{count:,} {verb}" for verb, count in sorted(numbers["ops"].items()))
    yield f"step {duration(step)}; {numbers['merged']:.0%} of the chunk forwards run merged"
    yield f"ops  {counts}"
    kinds = list(numbers["ranks"][0]["exposed"])
    columns = ["compute", *(f"exp. {kind}" for kind in kinds), "idle", "in flight", "peak memory"]
    columns += ["on the host"] if "host_bytes" in numbers["ranks"][0] else []
    yield "rank  " + "  ".join(f"{name:>12}" for name in columns)
    for rank, row in enumerate(numbers["ranks"]):
        times = [row["busy"], *(row["exposed"][kind] for kind in kinds), row["idle"]]
        cells = [f"{duration(t)} {t / (step or 1):4.0%}" for t in times]
        cells += [f"{row['in_flight']} chunks"]
        cells += [f"{row[memory] / 2**30:.2f} GiB" for memory in ("peak_bytes", "host_bytes") if memory in row]
        yield f"{rank:>4}  " + "  ".join(f"{cell:>12}" for cell in cells)
