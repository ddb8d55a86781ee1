"""Chooses what no simulation can judge: the transport, recorded steps, tensor-parallel pieces, the assumed network.

A communication kernel takes SMs from concurrent compute, and slows that compute down by more than this share. A copy
takes no SM. All steps in `benchmarks/results` that were measured on both are faster on copies, by 1 to 17 %. The
simulator models neither this nor the time to issue ops. So copy engines are chosen if they work and their buffers fit,
and steps are recorded if the host would be too slow.

Note: [One transport for all groups]
Groups with ranks on several hosts need NCCL's kernels, and all groups have the same transport. So a mesh on several
hosts uses NCCL for all groups, also for groups that stay inside a host.

Note: [What recorded steps cost]
If the host issues the ops of a step one by one and GPUs are faster than that, a step lasts as long as the host needs. A
replayed step lasts as long as its GPUs need. It costs memory: see `Note: [What a graph holds]`. With an expert
all-to-all it needs splits that only the devices know, room for more rows than arrive, and kernels that store rows.
Shapes must be the same in each step; packed documents need extra room for that. Profiled steps and validations still
run op by op. If a step has no room for its rows, it runs twice. The next step is recorded again with more room, if that
fits (`RowRoom.again`). If GPUs are busy enough, hosts that know the splits cost nothing, and NCCL or copy engines slow
down products less.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hocket.config import COPIED, Config, Purpose
from hocket.config.overlap import DIRECTIONS, ROLES, TENSOR, Direction, Method, Role, possible
from hocket.config.rule import Host, leaf
from hocket.config.schema import changed
from hocket.decision import Choice, Decision
from hocket.predict.cost import issued
from hocket.predict.hardware import BANDWIDTH, LATENCY, hardware_of
from hocket.predict.tensor_costs import cell_of, in_time, seconds, splits_for, without_pieces
from hocket.program.ops import recomputable
from hocket.rules import leaves_host, no_pieces, ranks_of_a_host, refusal
from hocket.sizes import duration
from hocket.tune.trials import Trials, fits, gib, memory_of
from hocket.variables import no_copies

TRANSPORT, GRAPHS, SPLITS = "train.transport", "plan.graphs", "overlap.ep.splits"
CHOSEN_BY_IT = TRANSPORT, "overlap.dp.update"
"""Settings that are chosen again if copy engines turn out not to work."""
_COPY_ENGINE = "copy_engine"
_BY_HOST = "host", "room for as many rows as come; splits that the device alone knows pay in replayed steps"
_LATE = 0.75
"""A host counts as late if it needs more than this share of the GPUs' time: some hosts are a third slower than
others."""
WORTH_PIECES = 1.03
"""Speed-up over the best tensor-parallel method without pieces that a method with pieces needs to be chosen."""

# -- Transport ---------------------------------------------------------------------------------------------------------


def choose_transport(c: Config, h: Host) -> tuple[str, str]:
    """The transport, by what works on the host."""
    each = ranks_of_a_host(c, h)
    reasons = {
        "no group that copy engines serve has several ranks": not any(c.mesh.members(p) > 1 for p in _served(c)),
        f"copy engines reach the GPUs of one host, and of {c.mesh.world} ranks {each} are on each": (
            leaves_host(c, h, "control")
        ),
        # copy engines move the pieces of tensor parallelism too
        "only where they are asked for: copy engines beside tensor-parallel ranks have not been timed": c.mesh.tp > 1,
        _host_against(h): bool(_host_against(h)),
    }
    if c.train.device != "cuda":
        return "gloo", "the ranks compute on CPUs"
    if reason := next((reason for reason, there in reasons.items() if there), ""):
        return "nccl", reason
    reach = ", which reach" if h.gpu else "; hocket assumes that they reach"
    return _COPY_ENGINE, f"{c.mesh.world} ranks on GPUs of one host{reach} each other's memory" + (
        "" if h.gpu else ", without a check"
    )


def _served(c: Config) -> Iterator[Purpose]:
    """The purposes of groups that copy engines would serve and that carry data."""
    for purpose in COPIED[_COPY_ENGINE]:
        if c.model.has_experts or not (purpose == "a2a" or purpose.endswith("_experts")):
            yield purpose


def _host_against(h: Host) -> str:
    """Why the GPUs of this host cannot use copy engines. Empty if they can, or if this was not checked."""
    return h.no_copy_engine or h.no_peer_memory or no_copies(h.variables)


def chose_copies(c: Config, decisions: Collection[Decision]) -> bool:
    """Whether hocket chose copy engines, without a request by the user."""
    return c.train.transport == _COPY_ENGINE and any(d.setting == TRANSPORT and d.chosen for d in decisions)


def lost_copies(h: Host, decisions: Collection[Decision]) -> Iterator[str]:
    """A message at the start of a run that would use copy engines if something on its host did not prevent it."""
    for decision in decisions:
        if decision.setting == TRANSPORT and decision.chosen and decision.reason == _host_against(h):
            yield str(decision)


def transport_that_fits(c: Config, h: Host, trials: Trials, open_: Collection[str]) -> Iterator[Choice]:
    """NCCL, if rules chose copy engines and the step with their buffers does not fit.

    NCCL is chosen if a step fits with it and not with copies, or with neither. Other open settings are taken as they
    would be with NCCL, and parts as recomputed only if no step fits otherwise. `open_` are the settings that were left
    open. `c` is valid.
    """
    memory = memory_of(c, h)
    if TRANSPORT not in open_ or c.train.transport != _COPY_ENGINE or not memory or trials.step(c).fits(memory):
        return
    nccl = changed(c, {TRANSPORT: "nccl"})
    for setting, value, _ in graphs_that_pay(nccl, h, trials, open_):
        nccl = changed(nccl, {setting: value} if setting in open_ else {})
    lean = changed(nccl, {"plan.recompute": recomputable(c.model.kinds())})
    for tried in (nccl, lean) if c.plan.recompute == ("auto",) else (nccl,):
        copied, plain = trials.step(changed(tried, {TRANSPORT: _COPY_ENGINE})), trials.step(tried)
        if copied.fits(memory):
            return
        if plain.fits(memory):
            needs = f"with room for copies a step needs {gib(copied.nbytes)} of {gib(memory)}"
            yield TRANSPORT, "nccl", f"{needs}; it fits with {gib(plain.nbytes)}"
            return
    least = trials.step(nccl).nbytes
    yield TRANSPORT, "nccl", f"a step needs {gib(least)} of {gib(memory)}, even without room for copies"


# -- Recorded steps ----------------------------------------------------------------------------------------------------


def choose_graphs(c: Config, h: Host) -> tuple[str, str]:
    """Whether steps could be replayed, by rules alone."""
    device = c.rows_travel and c.overlap.ep.splits == "auto"
    wanted = {GRAPHS: "on"} | ({SPLITS: "device"} if device else {})
    if (reason := refusal(c, h, wanted)) is not None:
        return "off", reason
    for what, there in (("tensor-parallel ranks", c.mesh.tp > 1), ("packed documents", c.data.packing != "off")):
        if there:
            return "off", f"only where it is asked for: replays of {what} have not been timed"
    return "on", "the host replays a step with one call"


def choose_splits(c: Config, h: Host) -> tuple[str, str]:
    """The splits that the choice of graphs needs, if there is an expert all-to-all."""
    if not c.rows_travel:
        return "host", ""
    if c.plan.graphs == "on":
        return "device", "a step that is replayed as one graph waits for no counts"
    return _BY_HOST


def graphs_that_pay(c: Config, h: Host, trials: Trials, open_: Collection[str]) -> Iterator[Choice]:
    """Confirm or undo the choice of rules by time and memory. `open_` are the settings that the user left open."""
    if GRAPHS not in open_ or c.plan.graphs != "on":
        return
    pays, reason = _pays(c, h, trials, c.rows_travel and SPLITS not in open_)
    yield GRAPHS, "on" if pays else "off", reason
    if not pays and SPLITS in open_ and c.rows_travel:
        yield SPLITS, *_BY_HOST


def _pays(c: Config, h: Host, trials: Trials, decided: bool) -> tuple[bool, str]:
    """Whether a graph gains something and fits, and why. `decided`: hosts do not know the splits in any case."""
    memory, name = memory_of(c, h), hardware_of(c).name
    if not memory:
        return False, f"how much memory a {name} rank can use is not known, and a graph keeps its own"
    # With splits on the device if they are open, and with the least memory.
    least = {"overlap.ep.copies": "per_expert", "overlap.dp.strategy": "optim_grads_params"}
    step = trials.step(changed(c, {name: value for name, value in least.items() if leaf(c, name) == "auto"}))
    host = issued(c, hardware_of(c)) * step.ops
    times = f"a host issues {step.ops:,} ops in about {duration(host)}, GPUs take {duration(step.seconds)}"
    if host < _LATE * step.seconds and not decided:
        return False, f"{times}: they never wait for it"
    needs = f"a graph and what lies beside it take {gib(step.nbytes)} of {gib(memory)}"
    if not fits(step.nbytes, memory):
        return False, f"{needs}, which does not fit; {times}"
    return True, f"{times}; replayed, a step is one call; {needs}"


# -- Tensor-parallel layers, by their own model (`predict/tensor_costs.py`) --------------------------------------------


def choose_tensor(c: Config, h: Host) -> list[Choice]:
    """A method for every role and direction that is left open; an empty list if none is.

    Without tensor parallelism all are off, without a reason, since there was no choice.
    """
    if not c.overlap.tp.open:
        return []
    if c.mesh.tp == 1:
        return [(TENSOR, ("off",), "")]
    ways, reasons = c.overlap.tp.named(), list[str]()
    for role, direction in ((role, direction) for role in ROLES for direction in DIRECTIONS):
        if (where := f"{role}_{direction}") not in ways:
            ways[where], reason = _method(c, h, role, direction)
            reasons.append(f"{where}: {reason}")
    return [(TENSOR, tuple(f"{where}:{way}" for where, way in ways.items()), tuple(reasons))]


def _method(c: Config, h: Host, role: Role, direction: Direction) -> tuple[Method, str]:
    """More pieces hide more communication, but take the host longer. So they must be issued in time and pay off."""
    hardware, cell, method = hardware_of(c), cell_of(c, role, direction), possible(role, direction)[-1]
    worse, splits = without_pieces(c, cell), splits_for(c, cell, method)
    beside = "; the second gather of the input is hidden beside the input gradient" if worse == "bulk" else ""
    if reason := no_pieces(c, h):
        return worse, reason + beside
    if not in_time(c, cell, method, splits):
        return worse, f"the host might not issue pieces as fast as they are computed{beside}"
    takes = seconds(cell, method, splits, hardware)
    gain = seconds(cell, worse, 0, hardware) / takes
    if gain < WORTH_PIECES:
        return worse, f"{splits} pieces would hide too little: {gain:.2f}x by the model of {hardware.name}{beside}"
    gain = seconds(cell, "off", 0, hardware) / takes
    return method, f"{splits} pieces: {gain:.2f}x one after the other by the model of {hardware.name}"


def choose_network(c: Config, h: Host) -> Iterator[Choice]:
    """The assumed network between hosts. A single host needs none."""
    each = ranks_of_a_host(c, h)
    if each < c.mesh.world:
        yield "network.ranks_per_host", each, f"{c.mesh.world} ranks on {c.mesh.world // each} hosts"
        reason = (
            "not set: hocket assumes one adapter of 400 Gb/s for each rank, and what NCCL reckons with on InfiniBand"
        )
        yield "network.link", f"{BANDWIDTH},{LATENCY}", reason
