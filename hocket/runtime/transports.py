"""Transports: how the collectives of one group run, over gloo, NCCL or a stand-in. Copy engines:
`collective_copies.py`.

Methods return a `Pending`. On gloo the result is ready once the pending was waited for. NCCL is *stream-ordered*: the
collective runs on the current CUDA stream and the pending is done at once.

Note: [All lanes' kernels fit on the chip together]
A NCCL kernel spins on its SMs until its peers start the same collective. Suppose rank 0 runs a gather and rank 1 a
reduce, each waiting for the other rank. They make progress only if each can start its second collective while the first
holds SMs. So the SMs of all lanes' collectives together, with room for compute, must fit on the chip. Each lane runs
one collective at a time: gather, reduce and a2a 16 SMs each, tp 24, cp 16, the four pipeline sends and receives and the
two after the turn of a V 4 each, control after everything else. That is at most 112 of the 132 SMs of a Hopper. With
16, NCCL still reaches its default bandwidth; 8 lose a third. Copy engines hold no SM while they wait, so they need no
place in this sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.kernels.pieces import Own, Pieces
from hocket.runtime.blocks import Blocks, HostBlocks, rows_of

# torch 2.13 renamed the flat collectives and warns about the old names.
gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
exchange_flat: Callable[..., Any] = dist.all_to_all_single
sum_flat: Callable[..., Any] = dist.all_reduce


@dataclass(frozen=True)
class RowTable:
    """Rows that an all-to-all moves: `rows[s][d]` from rank s to rank d of the group, known to all ranks."""

    rows: list[list[int]]
    rank: int
    label: int = 0
    """Bytes at the end of each row that hold its label (`layers/rows.py`); `Null` must keep them valid."""

    @property
    def send(self) -> list[int]:
        return self.rows[self.rank]

    @property
    def receive(self) -> list[int]:
        return [line[self.rank] for line in self.rows]

    @property
    def sent(self) -> int:
        return sum(self.send)

    @property
    def room(self) -> int:
        return sum(self.receive)

    @property
    def back(self) -> RowTable:
        return RowTable([list(column) for column in zip(*self.rows, strict=True)], self.rank)


Reduction = Literal["sum", "max", "min"]
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Pending:
    """A collective in flight. `wait` blocks the host only if the transport is not stream-ordered."""

    __slots__ = ("_after", "_wait")

    def __init__(self, wait: Callable[[], object] | None = None) -> None:
        self._wait = wait
        self._after: list[Callable[[], object]] = []

    @property
    def done(self) -> bool:
        return self._wait is None

    def then(self, fn: Callable[[], object]) -> Pending:
        """Run `fn` once, right after the wait; now if there is nothing to wait for."""
        if self._wait is None:
            fn()
        else:
            self._after.append(fn)
        return self

    def wait(self) -> None:
        """Return when the result may be read; repeated waits are free. Traces show it as `wait`."""
        if self._wait is None:
            return
        with torch.profiler.record_function("wait"):
            self._wait()
        self._wait = None
        after, self._after = self._after, []
        for fn in after:
            fn()


class Scratch:
    """Flat buffers of one group, reused by later operations of the same stream.

    A buffer never changes streams: the allocator reuses memory in the order of the stream that allocated it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[int, list[Tensor]] = {}

    @property
    def free(self) -> list[Tensor]:
        queue = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        return self._free.setdefault(queue, [])

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor of `numel` elements, uninitialized."""
        nbytes, free = numel * dtype.itemsize, self.free
        fitting = [i for i, buffer in enumerate(free) if buffer.numel() >= nbytes]
        if fitting:
            buffer = free.pop(min(fitting, key=lambda i: free[i].numel()))
        else:
            if free:  # replace a smaller one, so that the pool does not collect sizes
                free.pop()
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return buffer[:nbytes].view(dtype)

    def give(self, tensor: Tensor) -> None:
        whole = torch.empty(0, dtype=torch.uint8, device=self.device)
        self.free.append(whole.set_(tensor.untyped_storage()))


class Transport(Protocol):
    """The collectives of a group. Ranks are positions in the group."""

    def all_gather(self, out: Tensor, shard: Tensor, pieces: Pieces) -> Pending: ...
    def reduce_sum(self, full: Tensor, into: Tensor, scale: float, add: bool, pieces: Pieces) -> Pending: ...
    def all_sum(self, full: Tensor, into: Tensor, scale: float, add: bool) -> Pending: ...
    def all_to_all(self, out: Tensor, rows: Tensor, table: RowTable) -> Pending: ...
    def place_rows(self, out: Tensor, rows: Tensor, blocks: Blocks | HostBlocks) -> Pending: ...
    def all_counts(self, counts: Tensor) -> Tensor: ...
    def send(self, tensor: Tensor, to: int) -> Pending: ...
    def recv(self, tensor: Tensor, source: int) -> Pending: ...
    def all_reduce(self, tensor: Tensor, op: Reduction) -> Pending: ...
    def barrier(self) -> None: ...
    def destroy(self) -> None: ...


DONE = Pending()


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as uint8, which every backend can move. Keeps dimension 0."""
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)


