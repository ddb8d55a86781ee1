"""The hardware that ops are priced for: the rates of one rank, measured or limited by power, and the links of groups,
on one host or between hosts.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

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
    """A link as one kind of communication sees it: seconds of latency, bytes per second of one rank."""

    latency: float
    bandwidth: float

    def seconds(self, wire_bytes: float) -> float:
        return self.latency + wire_bytes / self.bandwidth if wire_bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Rates per second that one rank reaches on layer-sized work, and the links between ranks."""

    name: str
    origin: str
    """The source of its figures, in words."""
    peak_flops: float
    """Data-sheet rate of dense matmuls: the denominator of MFU."""
    gemm_flops: float
    """Rate of matmuls, of experts too, at the full clock, without the time of their reads and writes."""
    attention_fwd_flops: float
    attention_bwd_flops: float
    memory_bandwidth: float
    """Rate of copies, counting bytes read and bytes written."""
    kernel_bandwidth: float
    """The same for kernels other than matmuls."""
    links: Mapping[Kind | Purpose, Link]
    """Link of every kind of communication, and of purposes whose groups have another one: see `on_hosts`."""
    gap: float
    """Seconds of every compute op in which its kernels start and end."""
    routing: float = 0.0
    """Seconds to choose the experts in a MoE layer, in each direction: many small kernels."""
    clock: float = 0.0
    """The full clock in Hz; 0: no limit of power is known."""
    power: float = 0.0
    """FLOP/s times the clock's square at the power limit of a rank. See Note: [Power sets the clock]."""
    beside_kernels: float = 0.0
    """Relative slowdown of compute while NCCL's kernels, or kernels that store rows, communicate."""
    beside_copies: float = 0.0
    """The same while copy engines communicate."""
    beside_updates: float = 0.0
    """The same while weights are updated."""
    issue: float = 0.0
    """Seconds to issue one op on the host, with its kernels and collectives; 0: issuing an op executes it."""
    counts: float = 0.0
    """Seconds from the start of a dispatch until a host that needs the rows' counts continues."""
    memory: int = 0
    """Bytes that one rank can use; 0 means unknown."""
    copies: Link = Link(0.0, 1e12)
    """Link for pieces of tokens that copy engines move between tensor-parallel ranks."""
    host: Link = Link(0.0, 1e12)
    """Link to the memory of a rank's host, one direction, from pinned memory."""
    processors: int = 0
    """Matmul tiles that are computed at a time; 0 means that a matmul's time is proportional to its size."""
    wave_flops: float = 0.0
    """Rate of the matmuls of tensor-parallel ranks, whose pieces keep all SMs busy."""
    formulas: Formulas = STOCK
    """The implementation of operations other than matmuls: torch's, or fused kernels."""

    def link(self, purpose: Purpose) -> Link:
        """The link that the groups of a purpose use."""
        kind = "gather" if purpose == "cp" else KIND_OF_GROUPS[purpose]  # keys and values move like weights
        return self.links.get(purpose) or self.links[kind]


KIND_OF_GROUPS: Mapping[Purpose, Kind] = {
    "gather_dense": "gather", "gather_experts": "gather", "reduce_dense": "reduce", "reduce_experts": "reduce",
    "replicas": "reduce", "a2a": "a2a", "tp": "tp", "cp": "cp",
    "pp_fwd": "pp", "pp_bwd": "pp", "control": "reduce",
}  # fmt: skip
"""The kind of communication that groups of a purpose do."""


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
bf16 rate, `clock` the full clock.

Compute. Rates are at the full clock: matmuls reach 87 % of the tensor cores' peak at the clock that they run at, and
attention its rate in traces of Qwen3-30B-A3B without communication (overlap_trace_expert_parallel_long.json), as in
kernels.json; `kernel_bandwidth` is the median of the kernels there, 87 % of a copy's `memory_bandwidth`; `routing` is
from the same traces, and `gap`, in which some ten kernels start and end, is the remaining time of bounds. `power` is
the median of bounds. docs/benchmarks.md compares the predictions with measurements.

