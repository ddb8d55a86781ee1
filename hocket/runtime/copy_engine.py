"""Gathers and reductions that hold no SM: the GPUs' copy engines move the bytes, through NCCL.

A NCCL kernel under a product takes SMs from it, and the product slows down by more than its share. Inside one NVLink
domain NCCL can leave all-gathers and even all-to-alls to the copy engines. It does so without a word, and falls back to
kernels without a word, so everything that it asks for is made certain here:

- a group with `cta_policy` ZERO, of ranks of one host: `problem` says what is missing before anything starts;
- both buffers in memory that NCCL has allocated and that is registered as a symmetric window: `SymmetricWindow` makes
  such memory, and a collective on any other is refused;
- another stream than the default one, whose copies cannot be batched: there torch's own stream takes its place.

There is no reduction among copies, so a reduction is an all-to-all of the parts and one local kernel that adds them.
What it adds up is sent in the compute dtype and summed in fp32, in the order of ranks: always the same bits.

Note: [A window lives shorter than its group and longer than its tensors]
Registering a window is an act of all ranks of a group: they exchange addresses, and from then on each finds a buffer on
its peers at the offset that it has on itself. So all ranks open and close the windows of a group in one order, and
allocate the same sizes inside. A window that is still registered when its group is destroyed ends the process: torch
2.11 gives such memory back with the wrong call. So closing a window takes it back from the group, and what is still
open is closed before a group is destroyed, and before the process ends, whichever comes first. The memory itself goes
when the last tensor in it does: the pool is only a claim, and the allocator behind it lives as long as the process.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.runtime.lanes import drain, on_default_stream
from hocket.runtime.peer_access import unreachable
from hocket.runtime.transports import DONE, Nccl, Pending, Window, gather_flat, local_sum, nccl_options

NCCL_VERSION = (2, 28)
"""The first whose copy engine serves all-gathers and all-to-alls without multicast."""
CUDA_DRIVER = 12050
"""The first for which it does (`ncclCeImplemented` in NCCL's src/ce_coll.cc): a driver of CUDA 12.5."""


def problem() -> str:
    """Why this host's GPUs cannot use the copy engine, and empty if they can. Touches CUDA."""
    backend: Any = getattr(dist, "ProcessGroupNCCL", None)
    if not torch.cuda.is_available() or backend is None:
        return "torch finds no usable GPU, or was built without NCCL"
    version = tuple(torch.cuda.nccl.version())
    if version < NCCL_VERSION:
        has, needed = (".".join(map(str, numbers)) for numbers in (version, NCCL_VERSION))
        return f"NCCL {has} has no copy-engine collectives, they came with {needed}"
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: CUDA_DRIVER)()
    if driver < CUDA_DRIVER:
        return f"the driver is one of CUDA {driver // 1000}.{driver % 1000 // 10}, and NCCL's copies need one of 12.5"
    missing = [name for name in ("NCCL_CTA_POLICY_ZERO", "register_mem_pool") if not hasattr(backend, name)]
    missing += [name for name in ("MemPool", "use_mem_pool") if not hasattr(torch.cuda, name)]
    if missing:
        return f"torch {torch.__version__} has no {', '.join(missing)}"
    return unreachable()


def copy_engine_options(max_ctas: int, timeout: timedelta) -> Any:
    """Options of a NCCL group that leaves to copy engines what it can; the rest runs on at most `max_ctas` SMs."""
    options, backend = nccl_options(max_ctas, timeout), getattr(dist, "ProcessGroupNCCL", None)
    options.config.cta_policy = getattr(backend, "NCCL_CTA_POLICY_ZERO")  # noqa: B009
    return options


class Pool(Protocol):
    """A place to allocate in that can be shown to a group. See `NcclPool`."""

    def allocating(self) -> AbstractContextManager[None]:
        """Inside, all new memory of this thread comes from the pool."""
        ...

    def register(self) -> list[tuple[int, int]]:
        """Show all of the pool to the group; all ranks do. Returns its address ranges."""
        ...

    def deregister(self) -> None: ...


