"""What ops are priced for: the rates that one rank reaches, as measured or as its power allows, and the links of a
group, on one host or between hosts.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from hocket.config import Config, MeshConfig, Purpose
from hocket.files import json_in
from hocket.gpus import GPUS, GpuName
from hocket.predict.part_sizes import FUSED, STOCK, Formulas
from hocket.predict.simulate import KINDS, Kind
from hocket.program.mesh import PURPOSES, sums
from hocket.sizes import parse_rate, parse_time
from hocket.typed import read


@dataclass(frozen=True, slots=True)
class Link:
    """What one kind of communication can use: seconds of latency, bytes per second of one rank."""

    latency: float
    bandwidth: float

    def seconds(self, wire_bytes: float) -> float:
        return self.latency + wire_bytes / self.bandwidth if wire_bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Rates that one rank reaches on layer-sized work, per second, and the links between ranks."""

    name: str
    origin: str
    """Where its figures come from, in words."""
    peak_flops: float
    """Data-sheet rate of dense matmuls: the denominator of MFU."""
    gemm_flops: float
    """Rate of matmuls, of experts too, at the full clock, beside what they read and write."""
    attention_fwd_flops: float
    attention_bwd_flops: float
    memory_bandwidth: float
    """Bytes read and written together, by copies."""
    kernel_bandwidth: float
    """The same by kernels between matmuls."""
    links: Mapping[Kind | Purpose, Link]
    """Of every kind of communication, and of groups for a purpose that have another one: see `on_hosts`."""
    gap: float
    """Seconds of every compute op in which its kernels start and end."""
    routing: float = 0.0
    """Seconds in which a MoE layer's experts are chosen, in each direction: many small kernels."""
    clock: float = 0.0
    """The full clock in Hz; 0: no limit of power is known."""
    power: float = 0.0
    """FLOP/s times the clock's square at which a rank draws all the power it may. See Note: [Power sets the clock]."""
    beside_kernels: float = 0.0
    """By how much longer compute takes while NCCL's kernels, or kernels that store rows, communicate beside it."""
    beside_copies: float = 0.0
    """The same while copy engines do."""
    beside_updates: float = 0.0
    """The same while weights are updated beside it."""
    issue: float = 0.0
    """Seconds in which the host issues one op, its kernels and its collectives; 0: to issue an op is to do it."""
    counts: float = 0.0
    """Seconds from the start of a dispatch until a host that has to know the rows' counts goes on."""
    memory: int = 0
    """Bytes that one rank can use; 0 means not known."""
    copies: Link = Link(0.0, 1e12)
    """Of pieces of tokens that copy engines move between tensor-parallel ranks."""
    host: Link = Link(0.0, 1e12)
    """To the memory of a rank's host and back, one direction, from memory that the system may not move."""
    processors: int = 0
    """Tiles of a matmul that are computed at a time; 0 means that its time is in proportion to its size."""
    wave_flops: float = 0.0
    """Rate of the matmuls of tensor-parallel ranks, whose pieces keep all processors busy."""
    formulas: Formulas = STOCK
    """What computes beside matmuls: torch's operations, or kernels."""

    def link(self, purpose: Purpose) -> Link:
        """What the groups of a purpose use."""
        kind = "gather" if purpose == "cp" else KIND_OF_GROUPS[purpose]  # keys and values travel as weights do
        return self.links.get(purpose) or self.links[kind]


KIND_OF_GROUPS: Mapping[Purpose, Kind] = {
    "gather_dense": "gather", "gather_experts": "gather", "reduce_dense": "reduce", "reduce_experts": "reduce",
    "replicas": "reduce", "a2a": "a2a", "tp": "tp", "cp": "cp",
    "pp_fwd": "pp", "pp_bwd": "pp", "control": "reduce",
}  # fmt: skip
"""What their communication is like."""


