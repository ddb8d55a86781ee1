"""How many rows a rank has room for, where no host knows how many come. Imports no torch."""

from __future__ import annotations

import math

from hocket.config import Config


def rows_evenly(c: Config) -> int:
    """Rows that arrive at every rank if the load is even: as many as it sends."""
    return c.tokens * c.model.top_k


def rows_at_most(c: Config) -> int:
    """Rows that may arrive at one rank: all tokens of all ranks choose as many of its experts as there are."""
    tokens = c.tokens
    return tokens * min(c.model.top_k, c.model.experts // c.mesh.ep) * c.mesh.ep


def rows_allowed(c: Config) -> int:
    """Rows that a rank has room for: `overlap.ep.capacity` times those of an even load, and never more than needed."""
    return min(math.ceil(c.overlap.ep.capacity * rows_evenly(c)), rows_at_most(c))


def lack(c: Config, rows: int) -> str:
    """What a user is told of a step in which so many rows came to one rank and found no room."""
    times = rows / rows_evenly(c)
    enough = math.ceil(11 * times) / 10
    return (
        f"made twice, since {rows} rows of a layer came to one rank, {times:.2f} times those of an even load; "
        f"overlap.ep.capacity = {enough:g} would leave room for them, overlap.ep.splits = host for any"
    )
