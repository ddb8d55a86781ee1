"""What the plan's simulation says of a step's communication: times by kind, and the most that a rank holds.

Note: [An explanation is quick]
A step is simulated whole if it has few enough ops. One with more microbatches than it takes to reach the steady state
is simulated twice with fewer, a period apart, and continued: see Note: [Long steps are priced by their period]. One
that would take minutes even so is not simulated at all, which is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hocket.explain.explanation import Predicted, Times
from hocket.gpus import GPUS
from hocket.planning import adapter_seconds, network, predict, program_of, rates, told_documents
from hocket.program.cost import CostTable
from hocket.program.hardware import Hardware, hardware_of
from hocket.program.ops import Program
from hocket.program.simulate import kind_of
from hocket.program.stages import costs_of
from hocket.resolve import Settings
from hocket.settings.fp8_rules import FP8_RULES, FROM
from hocket.settings.rule import Host
from hocket.settings.schema import changed
from hocket.tune.period import continued, steady
from hocket_trace.without_collector import without_collector

MOST_OPS = 40_000
"""Ops of a program that is built and simulated in a second."""
LONGEST_OPS = 800_000
"""Ops of the longest program that is simulated at all: in half a minute, and half a GiB."""
OPS_PER_LAYER = {"dense": 12, "moe": 20}
"""Ops of one layer in one microbatch, forward and backward: an estimate, from above if nothing is recomputed."""


@dataclass(frozen=True)
class Step:
    """One simulated step."""

    program: Program
    costs: CostTable
    found: Predicted
    peaks: tuple[int, ...]
    """The most bytes that each pipeline rank holds."""
    adapter: float
    """See `adapter_seconds`."""


@without_collector()
def simulated(settings: Settings) -> tuple[Predicted, Step | None]:
    """What is predicted of a step, and the step that was simulated for it: shorter than the run's, or none."""
    hardware = hardware_of(settings)
    count = settings.train.microbatches
    per_microbatch = sum(OPS_PER_LAYER[kind] for kind in settings.model.kinds())
    few, more = steady(settings)
    whole = few + more >= count or count * per_microbatch <= MOST_OPS
    if (count if whole else more) * per_microbatch > LONGEST_OPS:
        note = f"not simulated: about {count * per_microbatch:,} operations, which would take minutes"
        return Predicted(hardware=hardware.name, step=0.0, compute=0.0, idle=0.0, kinds={}, note=note), None
    if whole:
        step = _step(settings, hardware, count)
        found, adapter, how = step.found, step.adapter, ""
    else:
        short, step = _step(settings, hardware, few), _step(settings, hardware, more)
        periods = (count - few) / (more - few)
        found = _continued(short.found, step.found, periods)
        adapter = continued(short.adapter, step.adapter, periods)
        how = f"simulated with {few} and {more} microbatches, and continued to {count}"
    told = told_documents(settings)
    notes = [how, rates(settings, hardware), told and f"documents: {told}", network(settings, adapter, found.step)]
    notes += _in_fp8(settings, hardware, step)
    return replace(found, note="; ".join(filter(None, notes))), step


def _in_fp8(settings: Settings, hardware: Hardware, step: Step) -> Iterator[str]:
    """What fp8 would save where it can be had. To round more is the user's choice."""
    gpu = next((gpu for name, gpu in GPUS.items() if name == hardware.name), None)
    if settings.precision.dtype != "bf16" or gpu is None or gpu.capability < FROM:
        return
    host, rules = Host(capability=gpu.capability), [rule for rule in FP8_RULES if not rule.only_if_set]
    tried = changed(settings, {"precision.compute": "fp8"})
    if settings.precision.compute == "fp8" or any(rule.broken(tried, host) for rule in rules):
        return
    ops = [(rank, op) for rank, ops in enumerate(step.program.ranks) for op in ops if op.lane == "compute"]
    own, other = (sum(costs.seconds(*op) for op in ops) for costs in (step.costs, costs_of(tried, hardware)))
    if own > other:
        yield f"precision.compute = fp8 makes compute {own / other:.2f} times as fast, and rounds more"


def _step(settings: Settings, hardware: Hardware, microbatches: int) -> Step:
    shorter = replace(settings, train=replace(settings.train, microbatches=microbatches))
    program, costs = program_of(shorter), costs_of(shorter, hardware)
    timeline = predict(shorter, program, hardware)
    count = len(timeline.ranks)
    seconds = dict.fromkeys(timeline.ranks[0].exposed, 0.0)
    for ops, spans in zip(program.ranks, timeline.spans, strict=True):
        for op, span in zip(ops, spans, strict=True):
            if "tp" in seconds:
                seconds["tp"] += costs.of(op).inner_bytes / hardware.links["tp"].bandwidth / count
            if (kind := kind_of(op.lane)) is not None:
                seconds[kind] += float(span.end - span.start) / count
    exposed = {kind: sum(float(use.exposed[kind]) for use in timeline.ranks) / count for kind in seconds}
    found = Predicted(
        hardware=hardware.name,
        step=float(timeline.makespan),
        compute=sum(float(use.busy) for use in timeline.ranks) / count,
        idle=sum(float(use.idle) for use in timeline.ranks) / count,
        kinds={kind: Times(seconds=seconds[kind], exposed=exposed[kind]) for kind in seconds if seconds[kind]},
    )
    peaks = tuple(use.peak_bytes for use in timeline.ranks)
    return Step(program, costs, found, peaks, adapter_seconds(settings, program, costs))


def _continued(short: Predicted, long: Predicted, periods: float) -> Predicted:
    """A step with more microbatches of the steady state."""
    kinds = {
        kind: Times(
            seconds=continued(times.seconds, long.kinds[kind].seconds, periods),
            exposed=continued(times.exposed, long.kinds[kind].exposed, periods),
        )
        for kind, times in short.kinds.items()
    }
    return replace(
        long,
        step=continued(short.step, long.step, periods),
        compute=continued(short.compute, long.compute, periods),
        idle=continued(short.idle, long.idle, periods),
        kinds=kinds,
    )