H200 = Hardware(
    name="h200",
    origin="measured on a host of eight",
    peak_flops=GPUS["h200"].flops,
    gemm_flops=930e12,
    attention_fwd_flops=700e12,
    attention_bwd_flops=595e12,
    memory_bandwidth=4.3e12,
    kernel_bandwidth=3.75e12,
    links={
        "a2a": Link(74e-6, 323e9),
        "pp": Link(222e-6, 346e9),
        "gather": Link(55e-6, 316e9),
        "reduce": Link(58e-6, 321e9),
        "tp": Link(30e-6, 312e9),
    },
    gap=20e-6,
    routing=100e-6,
    clock=GPUS["h200"].full_clock,
    power=1.32e33,
    beside_kernels=0.42,
    beside_copies=0.19,
    beside_updates=8.0,
    issue=0.45e-3,
    counts=0.3e-3,
    memory=139 * 2**30,
    copies=Link(18e-6, 400e9),
    host=Link(20e-6, 52e9),
    processors=GPUS["h200"].processors,
    wave_flops=730e12,
    formulas=FUSED,
)
"""One H200 of an 8-GPU NVLink host, torch 2.11.0, NCCL 2.28.9, multicast off. `peak_flops` is the data sheet's dense
bf16 rate, `clock` the full one.

Compute. Rates are those of the full clock: matmuls reach 87 % of what tensor cores could do at the clock that they run
at, and attention as in traces of Qwen3-30B-A3B without communication (overlap_trace_expert_parallel_long.json), as
kernels.json has it; `kernel_bandwidth` is the median of the kernels there, 87 % of a copy's `memory_bandwidth`;
`routing` is in the same traces, and `gap`, in which some ten kernels start and end, is what bounds take besides.
`power` is the median of bounds. What is predicted with all this stands beside what was measured in docs/benchmarks.md.

Beside communication. `beside_kernels` and `beside_copies`: products beside gathers and reductions of their weights
(copy_engine.json) and the layers of a MoE beside its all-to-alls take 0.36 to 0.46 and 0.18 to 0.22 longer for the time
that those last. `beside_updates`: forwards that could have hidden 27 ms of updates made a step 1 to 2 ms shorter
(expert_adamw.json), so beside updates they get on at a ninth of their speed. `issue` is 0.40 to 0.58 ms on hosts of
H200s, `counts` that of calibration.json.

Links are fits of latency and bandwidth to 1 MB .. 1 GB (within 12 %), for pp to ring sends of 16 and 256 MB, for tp,
whose collectives follow each other closely, to 50 and 100 MB of four ranks, and `copies` to pieces of 17 and 34 MB
beside their products; `wave_flops` is the median of what products alone reach there."""

LAPTOP = Hardware(
    name="laptop",
    origin="measured on two CPU cores",
    peak_flops=50e9,
    gemm_flops=50e9,
    attention_fwd_flops=25e9,
    attention_bwd_flops=25e9,
    memory_bandwidth=20e9,
    kernel_bandwidth=20e9,
    links=dict.fromkeys(("a2a", "pp", "gather", "reduce", "tp"), Link(2e-3, 0.7e9)),
    gap=200e-6,
    copies=Link(2e-3, 0.7e9),
    host=Link(0.0, 20e9),
)
"""One of four single-threaded processes that share two CPU cores, talking over gloo. Rounded from one measurement:
matmuls of 512x128x384, all-to-alls of 3 KB .. 3 MB. `peak_flops` is the matmul rate: there is no data sheet. Other CPUs
and processes with more threads reach other rates, so runs on CPUs have no MFU."""

SCALED = "scaled from its data sheet by what an H200 reaches of its own"
"""Of every GPU but the H200.

Note: [Scaled from the data sheet]
The H200 and the laptop were measured. All other GPUs are the H200 with figures of their data sheets (`gpus.py`):

    matmuls, attention    the H200's share of what processors can do at the full clock
    power                 the H200's share of the data sheet's clock, under a load of matmuls alone
    memory                the H200's share of bandwidth and of bytes
    links                 the H200's share of one direction; without a switch, that to one peer for p2p transfers and
    host                  the H200's share of PCIe, or of the link to the processor on the same module
    copies all else              as on the H200: latencies, gaps, the host's time, contention

Kernels, attention and libraries of other architectures reach other shares, so these are guesses until somebody
measures: `hocket doctor --measure` (`MeasuredHardware`)."""


