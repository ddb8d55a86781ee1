"""How the layers of a run can communicate: their products, into how many pieces, and whether the host keeps up.

Times are those of the model in `tensor_times.py`. `tune/tensor_choice.py` chooses among the ways.
"""

from __future__ import annotations

from dataclasses import replace

from hocket.config import Config
from hocket.config.overlap import COLUMNS, Direction, Method, Role, possible
from hocket.program.hardware import Hardware
from hocket.program.network import hardware_of
from hocket.program.part_sizes import into_heads, mostly_deltas
from hocket.program.tensor_times import Cell, issued, products, seconds


def cell_of(c: Config, role: Role, direction: Direction) -> Cell:
    """The product beside which tokens are moved: forward, or of the input gradient."""
    m, tp = c.model, c.mesh.tp
    rows = c.tokens * tp
    hidden, made = into_heads(replace(m, kv_heads=max(tp, m.kv_heads)))
    hidden, heads = hidden if role == "qkv" else m.hidden, m.heads * (m.v_head_dim if m.latent else m.head_dim)
    heads = m.delta_heads * m.delta_value_dim if mostly_deltas(m) else heads
    ffn = m.ffn if "dense" in m.kinds() else m.shared_ffn
    spread = {"qkv": made, "proj": heads, "fc1": 2 * ffn, "fc2": ffn}[role] // tp
    inner, columns = hidden, spread
    if (role in COLUMNS) != (direction == "forward"):
        inner, columns = columns, inner
    return Cell(role, direction, tp, rows, inner, columns, rows * hidden * c.element_bytes)


def time_of(c: Config, role: Role, direction: Direction, hardware: Hardware) -> tuple[float, int]:
    """Seconds in which a resolved layer's products wait for tokens, and how often all tokens are moved for them."""
    cell, way = cell_of(c, role, direction), c.overlap.tp.way(role, direction)
    takes = seconds(cell, way, splits_of(c, role, direction), hardware)
    return max(0.0, takes - products(cell, hardware)), 2 if cell.gathers_again else 1


def splits_of(c: Config, role: Role, direction: Direction) -> int:
    """Into how many pieces a resolved layer's product is cut; 0 if it is not."""
    way = c.overlap.tp.way(role, direction)
    return splits_for(c, cell_of(c, role, direction), way) if way in ("ring", "pipeline") else 0


def splits_for(c: Config, cell: Cell, method: Method) -> int:
    """The fastest number of what the host issues in time; of what takes as long, the most.

    More pieces wait less for peers that are late.
    """
    every = [n for n in range(2, cell.ranks + 1) if cell.ranks % n == 0]
    some = [n for n in every if in_time(c, cell, method, n)] or every
    return min(some, key=lambda n: (round(seconds(cell, method, n, hardware_of(c)), 9), -n))


def without_pieces(c: Config, cell: Cell) -> Method:
    """What is done without pieces."""
    return "bulk" if "bulk" in possible(cell.role, cell.direction) and in_time(c, cell, "bulk") else "off"


def in_time(c: Config, cell: Cell, method: Method, splits: int = 0) -> bool:
    """Whether a busy host has issued a way by the time that the GPU would need without it. Nobody waits for records."""
    without: Method = "off" if method == "bulk" else without_pieces(c, cell)
    hardware = hardware_of(c)
    return c.plan.graphs == "on" or issued(cell, method, splits, hardware) <= seconds(cell, without, 0, hardware)
