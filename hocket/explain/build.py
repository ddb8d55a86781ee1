"""Builds an explanation from settings and findings about the environment."""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hocket.collector import without_collector
from hocket.config import Purpose
from hocket.config.optimizer import samples, weight_groups
from hocket.config.overlap import CONTEXT as CP_METHOD
from hocket.config.overlap import DIRECTIONS, ROLES
from hocket.config.overlap import TENSOR as TP_METHOD
from hocket.config.precision import FROM, PRECISION_RULES
from hocket.config.rule import Host, problem
from hocket.config.schema import changed, command_words, digest, source
from hocket.decision import AUTOMATIC
from hocket.explain.explanation import FILE, Axis, Explanation, Overlap, Predicted, Row, State, Times, to_text
from hocket.files import json_in
from hocket.gpus import GPUS
from hocket.planning import adapter_seconds, documents_note, network, predict, program_of, rates
from hocket.predict.arrivals import arrival_bytes
from hocket.predict.cost import CostTable, costs_of
from hocket.predict.hardware import Hardware, hardware_of, hosts_of
from hocket.predict.part_sizes import unit_weights
from hocket.predict.simulate import KINDS, kind_of
from hocket.predict.tensor_costs import by_pieces, model_of_rank
from hocket.problems import printable
from hocket.program.mesh import P2P, PURPOSES, described, most_sms, mover_of
from hocket.program.ops import UNITS, Program
from hocket.program.shard import ALIGN
from hocket.program.stages import layout_of, mesh_of, sharding_of
from hocket.program.transformer import GATHERED
from hocket.resolve import Settings
from hocket.rules import recomputes, shares_units
from hocket.sizes import duration, listed, several
from hocket.tune.trials import continued, steady
from hocket.variables import Finding

if TYPE_CHECKING:
    from hocket_trace.data import Report

# -- What hides which communication, row by row ------------------------------------------------------------------------

ALWAYS = "always"
"""The source of behaviour without a setting."""
_METHODS = {
    "ring": "its own product, on the rows that have come",
    "pipeline": "its own product, of the next rows",
    "bulk": "the product of the input gradient",
}
_PRODUCTS = {"qkv": "queries, keys, values", "proj": "attention's output", "fc1": "MLP's input", "fc2": "MLP's output"}


def overlaps(settings: Settings) -> tuple[Overlap, ...]:
    """Every communication of a step, whether or not this run has it."""
    return tuple(row for make in (_tensor, _context, _data, _pipeline, _experts) for row in make(settings))


def _row(
    s: Settings,
    axis: Axis,
    what: str,
    setting: str = "",
    under: str = "",
    why: str = "",
    kind: str = "",
    lacks: str = "",
) -> Overlap:
    """A row, with the origin and reason of its setting. `lacks` says why the run has no such communication."""
    state: State = "n/a" if lacks else "on" if under else "off"
    decision = next((d for d in s.decisions if d.setting == setting), None)
    where = decision.source if decision else source(s, s.origins, setting) if setting else ALWAYS
    reason = decision.reason if decision else "as asked" if state == "off" else ""
    return Overlap(
        axis=axis,
        what=what,
        under=under if state == "on" else "",
        state=state,
        setting=setting,
        source=where,
        why=lacks or why or reason,
        kind="" if lacks else kind,
    )


def _tensor(s: Settings) -> Iterator[Overlap]:
    if s.mesh.tp == 1:
        yield _row(s, "tp", "rows gathered and reduced around products", "mesh.tp", lacks="mesh.tp is 1")
        return
    reasons = [reason for d in s.decisions if d.setting == TP_METHOD for reason in d.reasons]
    for role, direction in itertools.product(ROLES, DIRECTIONS):
        under, start = _METHODS.get(s.overlap.tp.way(role, direction), ""), f"{role}_{direction}: "
        why = next((reason.removeprefix(start) for reason in reasons if reason.startswith(start)), "")
        row = _row(s, "tp", f"{_PRODUCTS[role]}, {direction}", TP_METHOD, under)
        where = AUTOMATIC if why else source(s, s.origins, TP_METHOD)
        yield replace(row, why=why or ("" if under else "as asked"), source=where)