def scaled(name: GpuName) -> Hardware:
    """A GPU that nobody has measured here. See Note: [Scaled from the data sheet]."""
    gpu, base = GPUS[name], GPUS["h200"]
    cycles = gpu.processors * gpu.cycle / (base.processors * base.cycle)
    rate = cycles * gpu.full_clock / base.full_clock
    memory = gpu.memory_bandwidth / base.memory_bandwidth
    links = {kind: _scaled_link(link, gpu.link / base.link) for kind, link in H200.links.items()}
    links["pp"] = _scaled_link(H200.links["pp"], (gpu.pair or gpu.link) / base.link)
    return replace(
        H200,
        name=name,
        origin=SCALED,
        peak_flops=gpu.flops,
        gemm_flops=rate * H200.gemm_flops,
        attention_fwd_flops=rate * H200.attention_fwd_flops,
        attention_bwd_flops=rate * H200.attention_bwd_flops,
        wave_flops=rate * H200.wave_flops,
        memory_bandwidth=memory * H200.memory_bandwidth,
        kernel_bandwidth=memory * H200.kernel_bandwidth,
        links=links,
        copies=_scaled_link(H200.copies, (gpu.pair or gpu.link) / base.link),
        host=_scaled_link(H200.host, (gpu.host or gpu.pcie) / base.pcie),
        clock=gpu.full_clock,
        power=H200.power * gpu.flops / base.flops * (gpu.sheet_clock / base.sheet_clock) ** 2,
        memory=gpu.memory * H200.memory // base.memory,
        processors=gpu.processors,
    )


def _scaled_link(link: Link, factor: float) -> Link:
    return Link(link.latency, factor * link.bandwidth)


HARDWARE: Mapping[str, Hardware] = {
    **{name: H200 if name == "h200" else scaled(name) for name in GPUS},
    "laptop": LAPTOP,
}
"""What plans and predictions can be for, by the values of `hardware.gpu`."""


# ---------------------------------------------------------------------------------------------------------------- clock
#
# How fast a GPU's clock runs while it computes a step: as fast as its power allows.
#
# Note: [Power sets the clock]
# Matmuls and attention keep to the clock, kernels between them to the memory. A rank that draws as much power as it may
# runs at a lower clock than the full one. Drawn power grows with the voltage's square, the voltage with the clock, and
# what is drawn beside that is mostly what is computed: so at the limit
#
#     (FLOP/s of matmuls + 0.8 FLOP/s of attention) * clock^2 = a constant of the kind of GPU
#
# On an H200 at 700 W that was 1.15 to 1.52e33 for the bounds of `hocket bench` that kept to that limit, of dense models
# at 1.50 GHz as of MoEs at 1.78 GHz (clock and power stand in benchmarks/results). A step with less to multiply runs
# its matmuls at a higher clock. Attention draws less for a FLOP: sequences of 131,072 tokens, most of whose FLOPs are
# attention's, ran at 1.73 GHz. What communication draws is in its contention (`overheads_of` in `cost.py`).
#
# A GPU takes far longer than an op to change its clock. So one clock holds for a whole step, that of all ops of a
# microbatch one after the other; bubbles, in which a GPU cools, are left out.


@dataclass(frozen=True, slots=True)
class Work:
    """What compute does: seconds at the full clock that keep to the clock, and others; FLOPs."""

    clocked: float
    others: float
    flops: float
    """Of matmuls in bf16 that draw as much power."""


def clock_of(hardware: Hardware, works: Iterable[Work]) -> float:
    """The clock in Hz at which a rank does such works in turns, to within 1e-6."""
    parts = list(works)
    clocked, others, flops = (sum(part) for part in zip(*((w.clocked, w.others, w.flops) for w in parts), strict=True))
    low, high = 0.0, hardware.clock
    if flops * high**2 <= hardware.power * (clocked + others):
        return high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        too_fast = flops * middle**2 > hardware.power * (clocked * hardware.clock / middle + others)
        low, high = (low, middle) if too_fast else (middle, high)
    return low