class NcclPool:
    """A pool of memory that NCCL allocates. The group must have communicated before."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.backend: Any = group._get_backend(device)
        self.device = device
        self.pool = torch.cuda.MemPool(self.backend.mem_allocator)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        with torch.cuda.use_mem_pool(self.pool, self.device):
            yield

    def register(self) -> list[tuple[int, int]]:
        self.backend.register_mem_pool(self.pool, symm=True)
        segments = self.pool.snapshot()
        return [(segment["address"], segment["address"] + segment["total_size"]) for segment in segments]

    def deregister(self) -> None:
        drain(self.device)
        self.backend.deregister_mem_pool(self.pool)


class SymmetricWindow(Window):
    """Memory in which a peer finds every buffer where this rank has it. Entered once.

    See Note: [A window lives shorter than its group and longer than its tensors].
    """

    def __init__(self, pool: Pool, staging: int, device: torch.device) -> None:
        self._pool: Pool | None = pool
        self._bytes, self._device = staging, device
        self.staging = torch.empty(0, dtype=torch.uint8, device=device)
        """Where the parts of a reduction arrive."""
        self.ranges: list[tuple[int, int]] = []
        """Addresses that are registered; none before it is left and after it is closed."""
        self.registered = False

    def __enter__(self) -> SymmetricWindow:
        assert self._pool is not None, "a window that was closed cannot be used again"
        assert not self.registered, "a window is entered once"
        self._allocating = self._pool.allocating()
        self._allocating.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: Any) -> None:
        try:
            if error is None:
                self.staging = torch.empty(self._bytes, dtype=torch.uint8, device=self._device)
        finally:
            self._allocating.__exit__(kind, error, where)
        if error is None:
            assert self._pool is not None
            self.ranges = self._pool.register()
            self.registered = True
            atexit.register(self.close)

    def holds(self, tensor: Tensor) -> bool:
        """Whether all of a contiguous tensor lies in the window."""
        first = tensor.data_ptr()
        return any(low <= first and first + tensor.nbytes <= high for low, high in self.ranges)

    def close(self) -> None:
        if self.registered and self._pool is not None:
            atexit.unregister(self.close)
            self._pool.deregister()
        self.ranges, self.registered = [], False
        self._pool, self.staging = None, torch.empty(0, dtype=torch.uint8, device=self._device)


@dataclass
class CopyEngine(Nccl):
    """Gathers and reduces on copy engines; whatever else is asked of the group runs on NCCL's kernels."""

    make_pool: Callable[[], Pool] | None = None
    """How the memory of a window is made; a test may say another way."""
    windows: list[SymmetricWindow] = field(default_factory=list)
    """In the order in which all ranks opened them."""

    def window(self, reduced: int) -> SymmetricWindow:
        """A new window, with room for reductions of tensors of up to `reduced` bytes. All ranks ask in one order."""
        pool = self.make_pool() if self.make_pool else NcclPool(self.group, self.device)
        self.windows = [window for window in self.windows if window.registered]
        self.windows.append(SymmetricWindow(pool, reduced, self.device))
        return self.windows[-1]

    def _check(self, call: str, tensor: Tensor) -> None:
        """Assert what keeps NCCL from falling back to kernels."""
        assert tensor.is_contiguous(), f"{call} of a tensor that is not contiguous"
        if any(window.holds(tensor) for window in self.windows):
            return
        known = ", ".join(f"{low:#x}-{high:#x}" for window in self.windows for low, high in window.ranges)
        raise AssertionError(
            f"{call} on the copy engine of a tensor ({tensor.nbytes} bytes at {tensor.data_ptr():#x}) that was not "
            f"allocated inside of `with group.window():`; the windows are at {known or '(none)'}"
        )

    def _finish(self, work: Any) -> Pending:
        """Order the current stream behind a collective, which has run on torch's own stream if it was asked to."""
        if work is not None:
            work.wait()
        return DONE

    def all_gather(self, out: Tensor, shard: Tensor) -> Pending:
        self._check("all_gather", out)
        self._check("all_gather", shard)
        return self._finish(gather_flat(out, shard, group=self.group, async_op=on_default_stream(self.device)))

    def reduce_sum(self, full: Tensor, into: Tensor, scale: float, add: bool) -> Pending:
        # One buffer is enough: a rank's part of an exchange begins, and so its peers write, when its stream has come
        # there, which is behind the sum of the exchange before.
        self._check("reduce_sum", full)
        staging = max((window.staging for window in self.windows), key=Tensor.numel)
        assert full.nbytes <= staging.numel(), (
            f"reduce_sum of {full.nbytes} bytes on the copy engine, but the windows of the group have room for "
            f"{staging.numel()} to arrive: `with group.window(reduced=...)` says how much is needed"
        )
        parts = staging[: full.nbytes].view(full.dtype)
        work = dist.all_to_all_single(parts, full.view(-1), group=self.group, async_op=on_default_stream(self.device))
        self._finish(work)
        local_sum(parts.view(-1, into.numel()), into, scale, add)
        return DONE

    def all_sum(self, full: Tensor, into: Tensor, scale: float, add: bool) -> Pending:
        mine = full.view(len(self.ranks), -1)[dist.get_rank(self.group)]
        part = self.scratch.take(mine.numel(), into.dtype)
        self.reduce_sum(full, part, 1.0, add=False)
        mine.copy_(part)
        self.scratch.give(part)
        self.all_gather(full, mine)
        local_sum(full.view(1, -1), into, scale, add)
        return DONE

    def destroy(self) -> None:
        for window in reversed(self.windows):
            window.close()
        self.windows.clear()
        super().destroy()
