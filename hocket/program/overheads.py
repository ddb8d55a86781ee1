"""What slows a step down beyond the costs of its ops, as far as the kind of hardware says it: contention and the host.

Contention. NCCL's kernels hold processors, copy engines hold none; both move bytes through memory and links, which
takes of the bandwidth and of the power that compute has. So do updates beside forwards. The host. It issues a step op
by op, if the step is not replayed as a graph, and waits for the counts of rows that it has to know. Traces of a run
measure the same (`measured.py`); Note: [What the simulator believes] in `schedule.py` says what the simulator
makes of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hocket.config import COPIED, Config, Purpose
from hocket.program.cost import Measurement
from hocket.program.fp8_costs import ISSUED
from hocket.program.hardware import KIND_OF_GROUPS, Hardware
from hocket.program.schedule import UPDATES, CostKey, Kind, Overheads

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