def at_clock(hardware: Hardware, clock: float) -> Hardware:
    """The hardware with the rates of that clock. Its prices then are those of a GPU that knows no limit."""
    share = clock / hardware.clock
    return replace(
        hardware,
        gemm_flops=share * hardware.gemm_flops,
        attention_fwd_flops=share * hardware.attention_fwd_flops,
        attention_bwd_flops=share * hardware.attention_bwd_flops,
        clock=0.0,
    )


# ---------------------------------------------------------------------------------------------------- measured hardware
#
# Rates that were measured on a host's own GPUs and kept in a file: what takes the place of the table's.


VERSION = 1
"""Of the file."""
RATES = ("gemm_flops", "attention_fwd_flops", "attention_bwd_flops", "memory_bandwidth", "kernel_bandwidth")
"""Fields of `Hardware` that are measured. At the clock that a long load leaves, so no limit of power is asked for."""


@dataclass(frozen=True, kw_only=True)
class MeasuredHardware:
    """What `hocket doctor --measure` found, of one rank and between the ranks of one host."""

    device: str
    """The GPU's name in the driver's words."""
    gpu: GpuName
    """The table's GPU whose other figures are kept."""
    gpus: int
    """On which links were measured."""
    date: str
    versions: Mapping[str, str]
    rates: Mapping[str, float]
    """Per second, by the name of the field of `Hardware`."""
    links: Mapping[str, tuple[float, float]]
    """Kind of communication -> seconds of latency, bytes per second."""

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    def applied(self, source: str) -> Hardware:
        """The table's GPU with these rates and links. `source` is the file."""
        base = HARDWARE[self.gpu]
        links = {kind: Link(*self.links[kind]) if kind in self.links else link for kind, link in base.links.items()}
        origin = f"measured on {self.device}, {self.date} ({source}); latencies of kernels and the host as on an H200"
        rates: dict[str, Any] = dict(self.rates)
        if "gemm_flops" in rates:
            rates |= {"clock": 0.0, "power": 0.0, "wave_flops": base.wave_flops * rates["gemm_flops"] / base.gemm_flops}
        return replace(base, origin=origin, links=links, **rates)


@cache
def read_measured(path: str) -> MeasuredHardware:
    """What a file says. Raises ValueError if it cannot be read or is no such file."""
    try:
        fields = json_in(path)
        if not isinstance(fields, dict) or fields.pop("version", None) != VERSION:
            raise ValueError(f"it is not of version {VERSION} of what hocket doctor --measure writes")
        found = read(MeasuredHardware, fields, "")
        if wrong := [*(found.rates.keys() - RATES), *(found.links.keys() - set(KINDS))]:
            raise ValueError(f"it names {min(wrong)}, which this hocket does not know")
        if min(found.rates.values(), default=1) <= 0 or any(a < 0 or rate <= 0 for a, rate in found.links.values()):
            raise ValueError("it has a rate that is not above 0")
    except (OSError, ValueError) as error:
        reason = f"it cannot be read: {error.strerror}" if isinstance(error, OSError) else error
        fix = "a file of hocket doctor --measure, or the name of a GPU"
        raise ValueError(f"hardware.gpu = {path}: {reason}; fix: {fix}") from None
    return found


def kept_file(device: str) -> Path:
    """Where the rates of a GPU are kept, by its name in the driver's words."""
    name = "".join(letter if letter.isalnum() else "-" for letter in device.lower())
    return Path.home() / ".cache" / "hocket" / f"hardware-{name}.json"


