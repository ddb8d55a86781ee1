"""How tensor-parallel layers communicate: what can be done at all, what is worth it, and what was asked for.

For each weight's role and direction the rule compares one thing after the other with everything that can be done piece
by piece, on the layer's own shapes. A product of fewer rows does not get faster in proportion: it is done in *waves* of
tiles, as many at a time as the GPU has processors, and the last wave is rarely full. So more pieces hide more and
compute worse. What doesn't save a few per cent is not done.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from hocket.config import Config, TensorMethod
from hocket.machine import hardware_of
from hocket.plan.cost import Hardware, Link
from hocket.settings.rule import Host

Role = Literal["qkv", "proj", "fc1", "fc2"]
Direction = Literal["forward", "backward"]

COLUMNS = ("qkv", "fc1")
ROLES: tuple[Role, ...] = get_args(Role)
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
TILES = ((128, 256, 1.0), (128, 128, 0.9))
"""Rows and columns that one processor computes at a time, and how well it does: the library takes what suits it."""
WORTH = 1.03
"""By how much a way must be faster than one thing after the other to be taken."""
CALL = 8e-6
"""Seconds that each further piece costs a GPU: a product's start and end, and a wait."""
HOST: dict[Direction, float] = {"forward": 100e-6, "backward": 200e-6}
"""Seconds in which the host issues a piece, and as much again for a layer: it must not take longer than the GPU. More
than it should take, since where it is late a way is slower than one thing after the other."""
PAIR = 2 / 3
"""Share of a collective's bandwidth that two ranks alone reach."""
LITTLE = 100e-6
"""A product of fewer seconds ends before the host has issued what is to run beside it."""


def possible(role: str, direction: str) -> tuple[TensorMethod, ...]:
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
    if h.local_workers and (h.local_workers % c.mesh.tp or c.mesh.tp > h.local_workers):
        return f"pieces are copied between the GPUs of one host, and {h.local_workers} ranks are on each"
    return ""


@dataclass(frozen=True)
class Product:
    """A layer's product on one rank, T rows: T x inner times inner x columns; the tokens that are moved are `moved`."""

    rows: int
    inner: int
    columns: int
    moved: int
    """Bytes of all tokens, of which a rank sends or receives all but its own."""
    host: float
    """Seconds in which the host issues a piece of it; none in a step that is recorded."""


def product_of(c: Config, role: str, direction: Direction) -> Product:
    """The product beside which tokens are moved: forward, or of the input gradient."""
    m, tp = c.model, c.mesh.tp
    rows = c.train.sequences * c.data.sequence_length
    heads, keys = m.heads * m.head_dim, max(tp, m.kv_heads) * m.head_dim
    ffn = m.ffn if "dense" in m.kinds() else m.shared_ffn
    spread = {"qkv": heads + 2 * keys, "proj": heads, "fc1": 2 * ffn, "fc2": ffn}[role] // tp
    inner, columns = m.hidden, spread
    if (role in COLUMNS) != (direction == "forward"):
        inner, columns = columns, inner
    host = 0.0 if c.plan.graphs == "on" else HOST[direction]
    return Product(rows, inner, columns, rows * m.hidden * c.element_bytes, host)


def seconds(product: Product, rows: int, hardware: Hardware) -> float:
    """Of `rows` rows of a product."""
    flops = 2.0 * rows * product.inner * product.columns
    if not hardware.processors:
        return flops / hardware.gemm_flops
    choices = []
    for height, width, rate in TILES:
        waves = math.ceil(math.ceil(rows / height) * math.ceil(product.columns / width) / hardware.processors)
        computed = 2.0 * waves * hardware.processors * height * width * product.inner
        choices.append(computed / (rate * hardware.wave_flops))
    return min(choices)


def apart(product: Product, tp: int, hardware: Hardware) -> float:
    """Seconds of the collective and the product, one after the other."""
    moved = product.moved * (tp - 1) / tp / (PAIR if tp == 2 and hardware.processors else 1.0)
    return hardware.links["tp"].seconds(moved) + seconds(product, product.rows, hardware)