def local_sum(parts_WS: Tensor, into_S: Tensor, scale: float, add: bool = True, own: Own | None = None) -> None:
    """`into` += (or =) scale * the sum of the rows of `parts`, in order and in the dtype of `into`.

    `own` is one more row, at the position of its rank; what belongs to no chunk is left alone then. Multiplication and
    addition round separately, whether or not a kernel could fuse them, so CPU and GPU agree bitwise. Into fp32 a GPU
    reads every part once.
    """
    assert parts_WS.shape[1:] == into_S.shape, f"{tuple(parts_WS.shape)} and {tuple(into_S.shape)}"
    assert parts_WS.stride(1) == 1 or parts_WS.numel() == 0
    assert into_S.is_contiguous()
    if into_S.is_cuda and into_S.dtype is torch.float32:
        from hocket.kernels.sums import launch

        launch(parts_WS, into_S, scale, add, own)
        return
    if own is not None:
        before, after = parts_WS[: own.rank], parts_WS[own.rank :]
        for mine, here in own.chunks(own.low + len(into_S)):
            _add_up([*before[:, here], mine, *after[:, here]], into_S[here], scale, add)
    else:
        _add_up(list(parts_WS), into_S, scale, add)


def _add_up(parts: Sequence[Tensor], into: Tensor, scale: float, add: bool) -> None:
    total = parts[0].to(into.dtype, copy=True)
    for part in parts[1:]:
        total.add_(part)
    total.mul_(scale)
    if add:
        into.add_(total)
    else:
        into.copy_(total)


def place_own(shard_S: Tensor, own: Own, high: int, packed: Tensor | None = None) -> None:
    """Cast the elements `own.low:high` of a rank's shard into its places in the buffer, unless it shares memory with
    them, and into `packed`.
    """
    chunks = list(own.chunks(high))
    mine = [shard_S[own.low + here.start : own.low + here.stop] for _, here in chunks]
    if not chunks or (own.whole.dtype == shard_S.dtype and mine[0].data_ptr() == chunks[0][0].data_ptr()):
        if packed is not None:
            packed.copy_(shard_S[own.low : high])
    elif shard_S.is_cuda and shard_S.is_floating_point() and shard_S.itemsize > 1:
        from hocket.kernels.sums import place

        place(shard_S, own, high, packed)
    else:
        torch._foreach_copy_([view for view, _ in chunks], mine)
        if packed is not None:
            packed.copy_(shard_S[own.low : high])


class Local:
    """The transport of a group of one: no communication."""

    def all_gather(self, out: Tensor, shard: Tensor, pieces: Pieces) -> Pending:
        if out.dtype != shard.dtype or out.data_ptr() != shard.data_ptr():
            out.copy_(shard)
        return DONE

    def reduce_sum(self, full: Tensor, into: Tensor, scale: float, add: bool, pieces: Pieces) -> Pending:
        local_sum(full.view(1, -1), into.view(-1), scale, add)
        return DONE

    def all_sum(self, full: Tensor, into: Tensor, scale: float, add: bool) -> Pending:
        local_sum(full.view(1, -1), into.view(-1), scale, add)
        return DONE

    def all_to_all(self, out: Tensor, rows: Tensor, table: RowTable) -> Pending:
        out.copy_(rows)
        return DONE

    def place_rows(self, out: Tensor, rows: Tensor, blocks: Blocks | HostBlocks) -> Pending:
        raise AssertionError("rows of a group of one are where they belong")

    def all_counts(self, counts: Tensor) -> Tensor:
        return counts.clone().unsqueeze(0)

    def send(self, tensor: Tensor, to: int) -> Pending:
        raise AssertionError("a group of one has no rank to send to")

    def recv(self, tensor: Tensor, source: int) -> Pending:
        raise AssertionError("a group of one has no rank to receive from")

    def all_reduce(self, tensor: Tensor, op: Reduction) -> Pending:
        return DONE

    def barrier(self) -> None:
        pass

    def destroy(self) -> None:
        pass


