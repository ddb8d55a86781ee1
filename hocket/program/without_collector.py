"""Plans are made without the cyclic garbage collector.

A program is many small tuples, none of which is part of a circle, and the collector would walk through all of them
again and again: that takes up to a third of the time in which plans are built and simulated.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Pause the collector, for a block or as a decorator for a function; what was paused before stays so."""
    ran = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if ran:
            gc.enable()
