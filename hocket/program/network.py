"""What groups can use whose ranks are on several hosts: where ranks are, and links that go through adapters.

Note: [Links between hosts]
Each rank has an adapter of its own, which sends and receives at the rate of `network.link`; hosts are joined by a
network that holds nobody up. A group has n ranks on h hosts, r of them on the host that has the fewest. With a link of
one host of bandwidth B and an adapter of bandwidth A, the links of groups that are on several hosts are

    gathers, reduces, tokens    bandwidth min(B, r A)                   h - 1 crossings, n - (ranks of a host) steps
    all-to-all                  bandwidth min(B, A (n-1) / (n-r))       h - 1 crossings
    sum over replicas           bandwidth min(B, r A)                   h - 1 crossings, n - (ranks of a host) steps
    pipeline p2p transfer                bandwidth min(B, A)                     1 crossing
    sum of one number           bandwidth min(B, r A)                   2 log2(h) crossings

NCCL gathers and reduces in rings that pass each host once, and each ring leaves a host through another adapter. So the
(n - 1) / n of all bytes that every rank gets, the factor of `busbw` in nccl-tests, come to a host through the adapters
of all the group's ranks there together. In an all-to-all nothing is passed on: what n - r of n - 1 peers send has to
come in through a rank's own adapter. (NCCL's authors expect no more of it than one adapter carries: nccl-tests, issue
267 on GitHub.)

A crossing takes the time of `network.link` longer than a step inside of a host, and a ring of more ranks than a host
has takes more steps. Both are NCCL's own model of a ring in its protocol for large messages (src/graph/tuning.cc):
3.4 us for a step on NVLink, some 10 us more for one through the network; small sums go up a tree of hosts and down.
NVLink SHARP and trees for large sums are left out, and so is that groups of one rank on different lanes share its
adapter: how long it is busy in all is told beside a prediction (`adapter_times`).

Of all groups for a purpose the one that is spread widest is what is priced, for all ranks: none is quicker than that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from hocket.config import Config, MeshConfig, Purpose
from hocket.program.hardware import HARDWARE, Hardware, Link
from hocket.program.measured_hardware import read
from hocket.program.mesh import PURPOSES, sums
from hocket.sizes import parse_rate, parse_time

BANDWIDTH, LATENCY = "48GB/s", "10us"
"""What is taken for granted of a network that nobody has described: one adapter of 400 Gb/s for each GPU, as DGX H100
and H200 have them (NVIDIA's user guide), of which NCCL should reach 46 to 49 GB/s (nccl-tests, issues 267 and 290 on
GitHub); and see Note: [Links between hosts]."""
STEP = 3.4e-6
"""Seconds of one more step of a ring inside of a host."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How the groups for a purpose lie on hosts, of the group that is spread widest."""

    ranks: int
    hosts: int
    """On which the group has ranks."""
    fewest: int
    """Its ranks on the host that has the fewest of them."""


@cache
def spread_of(mesh: MeshConfig, purpose: Purpose, ranks_per_host: int) -> Spread:
    """How the groups for a purpose lie on hosts with neighbouring ranks."""
    members, starts = mesh.grid(purpose)
    if mesh.world <= ranks_per_host:
        size = math.prod(count for count, _ in members)
        return Spread(size, 1, size)
    begins = {0}  # groups that begin at the same place of a host lie on hosts in the same way
    for count, stride in starts:
        ahead = {i * stride % ranks_per_host for i in range(min(count, ranks_per_host))}
        begins = {(begin + more) % ranks_per_host for begin in begins for more in ahead}
    ranks = sums(members)
    found = [Counter((begin + rank) // ranks_per_host for rank in ranks) for begin in begins]
    return Spread(len(ranks), max(map(len, found)), min(min(hosts.values()) for hosts in found))


def hosts_of(c: Config) -> int:
    """On how many hosts the ranks are; one while that is open."""
    each = c.network.ranks_per_host
    return 1 if each == "auto" else max(1, c.mesh.world // each)


def crossing(c: Config) -> Mapping[Purpose, Spread]:
    """The purposes of groups that have ranks on several hosts."""
    each = c.network.ranks_per_host
    if each == "auto" or hosts_of(c) == 1:
        return {}
    spreads = ((purpose, spread_of(c.mesh, purpose, each)) for purpose in PURPOSES)
    return {purpose: spread for purpose, spread in spreads if spread.hosts > 1}


def on_hosts(hardware: Hardware, c: Config) -> Hardware:
    """The hardware with the links of groups that have ranks on several hosts. See Note: [Links between hosts]."""
    wide = crossing(c)
    if not wide:
        return hardware
    links = {purpose: _link(c, purpose, hardware.link(purpose), spread) for purpose, spread in wide.items()}
    copies = _link(c, "pp_fwd", hardware.copies, wide["tp"]) if "tp" in wide else hardware.copies
    return replace(hardware, links={**hardware.links, **links}, copies=copies)


def hardware_of(config: Config) -> Hardware:
    """The hardware to predict for, with the links between its hosts."""
    hardware = on_one_host(config)
    if _is_exchange(config, "cp"):
        hardware = replace(hardware, links={"cp": hardware.link("a2a"), **hardware.links})
    return on_hosts(hardware, config)


def _is_exchange(c: Config, purpose: Purpose) -> bool:
    """Whether each rank of a group has something else for each of the others."""
    return purpose == "a2a" or (purpose == "cp" and c.overlap.cp.method == "heads")


def on_one_host(config: Config) -> Hardware:
    """The same with the links of one host. While `hardware.gpu` is open it is what fits the dtype of the run."""
    name = config.hardware.gpu
    if name == "auto":
        name = "laptop" if config.precision.compute == "fp32" else "h200"
    return read(name).applied(name) if name.endswith(".json") else HARDWARE[name]


def _link(c: Config, purpose: Purpose, link: Link, spread: Spread) -> Link:
    adapter, late = _described(c)
    each = c.network.ranks_per_host
    assert each != "auto"
    crossings, steps = spread.hosts - 1, max(0, spread.ranks - each)
    if _is_exchange(c, purpose):
        steps = 0
    elif purpose in ("pp_fwd", "pp_bwd"):
        crossings, steps = 1, 0
    elif purpose == "control":
        crossings, steps = 2 * math.ceil(math.log2(spread.hosts)), 0
    bandwidth = min(link.bandwidth, _adapters(c, purpose, spread) * adapter)
    return Link(link.latency + crossings * late + steps * STEP, bandwidth)


def _adapters(c: Config, purpose: Purpose, spread: Spread) -> float:
    """How many adapters together bring what one rank gets."""
    if _is_exchange(c, purpose):
        return (spread.ranks - 1) / (spread.ranks - spread.fewest)
    return 1.0 if purpose in ("pp_fwd", "pp_bwd") else float(spread.fewest)


def adapter_times(c: Config) -> Mapping[Purpose, float]:
    """Seconds in which a rank's own adapter is busy for each byte that the rank gets, by purpose; empty on one host."""
    adapter, _ = _described(c)
    return {purpose: 1 / (_adapters(c, purpose, spread) * adapter) for purpose, spread in crossing(c).items()}


def _described(c: Config) -> tuple[float, float]:
    """Bandwidth and latency of an adapter, as given or taken for granted."""
    rate, late = c.network.adapter
    return parse_rate(rate or BANDWIDTH), parse_time(late or LATENCY)