def piecewise(product: Product, tp: int, splits: int, hardware: Hardware) -> float:
    """Seconds of a gather with its product, as `parallel.tensor.pieces` cuts it; a sum over ranks is its mirror image.

    Each piece begins when the one before is done and its tokens are here. A rank in the middle of its group of
    neighbours has the most pieces.
    """
    link: Link = hardware.copies
    share, width = product.rows // tp, tp // splits
    counts = [1, *([width - 1] if width > 1 else []), *[width] * (splits - 1)]
    if width > 2:  # what is left of its own group lies on both sides
        counts[1:2] = [(width - 1) // 2, width - 1 - (width - 1) // 2]
    now = arrived = 0.0
    for number, count in enumerate(counts):
        if number:
            arrived += link.seconds(product.moved * count / tp)
            now = max(now, arrived) + CALL
        now += seconds(product, share * count, hardware)
    return max(now, product.host * (len(counts) + 1)) if hardware.processors else now


def best(product: Product, tp: int, hardware: Hardware, splits: int = 0) -> tuple[int, float]:
    """The number of splits that is fastest, or the one asked for, and by what factor it beats one after the other."""
    choices = [splits] if splits else [n for n in range(2, tp + 1) if tp % n == 0]
    chosen = min(choices, key=lambda n: piecewise(product, tp, n, hardware))
    return chosen, apart(product, tp, hardware) / piecewise(product, tp, chosen, hardware)


def time_of(c: Config, role: str, direction: Direction, hardware: Hardware) -> tuple[float, int]:
    """Seconds in which a resolved layer's product waits for tokens, and how often all tokens are moved beside it.

    Backward, a column layer gathers its input again; where that has a side queue, something else runs meanwhile.
    """
    way, tp = getattr(c.overlap.tp, f"{role}_{direction}"), c.mesh.tp
    product = product_of(c, role, direction)
    alone = seconds(product, product.rows, hardware)
    twice = role in COLUMNS and direction == "backward"
    if way in ("ring", "pipeline"):
        splits, _ = best(product, tp, hardware, c.overlap.tp.pieces)
        return max(0.0, piecewise(product, tp, splits, hardware) - alone), 1 + twice
    waits = apart(product, tp, hardware) - alone
    return (2 if twice and way == "off" else 1) * waits, 1 + twice


def splits_of(c: Config, role: str, direction: Direction) -> int:
    """Into how many pieces a layer's product is cut, where it is."""
    return best(product_of(c, role, direction), c.mesh.tp, hardware_of(c), c.overlap.tp.pieces)[0]


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


def _choose(c: Config, h: Host, role: str, direction: Direction) -> tuple[str, str]:
    asked, can = c.overlap.tp.method, possible(role, direction)
    if asked != "auto":
        if asked in can:
            return asked, f"overlap.tp.method = {asked}"
        return "off", f"overlap.tp.method = {asked} is not for this direction of these layers, which can be {_or(can)}"
    reason = no_pieces(c, h)
    hardware, product = hardware_of(c), product_of(c, role, direction)
    late = bool(hardware.processors and product.host)
    little = late and seconds(product, product.rows, hardware) < LITTLE
    worse = "bulk" if "bulk" in can and not little else "off"
    beside = "; the second gather of the input is hidden beside the input gradient" if worse == "bulk" else ""
    if reason:
        return worse, reason + beside
    splits, gain = best(product, c.mesh.tp, hardware, c.overlap.tp.pieces)
    if gain < WORTH:
        return worse, f"{splits} pieces would compute worse than they hide: {gain:.2f}x by the model{beside}"
    return can[-1], f"{splits} pieces: {gain:.2f}x one after the other by the model of {hardware.name}"


def _or(values: tuple[str, ...]) -> str:
    return " or ".join(values)
