"""Keeps Python's garbage collector out of steps.

Note: [Garbage waits for all ranks]
The collector starts when it has counted enough new objects: in the middle of a step, on every rank at another time, and
walks through all objects that there are. Where the host is just ahead of its GPU, the GPU then waits, and all other
ranks for it. A step leaves no cycles of objects behind that hold tensors (`tests/ranks/test_collection.py`), so the
collector can wait, and run on all ranks at once.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

EVERY = 50
"""Steps between two collections."""


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Nothing is collected inside, unless somebody asks for it; what exists already, never.

    Where the process had frozen objects before, all stay frozen behind it: Python cannot tell them apart.
    """
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        if not frozen:
            gc.unfreeze()


def collect_after(step: int) -> None:
    """Collect what `EVERY` steps have left behind, if that many are over."""
    if step % EVERY == 0:
        gc.collect()
