"""All ranks of a run: how they connect, exchange Python objects, and exit.

Note: [Local runs use loopback only]
Torch's store, gloo and NCCL authenticate no peer. So if all ranks are on one host (a loopback address in `MASTER_ADDR`,
or a store in a file), their sockets listen on the loopback interface only. Torch binds a store to all interfaces, so it
gets a socket that is already bound. gloo and NCCL read the interface from a variable, which a user's value overrides.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
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
"""Torch's default timeout of a gloo group, in seconds."""
IDLE = 1.0
"""Seconds after which ranks that wait for others look what those do."""
GIVE_UP = dist.constants.default_pg_timeout
"""How long a rank waits for late ranks: the timeout of a collective."""


@contextlib.contextmanager
def within(seconds: float, doing: str) -> Iterator[None]:
    """End this process with a one-line message if the body takes longer.

    Torch's store waits for ever for a host that the network has lost, whatever its timeout.
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
    """Make the default group of all ranks from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or from `where`: a file
    store, rank and world size. See Note: [Local runs use loopback only].

    The group carries Python objects and barriers; with NCCL there is also a gloo backend. `timeout` is in seconds.
    Workers restarted by torchrun find the old keys in its store, so each `attempt` prefixes its own.
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
    """Torch's rendezvous with a store that listens on loopback. Raises OSError."""
    rank, world, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    listening: int | None = None
    if serves := rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        listening = socket.create_server((LOOPBACK, port)).detach()  # the store closes it
    return dist.TCPStore(LOOPBACK, port, world, serves, limit, master_listen_fd=listening), rank, world


def leave_world() -> None:
    """Wait until every rank has done its last collective; then a process may exit.

    Groups are not destroyed: NCCL waits there for all members, so ranks would need a common order.
    """
    dist.all_reduce(torch.zeros(1))  # a CPU tensor uses gloo


def everyone(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """All-gather a Python object over all ranks or a group, in rank order."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def together(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """The results of an action on every rank. An OSError or ValueError of any rank is raised on all."""
    result: Any = None
    error: tuple[type[Exception], str] | None = None
    try:
        result = action()
    except (OSError, ValueError) as caught:
        error = OSError if isinstance(caught, OSError) else ValueError, str(caught)
    answers = everyone((result, error), group)
    for kind, text in (found for _, found in answers if found):  # of the lowest rank, on all
        raise kind(text)
    return [answer for answer, _ in answers]


def by_first(action: Callable[[], object], group: dist.ProcessGroup | None = None) -> None:
    """Run an action on rank 0, for a shared file system. Its OSError or ValueError is raised on all ranks."""
    together(lambda: action() if rank_and_world()[0] == 0 else None, group)


def rank_and_world() -> tuple[int, int]:
    """(rank, world size); (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def all_reduce_over_group(value: torch.Tensor, how: Literal["sum", "max"], group: dist.ProcessGroup) -> torch.Tensor:
    """All-reduce a tensor over a group, in place; returns it."""
    dist.all_reduce(value, dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX, group)
    return value


def host_group(timeout: float | None = None) -> dist.ProcessGroup:
    """Another gloo group of all ranks, for a background thread.

    They call this at the same point. `timeout` is in seconds; None is torch's own.
    """
    ranks = dist.get_process_group_ranks(dist.group.WORLD)
    limit = None if timeout is None else timedelta(seconds=timeout)
    with within((timeout or MOST) + MARGIN, "ranks that were to make a group have not met"):
        made = dist.new_group(ranks, limit, "gloo", use_local_synchronization=True, group_desc="host")
    assert isinstance(made, dist.ProcessGroup)
    return made


def waiting(there: Callable[[], bool], late: Callable[[], str]) -> Iterator[None]:
    """Wait until something is `there`; yields once in `IDLE` seconds. ValueError, with what is `late`, at last."""
    start, turns = time.monotonic(), 0
    while not there():
        waited = time.monotonic() - start
        if waited > GIVE_UP.total_seconds():
            raise ValueError(f"{late()} in {GIVE_UP}: all ranks run the same units in the same order")
        if waited > (turns + 1) * IDLE:
            turns += 1
            yield
        time.sleep(min(max(waited, 1e-4), 5e-3))
