"""Memory of this rank into which the other ranks of its group write.

All memory of one NVLink domain can be mapped into each process: torch calls that symmetric memory. Whether ranks are in
one domain is asked before (`reach.py`). NVLink multicast must be switched off (`hocket/environment.py`): torch would
make a multicast object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor


def shared_memory(
    group: dist.ProcessGroup,
    nbytes: int,
    device: torch.device,
    timeout: float,
    prepare: Callable[[Tensor], object] | None = None,
) -> tuple[int, list[Tensor], Callable[[], object]]:
    """Return (this rank, every rank's `nbytes` bytes, a barrier of current streams).

    All ranks of the group call it together. `prepare` makes a rank's own bytes what they are before anybody writes.
    A barrier that lasts more than `timeout` seconds ends its process' use of the GPU, with an error.
    """
    mine = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
    handle: Any = symm_mem.rendezvous(mine, group)

    def barrier() -> None:
        handle.barrier(channel=0, timeout_ms=round(timeout * 1000))

    if prepare is not None:
        prepare(mine)
        barrier()
    memories = [handle.get_buffer(rank, mine.shape, torch.uint8) for rank in range(handle.world_size)]
    memories[handle.rank] = mine  # the others are views of memory that the handle keeps
    return handle.rank, memories, barrier