# -------------------------------------------------------------------------------------------------------------- network
#
# What groups can use whose ranks are on several hosts: where ranks are, and links that go through adapters.
#
# Note: [Links between hosts]
# Each rank has an adapter of its own, which sends and receives at the rate of `network.link`; hosts are joined by a
# network that holds nobody up. A group has n ranks on h hosts, r of them on the host that has the fewest. With a link
# of one host of bandwidth B and an adapter of bandwidth A, the links of groups that are on several hosts are
#
#     gathers, reduces, tokens    bandwidth min(B, r A)                   h - 1 crossings, n - (ranks of a host) steps
#     all-to-all                  bandwidth min(B, A (n-1) / (n-r))       h - 1 crossings
#     sum over replicas           bandwidth min(B, r A)                   h - 1 crossings, n - (ranks of a host) steps
#     pipeline p2p transfer                bandwidth min(B, A)                     1 crossing
#     sum of one number           bandwidth min(B, r A)                   2 log2(h) crossings
#
# NCCL gathers and reduces in rings that pass each host once, and each ring leaves a host through another adapter. So
# the (n - 1) / n of all bytes that every rank gets, the factor of `busbw` in nccl-tests, come to a host through the
# adapters of all the group's ranks there together. In an all-to-all nothing is passed on: what n - r of n - 1 peers
# send has to come in through a rank's own adapter. (NCCL's authors expect no more of it than one adapter carries:
# nccl-tests, issue 267 on GitHub.)
#
# A crossing takes the time of `network.link` longer than a step inside of a host, and a ring of more ranks than a host
# has takes more steps. Both are NCCL's own model of a ring in its protocol for large messages (src/graph/tuning.cc):
# 3.4 us for a step on NVLink, some 10 us more for one through the network; small sums go up a tree of hosts and down.
# NVLink SHARP and trees for large sums are left out, and so is that groups of one rank on different lanes share its
# adapter: how long it is busy in all is told beside a prediction (`adapter_times`).
#
# Of all groups for a purpose the one that is spread widest is what is priced, for all ranks: none is quicker than that.


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
    return max(1, c.mesh.world // (c.network.given or c.mesh.world))


def crossing(c: Config) -> Mapping[Purpose, Spread]:
    """The purposes of groups that have ranks on several hosts."""
    if hosts_of(c) == 1:
        return {}
    spreads = ((purpose, spread_of(c.mesh, purpose, c.network.given)) for purpose in PURPOSES)
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
    """The hardware to predict for, with the links between its hosts.

    While `hardware.gpu` is open it is what fits the dtype of the run.
    """
    name = config.hardware.gpu
    if name == "auto":
        name = "laptop" if config.precision.compute == "fp32" else "h200"
    hardware = read_measured(name).applied(name) if name.endswith(".json") else HARDWARE[name]
    if _is_exchange(config, "cp"):
        hardware = replace(hardware, links={"cp": hardware.link("a2a"), **hardware.links})
    return on_hosts(hardware, config)


def _is_exchange(c: Config, purpose: Purpose) -> bool:
    """Whether each rank of a group has something else for each of the others."""
    return purpose == "a2a" or (purpose == "cp" and c.overlap.cp.method == "heads")


def _link(c: Config, purpose: Purpose, link: Link, spread: Spread) -> Link:
    adapter, late = _described(c)
    adapters, crossings, steps = _through(c, purpose, spread)
    return Link(link.latency + crossings * late + steps * STEP, min(link.bandwidth, adapters * adapter))


def _through(c: Config, purpose: Purpose, spread: Spread) -> tuple[float, int, int]:
    """A row of the table in Note: [Links between hosts]: (adapters that bring what one rank gets, crossings, steps)."""
    if _is_exchange(c, purpose):
        return (spread.ranks - 1) / (spread.ranks - spread.fewest), spread.hosts - 1, 0
    if purpose in ("pp_fwd", "pp_bwd"):
        return 1.0, 1, 0
    if purpose == "control":
        return spread.fewest, 2 * math.ceil(math.log2(spread.hosts)), 0
    return spread.fewest, spread.hosts - 1, max(0, spread.ranks - c.network.given)


def adapter_times(c: Config) -> Mapping[Purpose, float]:
    """Seconds in which a rank's own adapter is busy for each byte that the rank gets, by purpose; empty on one host."""
    adapter, _ = _described(c)
    return {purpose: 1 / (_through(c, purpose, spread)[0] * adapter) for purpose, spread in crossing(c).items()}


def _described(c: Config) -> tuple[float, float]:
    """Bandwidth and latency of an adapter, as given or taken for granted."""
    rate, late = c.network.adapter
    return parse_rate(rate or BANDWIDTH), parse_time(late or LATENCY)