Contention. `beside_kernels` and `beside_copies`: products that overlap gathers and reductions of their weights
(copy_engine.json), and MoE layers that overlap their all-to-alls, take 0.36 to 0.46 and 0.18 to 0.22 longer for the
duration of the communication. `beside_updates`: forwards that could have hidden 27 ms of updates made a step 1 to 2 ms
shorter (expert_adamw.json), so during updates they run at a ninth of their speed. `issue` is 0.40 to 0.58 ms on hosts
of H200s, `counts` that of calibration.json.

Links are fits of latency and bandwidth to 1 MB .. 1 GB (within 12 %), for pp to ring sends of 16 and 256 MB, for tp,
whose collectives follow each other closely, to 50 and 100 MB of four ranks, and `copies` to pieces of 17 and 34 MB
concurrent with their products; `wave_flops` is the median rate of those products alone."""

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
"""One of four single-threaded processes that share two CPU cores and communicate over gloo. Rounded from one
measurement: matmuls of 512x128x384, all-to-alls of 3 KB .. 3 MB. `peak_flops` is the matmul rate: there is no data
sheet. Other CPUs, and processes with more threads, reach other rates, so runs on CPUs have no MFU."""

SCALED = "scaled from its data sheet by what an H200 reaches of its own"
"""Origin of every GPU but the H200.

Note: [Scaled from the data sheet]
The H200 and the laptop were measured. All other GPUs are the H200 with figures of their data sheets (`gpus.py`):

    matmuls, attention    the H200's share of the SMs' peak at the full clock
    power                 the H200's share of the data sheet's clock, under a load of matmuls alone
    memory                the H200's share of bandwidth and of bytes
    links                 the H200's share of one direction; without a switch, pp and copies use the link to a peer
    host                  the H200's share of PCIe, or of the link to the processor on the same module
    all else              as on the H200: latencies, gaps, the host's time, contention

Kernels, attention and libraries reach other shares on other architectures, so these are guesses until they are
measured: `hocket doctor --measure` (`MeasuredHardware`)."""


def scaled(name: GpuName) -> Hardware:
    """A GPU without measurements. See Note: [Scaled from the data sheet]."""
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
"""The hardware for plans and predictions, by the values of `hardware.gpu`."""


# ---------------------------------------------------------------------------------------------------------------- clock
#
# The clock of a GPU during a step is the highest that its power limit allows.
#
# Note: [Power sets the clock]
# Matmuls and attention scale with the clock, other kernels with memory bandwidth. A rank at its power limit runs below
# its full clock. Power grows with the voltage's square, the voltage grows with the clock, and the rest of the power is
# mostly proportional to arithmetic. So at the limit
#
#     (FLOP/s of matmuls + 0.8 FLOP/s of attention) * clock^2 = a constant of the kind of GPU
#
# On an H200 at 700 W that was 1.15 to 1.52e33 for the bounds of `hocket bench` at the power limit, for dense models at
# 1.50 GHz and for MoEs at 1.78 GHz (clock and power are in benchmarks/results). A step with fewer FLOPs runs its
# matmuls at a higher clock. Attention draws less power per FLOP: sequences of 131,072 tokens, whose FLOPs are mostly
# attention's, ran at 1.73 GHz. The power of communication is part of its contention (`overheads_of` in `cost.py`).
#
# A GPU takes far longer than an op to change its clock. So one clock holds for a whole step, computed from all ops of a
# microbatch in sequence; bubbles, in which a GPU cools, are left out.


@dataclass(frozen=True, slots=True)
class Work:
    """Work of compute ops: seconds that scale with the clock (given at the full clock), other seconds, and FLOPs."""

    clocked: float
    others: float
    flops: float
    """In units of bf16 matmul FLOPs that draw the same power."""


def clock_of(hardware: Hardware, works: Iterable[Work]) -> float:
    """The clock in Hz at which a rank runs these works in turn, to within 1e-6."""
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
    """The hardware with the rates of that clock, and no further power limit."""
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
# Rates measured on a host's own GPUs and stored in a file: they replace the table's.


VERSION = 1
"""Version of the file."""
RATES = ("gemm_flops", "attention_fwd_flops", "attention_bwd_flops", "memory_bandwidth", "kernel_bandwidth")
"""Fields of `Hardware` that are measured, at the clock of a long load, so that no power limit is needed."""


@dataclass(frozen=True, kw_only=True)
class MeasuredHardware:
    """The results of `hocket doctor --measure`: of one rank, and between the ranks of one host."""

    device: str
    """The GPU's name as the driver spells it."""
    gpu: GpuName
    """The table's GPU that supplies all other figures."""
    gpus: int
    """Number of GPUs on which links were measured."""
    date: str
    versions: Mapping[str, str]
    rates: Mapping[str, float]
    """Per second, by field of `Hardware`."""
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
    """Read a file of measurements. Raises ValueError if it cannot be read or is another kind of file."""
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


