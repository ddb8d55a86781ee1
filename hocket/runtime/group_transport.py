"""The transport of one group: which one serves a purpose, under which name, with which options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from hocket.config import Purpose
from hocket.program.mesh import HALF, P2P, Mover, most_sms, mover_of
from hocket.runtime.collective_copies import CopiedCollectives, collective_copies
from hocket.runtime.lanes import SideStream
from hocket.runtime.p2p_copies import CopiedHops, p2p_copies
from hocket.runtime.peer_copies import CopiedRows, peer_copies
from hocket.runtime.pretended import Link, Null, Slow
from hocket.runtime.pushed_rows import PushedRows, pushes
from hocket.runtime.token_copies import CopyingNccl, copied_tokens
from hocket.runtime.transports import Gloo, Local, Nccl, Transport, nccl_options
from hocket.runtime.world import within

LATER = 5.0
"""Seconds that ranks wait for a group behind the limit that torch was given: it knows more, where it keeps to it."""

TransportName = Literal["gloo", "nccl", "copy_engine", "copy_engine_gathers", "null", "slow"]


@dataclass(frozen=True)
class CommOptions:
    """How groups are made. Times in seconds."""

    timeout: float = 300.0
    arrival: int = 64 << 20
    """Bytes of rows that a rank has room for in one round of a copied all-to-all; there are two such buffers."""
    half: int = HALF
    """Bytes of a half, through which copy engines move what is gathered or reduced."""
    tokens: int = 0
    """Bytes of all tokens of a microbatch, for tensor-parallel ranks that move them by copy engines; 0: they don't."""
    p2p: int = 32 << 20
    """Bytes that a pipeline rank has room for on each edge, where copy engines move what is sent over it."""
    device_splits: bool = False
    """Groups that exchange rows can do so by `Blocks`: on GPUs, by kernels that store into the peers' memory."""
    links: Mapping[Purpose, Link] = field(default_factory=dict)
    """The emulated network of the slow transport; purposes that are missing are not slowed."""
    spin: Callable[[float], None] | None = None
    """Keeps the current CUDA stream busy for so many seconds; needed by the slow transport on a GPU."""


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
    real = _on_gpus(purpose, made, ranks, device, mover, options) if on_gpu else Gloo(made, ranks)
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
    """What moves the bytes of a NCCL group."""
    if mover == "kernels":
        return PushedRows(made, ranks, device, options.timeout, pushes(made, options.arrival, device, options.timeout))
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
