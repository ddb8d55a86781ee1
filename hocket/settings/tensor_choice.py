"""How tensor-parallel layers communicate: what can be done at all, what is worth it, and what was asked for.

For each weight's role and direction the rule compares all that can be done, on the layer's own shapes, by the model of
`tensor_times.py`. More pieces hide more and take the host longer. What a busy host would not issue in time is not done,
nor what doesn't save a few per cent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hocket.config import Config
from hocket.machine import hardware_of
from hocket.plan.hardware import Hardware
from hocket.settings.network_choice import leaves_host, ranks_of_a_host
from hocket.settings.rule import Host
from hocket.settings.tensor_times import (
    COLUMNS,
    DIRECTIONS,
    ROLES,
    Cell,
    Direction,
    Method,
    Role,
    issued,
    products,
    seconds,
)

WORTH = 1.03
"""By how much pieces must be faster than what can be done without them to be taken."""


def possible(role: str, direction: str) -> tuple[Method, ...]:
    """What the layers of a role can do in a direction (`parallel/tensor.py` has the table)."""
    if role in COLUMNS:
        return ("off", "ring") if direction == "forward" else ("off", "bulk", "pipeline")
    return ("off", "pipeline") if direction == "forward" else ("off", "ring")


def no_pieces(c: Config, h: Host) -> str:
    """Why tokens cannot be moved piece by piece; empty if they can."""
    if c.train.device == "cpu" or c.train.transport == "null":
        return ""
    if c.train.transport == "slow":
        return "the slow transport imitates whole collectives on GPUs"
    if leaves_host(c, h, "tp"):
        return f"pieces are copied between the GPUs of one host, and {ranks_of_a_host(c, h)} ranks are on each"
    if h.no_peer_memory:
        return f"{h.no_peer_memory}, and pieces are copied there"
    return ""


def cell_of(c: Config, role: Role, direction: Direction) -> Cell:
    """The product beside which tokens are moved: forward, or of the input gradient."""
    m, tp = c.model, c.mesh.tp
    rows = c.train.sequences * c.data.sequence_length
    heads, keys = m.heads * m.head_dim, max(tp, m.kv_heads) * m.head_dim
    ffn = m.ffn if "dense" in m.kinds() else m.shared_ffn
    spread = {"qkv": heads + 2 * keys, "proj": heads, "fc1": 2 * ffn, "fc2": ffn}[role] // tp
    inner, columns = m.hidden, spread
    if (role in COLUMNS) != (direction == "forward"):
        inner, columns = columns, inner
    return Cell(role, direction, tp, rows, inner, columns, rows * m.hidden * c.element_bytes)


def time_of(c: Config, role: Role, direction: Direction, hardware: Hardware) -> tuple[float, int]:
    """Seconds in which a resolved layer's products wait for tokens, and how often all tokens are moved for them."""
    cell, way = cell_of(c, role, direction), getattr(c.overlap.tp, f"{role}_{direction}")
    takes = seconds(cell, way, splits_of(c, role, direction), hardware)
    return max(0.0, takes - products(cell, hardware)), 2 if cell.gathers_again else 1


def splits_of(c: Config, role: Role, direction: Direction) -> int:
    """Into how many pieces a resolved layer's product is cut; 0 if it is not."""
    way = getattr(c.overlap.tp, f"{role}_{direction}")
    return _splits(c, cell_of(c, role, direction), way) if way in ("ring", "pipeline") else 0


def _splits(c: Config, cell: Cell, method: Method) -> int:
    """The number asked for, or the fastest of what the host issues in time; of what takes as long, the most.

    More pieces wait less for peers that are late.
    """
    if c.overlap.tp.pieces:
        return c.overlap.tp.pieces
    every = [n for n in range(2, cell.ranks + 1) if cell.ranks % n == 0]
    some = [n for n in every if _in_time(c, cell, method, n)] or every
    return min(some, key=lambda n: (round(seconds(cell, method, n, hardware_of(c)), 9), -n))


def _whole(c: Config, cell: Cell) -> Method:
    """What is done without pieces."""
    return "bulk" if "bulk" in possible(cell.role, cell.direction) and _in_time(c, cell, "bulk") else "off"


def _in_time(c: Config, cell: Cell, method: Method, splits: int = 0) -> bool:
    """Whether a busy host has issued a way by the time that the GPU would need without it. Nobody waits for records."""
    without: Method = "off" if method == "bulk" else _whole(c, cell)
    hardware = hardware_of(c)
    return c.plan.graphs == "on" or issued(cell, method, splits, hardware) <= seconds(cell, without, 0, hardware)


def setting_of(role: str, direction: str) -> str:
    return f"overlap.tp.{role}_{direction}"


def choose_tensor(c: Config, h: Host) -> Iterator[tuple[str, str, str]]:
    """(setting, value, reason) for every role and direction that is left open.

    Without tensor parallelism all is off, and there is no reason to give: nothing was chosen.
    """
    if c.mesh.tp == 1 and c.overlap.tp.method == "auto":
        yield "overlap.tp.method", "off", ""
    for role in ROLES:
        for direction in DIRECTIONS:
            if getattr(c.overlap.tp, f"{role}_{direction}") == "auto":
                value, reason = ("off", "") if c.mesh.tp == 1 else _choose(c, h, role, direction)
                yield setting_of(role, direction), value, reason


def _choose(c: Config, h: Host, role: Role, direction: Direction) -> tuple[str, str]:
    asked, can = c.overlap.tp.method, possible(role, direction)
    if asked != "auto":
        if asked in can:
            return asked, f"overlap.tp.method = {asked}"
        return "off", f"overlap.tp.method = {asked} is not for this direction of these layers, which can be {_or(can)}"
    hardware, cell, method = hardware_of(c), cell_of(c, role, direction), can[-1]
    worse = _whole(c, cell)
    beside = "; the second gather of the input is hidden beside the input gradient" if worse == "bulk" else ""
    reason = no_pieces(c, h)
    if reason:
        return worse, reason + beside
    splits = _splits(c, cell, method)
    if not _in_time(c, cell, method, splits):
        return worse, f"the host might not issue pieces as fast as they are computed{beside}"
    takes = seconds(cell, method, splits, hardware)
    gain = seconds(cell, worse, 0, hardware) / takes
    if gain < WORTH:
        return worse, f"{splits} pieces would hide too little: {gain:.2f}x by the model of {hardware.name}{beside}"
    gain = seconds(cell, "off", 0, hardware) / takes
    return method, f"{splits} pieces: {gain:.2f}x one after the other by the model of {hardware.name}"


def _or(values: Iterable[str]) -> str:
    return " or ".join(values)