def _context(s: Settings) -> Iterator[Overlap]:
    """Keys and values of other ranks' tokens, or heads, and their gradients."""
    keys = "keys and values gathered, and their gradients reduced"
    if s.mesh.cp == 1:
        yield _row(s, "cp", keys, "mesh.cp", lacks="mesh.cp is 1")
    elif s.overlap.cp.method == "gather":
        yield _row(s, "cp", keys, CP_METHOD, "queries; weight gradients of attention", kind="cp")
        if recomputes(s, GATHERED):
            again, under = (
                "keys and values gathered again, for backward",
                "backward of the layer's parts after attention",
            )
            yield _row(s, "cp", again, "plan.recompute", under, kind="cp")
    else:
        own = "keys and values of heads exchanged, and their gradients"
        yield _row(s, "cp", own, CP_METHOD, "queries; their weight gradients", kind="cp")
        why = "but for gradients of results, beside weight gradients of attention's output, nothing is beside them"
        merged = s.overlap.ep.merge == "on"
        under, why = ("the other half of a merged step", "") if merged else ("", why)
        yield _row(s, "cp", "queries and results of heads exchanged, and their gradients", CP_METHOD, under, why, "cp")


def _data(s: Settings) -> Iterator[Overlap]:
    weights, gradients, dp = "weights gathered", "gradients reduced", s.overlap.dp
    alone = "" if shares_units(s) else "mesh.dp is 1"
    if alone or dp.strategy == "no_shard":
        setting = "mesh.dp" if alone else "overlap.dp.strategy"
        yield _row(s, "dp", weights, setting, lacks=alone or "every rank has all weights")
    else:
        under = f"the layers before, {dp.prefetch} pass{'' if dp.prefetch == 1 else 'es'} ahead" if dp.prefetch else ""
        how = "within a step a unit is gathered again when its slot was needed"
        why = how if dp.strategy == "optim_grads_params" else "each unit once a step"
        why += "; the first ones beside the updates of other units" if dp.update == "next_step" else ""
        why = why if under else "a gather starts when its reader is next: overlap.dp.prefetch is 0"
        yield _row(s, "dp", weights, "overlap.dp.prefetch", under, why, "gather")
        if s.optimizer.name == "muon":
            under = "other units' iterations, and the first forwards" if dp.update == "next_step" else ""
            yield _row(s, "dp", "averages and matrices of Muon", "overlap.dp.update", under, "4 bytes per parameter")
    if alone:
        yield _row(s, "dp", gradients, "mesh.dp", lacks=alone)
        return
    once = dp.strategy in ("no_shard", "optim")
    why = "once a step, after the last microbatch" if once else "after the weight gradients of every microbatch"
    why += "; over replicas of the weights once a step" if s.mesh.replicas > 1 else ""
    yield _row(s, "dp", gradients, "overlap.dp.strategy", "backward of what follows", why, "reduce")


def _pipeline(s: Settings) -> Iterator[Overlap]:
    forward, backward = "activations sent", "gradients sent"
    if s.mesh.pp == 1:
        yield from (_row(s, "pp", what, "mesh.pp", lacks="mesh.pp is 1") for what in (forward, backward))
        return
    why = "lanes and groups of their own; needs no virtual stages"
    yield _row(s, "pp", forward, "", "other microbatches", why, "pp")
    if s.model.tied and not s.plan.turning:
        why = "one way; the first rank's own leaves after its last reduce"
        yield _row(s, "pp", "gradients of the tied embedding", "", "the first rank's last backward", why)
    separate = s.plan.zero_bubble
    after = s.overlap.defer_wgrad != "off" and (separate or s.overlap.pp.defer_layers != 0)
    setting = "overlap.defer_wgrad" if separate or s.overlap.defer_wgrad == "off" else "overlap.pp.defer_layers"
    yield _row(s, "pp", backward, setting, "weight gradients after them" if after else "")


