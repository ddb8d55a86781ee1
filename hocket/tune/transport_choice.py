"""Chooses `train.transport` if it is `auto`: copy engines if they can serve, shorten the step and fit into memory.

A kernel that communicates takes SMs from the compute beside it, and slows that compute down by more than this share. A
copy takes no SM. All steps in `benchmarks/results` that were measured on both are faster on copies, by 1 to 17 %.
Copies need one host whose GPUs reach each other's memory, and buffers into which peers write.

Note: [One transport for all groups]
Groups with ranks on several hosts need NCCL's kernels, and all groups have the same transport. So a mesh on several
hosts uses NCCL for all groups, also for groups that stay inside a host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hocket.config import COPIED, Config, Purpose
from hocket.program.ops import recomputable
from hocket.settings.decision import Choice, Decision
from hocket.settings.derived import has_experts, leaves_host, ranks_of_a_host
from hocket.settings.rule import Host
from hocket.settings.schema import changed
from hocket.tune.graph_choice import graphs_that_pay
from hocket.tune.trials import Trials, gib, memory_of
from hocket.variables import no_copies

TRANSPORT = "train.transport"
COPIES = "copy_engine"
CHOSEN_BY_IT = TRANSPORT, "overlap.dp.update"
"""Settings that are chosen anew if copy engines turn out not to work."""


def choose_transport(c: Config, h: Host) -> tuple[str, str]:
    """By rules alone."""
    if c.train.device != "cuda":
        return "gloo", "the ranks compute on CPUs"
    if reason := _against(c, h):
        return "nccl", reason
    ranks = f"{c.mesh.world} ranks on GPUs of one host"
    if not h.gpu:
        return COPIES, f"{ranks}; hocket assumes that they reach each other's memory, without a check"
    return COPIES, f"{ranks}, which reach each other's memory"


def chose_copies(c: Config, decisions: Collection[Decision]) -> bool:
    """Whether hocket chose copy engines, without a user's demand for them."""
    return c.train.transport == COPIES and any(d.setting == TRANSPORT and d.chosen for d in decisions)


def _against(c: Config, h: Host) -> str:
    """Why copy engines are not for ranks on GPUs; empty if they are."""
    if not any(c.mesh.members(purpose) > 1 for purpose in _served(c)):
        return "no group that copy engines serve has several ranks"
    if leaves_host(c, h, "control"):
        each = ranks_of_a_host(c, h)
        return f"copy engines reach the GPUs of one host, and of {c.mesh.world} ranks {each} are on each"
    if c.mesh.tp > 1:  # whose pieces copy engines move
        return "only where they are asked for: copy engines beside tensor-parallel ranks have not been timed"
    return _host_against(h)


def _host_against(h: Host) -> str:
    """Why the GPUs of this host cannot use copy engines. Empty if they can, or if this was not checked."""
    return h.no_copy_engine or h.no_peer_memory or no_copies(h.variables)


def lost_copies(h: Host, decisions: Collection[Decision]) -> Iterator[str]:
    """What to say where a run begins that would be on copy engines, were it not for something on its host."""
    for decision in decisions:
        if decision.setting == TRANSPORT and decision.chosen and decision.reason == _host_against(h):
            yield str(decision)


def _served(c: Config) -> Iterator[Purpose]:
    """The purposes of groups that copy engines would serve and that something is sent on."""
    for purpose in COPIED[COPIES]:
        if has_experts(c) or not (purpose == "a2a" or purpose.endswith("_experts")):
            yield purpose


def transport_that_fits(c: Config, h: Host, open_: Collection[str], trials: Trials) -> Iterator[Choice]:
    """NCCL, where copy engines were chosen by rules and their buffers leave a step no room.

    NCCL is chosen where a step fits with it and not with copies, or with neither. What else is open is taken as it
    would be with NCCL, and parts as recomputed only if no step fits otherwise. `open_` are the settings that were left
    open. `c` is sound.
    """
    memory = memory_of(c, h)
    if TRANSPORT not in open_ or c.train.transport != COPIES or not memory or trials.step(c).fits(memory):
        return
    nccl = changed(c, {TRANSPORT: "nccl"})
    for setting, value, _ in graphs_that_pay(nccl, h, open_, trials):
        nccl = changed(nccl, {setting: value} if setting in open_ else {})
    for tried in _ways(nccl):
        copied = changed(tried, {TRANSPORT: COPIES})
        if trials.step(copied).fits(memory):
            return
        if trials.step(tried).fits(memory):
            needs, less = (gib(trials.step(each).nbytes) for each in (copied, tried))
            yield TRANSPORT, "nccl", f"with room for copies a step needs {needs} of {gib(memory)}; it fits with {less}"
            return
    least = trials.step(nccl).nbytes
    yield TRANSPORT, "nccl", f"a step needs {gib(least)} of {gib(memory)}, even without room for copies"


def _ways(c: Config) -> Iterator[Config]:
    """A configuration with nothing recomputed where that is open, then with everything."""
    yield c
    if c.plan.recompute == ("auto",):
        yield changed(c, {"plan.recompute": recomputable(c.model.kinds())})
