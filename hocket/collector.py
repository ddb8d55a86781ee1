"""Keeps Python's garbage collector out of steps, and out of plans.

Note: [Garbage waits for all ranks]
The collector starts when it has counted enough new objects: in the middle of a step, on every rank at another time,
and walks through all objects that there are. Where the host is just ahead of its GPU, the GPU then waits, and all
other ranks for it. A step leaves no cycles of objects that hold tensors (`tests/ranks/test_collection.py`), so
the collector can wait, and run on all ranks at once.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 50
"""Steps between two collections."""


@contextmanager
def no_collection() -> Iterator[None]:
    """Inside, the garbage collector runs only when it is asked to, and never visits objects that exist already."""
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        gc.unfreeze()  # of all: what stays frozen is never freed if it is part of a cycle, as engines are


def collect_after(step: int) -> None:
    """Collect what `EVERY` steps have left behind, if that many are over."""
    if step % EVERY == 0:
        gc.collect()


@contextmanager
def without_collector() -> Iterator[None]:
    """Pause the collector, for a block or as a decorator for a function; what was paused before stays so.

    A plan is many small tuples, none of which is part of a circle. The collector would walk through all of them again
    and again, for up to a third of the time in which plans are built and simulated.
    """
    ran = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if ran:
            gc.enable()