def measured_file(device: str) -> Path:
    """The file for the measured rates of a GPU, by its name in the driver's words."""
    name = "".join(letter if letter.isalnum() else "-" for letter in device.lower())
    return Path.home() / ".cache" / "hocket" / f"hardware-{name}.json"


# -------------------------------------------------------------------------------------------------------------- network
#
# Links of groups whose ranks are on several hosts and communicate through network adapters.
#
# Note: [Links between hosts]
# Each rank has its own adapter, which sends and receives at the rate of `network.link`; the network between hosts has
# no bottleneck. A group has n ranks on h hosts, r of them on the host with the fewest. With a link of one host of
# bandwidth B and an adapter of bandwidth A, the links of groups on several hosts are
#
#     gathers, reduces, tokens    bandwidth min(B, r A)                   h - 1 crossings, n - (ranks of a host) steps
#     all-to-all                  bandwidth min(B, A (n-1) / (n-r))       h - 1 crossings
#     sum over replicas           bandwidth min(B, r A)                   h - 1 crossings, n - (ranks of a host) steps
#     pipeline p2p transfer       bandwidth min(B, A)                     1 crossing
#     sum of one number           bandwidth min(B, r A)                   2 log2(h) crossings
#
# NCCL gathers and reduces in rings that pass each host once, and each ring leaves a host through another adapter. So
# the (n - 1) / n of all bytes that every rank gets (the `busbw` factor of nccl-tests) enter a host through the adapters
# of all the group's ranks on it together. An all-to-all forwards nothing: what n - r of n - 1 peers send has to enter
# through a rank's own adapter. (NCCL's authors expect no more of it than one adapter carries: nccl-tests, issue 267 on
# GitHub.)
#
# A crossing takes the latency of `network.link` longer than a step inside of a host, and a ring over several hosts
# takes more steps. Both are NCCL's own model of a ring in its protocol for large messages (src/graph/tuning.cc): 3.4 us
# for a step on NVLink, some 10 us more for one through the network; small sums use a tree of hosts, up and down. NVLink
# SHARP and trees for large sums are not modelled. Neither is the sharing of a rank's adapter by groups on different
# lanes: predictions report how long it is busy in all (`adapter_times`).
#
# The price of a purpose is that of its widest group, for all ranks: no other group takes longer.


BANDWIDTH, LATENCY = "48GB/s", "10us"
"""The default for an undescribed network: one adapter of 400 Gb/s per GPU, as in DGX H100 and H200 (NVIDIA's user
guide), of which NCCL should reach 46 to 49 GB/s (nccl-tests, issues 267 and 290 on GitHub); see Note: [Links between
hosts]."""
STEP = 3.4e-6
"""Seconds of an additional ring step inside of a host."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How the widest group of a purpose spreads over hosts."""

    ranks: int
    hosts: int
    """Number of hosts with ranks of the group."""
    fewest: int
    """Its ranks on the host with the fewest of them."""


