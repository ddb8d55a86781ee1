"""What something costs a CPU, on a machine that may be busy with something else."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def cpu_seconds(action: Callable[[], object], times: int = 3) -> float:
    """Seconds of CPU time, the least of a few times: caches shared with other programs make them longer, never shorter.

    Nothing that other tests have left is collected meanwhile.
    """
    found = []
    for _ in range(times):
        gc.collect()
        gc.disable()
        try:
            begin = time.process_time()
            action()
            found.append(time.process_time() - begin)
        finally:
            gc.enable()
    return min(found)
