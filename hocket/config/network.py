"""Section `network`: the network between hosts that predictions assume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hocket.config.rule import MOST_RANKS, Between, Form, OnlyWith, Rule
from hocket.sizes import parse_rate, parse_time


def link_of(text: str) -> None:
    """Raise ValueError for a text that is neither a rate nor a rate and a time."""
    rate, comma, latency = text.partition(",")
    parse_rate(rate)
    if comma:
        parse_time(latency)


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """The network between hosts that predictions, and the choices made by them, assume."""

    ranks_per_host: Annotated[int | Literal["auto"], Between(1, MOST_RANKS)] = "auto"
    """Ranks on each host, with consecutive numbers. auto is the number that torchrun or Slurm started on this host, and
    all ranks if hocket starts them itself. hocket plan assumes 8 on GPUs, or the largest number below 8 that divides
    the ranks."""
    link: Annotated[str, Form(link_of, "50GB/s, or 50GB/s,10us"), OnlyWith("several hosts", remark=True)] = "auto"
    """Rate at which a rank sends to other hosts, and receives at the same time, such as 50GB/s or 400Gb/s. After a
    comma, optionally, the additional latency of a message to another host. The rate is the rank's share of the
    adapters, as NCCL reaches it. auto is 48GB/s,10us: one adapter of 400 Gb/s per rank, and NCCL's own estimate for
    InfiniBand."""

    @property
    def adapter(self) -> tuple[str, str]:
        """Rate and latency of `link`, as texts; empty if unspecified."""
        rate, _, latency = ("" if self.link == "auto" else self.link).partition(",")
        return rate, latency

    @property
    def given(self) -> int:
        """Ranks of a host; 0 while that is open."""
        return 0 if self.ranks_per_host == "auto" else self.ranks_per_host


_RANKS = "network.ranks_per_host"

NETWORK_RULES = (
    Rule(
        (_RANKS, "mesh.dp", "mesh.pp", "mesh.tp"),
        lambda c, h: bool(c.network.given) and c.mesh.world % c.network.given != 0,
        "all hosts have the same number of ranks, and {network.ranks_per_host} does not divide {mesh.world}",
        "a network.ranks_per_host that divides {mesh.world}, or leave network.ranks_per_host out",
    ),
    Rule(
        (_RANKS,),
        lambda c, h: h.workers == c.mesh.world and 0 < h.local_workers < c.network.given <= c.mesh.world,
        "of {host.workers} processes only {host.local_workers} are on this host",
        "network.ranks_per_host = {host.local_workers}, or leave network.ranks_per_host out",
    ),
    Rule(
        (_RANKS, "mesh.dp"),
        lambda c, h: (
            not c.network.given
            and h.workers == c.mesh.world
            and h.local_workers > 0
            and h.workers % h.local_workers != 0
        ),
        "{host.local_workers} of {host.workers} processes are on this host, so others have another number, and what "
        "is on which host is not known here",
        "as many processes on every host, or network.ranks_per_host = a number that divides those of each",
    ),
)
