"""Without the cyclic garbage collector, where many objects are made of which none is part of a circle.

It would walk through all of them again and again: through the events of a trace, and the many small tuples of a plan,
where that takes up to a third of the time in which plans are built and simulated.
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
