"""Tests run side by side, but those marked `alone` have the machine for themselves: they measure time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(folder: Path, alone: bool) -> Iterator[None]:
    """Wait until this test may run beside those that do, and hold its place. All processes name the same folder.

    Who comes waits at the door until everyone before him is in the room; so who wants to be alone is not passed by
    others for ever. A process that ends gives its locks back, and tests have limits, so the wait ends.
    """
    with (folder / "door").open("w") as door, (folder / "room").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
