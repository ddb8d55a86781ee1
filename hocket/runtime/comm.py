"""Process groups by purpose, and their collectives.

Only this file and the transports call collectives of `torch.distributed`. Every purpose and direction has its own group
(`program/mesh.py` lists the ranks). All groups are created and warmed up before the first step, in one order on all
ranks, so that no collective has to create a communicator while lanes are running.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.config import COPIED, Purpose
from hocket.kernels.pieces import Pieces
from hocket.program.mesh import HALF, P2P, PURPOSES, Mesh, Mover, most_sms, mover_of
from hocket.runtime.blocks import Blocks, HostBlocks
from hocket.runtime.collective_copies import CopiedCollectives, collective_copies
from hocket.runtime.hangs import Flags, Issued
from hocket.runtime.lanes import SideStream
from hocket.runtime.p2p_copies import CopiedHops, p2p_copies
from hocket.runtime.peer_rows import CopiedRows, PushedRows, peer_copies, push_buffers
from hocket.runtime.shared_memory import Barrier, place, problem, refuse, unreachable
from hocket.runtime.tokens import CopyingNccl, SentTokens, Tokens, copied_tokens
from hocket.runtime.transports import (
    Gloo,
    Link,
    Local,
    Nccl,
    Null,
    Pending,
    Reduction,
    RowTable,
    Slow,
    Transport,
    nccl_options,
)
from hocket.runtime.world import everyone, within

__all__ = [
    "CommOptions",
    "Group",
    "Groups",
    "Link",
    "Pending",
    "RowTable",
    "TransportName",
    "make_group",
    "make_groups",
]

T = TypeVar("T")


class Group:
    """Ranks that communicate for one purpose. Ranks are positions in the group."""

    def __init__(self, name: str, ranks: tuple[int, ...], rank: int, transport: Transport) -> None:
        self.name, self.ranks, self.rank, self.transport = name, ranks, rank, transport
        self.size = len(ranks)
        self.calls: Counter[str] = Counter()
        self.sent_bytes = 0
        self.issued: Issued | None = None
        """Calls since the step began, for hang reports; None: not recorded."""

    def __repr__(self) -> str:
        return f"Group({self.name}, ranks {list(self.ranks)}, rank {self.rank})"

    @property
    def other(self) -> int:
        assert self.size == 2, f"{self} has no single other rank"
        return 1 - self.rank

    @property
    def key(self) -> str:
        """Identifies the group; the same on all its ranks."""
        sends_and_receives = self.name.startswith(("send_", "recv_"))
        purpose = self.name.split("_")[1] if sends_and_receives else self.name
        return f"{purpose} {','.join(map(str, self.ranks))}"

    @property
    def flags(self) -> Flags | None:
        """Flags in memory by which the ranks wait for each other; None if there are none to read."""
        match self.transport:
            case CopiedHops(copies=flags) | CopyingNccl(tokens=flags):
                return flags
            case CopiedRows(copies=rows) | PushedRows(pushes=rows):
                return rows.barrier if isinstance(rows.barrier, Barrier) else None
        return None

    def begin(self) -> Issued:
        """Begin a step: record what is issued from now on."""
        self.issued = Issued(marks=self.flags.begin() if self.flags else [])
        return self.issued

    def tokens(self) -> Tokens | None:
        """How tensor-parallel ranks move tokens piece by piece; None if they can't."""
        match self.transport:
            case CopyingNccl(tokens=tokens):
                return tokens
            case Nccl() | Local() | Slow(inner=Nccl()):
                return None
        return SentTokens(self.rank, self.size, self.send, self.recv)

    @property
    def copies(self) -> bool:
        """Whether all-gather and reduce-scatter use copy engines."""
        return isinstance(self.transport, CopiedCollectives)

    def _count(self, call: str, nbytes: int) -> None:
        self.calls[call] += 1
        if self.issued is not None:
            self.issued.calls.append((call, time.monotonic()))
        self.sent_bytes += nbytes if self.size > 1 else 0

    def forget_calls(self) -> None:
        self.calls.clear()
        self.sent_bytes = 0

    def all_gather(self, out: Tensor, shard: Tensor, pieces: Pieces | None = None) -> Pending:
        """`out` (size * n) becomes the ranks' `shard`s (n), cast to its dtype: in rank order, or where `pieces` are.

        `shard` may be this rank's place in `out` itself, if that is one slice. Gaps of `out` keep what they have.
        """
        assert out.numel() == self.size * shard.numel(), f"{self.name}: {out.numel()} != {self.size} * {shard.numel()}"
        self._count("all_gather", (self.size - 1) * shard.numel() * out.itemsize)
        return self.transport.all_gather(out, shard, pieces or Pieces.one(shard.numel(), self.size))

    def reduce_sum(
        self, full: Tensor, into: Tensor, scale: float = 1.0, add: bool = True, pieces: Pieces | None = None
    ) -> Pending:
        """Reduce-scatter: `into` (n, fp32) += scale * this rank's part of the sum over ranks of `full` (size * n).

        Parts are in rank order, or where `pieces` are; gaps of `into` keep what they have. Without `add` it overwrites
        `into`. On gloo and on copy engines the sum is in rank order and in the dtype of `into`.
        """
        assert full.numel() == self.size * into.numel(), f"{self.name}: {full.numel()} != {self.size} * {into.numel()}"
        self._count("reduce_sum", (self.size - 1) * into.numel() * full.itemsize)
        return self.transport.reduce_sum(full, into, scale, add, pieces or Pieces.one(into.numel(), self.size))

    def all_sum(self, full: Tensor, into: Tensor, scale: float = 1.0, add: bool = True) -> Pending:
        """All-reduce: `into` (n, fp32) += scale * the sum over ranks of `full` (n), rounded to the dtype of `full`.

        `full` is overwritten. Otherwise like `reduce_sum`; on copy engines n is a multiple of the group's size.
        """
        assert full.numel() == into.numel(), f"{self.name}: {full.numel()} != {into.numel()}"
        self._count("all_sum", 2 * (self.size - 1) * full.nbytes // self.size)
        return self.transport.all_sum(full, into, scale, add)

    def sum_parts(self, full: Tensor, out: Tensor) -> Pending:
        """`out` (n) becomes this rank's part of the sum over ranks of `full` (size * n), of the same dtype.

        On gloo and on copy engines the sum is in rank order in fp32 and rounded once; on NCCL it is in that dtype.
        """
        full, out = full.view(-1), out.view(-1)
        if isinstance(self.transport, Nccl) and not self.copies:
            return self.reduce_sum(full, out, add=False)
        total = torch.empty_like(out, dtype=torch.float32)
        return self.reduce_sum(full, total, add=False).then(lambda: out.copy_(total))

    def all_to_all(self, out: Tensor, rows: Tensor, table: RowTable | HostBlocks | Blocks) -> Pending:
        """Exchange rows [R, D], ordered by target rank in `rows` and by source rank in `out`.

        With blocks, these give the position of every row. `Blocks` need a group made with `device_splits` on a GPU.
        """
        if isinstance(table, Blocks):
            row = rows.nbytes // rows.shape[0] if rows.shape[0] else 0
            evenly = min(rows.shape[0], out.shape[0]) * (self.size - 1) // self.size  # the host knows no better
            self._count("all_to_all", evenly * row)
            return self.transport.place_rows(out, rows, table)
        assert rows.shape[0] == table.sent, f"{self.name}: {rows.shape[0]} rows to send, {table}"
        assert out.shape[0] == table.room, f"{self.name}: {out.shape[0]} rows to receive, {table}"
        row = rows.nbytes // rows.shape[0] if rows.shape[0] else 0
        self._count("all_to_all", (rows.shape[0] - table.send[self.rank]) * row)
        if isinstance(table, HostBlocks):
            return self.transport.place_rows(out, rows, table)
        return self.transport.all_to_all(out, rows, table)

    def make_room(self, nbytes: int) -> None:
        """Reserve arrival buffers for rows of `nbytes` in exchanges by `Blocks`. All ranks call this at the same
        point.
        """
        moved_by = self.transport.inner if isinstance(self.transport, Slow) else self.transport
        if isinstance(moved_by, PushedRows):
            moved_by.make_room(nbytes)

    def all_counts(self, counts: Tensor) -> Tensor:
        """All-gather `counts` (size, ...), the rows that this rank sends to each: (size, size, ...), from rank 0 first.

        Waits on a CPU; stream-ordered on a GPU.
        """
        assert counts.shape[0] == self.size, f"{self.name}: counts of shape {tuple(counts.shape)} for {self.size} ranks"
        self._count("all_counts", (self.size - 1) * counts.nbytes)
        return self.transport.all_counts(counts)

    def send(self, tensor: Tensor, to: int) -> Pending:
        """Send a contiguous tensor. The n-th send to a rank matches its n-th receive from this one."""
        self._count("send", tensor.nbytes)
        return self.transport.send(tensor, to)

    def recv(self, tensor: Tensor, source: int) -> Pending:
        self._count("recv", 0)
        return self.transport.recv(tensor, source)

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Pending:
        """Reduce over the group in place."""
        self._count("all_reduce", tensor.nbytes)
        return self.transport.all_reduce(tensor, op)

    def barrier(self) -> None:
        self.transport.barrier()


@dataclass
class Groups:
    """The groups of one rank. Pipeline edges are None without a pipeline; see `Mesh.groups`.

    Edges ending in `back` are for chunks after the turn (`Layout.turning`), whose activations come from the next rank.
    """

    gather_dense: Group
    reduce_dense: Group
    gather_experts: Group
    reduce_experts: Group
    replicas: Group
    a2a: Group
    tp: Group
    cp: Group
    control: Group
    send_act: Group | None = None
    recv_act: Group | None = None
    send_grad: Group | None = None
    recv_grad: Group | None = None
    send_act_back: Group | None = None
    recv_act_back: Group | None = None
    send_grad_back: Group | None = None
    recv_grad_back: Group | None = None
    made: tuple[str, ...] = ()
    """Names of the groups in order of creation, the same on all ranks."""
    steps: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[Group]:
        for name in self.made:
            yield getattr(self, name)

    def begin(self) -> dict[str, Issued]:
        self.steps += 1
        return {group.name: group.begin() for group in self if group.size > 1}

    def sum_over_dp(self, tensor: Tensor) -> None:
        """Sum integers over all data-parallel ranks, in place. Waits."""
        self.reduce_dense.all_reduce(tensor).wait()
        self.replicas.all_reduce(tensor).wait()

    def edges(self) -> Iterator[Group]:
        for name in self.made:
            if name.startswith(("send_", "recv_")):
                yield getattr(self, name)

    def destroy(self) -> None:
        """Destroy every group except the default one, in the order of `made`.

        NCCL waits for all members of a group, and the two edges of a ring of two ranks have different names on each of
        them.
        """
        for group in self:
            group.transport.destroy()


def make_groups(
    mesh: Mesh, rank: int, device: torch.device, transport: TransportName, options: CommOptions | None = None
) -> Groups:
    """Create and warm up all groups. All ranks of the world call this at the same point.

    The default process group must exist, unless the world has one rank or the transport is `null`. `slow` delays gloo
    on a CPU and NCCL on a GPU. Raises ValueError if copy engines are requested but not available.
    """
    options = options or CommOptions()
    _refuse_distance(mesh, device, transport, options)
    mine: dict[str, Group] = {}
    for purpose in PURPOSES:
        for ranks in mesh.groups(purpose):
            # Creating a group is collective over all ranks of the world, members or not.
            moved_by = make_transport(purpose, ranks, rank, device, transport, options)
            if moved_by is not None:
                field_name = _field(purpose, ranks, rank, mesh)
                mine[field_name] = Group(field_name, ranks, ranks.index(rank), moved_by)
    groups = Groups(**mine, made=tuple(mine))
    _warm(groups, mesh, rank, device)
    return groups


_COPY_ENGINE = "transport = copy_engine", "transport = nccl"
"""The setting, and the fix: one that needs no peer memory."""


def _refuse_distance(mesh: Mesh, device: torch.device, transport: TransportName, options: CommOptions) -> None:
    """Raise ValueError where ranks need peer access and lack it."""
    if transport in COPIED:
        refuse(everyone(place(problem())), *_COPY_ENGINE)
    if device.type != "cuda" or transport == "null":
        return
    places = everyone(place(unreachable())) if options.tokens or options.device_splits else []
    if options.tokens:
        for ranks in mesh.groups("tp"):
            refuse([places[member] for member in ranks], "overlap.tp.method", "overlap.tp.method = bulk")
    if options.device_splits:
        for ranks in mesh.groups("a2a"):
            refuse([places[member] for member in ranks], "overlap.ep.splits = device", "overlap.ep.splits = host")


def make_group(
    purpose: Purpose,
    ranks: tuple[int, ...],
    rank: int,
    device: torch.device,
    transport: TransportName,
    options: CommOptions | None = None,
) -> Group | None:
    """Create and warm up one group for gathers, reductions or exchanges of rows; None if `rank` is no member.

    All ranks of the world call this at the same point, members or not. Raises ValueError like `make_groups`.
    """
    if transport in COPIED:
        places = everyone(place(problem()))
        refuse([places[member] for member in ranks], *_COPY_ENGINE)
    moved_by = make_transport(purpose, ranks, rank, device, transport, options or CommOptions())
    if moved_by is None:
        return None
    group = Group(purpose, ranks, ranks.index(rank), moved_by)
    _warm_collectives(group, torch.zeros(group.size, 64, device=device))
    group.forget_calls()
    return group


def _field(purpose: Purpose, ranks: tuple[int, ...], rank: int, mesh: Mesh) -> str:
    """The field of `Groups` for a group. Activations flow along an edge, gradients against it."""
    if purpose not in P2P:
        return purpose
    part = "act" if purpose == "pp_fwd" else "grad"
    sends = (ranks[0] == rank) == (part == "act")
    return f"{'send' if sends else 'recv'}_{part}{'_back' if mesh.goes_back(ranks) else ''}"


def _warm(groups: Groups, mesh: Mesh, rank: int, device: torch.device) -> None:
    """Use every group once, in one order on all ranks, so that connections exist before lanes run concurrently."""
    row = torch.zeros(1, 64, device=device)
    for purpose in PURPOSES:
        for ranks in mesh.groups(purpose):
            if rank not in ranks:
                continue
            group = getattr(groups, _field(purpose, ranks, rank, mesh))
            if purpose in P2P:
                sends = (group.rank == 0) == (purpose == "pp_fwd")
                (group.send if sends else group.recv)(row[0], group.other).wait()
            else:
                _warm_collectives(group, row.expand(group.size, -1).contiguous(), copies=False)
    for group in groups:
        group.forget_calls()
    groups.control.barrier()


def _warm_collectives(group: Group, rows: Tensor, copies: bool = True) -> None:
    """Call the collectives of the group's purpose; `rows` has one row per rank. NCCL connects separately for each kind.

    Copy engines allocate memory on first use: without `copies`, that is left to the first real call.
    """
    if group.name.startswith(("gather", "reduce")):
        group.all_reduce(rows).wait()
        if group.copies and not copies:
            return
        row, full, narrow = rows[0].clone(), rows.clone(), rows.to(torch.bfloat16)
        if group.name.startswith("gather"):
            group.all_gather(full.view(-1), row).wait()
            return
        for each in (full, narrow):  # also loads the kernels, which may synchronize
            group.reduce_sum(each.view(-1), torch.zeros_like(row)).wait()
            if not group.copies:  # it would allocate halves for gathers too
                group.all_sum(each.view(-1), torch.zeros_like(rows).view(-1)).wait()
    elif group.name in ("tp", "cp"):
        if group.name == "cp":
            _warm_exchange(group, rows)
        if group.copies and not copies:
            return
        group.all_gather(rows.view(-1), rows[0].clone()).wait()
        for each in (rows, rows.to(torch.bfloat16)):
            group.sum_parts(each, torch.empty_like(each[0])).wait()
        if group.name == "tp":
            _warm_tokens(group, rows[:1])
    elif group.name == "a2a":
        _warm_exchange(group, rows)
        group.all_counts(rows[:, :1].long())
    else:
        group.all_reduce(rows).wait()


def _warm_exchange(group: Group, rows: Tensor) -> None:
    table = RowTable([[1] * group.size] * group.size, group.rank)
    group.all_to_all(torch.empty_like(rows), rows, table).wait()


def _warm_tokens(group: Group, row: Tensor) -> None:
    """Move pieces once each way, twice, so that both buffers are used."""
    tokens = group.tokens()
    for _ in range(2 if tokens is not None else 0):
        assert tokens is not None
        spread = tokens.spread(row)
        spread.whole(row.new_empty(group.size, row.shape[1]))()
        spread.end()
        collect = tokens.collect(row)
        for rank in range(group.size):
            collect.place(rank, rank + 1).copy_(row)
            collect.send(rank, rank + 1)
        collect.sum(torch.empty_like(row))


# ------------------------------------------------------------------------------------------------------ group transport
#
# The transport of one group.


LATER = 5.0
"""Seconds to wait for a group beyond torch's own timeout, whose error says more."""

TransportName = Literal["gloo", "nccl", "copy_engine", "copy_engine_gathers", "null", "slow"]


@dataclass(frozen=True)
class CommOptions:
    """How groups are made. Times in seconds."""

    timeout: float = 300.0
    arrival: int = 64 << 20
    """Bytes of an arrival buffer of a copied all-to-all; there are two."""
    half: int = HALF
    """Bytes of a half, through which copy engines gather and reduce."""
    tokens: int = 0
    """Bytes of all tokens of a microbatch, for tensor-parallel ranks that move them by copy engines; 0: they don't."""
    p2p: int = 32 << 20
    """Bytes of a pipeline rank's receive buffer per edge, where copy engines move activations and gradients."""
    device_splits: bool = False
    """Whether groups that exchange rows can use `Blocks`: on GPUs, by kernels that store into peer memory."""
    links: Mapping[Purpose, Link] = field(default_factory=dict)
    """The emulated network of the slow transport; purposes not listed are not slowed."""
    spin: Callable[[float], None] | None = None
    """Keeps the current CUDA stream busy for so many seconds; required by the slow transport on a GPU."""


def make_transport(
    purpose: Purpose,
    ranks: tuple[int, ...],
    rank: int,
    device: torch.device,
    name: TransportName,
    options: CommOptions,
) -> Transport | None:
    """The transport of one group, or None if `rank` is not a member. Every rank of the world calls this."""
    member = rank in ranks
    if len(ranks) == 1:
        return Local() if member else None
    mover = mover_of(purpose, name, device.type == "cuda", options.device_splits, options.tokens > 0)
    if mover == "nothing":
        return Null(len(ranks), ranks.index(rank), device) if member else None
    timeout = timedelta(seconds=options.timeout)
    with within(options.timeout + LATER, f"ranks that were to make the group {purpose} have not met"):
        if mover == "gloo":
            made = dist.new_group(list(ranks), timeout, "gloo", group_desc=purpose)
        else:
            pg_options = nccl_options(most_sms(purpose), timeout)
            made = dist.new_group(list(ranks), timeout, "nccl", pg_options=pg_options, group_desc=purpose)
    if not member:
        return None
    assert isinstance(made, dist.ProcessGroup)
    on_gpu = mover != "gloo"
    real = _on_gpus(purpose, made, ranks, device, mover, options) if on_gpu else Gloo(made, ranks, device)
    if name != "slow" or purpose not in options.links:
        return real
    assert not on_gpu or options.spin is not None, "the slow transport on a GPU needs a way to spin"
    spin = options.spin if on_gpu else None
    return Slow(real, options.links[purpose], ranks.index(rank), options.timeout, spin)


def _on_gpus(
    purpose: Purpose,
    made: dist.ProcessGroup,
    ranks: tuple[int, ...],
    device: torch.device,
    mover: Mover,
    options: CommOptions,
) -> Transport:
    if mover == "kernels":
        buffers = push_buffers(made, options.arrival, device, options.timeout)
        return PushedRows(made, ranks, device, options.timeout, buffers)
    if mover == "pieces":
        tokens = copied_tokens(made, options.tokens, device, options.timeout, SideStream(device))
        return CopyingNccl(made, ranks, device, tokens)
    if mover == "nccl":
        return Nccl(made, ranks, device)
    if purpose == "a2a":
        return CopiedRows(made, ranks, device, peer_copies(made, options.arrival, device, options.timeout))
    if purpose in P2P:
        return CopiedHops(made, ranks, device, p2p_copies(made, ranks, options.p2p, device, options.timeout))
    return CopiedCollectives(made, ranks, device, collective_copies(made, options.half, device, options.timeout))