def _experts(s: Settings) -> Iterator[Overlap]:
    rows, ends, under = (
        "rows to experts and back",
        "the same, at both ends of a step",
        "the other half of a merged step",
    )
    if not s.rows_travel:
        setting, why = (
            ("mesh.ep", "mesh.ep is 1") if s.model.has_experts else ("model.experts", "the model has no experts")
        )
        yield from (_row(s, "ep", what, setting, lacks=why) for what in (rows, ends))
        return
    merged, merged_ends = (under if way == "on" else "" for way in (s.overlap.ep.merge, s.overlap.ep.merge_ends))
    if not merged and s.overlap.defer_wgrad == "on" and not s.plan.zero_bubble:
        alone, why = (
            "experts' weight gradients, backwards alone",
            "overlap.ep.merge is off: nothing else is beside them",
        )
        yield _row(s, "ep", rows, "overlap.defer_wgrad", alone, why, "a2a")
    else:
        yield _row(s, "ep", rows, "overlap.ep.merge", merged, kind="a2a")
    yield _row(s, "ep", ends, "overlap.ep.merge_ends", merged_ends)


# -- predicted ---------------------------------------------------------------------------------------------------------
# The simulated communication of a step: times by kind, and the peak memory of ranks.
#
# Note: [An explanation is quick]
# A step with few ops is simulated whole. One with more microbatches than are needed to reach the steady state is
# simulated twice with fewer, a period apart, and extrapolated: see Note: [Long steps are priced by their period]. If
# even that would take minutes, the step is not simulated, and the explanation says so.

MOST_OPS = 40_000
"""Ops of a program that can be built and simulated in a second."""
LONGEST_OPS = 800_000
"""Ops of the longest program that is simulated: it takes half a minute, and half a GiB."""
OPS_PER_LAYER = {"dense": 12, "moe": 20}
"""Ops of one layer in one microbatch, forward and backward: an upper estimate if nothing is recomputed."""


@dataclass(frozen=True)
class Step:
    """One simulated step."""

    program: Program
    costs: CostTable
    found: Predicted
    peaks: tuple[int, ...]
    """Peak bytes of each pipeline rank."""
    adapter: float
    """See `adapter_seconds`."""


@without_collector()
def simulated(settings: Settings) -> tuple[Predicted, Step | None]:
    """The prediction of a step, and the step that was simulated for it: shorter than the run's, or None."""
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
        found = continued(short.found, step.found, periods)
        adapter = continued(short.adapter, step.adapter, periods)
        how = f"simulated with {few} and {more} microbatches, and continued to {count}"
    note = documents_note(settings)
    notes = [how, rates(settings, hardware), note and f"documents: {note}", network(settings, adapter, found.step)]
    notes += _in_fp8(settings, hardware, step)
    return replace(found, note="; ".join(filter(None, notes))), step


def _in_fp8(settings: Settings, hardware: Hardware, step: Step) -> Iterator[str]:
    """A note on what fp8 would save, where it is possible. Whether to round more is the user's choice."""
    gpu = next((gpu for name, gpu in GPUS.items() if name == hardware.name), None)
    if settings.precision.dtype != "bf16" or gpu is None or gpu.capability < FROM:
        return
    host, rules = Host(capability=gpu.capability), [one for rule in PRECISION_RULES for one in rule.each()]
    tried = changed(settings, {"precision.compute": "fp8"})
    if settings.precision.compute == "fp8" or any(rule.broken(tried, host) for rule in rules):
        return
    ops = [op for _, _, op in step.program if op.lane == "compute"]
    own, other = (sum(costs.of(op).seconds for op in ops) for costs in (step.costs, costs_of(tried, hardware)))
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


# -- Units, groups and memory of a run ---------------------------------------------------------------------------------

LANES: dict[str, tuple[str, ...]] = {
    "gather_dense": ("gather",), "gather_experts": ("gather",), "reduce_dense": ("reduce",),
    "reduce_experts": ("reduce",), "replicas": ("reduce",), "a2a": ("a2a",), "tp": ("compute",), "cp": ("cp",),
    "pp_fwd": ("send_act", "recv_act"), "pp_bwd": ("send_grad", "recv_grad"), "control": (),
}  # fmt: skip
"""Purpose of a group -> lanes of the plan that use it."""