@dataclass
class _TorchTransport:
    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    device: torch.device

    def __post_init__(self) -> None:
        self.scratch = Scratch(self.device)

    def all_counts(self, counts: Tensor) -> Tensor:
        out = counts.new_empty(len(self.ranks), *counts.shape)
        gather_flat(out.view(-1), counts.contiguous().view(-1), group=self.group)
        return out

    def destroy(self) -> None:
        dist.destroy_process_group(self.group)


@dataclass
class Gloo(_TorchTransport):
    """CPU processes. Sums are computed locally after an all-to-all, in rank order."""

    def all_gather(self, out: Tensor, shard: Tensor, pieces: Pieces) -> Pending:
        if pieces.in_order and shard.dtype == out.dtype:
            return Pending(gather_flat(_bytes(out), _bytes(shard), group=self.group, async_op=True).wait)
        mine, every = (self.scratch.take(n, out.dtype) for n in (pieces.size, pieces.world * pieces.size))
        mine.copy_(shard)

        def unpack() -> None:
            pieces.unpack(every, out)
            self.scratch.give(mine)
            self.scratch.give(every)

        return Pending(gather_flat(_bytes(every), _bytes(mine), group=self.group, async_op=True).wait).then(unpack)

    def reduce_sum(self, full: Tensor, into: Tensor, scale: float, add: bool, pieces: Pieces) -> Pending:
        packed, received = (self.scratch.take(full.numel(), full.dtype) for _ in range(2))
        pieces.pack(full, packed)
        work = dist.all_to_all_single(_bytes(received), _bytes(packed), group=self.group, async_op=True)
        assert work is not None

        def accumulate() -> None:
            parts, total = received.view(pieces.world, -1), into.view(-1)
            for start, length in pieces.runs:
                here = slice(start, start + length)
                local_sum(parts[:, here], total[here], scale, add)
            self.scratch.give(packed)
            self.scratch.give(received)

        return Pending(work.wait).then(accumulate)

    def all_sum(self, full: Tensor, into: Tensor, scale: float, add: bool) -> Pending:
        # An all-gather instead of an all-reduce, for the order of the sum.
        received = self.scratch.take(len(self.ranks) * full.numel(), full.dtype)
        work = gather_flat(_bytes(received), _bytes(full), group=self.group, async_op=True)

        def accumulate() -> None:
            total = self.scratch.take(into.numel(), into.dtype)
            local_sum(received.view(len(self.ranks), -1), total, 1.0, add=False)
            full.view(-1).copy_(total)
            local_sum(full.view(1, -1), into.view(-1), scale, add)
            self.scratch.give(total)
            self.scratch.give(received)

        return Pending(work.wait).then(accumulate)

    def all_to_all(self, out: Tensor, rows: Tensor, table: RowTable) -> Pending:
        work = dist.all_to_all_single(
            _bytes(out), _bytes(rows), table.receive, table.send, group=self.group, async_op=True
        )
        assert work is not None
        return Pending(work.wait)

    def place_rows(self, out: Tensor, rows: Tensor, blocks: Blocks | HostBlocks) -> Pending:
        """On a CPU the host may read counts: exchange the blocks in order, then put them in place."""
        places = rows_of(blocks.arriving)
        landed = out.new_empty(len(places), *out.shape[1:])
        send, receive = (counts[2].sum(1).tolist() for counts in (blocks.leaving, blocks.arriving))
        leaving = _bytes(rows[rows_of(blocks.leaving)])
        work = dist.all_to_all_single(_bytes(landed), leaving, receive, send, group=self.group, async_op=True)
        assert work is not None

        def put() -> None:
            out[places] = landed

        return Pending(work.wait).then(put)

    def send(self, tensor: Tensor, to: int) -> Pending:
        work = dist.isend(_bytes(tensor), self.ranks[to], group=self.group)
        assert work is not None
        return Pending(work.wait)

    def recv(self, tensor: Tensor, source: int) -> Pending:
        work = dist.irecv(_bytes(tensor), self.ranks[source], group=self.group)
        assert work is not None
        return Pending(work.wait)

    def all_reduce(self, tensor: Tensor, op: Reduction) -> Pending:
        work = dist.all_reduce(tensor, _REDUCE_OPS[op], group=self.group, async_op=True)
        assert work is not None
        return Pending(work.wait)

    def barrier(self) -> None:
        dist.barrier(group=self.group)


