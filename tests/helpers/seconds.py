"""What something costs a CPU, on a machine that may be slow, or busy with something else.

Caches and cores that are shared with other programs make everything slower, by a half and more, and machines differ. So
next to what is timed stands a yardstick, a fixed piece of Python of the same kind, and what counts is their ratio.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

YARDSTICK = 0.022
"""Seconds of the yardstick on the machine on which bounds were set, a core of a x86 server at about 3 GHz, undisturbed.

There CPU time is what `cpu_seconds` says; on a machine that is slower at everything it says the same.
"""


def cpu_seconds(action: Callable[[], object], times: int = 3) -> float:
    """Seconds of CPU time as on the machine of `YARDSTICK`, the least of a few times.

    Nothing that other tests have left is collected meanwhile.
    """
    found = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(times):
            before, spent, behind = (_timed(each) for each in (_yardstick, action, _yardstick))
            found.append(spent / (before + behind) * 2 * YARDSTICK)
    finally:
        gc.enable()
    return min(found)


def _timed(action: Callable[[], object]) -> float:
    begin = time.process_time()
    action()
    return time.process_time() - begin


def _yardstick() -> None:
    """Small tuples, looked up and kept, as in making plans."""
    latest: dict[tuple[str, int, int], int] = {}
    kept = []
    for i in range(25_000):
        key = ("fwd" if i % 3 else "bwd", i % 97, i % 89)
        kept.append((*key, latest.get(key, -1), i))
        latest[key] = i
    kept.sort()