def units(settings: Settings) -> tuple[Row, ...]:
    """All kinds of units. Layers with and without a window have the same."""
    layout, sharding, model, mesh = layout_of(settings), sharding_of(settings), model_of_rank(settings), settings.mesh
    found = Counter(each for rank in range(layout.pp) for each in layout.units(rank))
    rows = list[dict[str, Any]]()
    for unit, kind in sorted(found, key=lambda key: (UNITS.index(key[0]), key[1])):
        elements, members = unit_weights(model, layout, unit, kind), sharding.size(unit)
        padded = -(-elements // (members * ALIGN)) * members * ALIGN
        others = ", all but its experts" if ("experts", kind) in found else ""
        name = f"layer{others}" if unit == "dense" else unit
        axis = "ep" if unit == "experts" else "tp"
        row = dict(
            unit=f"{name} of one {axis} rank" if getattr(mesh, axis) > 1 else name,
            count=found[unit, kind],
            elements=elements,
            padding=1 - elements / padded if members > 1 else 0.0,
            members=members,
            nbytes=elements * settings.element_bytes,
        )
        if rows and rows[-1] | {"count": row["count"]} == row:
            rows[-1]["count"] += row["count"]
        else:
            rows.append(row)
    return tuple(rows)


def optimizer(settings: Settings) -> tuple[Row, ...]:
    """All weights, by the optimizer's treatment."""
    from hocket.model.source import parameter_shapes  # imports torch

    return tuple(
        dict(
            what=group.why,
            count=len(group.names),
            elements=group.elements,
            decay=group.decay,
            names=" ".join(samples(group.names)),
        )
        for group in weight_groups(settings.optimizer, settings.train.weight_decay, parameter_shapes(settings.model))
    )


def groups(settings: Settings) -> Iterator[Row]:
    """All process groups with more than one member, by purpose, in the order of their creation."""
    mesh = mesh_of(settings)
    for purpose in PURPOSES:
        members = settings.mesh.members(purpose)
        if members == 1:
            continue
        count = len(mesh.edges) * mesh.data * mesh.tp if purpose in P2P else settings.world // members
        used = settings.model.has_experts or not purpose.endswith("_experts")
        moved, lanes = _moved_by(settings, purpose), LANES.get(purpose, ()) if used else ()
        yield dict(purpose=purpose, members=members, count=count, lanes=lanes, moved_by=moved)


def _moved_by(settings: Settings, purpose: Purpose) -> str:
    on_gpu, placed = settings.train.device == "cuda", settings.overlap.ep.splits == "device"
    return {
        "nothing": "nothing: it only pretends to",
        "gloo": "gloo",
        "nccl": f"NCCL, at most {most_sms(purpose)} SMs",
        "copies": "copy engines, no SM",
        "pieces": f"copy engines, piece by piece; else NCCL, at most {most_sms(purpose)} SMs",
        "kernels": "kernels that store into the peers' memory",
    }[mover_of(purpose, settings.train.transport, on_gpu, placed, by_pieces(settings))]


def memory(settings: Settings, step: Step | None) -> tuple[Row, ...]:
    """Memory of pipeline ranks; empty if the step was not simulated."""
    if step is None:
        return ()
    room, arrivals = hardware_of(settings).memory, arrival_bytes(settings)
    rows = []
    for rank, peak in enumerate(step.peaks):
        state = step.costs.state_bytes[rank]
        slots = step.costs.fixed_bytes(step.program, rank) - state
        fits = not room or peak + arrivals <= room
        rows.append(dict(rank=rank, state=state, slots=slots, peak=peak, arrivals=arrivals, fits=fits))
    return tuple(rows)


# -- What traces of the run show, in place of a prediction -------------------------------------------------------------


def in_traces(report: Report, predicted: Predicted) -> Predicted:
    """The step of the slowest rank; compute and times by kind are means over ranks and steps of the traces.

    Raises ValueError if they hold no whole step.
    """
    if not report.steps:
        raise ValueError(f"{several(report.sources)}: no whole step was recorded; fix: record at least one")
    numbers = sorted({step.step for step in report.steps})
    kinds: dict[str, Times] = {}
    for kind in KINDS:
        shares = [step.kinds[kind] for step in report.steps if kind in step.kinds]
        if shares:
            exposed = [step.exposed_for.get(kind, 0.0) for step in report.steps]
            seconds = sum(share.seconds for share in shares) / len(report.steps)
            kinds[kind] = Times(seconds=seconds, exposed=fmean(exposed))
    return replace(
        predicted,
        hardware=report.device,
        step=report.step_seconds,
        compute=fmean(step.compute for step in report.steps),
        idle=fmean(step.idle for step in report.steps),
        kinds=kinds,
        note=f"{listed('step', numbers)} of {several(report.sources)}{_waits(report)}",
    )


def _waits(report: Report) -> str:
    """A note on exposed time that a prediction counts as idle; empty if there is none."""
    waits = [step.exposed_waiting for step in report.steps if not isnan(step.exposed_waiting)]
    if not any(waits):
        return ""
    return f"; of what is exposed, {duration(fmean(waits))} only waits for late peers: predicted as nothing at all"


# -- build -------------------------------------------------------------------------------------------------------------


def explain(settings: Settings, environment: Sequence[Finding]) -> Explanation:
    """Explain the decisions about a run, and predict its step. Pure; needs no GPU."""
    predicted, step = simulated(settings)
    return Explanation(
        name=settings.run.name,
        recipe=_recipe(settings.origins),
        steps=settings.train.steps,
        heading=heading(settings),
        digest=digest(settings),
        overlaps=overlaps(settings),
        predicted=predicted,
        decisions=settings.decisions,
        optimizer=optimizer(settings),
        units=units(settings),
        groups=tuple(groups(settings)),
        memory=memory(settings, step),
        environment=tuple(environment),
        check=_check(settings),
    )


def _recipe(origins: Mapping[str, str]) -> str:
    """The file or recipe that a run is started with."""
    files = {origin.split(".toml:")[0] for origin in origins.values() if ".toml:" in origin}
    return f"{min(files)}.toml" if files else origins.get("", "").removeprefix("recipe ")


def heading(settings: Settings) -> str:
    """A line about the ranks and their purposes."""
    t, ranks = settings.train, f"{settings.world} ranks = {described(settings.mesh)}"
    ranks += f", {settings.network.ranks_per_host} on each host" if hosts_of(settings) > 1 else ""
    return f"{ranks}, {t.device}, {settings.precision.compute}, {t.transport}"


def _check(settings: Settings) -> tuple[str, ...]:
    """Commands to measure the run: against the same step without communication, and with a trace in another folder."""
    if settings.world == 1:
        return ()
    command = shlex.join(command_words(settings, settings.origins))
    traced = changed(settings, {"run.folder": f"{settings.run.folder}-traced"})
    train = shlex.join(command_words(traced, settings.origins, ["run.folder"]))
    traces = shlex.join(["hocket", "trace", traced.run.folder])
    return (f"hocket bench {command} --against hocket_null", f"hocket train {train} --profile && {traces}")


# -- The explanation in a run's folder: written once, by the process that holds the lock, and read again ---------------


def record(settings: Settings, folder: Path) -> None:
    """Write the explanation of a run as JSON, which includes the text that `hocket explain` prints.

    Raises ValueError if it cannot be written.
    """
    found = explain(settings, settings.host.variables)
    temporary = folder / f"{FILE}.tmp"
    try:
        temporary.write_text(json.dumps({**found.as_json(), "text": to_text(found)}, indent=1))
        temporary.replace(folder / FILE)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        reason, fix = f"cannot be written ({error.strerror})", "make room, or name a folder you can write to"
        raise ValueError(problem("run.folder", settings.run.folder, settings.origins, reason, fix)) from None


def read(name: str) -> tuple[dict[str, Any], str]:
    """The explanation that a run has written, as JSON and as text; `name` is its folder or file.

    Raises ValueError if it is missing or invalid.
    """
    path = Path(name)
    try:
        path = path / FILE if path.is_dir() else path
        found = json_in(path)
        return found, printable(str(found.pop("text")))
    except OSError as error:
        reason, fix = f"cannot be read ({error.strerror})", f"the folder of a run, or its {FILE}"
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        reason = "damaged, or written by another version of hocket"
        fix = "the hocket that wrote it, or hocket explain with the words that the run was started with"
    raise ValueError(f"{path} (command line): {reason}; fix: {fix}")
