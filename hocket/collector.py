"""Keeps Python's garbage collector out of training steps and of planning.

Note: [Garbage waits for all ranks]
The collector starts once it has counted enough new objects: in the middle of a step, at a different time on every rank,
and it visits all objects. If the host is only just ahead of its GPU, the GPU then waits, and all other ranks wait for
it. A step leaves no reference cycles that hold tensors (`tests/ranks/test_collection.py`), so collection can be
deferred, and run on all ranks at the same step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 50
"""Steps between two collections."""


@contextmanager
def no_collection() -> Iterator[None]:
    """Inside, garbage is collected only explicitly, and objects that existed before are never visited."""
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        gc.unfreeze()  # else cycles among frozen objects, such as engines, are never freed


def collect_after(step: int) -> None:
    """Collect garbage every `EVERY` steps."""
    if step % EVERY == 0:
        gc.collect()


@contextmanager
def without_collector() -> Iterator[None]:
    """Pause the collector, for a block or, as a decorator, for a function. Nests.

    A plan is many small tuples without reference cycles. The collector would visit all of them again and again, for up
    to a third of the time of planning and simulating.
    """
    ran = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if ran:
            gc.enable()
