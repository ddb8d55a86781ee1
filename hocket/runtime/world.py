"""All ranks of a run: how they meet, what they tell each other as Python objects, and how they part.

Note: [Nobody else is let in]
Neither torch's store nor gloo nor NCCL asks who connects. So where all ranks are on one host, which a loopback address
in `MASTER_ADDR` or a store in a file says, their sockets listen on its loopback interface alone. Torch binds a store to
all interfaces by itself, so the store gets a socket that is bound already. gloo and NCCL take the interface that a
variable names, unless the user has named one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from hocket.runtime.hangs import HANG_EXIT_CODE, MARGIN

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
SOCKETS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the interface of gloo and NCCL."""
MOST = 1800.0
"""Seconds that torch gives a group of gloo by itself."""


@contextlib.contextmanager
def within(seconds: float, doing: str) -> Iterator[None]:
    """End this process, in one line, if something takes longer.

    Torch's store waits for ever for the answer of a host that the network has lost, whatever limit it was given.
    """

    def end() -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(
                f"hocket: no progress for {seconds:g} s: {doing}; fix: look at the network between hosts\n"
            )
            sys.stderr.flush()
        os._exit(HANG_EXIT_CODE)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def join_world(gpus: bool, timeout: float, attempt: str = "0", **where: Any) -> None:
    """Make the default group of all ranks, as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say, or `where`: a store in
    a file, the rank and the number of ranks. See Note: [Nobody else is let in].

    It carries Python objects and barriers; beside NCCL a gloo of its own does. `timeout` is in seconds. Workers that
    torchrun has started again find in its store what ended ones left there, so each `attempt` has names of its own.
    """
    limit = timedelta(seconds=timeout)
    with within(timeout + MARGIN, "ranks that were to meet have not"):
        here = bool(where) or os.environ.get("MASTER_ADDR", "").startswith(("127.", "localhost"))
        for name in SOCKETS if here else ():
            os.environ.setdefault(name, "lo")
        if not where:
            store, rank, world = _store_here(limit) if here else next(rendezvous("env://", timeout=limit))
            where = {"store": dist.PrefixStore(f"attempt{attempt}", store), "rank": rank, "world_size": world}
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=limit, **where)


def _store_here(limit: timedelta) -> tuple[dist.Store, int, int]:
    """What torch's rendezvous gives, with a store that listens on the loopback interface. Raises OSError."""
    rank, world, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    listening: int | None = None
    if serves := rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        listening = socket.create_server((LOOPBACK, port)).detach()  # the store closes it
    return dist.TCPStore(LOOPBACK, port, world, serves, limit, master_listen_fd=listening), rank, world


def leave_world() -> None:
    """Wait until every rank has done its last collective. After that, a process may simply end.

    Groups are not destroyed: NCCL waits for all members of a group there, and ranks on several groups would have to
    do it in an order that suits everybody.
    """
    dist.all_reduce(torch.zeros(1))  # of a CPU tensor: gloo, on GPU hosts too


def everyone(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The value of every rank, or of every rank of a group, in rank order. Waits for them, whatever the transport."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def together(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """The results of an action on every rank. An OSError or ValueError of one rank is raised on all, so none hangs."""
    result: Any = None
    error: tuple[type[Exception], str] | None = None
    try:
        result = action()
    except (OSError, ValueError) as caught:
        error = OSError if isinstance(caught, OSError) else ValueError, str(caught)
    answers = everyone((result, error), group)
    for kind, text in (found for _, found in answers if found):  # of the lowest rank, so that all say the same
        raise kind(text)
    return [answer for answer, _ in answers]


def by_first(action: Callable[[], object], group: dist.ProcessGroup | None = None) -> None:
    """Have rank 0 do something, on a file system that all share. Its OSError or ValueError is raised on all."""
    together(lambda: action() if rank_and_world()[0] == 0 else None, group)


def rank_and_world() -> tuple[int, int]:
    """(rank, ranks), also where there is no process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def of_rank(value: T, rank: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """The value that a rank has. Every rank calls this, or every rank of a group."""
    values: list[Any] = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, rank, group)
    return values[0]


def take_from_first_rank(tensor: torch.Tensor) -> None:
    """Copy rank 0's tensor into that of every rank, which all call this."""
    dist.broadcast(tensor, 0)


def over_group(value: torch.Tensor, how: Literal["sum", "max"], group: dist.ProcessGroup) -> torch.Tensor:
    """The `sum` or `max` of a tensor over the ranks of a group, in place; returns it."""
    dist.all_reduce(value, dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX, group)
    return value


def host_group(of: dist.ProcessGroup | None = None, timeout: float | None = None) -> dist.ProcessGroup:
    """Another gloo group of the ranks of a group, or of all ranks: for what a thread of its own sends meanwhile.

    All of these ranks call it at the same point, and nobody else. `timeout` is in seconds; None is torch's own.
    """
    ranks = dist.get_process_group_ranks(of or dist.group.WORLD)
    limit = None if timeout is None else timedelta(seconds=timeout)
    with within((timeout or MOST) + MARGIN, "ranks that were to make a group have not met"):
        made = dist.new_group(ranks, limit, "gloo", use_local_synchronization=True, group_desc="host")
    assert isinstance(made, dist.ProcessGroup)
    return made