@dataclass
class Nccl(_TorchTransport):
    """GPUs. Everything runs on the caller's current stream; see Note: [All lanes' kernels fit on the chip together]."""

    def all_gather(self, out: Tensor, shard: Tensor, pieces: Pieces) -> Pending:
        if pieces.in_order and shard.dtype == out.dtype:
            gather_flat(out, shard, group=self.group)
            return DONE
        own = Own(dist.get_rank(self.group), out, pieces)
        place_own(shard, own, pieces.size)
        with self._as_one(pieces):
            for (whole, _), (mine, _) in zip(pieces.tensors(out), own.chunks(pieces.size), strict=True):
                gather_flat(whole, mine, group=self.group)
        return DONE

    def reduce_sum(self, full: Tensor, into: Tensor, scale: float, add: bool, pieces: Pieces) -> Pending:
        into = into.view(-1)
        as_is = into.dtype == full.dtype and not add and scale == 1.0
        part = into if as_is else self.scratch.take(into.numel(), full.dtype)
        with self._as_one(pieces):
            for whole, here in pieces.tensors(full):
                reduce_scatter_flat(part[here], whole, group=self.group)
        if not as_is:
            for start, length in pieces.runs:
                here = slice(start, start + length)
                local_sum(part[here].view(1, -1), into[here], scale, add)
            self.scratch.give(part)
        return DONE

    def _as_one(self, pieces: Pieces) -> AbstractContextManager[object]:
        """Groups the calls inside into one."""
        several = len(pieces.bounds) > 1
        return dist._coalescing_manager(group=self.group, device=self.device) if several else nullcontext()

    def all_sum(self, full: Tensor, into: Tensor, scale: float, add: bool) -> Pending:
        dist.all_reduce(full, group=self.group)
        local_sum(full.view(1, -1), into.view(-1), scale, add)
        return DONE

    def all_to_all(self, out: Tensor, rows: Tensor, table: RowTable) -> Pending:
        dist.all_to_all_single(out, rows, table.receive, table.send, group=self.group)
        return DONE

    def place_rows(self, out: Tensor, rows: Tensor, blocks: Blocks | HostBlocks) -> Pending:
        raise AssertionError("NCCL asks the host how many rows to move; groups of pushed rows do not")

    def send(self, tensor: Tensor, to: int) -> Pending:
        dist.send(tensor, self.ranks[to], group=self.group)
        return DONE

    def recv(self, tensor: Tensor, source: int) -> Pending:
        dist.recv(tensor, self.ranks[source], group=self.group)
        return DONE

    def all_reduce(self, tensor: Tensor, op: Reduction) -> Pending:
        dist.all_reduce(tensor, _REDUCE_OPS[op], group=self.group)
        return DONE

    def barrier(self) -> None:
        dist.barrier(group=self.group, device_ids=[self.device.index or 0])


