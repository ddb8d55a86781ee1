"""How many rows a rank has room for, where no host knows how many come. Imports no torch."""

from __future__ import annotations

import math

from hocket.config import Config

MORE = 1.25
"""Room that is made, as a multiple of the rows that found none."""


def rows_evenly(c: Config) -> int:
    """Rows that arrive at every rank if the load is even: as many as it sends."""
    return c.tokens * c.model.top_k


def rows_at_most(c: Config) -> int:
    """Rows that may arrive at one rank: all tokens of all ranks choose as many of its experts as there are."""
    tokens = c.tokens
    return tokens * min(c.model.top_k, c.model.experts // c.mesh.ep) * c.mesh.ep


def rows_allowed(c: Config) -> int:
    """Rows that a rank has room for: `overlap.ep.room` times those of an even load, and never more than needed."""
    return min(math.ceil(c.overlap.ep.room * rows_evenly(c)), rows_at_most(c))


def rows_grown(c: Config, rows: int) -> int:
    """Rows that a rank has room for from then on, after so many came and found none."""
    return min(math.ceil(MORE * rows), rows_at_most(c))


def lack(c: Config, rows: int, grown: bool) -> str:
    """What a user is told of a step in which so many rows came to one rank and found no room, and whether it grew."""
    came, now = (count / rows_evenly(c) for count in (rows, rows_grown(c, rows)))
    after = (
        f"there is room for {now:.2f} times from now on"
        if grown
        else f"room for {now:.2f} times does not fit, so from now on hosts know the splits and issue every step"
    )
    why = f"made twice, since {came:.2f} times the rows of an even load came to one rank in a layer"
    return f"{why}; {after} (overlap.ep.room = {c.overlap.ep.room:g})"
