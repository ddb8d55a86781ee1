"""Transports that are not what they seem: one that moves nothing (null), and one that is late (slow)."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.runtime.blocks import Blocks, HostBlocks
from hocket.runtime.transports import DONE, Pending, Reduction, RowTable, Transport, local_sum


@dataclass
class Null:
    """Pretends: nothing moves and nobody waits. A step under it is the bound, a step with free communication.

    Note: [The bound does the same work]
    Gathered slots hold this rank's part of the weights and keep what they have for others, normal numbers, since
    products of zeros draw less power and run faster. Received rows are overwritten with normal numbers, which costs the
    memory writes that a real arrival costs too. Local work (casting weights, adding up gradients) is still done. An
    exchange of rows has splits like a real one: each rank sends the rows that its own router chose, and gets from every
    peer as many as it keeps for itself, `size` times its own share; backward uses the forward's splits, as always. A
    planned step updates with a learning rate of 0, so every step routes the same way: nearly evenly, like an untrained
    router. So where a real run's load is uneven, what that costs counts as cost of communication; the load that both
    report says how much of it there is.
    """

    size: int
    rank: int
    device: torch.device

    def __post_init__(self) -> None:
        self.blocks: dict[torch.dtype, Tensor] = {}

    def _fill(self, out: Tensor) -> None:
        if not out.is_floating_point() or not out.numel():
            return
        block = self._block(out)
        for part in out.view(-1).split(block.numel()):
            part.copy_(block[: part.numel()])

    def _block(self, out: Tensor) -> Tensor:
        """Normal numbers of the dtype of `out`."""
        if out.dtype not in self.blocks:  # of a size that a few copies, at a copy's full speed, fill most tensors
            generator = torch.Generator(self.device).manual_seed(self.rank)
            numbers = torch.randn(1 << (24 if out.is_cuda else 17), device=self.device, generator=generator)
            self.blocks[out.dtype] = numbers.to(out.dtype)
        return self.blocks[out.dtype]

    def all_gather(self, out: Tensor, shard: Tensor) -> Pending:
        return DONE

    def reduce_sum(self, full: Tensor, into: Tensor, scale: float, add: bool) -> Pending:
        mine = full[self.rank * into.numel() :][: into.numel()]
        local_sum(mine.view(1, -1), into.view(-1), scale, add)
        return DONE

    def all_sum(self, full: Tensor, into: Tensor, scale: float, add: bool) -> Pending:
        local_sum(full.view(1, -1), into.view(-1), scale, add)
        return DONE

    def all_to_all(self, out: Tensor, rows: Tensor, table: RowTable) -> Pending:
        self._fill(out)
        if table.label:  # every peer's rows are those that this rank keeps for itself, as far as labels say
            size, before = table.send[self.rank], sum(table.send[: self.rank])
            labels = rows.view(torch.uint8)[before : before + size, -table.label :]
            out.view(torch.uint8).view(self.size, size, -1)[..., -table.label :] = labels
        return DONE

    def place_rows(self, out: Tensor, rows: Tensor, blocks: Blocks | HostBlocks) -> Pending:
        """As many rows are overwritten as would have arrived, which on a GPU no host may know."""
        if isinstance(blocks, HostBlocks):
            self._fill(out)
            return DONE
        if not out.is_cuda:
            self._fill(out[: int(blocks.arrived)])
            return DONE
        from hocket.kernels.exchange import take

        block, width = self._block(out), out.shape[1]
        numbers = block[: block.numel() // width * width].view(-1, width)
        take(numbers, out, blocks.arrived, cycle=len(numbers))
        return DONE

    def all_counts(self, counts: Tensor) -> Tensor:
        """Every peer sends what this rank would keep for itself, and nobody anything to others."""
        every = counts.new_zeros(self.size, *counts.shape)
        every[:, self.rank] = counts[self.rank]
        every[self.rank] = counts
        return every

    def send(self, tensor: Tensor, to: int) -> Pending:
        return DONE

    def recv(self, tensor: Tensor, source: int) -> Pending:
        self._fill(tensor)
        return DONE

    def all_reduce(self, tensor: Tensor, op: Reduction) -> Pending:
        return DONE

    def barrier(self) -> None:
        pass

    def destroy(self) -> None:
        self.blocks.clear()


@dataclass(frozen=True)
class Link:
    """An imagined network: `latency` in seconds per operation, `bandwidth` in bytes per second and rank."""

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth


@dataclass
class Slow:
    """Emulated: every operation of `inner` happens later by what it would take on `link`.

    On a CPU a thread per group holds each operation back before it starts it, one after the other like a link, so peers
    see late data exactly as they would from a slow network. On a GPU `spin` keeps the current stream busy instead.
    """

    inner: Transport
    link: Link
    rank: int
    timeout: float
    spin: Callable[[float], None] | None = None

    def __post_init__(self) -> None:
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="slow") if self.spin is None else None

    def _late(self, nbytes: float, start: Callable[[], Pending]) -> Pending:
        seconds = self.link.seconds(nbytes)
        if self.worker is None:
            assert self.spin is not None
            self.spin(seconds)
            return start()

        def run() -> None:
            time.sleep(seconds)
            start().wait()

        future: Future[None] = self.worker.submit(run)
        return Pending(lambda: future.result(self.timeout))

    def all_gather(self, out: Tensor, shard: Tensor) -> Pending:
        return self._late(out.nbytes - shard.nbytes, lambda: self.inner.all_gather(out, shard))

    def reduce_sum(self, full: Tensor, into: Tensor, scale: float, add: bool) -> Pending:
        nbytes = full.nbytes - into.numel() * full.itemsize
        return self._late(nbytes, lambda: self.inner.reduce_sum(full, into, scale, add))

    def all_sum(self, full: Tensor, into: Tensor, scale: float, add: bool) -> Pending:
        return self._late(2 * full.nbytes, lambda: self.inner.all_sum(full, into, scale, add))

    def all_to_all(self, out: Tensor, rows: Tensor, table: RowTable) -> Pending:
        foreign = sum(table.send) - table.send[self.rank]
        nbytes = foreign * (rows.nbytes / max(1, rows.shape[0]))
        return self._late(nbytes, lambda: self.inner.all_to_all(out, rows, table))

    def place_rows(self, out: Tensor, rows: Tensor, blocks: Blocks | HostBlocks) -> Pending:
        """Late by what an even share of the rows takes, where the host does not know the true one."""
        share = min(rows.nbytes, out.nbytes) * (1 - 1 / blocks.leaving.shape[1])
        if isinstance(blocks, HostBlocks):
            share = (blocks.sent - blocks.send[self.rank]) * (rows.nbytes / max(1, rows.shape[0]))
        return self._late(share, lambda: self.inner.place_rows(out, rows, blocks))

    def all_counts(self, counts: Tensor) -> Tensor:
        received: list[Tensor] = []

        def start() -> Pending:
            received.append(self.inner.all_counts(counts))
            return DONE

        self._late(counts.nbytes, start).wait()
        return received[0]

    def send(self, tensor: Tensor, to: int) -> Pending:
        return self._late(tensor.nbytes, lambda: self.inner.send(tensor, to))

    def recv(self, tensor: Tensor, source: int) -> Pending:
        return self.inner.recv(tensor, source)

    def all_reduce(self, tensor: Tensor, op: Reduction) -> Pending:
        return self._late(2 * tensor.nbytes, lambda: self.inner.all_reduce(tensor, op))

    def barrier(self) -> None:
        self.inner.barrier()

    def destroy(self) -> None:
        if self.worker is not None:
            self.worker.shutdown(wait=False, cancel_futures=True)
        self.inner.destroy()
