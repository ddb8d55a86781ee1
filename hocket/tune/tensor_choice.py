"""Chooses how tensor-parallel layers communicate: by what is possible, what is worth it, and what the user set.

For each weight's role and direction the rule compares all possible methods, on the layer's own shapes, by the model of
`program/tensor_costs.py`. More pieces hide more communication, and take the host longer. The rule leaves out methods
that a busy host would not issue in time, and methods that save less than a few per cent.
"""

from __future__ import annotations

from collections.abc import Iterator

from hocket.config import Config
from hocket.config.overlap import DIRECTIONS, ROLES, Direction, Method, Role, possible
from hocket.program.hardware import BANDWIDTH, LATENCY, hardware_of
from hocket.program.tensor_costs import cell_of, in_time, seconds, splits_for, without_pieces
from hocket.settings.decision import Choice
from hocket.settings.derived import no_pieces, ranks_of_a_host
from hocket.settings.overlap_rules import TENSOR as METHOD
from hocket.settings.rule import Host

WORTH = 1.03
"""Factor by which a method with pieces must be faster than the best one without pieces to be chosen."""


def choose_tensor(c: Config, h: Host) -> list[Choice]:
    """A method for every role and direction that is left open; nothing if none is.

    Without tensor parallelism all is off, and there is no reason to give: nothing was chosen.
    """
    if not c.overlap.tp.open:
        return []
    if c.mesh.tp == 1:
        return [(METHOD, ("off",), "")]
    ways, reasons = c.overlap.tp.named(), list[str]()
    for role, direction in ((role, direction) for role in ROLES for direction in DIRECTIONS):
        if (where := f"{role}_{direction}") not in ways:
            ways[where], reason = _choose(c, h, role, direction)
            reasons.append(f"{where}: {reason}")
    return [(METHOD, tuple(f"{where}:{way}" for where, way in ways.items()), tuple(reasons))]


def _choose(c: Config, h: Host, role: Role, direction: Direction) -> tuple[Method, str]:
    can = possible(role, direction)
    hardware, cell, method = hardware_of(c), cell_of(c, role, direction), can[-1]
    worse = without_pieces(c, cell)
    beside = "; the second gather of the input is hidden beside the input gradient" if worse == "bulk" else ""
    reason = no_pieces(c, h)
    if reason:
        return worse, reason + beside
    splits = splits_for(c, cell, method)
    if not in_time(c, cell, method, splits):
        return worse, f"the host might not issue pieces as fast as they are computed{beside}"
    takes = seconds(cell, method, splits, hardware)
    gain = seconds(cell, worse, 0, hardware) / takes
    if gain < WORTH:
        return worse, f"{splits} pieces would hide too little: {gain:.2f}x by the model of {hardware.name}{beside}"
    gain = seconds(cell, "off", 0, hardware) / takes
    return method, f"{splits} pieces: {gain:.2f}x one after the other by the model of {hardware.name}"


def choose_network(c: Config, h: Host) -> Iterator[Choice]:
    """What hocket assumes about the network of several hosts. A single host needs no assumption."""
    each = ranks_of_a_host(c, h)
    if each < c.mesh.world:
        yield "network.ranks_per_host", each, f"{c.mesh.world} ranks on {c.mesh.world // each} hosts"
        reason = (
            "not set: hocket assumes one adapter of 400 Gb/s for each rank, and what NCCL reckons with on InfiniBand"
        )
        yield "network.link", f"{BANDWIDTH},{LATENCY}", reason
