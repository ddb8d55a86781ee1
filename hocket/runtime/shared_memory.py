"""Symmetric memory: buffers of a group's ranks, mapped into each other's processes within one NVLink domain.

`problem` checks the hardware beforehand. NVLink multicast must be off, or torch would create a multicast object:
`hocket/environment.py` disables it for runs, and this file for other programs.
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

    After `timeout` seconds it fails, and the process can't use the GPU any more.
    """

    handle: Any
    timeout: float

    def __call__(self) -> None:
        self.handle.barrier(channel=0, timeout_ms=round(self.timeout * 1000))

    def begin(self) -> list[int]:
        """A barrier counts nothing."""
        return []

    def progress(self, marks: list[int], replayed: bool) -> FlagProgress | None:
        """Ranks missing from the barrier that this rank waits in.

        A rank that enters sets its own flag at each peer, and waits until the peer has entered and reset it.
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

    All ranks of the group call this together. `prepare` initializes a rank's own bytes before peers access them.
    """
    if os.environ.setdefault(MULTICAST, "1") != "1":  # torch reads it on rendezvous
        raise RuntimeError(f"{MULTICAST} = {os.environ[MULTICAST]}: NVLink multicast must be off; fix: {MULTICAST}=1")
    mine = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
    handle: Any = symm_mem.rendezvous(mine, group)
    barrier = Barrier(handle, timeout)
    if prepare is not None:
        prepare(mine)
        barrier()
    memories = [handle.get_buffer(rank, mine.shape, torch.uint8) for rank in range(handle.world_size)]
    memories[handle.rank] = mine  # views of peers are kept alive by the handle
    return handle.rank, memories, barrier


# ---------------------------------------------------------------------------------------------------------- peer access
#
# Whether ranks have peer access, which copy engines and some kernels need: all on one host.


Place = tuple[str, str]
"""(host, why its GPUs lack peer access; empty if they have it) of one rank."""


def problem() -> str:
    """Why this host's GPUs cannot use copy engines; empty if they can. Initializes CUDA."""
    if not torch.cuda.is_available() or not hasattr(torch.distributed, "ProcessGroupNCCL"):
        return "torch finds no usable GPU, or was built without NCCL"
    return unreachable()


def unreachable() -> str:
    """Why this host's GPUs lack peer access; empty if they have it. Initializes CUDA."""
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    return f"GPU {apart[0][0]} cannot reach the memory of GPU {apart[0][1]}" if apart else ""


def place(problem: str) -> Place:
    return platform.node(), problem


def apart(places: Collection[Place]) -> str:
    """Why ranks with these places lack peer access; empty if they have it."""
    hosts, reasons = {host for host, _ in places}, sorted({reason for _, reason in places} - {""})
    if len(hosts) > 1:
        reasons.append(f"the ranks are on {len(hosts)} hosts, and only GPUs of one reach each other's memory")
    return "; ".join(reasons)


def refuse(places: Collection[Place], setting: str, fix: str) -> None:
    """Raise ValueError unless ranks with these places have peer access."""
    if reason := apart(places):
        raise ValueError(f"{setting}: {reason}; fix: {fix}")
