"""Rules for the settings of hosts and of the network between them."""

from __future__ import annotations

from hocket.config import Config, Purpose
from hocket.config.bounds import MOST_RANKS
from hocket.program.hardware import hosts_of, spread_of
from hocket.settings.rule import Host, Rule

_RANKS = "network.ranks_per_host"


def ranks_of_a_host(c: Config, h: Host) -> int:
    """Ranks of a host, as the settings give them or as the run found them."""
    each = c.network.ranks_per_host
    return (h.local_workers or c.mesh.world) if each == "auto" else each


def leaves_host(c: Config, h: Host, purpose: Purpose) -> bool:
    """Whether the groups for a purpose have ranks on several hosts."""
    return c.mesh.world <= MOST_RANKS and spread_of(c.mesh, purpose, ranks_of_a_host(c, h)).hosts > 1


def _given(c: Config) -> int:
    """Ranks of a host as the settings give them; 0 if they give none."""
    return 0 if c.network.ranks_per_host == "auto" else c.network.ranks_per_host


NETWORK_RULES: tuple[Rule, ...] = (
    Rule(
        (_RANKS, "mesh.dp", "mesh.pp", "mesh.tp"),
        lambda c, h: bool(_given(c)) and c.mesh.world % _given(c) != 0,
        "all hosts have the same number of ranks, and {network.ranks_per_host} does not divide {world}",
        "a network.ranks_per_host that divides {world}, or leave network.ranks_per_host out",
    ),
    Rule(
        (_RANKS,),
        lambda c, h: h.workers == c.mesh.world and 0 < h.local_workers < _given(c) <= c.mesh.world,
        "of {host.workers} processes only {host.local_workers} are on this host",
        "network.ranks_per_host = {host.local_workers}, or leave network.ranks_per_host out",
    ),
    Rule(
        (_RANKS, "mesh.dp"),
        lambda c, h: (
            not _given(c) and h.workers == c.mesh.world and h.local_workers > 0 and h.workers % h.local_workers != 0
        ),
        "{host.local_workers} of {host.workers} processes are on this host, so others have another number, and what "
        "is on which host is not known here",
        "as many processes on every host, or network.ranks_per_host = a number that divides those of each",
    ),
    Rule(
        ("network.link", _RANKS),
        lambda c, h: hosts_of(c) == 1,
        "no effect: all ranks are on one host",
        "leave it out, or network.ranks_per_host below {world}",
        remark=True,
    ),
)