@cache
def spread_of(mesh: MeshConfig, purpose: Purpose, ranks_per_host: int) -> Spread:
    """How the widest group of a purpose spreads over hosts, whose ranks are consecutive."""
    members, starts = mesh.grid(purpose)
    if mesh.world <= ranks_per_host:
        size = math.prod(count for count, _ in members)
        return Spread(size, 1, size)
    begins = {0}  # groups that start at the same offset in a host spread alike
    for count, stride in starts:
        ahead = {i * stride % ranks_per_host for i in range(min(count, ranks_per_host))}
        begins = {(begin + more) % ranks_per_host for begin in begins for more in ahead}
    ranks = sums(members)
    found = [Counter((begin + rank) // ranks_per_host for rank in ranks) for begin in begins]
    return Spread(len(ranks), max(map(len, found)), min(min(hosts.values()) for hosts in found))


def hosts_of(c: Config) -> int:
    """Number of hosts of the ranks; one while that is open."""
    return max(1, c.mesh.world // (c.network.given or c.mesh.world))


def across_hosts(c: Config) -> Mapping[Purpose, Spread]:
    """The purposes whose groups span several hosts."""
    if hosts_of(c) == 1:
        return {}
    spreads = ((purpose, spread_of(c.mesh, purpose, c.network.given)) for purpose in PURPOSES)
    return {purpose: spread for purpose, spread in spreads if spread.hosts > 1}


def on_hosts(hardware: Hardware, c: Config) -> Hardware:
    """The hardware with the links of groups that span several hosts. See Note: [Links between hosts]."""
    wide = across_hosts(c)
    if not wide:
        return hardware
    links = {purpose: _link(c, purpose, hardware.link(purpose), spread) for purpose, spread in wide.items()}
    copies = _link(c, "pp_fwd", hardware.copies, wide["tp"]) if "tp" in wide else hardware.copies
    return replace(hardware, links={**hardware.links, **links}, copies=copies)


def hardware_of(config: Config) -> Hardware:
    """The hardware that predictions assume, with the links between its hosts.

    While `hardware.gpu` is open, the run's dtype decides.
    """
    name = config.hardware.gpu
    if name == "auto":
        name = "laptop" if config.precision.compute == "fp32" else "h200"
    hardware = read_measured(name).applied(name) if name.endswith(".json") else HARDWARE[name]
    if config.precision.compute == "fp32" and name in GPUS:
        rates = ("peak_flops", "gemm_flops", "attention_fwd_flops", "attention_bwd_flops", "wave_flops")
        share = GPUS[cast(GpuName, name)].fp32_share
        hardware = replace(hardware, **{rate: share * getattr(hardware, rate) for rate in rates})
    if _is_exchange(config, "cp"):
        hardware = replace(hardware, links={"cp": hardware.link("a2a"), **hardware.links})
    return on_hosts(hardware, config)


def _is_exchange(c: Config, purpose: Purpose) -> bool:
    """Whether each rank sends different data to each of the others."""
    return purpose == "a2a" or (purpose == "cp" and c.overlap.cp.method == "heads")


def _link(c: Config, purpose: Purpose, link: Link, spread: Spread) -> Link:
    bandwidth, latency = _adapter(c)
    adapters, crossings, steps = _path(c, purpose, spread)
    return Link(link.latency + crossings * latency + steps * STEP, min(link.bandwidth, adapters * bandwidth))


def _path(c: Config, purpose: Purpose, spread: Spread) -> tuple[float, int, int]:
    """A row of the table in Note: [Links between hosts]: (adapters per rank that carry its data, crossings, steps)."""
    if _is_exchange(c, purpose):
        return (spread.ranks - 1) / (spread.ranks - spread.fewest), spread.hosts - 1, 0
    if purpose in ("pp_fwd", "pp_bwd"):
        return 1.0, 1, 0
    if purpose == "control":
        return spread.fewest, 2 * math.ceil(math.log2(spread.hosts)), 0
    return spread.fewest, spread.hosts - 1, max(0, spread.ranks - c.network.given)


def adapter_times(c: Config) -> Mapping[Purpose, float]:
    """Seconds per byte received in which a rank's adapter is busy, by purpose; empty on one host."""
    bandwidth, _ = _adapter(c)
    return {purpose: 1 / (_path(c, purpose, spread)[0] * bandwidth) for purpose, spread in across_hosts(c).items()}


def _adapter(c: Config) -> tuple[float, float]:
    """Bandwidth and latency of a network adapter, as configured or assumed."""
    rate, latency = c.network.adapter
    return parse_rate(rate or BANDWIDTH), parse_time(latency or LATENCY)
