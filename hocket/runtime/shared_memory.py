"""Memory of this rank into which the other ranks of its group write.

All memory of one NVLink domain can be mapped into each process: torch calls that symmetric memory. Whether ranks are in
one domain is asked before (`problem`). NVLink multicast must be off, or torch would make a multicast object:
runs switch it off before they start (`hocket/environment.py`), and for programs of others it is done here.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from hocket.runtime.driver import reader
from hocket.runtime.hangs import FlagProgress

MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@dataclass
class Barrier:
    """Orders the current streams of all ranks of a group.

    One that lasts more than `timeout` seconds ends its process' use of the GPU, with an error.
    """

    handle: Any
    timeout: float

    def __call__(self) -> None:
        self.handle.barrier(channel=0, timeout_ms=round(self.timeout * 1000))

    def begin(self) -> list[int]:
        """A step begins; a barrier counts nothing."""
        return []

    def progress(self, marks: list[int], replayed: bool) -> FlagProgress | None:
        """Who has not come to the barrier that this rank stands in.

        A rank that comes makes its own flag of each peer one, and waits until the peer has come and made it zero.
        """
        rank, pads = self.handle.rank, self.handle.signal_pad_ptrs
        others = [peer for peer in range(self.handle.world_size) if peer != rank]
        flags = reader().read([pads[peer] + 4 * rank for peer in others])
        if flags is None:
            return None
        absent = tuple(peer for peer, flag in zip(others, flags, strict=True) if flag)
        return FlagProgress(absent=absent)


def shared_memory(
    group: dist.ProcessGroup,
    nbytes: int,
    device: torch.device,
    timeout: float,
    prepare: Callable[[Tensor], object] | None = None,
) -> tuple[int, list[Tensor], Barrier]:
    """Return (this rank, every rank's `nbytes` bytes, a barrier of current streams).

    All ranks of the group call it together. `prepare` makes a rank's own bytes what they are before anybody writes.
    """
    if os.environ.setdefault(MULTICAST, "1") != "1":  # torch reads it below
        raise RuntimeError(f"{MULTICAST} = {os.environ[MULTICAST]}: NVLink multicast must be off; fix: {MULTICAST}=1")
    mine = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
    handle: Any = symm_mem.rendezvous(mine, group)
    barrier = Barrier(handle, timeout)
    if prepare is not None:
        prepare(mine)
        barrier()
    memories = [handle.get_buffer(rank, mine.shape, torch.uint8) for rank in range(handle.world_size)]
    memories[handle.rank] = mine  # the others are views of memory that the handle keeps
    return handle.rank, memories, barrier


# ---------------------------------------------------------------------------------------------------------- peer access
#
# Whether ranks can use each other's memory, as copy engines and some kernels do: they are on one host of GPUs.


Place = tuple[str, str]
"""Of one rank: its host, and why its GPUs cannot do what is asked of them; empty if they can."""


def problem() -> str:
    """Why this host's GPUs cannot use copy engines, and empty if they can. Touches CUDA."""
    if not torch.cuda.is_available() or not hasattr(torch.distributed, "ProcessGroupNCCL"):
        return "torch finds no usable GPU, or was built without NCCL"
    return unreachable()


def unreachable() -> str:
    """Why the GPUs of this host cannot use each other's memory, and empty if they can. Touches CUDA."""
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    return f"GPU {apart[0][0]} cannot reach the memory of GPU {apart[0][1]}" if apart else ""


def place(problem: str) -> Place:
    """Where a rank with such a problem, or with none, is."""
    return platform.node(), problem


def apart(places: Collection[Place]) -> str:
    """Why the ranks, whose places these are, cannot use each other's memory; empty if they can."""
    hosts, reasons = {host for host, _ in places}, sorted({reason for _, reason in places} - {""})
    if len(hosts) > 1:
        reasons.append(f"the ranks are on {len(hosts)} hosts, and only GPUs of one reach each other's memory")
    return "; ".join(reasons)


def refuse(places: Collection[Place], setting: str, fix: str) -> None:
    """Raise ValueError unless the ranks, whose places these are, can use each other's memory."""
    if reason := apart(places):
        raise ValueError(f"{setting}: {reason}; fix: {fix}")
