"""Chooses `plan.graphs` and `overlap.ep.splits` if they are `auto`: together, by rules, time and memory.

If the host issues the ops of a step one by one and GPUs are faster than that, a step lasts as long as the host needs. A
replayed step lasts as long as its GPUs need. So hocket records steps if hosts would be late. If experts' rows travel,
recording needs splits that only the devices know, room of a fixed size, and kernels that store rows. If GPUs have
enough to do, hosts that know the splits cost nothing. Then NCCL or copy engines move the rows, and slow down products
less.

Note: [What recorded steps cost]
They cost memory: see `Note: [What a graph holds]`. There is room for more rows than arrive. Shapes must be the same in
each step. Those of microbatches and sequences always are; packed documents need extra room for that. Profiled steps and
validations still run op by op. If a step has no room for its rows, it runs twice. The next step is recorded anew with
more room, if that fits (`RowRoom.again`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hocket.config import Config
from hocket.program.cost import issued
from hocket.program.hardware import hardware_of
from hocket.settings.decision import Choice
from hocket.settings.derived import has_experts
from hocket.settings.rule import Host
from hocket.settings.rules import CHECKS, rule_text
from hocket.settings.schema import changed, leaf
from hocket.sizes import duration
from hocket.tune.trials import Trials, fits, gib, memory_of

GRAPHS, SPLITS, COPIES = "plan.graphs", "overlap.ep.splits", "overlap.ep.copies"
_LATE = 0.75
"""A host counts as late if it needs more than this share of the GPUs' time: some hosts are a third slower than
others."""


def choose_graphs(c: Config, h: Host) -> tuple[str, str]:
    """Whether steps could be replayed, by rules alone."""
    wanted = _recorded(c)
    for rule in CHECKS:
        concerned = GRAPHS in rule.settings or (wanted.overlap.ep.splits == "device" and SPLITS in rule.settings)
        if concerned and not rule.only_if_set and not rule.remark and rule.broken(wanted, h):
            return "off", rule_text(rule.reason, wanted, h)
    for what, there in (("tensor-parallel ranks", c.mesh.tp > 1), ("packed documents", c.data.packing != "off")):
        if there:
            return "off", f"only where it is asked for: replays of {what} have not been timed"
    return "on", "the host replays a step with one call"


def choose_splits(c: Config, h: Host) -> tuple[str, str]:
    """The splits that the choice of graphs needs, if rows travel."""
    if not _rows_travel(c):
        return "host", "no rows travel (needs MoE layers and mesh.ep above 1)"
    if c.plan.graphs == "on":
        return "device", "a step that is replayed as one graph waits for no counts"
    return "host", "room for as many rows as come; splits that the device alone knows pay in replayed steps"


def graphs_that_pay(c: Config, h: Host, open_: Collection[str], trials: Trials) -> Iterator[Choice]:
    """Confirm or undo the choice of rules by time and memory. `open_` are the settings that the user left open."""
    if GRAPHS not in open_ or c.plan.graphs != "on":
        return
    against, reason = _weighed(c, h, _rows_travel(c) and SPLITS not in open_, trials)
    yield GRAPHS, "off" if against else "on", reason
    if against and _rows_travel(c):
        yield SPLITS, "host", "room for as many rows as come; splits that the device alone knows pay in replayed steps"


def _weighed(c: Config, h: Host, decided: bool, trials: Trials) -> tuple[bool, str]:
    """Whether a graph gains nothing or does not fit, and why. `decided`: hosts do not know the splits in any case."""
    memory = memory_of(c, h)
    if not memory:
        return True, f"how much memory a {hardware_of(c).name} rank can use is not known, and a graph keeps its own"
    step = trials.step(_smallest(c))
    host = issued(c, hardware_of(c)) * step.ops
    times = f"a host issues {step.ops:,} ops in about {duration(host)}, GPUs take {duration(step.seconds)}"
    if host < _LATE * step.seconds and not decided:
        return True, f"{times}: they never wait for it"
    needs = f"a graph and what lies beside it take {gib(step.nbytes)} of {gib(memory)}"
    if not fits(step.nbytes, memory):
        return True, f"{needs}, which does not fit; {times}"
    return False, f"{times}; replayed, a step is one call; {needs}"


def _rows_travel(c: Config) -> bool:
    return has_experts(c) and c.mesh.ep > 1


def _recorded(c: Config) -> Config:
    """The configuration with graphs, as far as the user left that open."""
    device = _rows_travel(c) and c.overlap.ep.splits == "auto"
    return changed(c, {GRAPHS: "on", **({SPLITS: "device"} if device else {})})


def _smallest(c: Config) -> Config:
    """The configuration with rows that devices can place, and with the least memory, as far as that is open."""
    least = {COPIES: "per_expert", "overlap.dp.strategy": "optim_grads_params"}
    return changed(c, {name: value for name, value in least.items() if leaf(c, name) == "auto"})