def nccl_options(max_ctas: int, timeout: timedelta) -> Any:
    """Options of a NCCL group with at most `max_ctas` SMs. See Note: [All lanes' kernels fit on the chip together]."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.min_ctas = 1
    options.config.max_ctas = max_ctas
    options._timeout = timeout
    return options


# ------------------------------------------------------------------------------------------------------------ pretended
#
# Stand-ins: one without communication (null), one with emulated delays (slow).


@dataclass
class Null:
    """No communication. A step with it is the bound: a step with free communication.

    Note: [The bound does the same work]
    Gathered slots hold this rank's part of the weights and keep normal numbers for the rest, since products of zeros
    draw less power and run faster. Received rows are overwritten with normal numbers, which costs the memory writes of
    a real arrival. Local work (casts, sums of gradients) is done. Splits of an exchange are realistic: each rank sends
    the rows that its router chose, and receives from every peer as many as it keeps for itself; backward uses the
    forward's splits. A planned step updates with a learning rate of 0, so every step routes alike: nearly evenly, like
    an untrained router. So the cost of a real run's uneven load counts as communication; reports of both show the load.
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
        """Normal numbers in the dtype of `out`."""
        if out.dtype not in self.blocks:  # large enough for copies at full speed
            generator = torch.Generator(self.device).manual_seed(self.rank)
            numbers = torch.randn(1 << (24 if out.is_cuda else 17), device=self.device, generator=generator)
            self.blocks[out.dtype] = numbers.to(out.dtype)
        return self.blocks[out.dtype]

    def all_gather(self, out: Tensor, shard: Tensor, pieces: Pieces) -> Pending:
        # In order, whatever the pieces: all units of a slot write the same part of it, and the rest stays as it is.
        place_own(shard, Own(self.rank, out, Pieces.one(pieces.size, pieces.world)), pieces.size)
        return DONE

    def reduce_sum(self, full: Tensor, into: Tensor, scale: float, add: bool, pieces: Pieces) -> Pending:
        for view, here in Own(self.rank, full, pieces).chunks(pieces.size):
            local_sum(view.view(1, -1), into.view(-1)[here], scale, add)
        return DONE

    def all_sum(self, full: Tensor, into: Tensor, scale: float, add: bool) -> Pending:
        local_sum(full.view(1, -1), into.view(-1), scale, add)
        return DONE

    def all_to_all(self, out: Tensor, rows: Tensor, table: RowTable) -> Pending:
        self._fill(out)
        if table.label:  # labels as if every peer sent what this rank keeps for itself
            size, before = table.send[self.rank], sum(table.send[: self.rank])
            labels = rows.view(torch.uint8)[before : before + size, -table.label :]
            out.view(torch.uint8).view(self.size, size, -1)[..., -table.label :] = labels
        return DONE

    def place_rows(self, out: Tensor, rows: Tensor, blocks: Blocks | HostBlocks) -> Pending:
        """Overwrite as many rows as would have arrived; on a GPU the host may not know the number."""
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
        """As if every peer sent what this rank keeps for itself, and nothing to others."""
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
    """An emulated link: `latency` in seconds per operation, `bandwidth` in bytes per second and rank."""

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth


@dataclass
class Slow:
    """Delays every operation of `inner` by its time on `link`.

    On a CPU one thread per group delays operations in turn, so peers receive late as over a slow network. On a GPU
    `spin` keeps the current stream busy.
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

    def all_gather(self, out: Tensor, shard: Tensor, pieces: Pieces) -> Pending:
        nbytes = out.nbytes - shard.numel() * out.itemsize
        return self._late(nbytes, lambda: self.inner.all_gather(out, shard, pieces))

    def reduce_sum(self, full: Tensor, into: Tensor, scale: float, add: bool, pieces: Pieces) -> Pending:
        nbytes = full.nbytes - into.numel() * full.itemsize
        return self._late(nbytes, lambda: self.inner.reduce_sum(full, into, scale, add, pieces))

    def all_sum(self, full: Tensor, into: Tensor, scale: float, add: bool) -> Pending:
        return self._late(2 * full.nbytes, lambda: self.inner.all_sum(full, into, scale, add))

    def all_to_all(self, out: Tensor, rows: Tensor, table: RowTable) -> Pending:
        foreign = sum(table.send) - table.send[self.rank]
        nbytes = foreign * (rows.nbytes / max(1, rows.shape[0]))
        return self._late(nbytes, lambda: self.inner.all_to_all(out, rows, table))

    def place_rows(self, out: Tensor, rows: Tensor, blocks: Blocks | HostBlocks) -> Pending:
        """Delayed by the time of an even share if the host does not know the counts."""
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
