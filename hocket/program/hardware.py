"""What ops are priced for: the rates that one rank reaches, and the links between ranks of one host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hocket.config import Purpose
from hocket.gpus import GPUS, GpuName
from hocket.program.formulas import FUSED, STOCK, Formulas
from hocket.program.schedule import Kind


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
    """Of every kind of communication, and of groups for a purpose that have another one: see `network.py`."""
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
        return self.links.get(purpose) or self.links[KIND_OF_GROUPS[purpose]]


KIND_OF_GROUPS: Mapping[Purpose, Kind] = {
    "gather_dense": "gather", "gather_experts": "gather", "reduce_dense": "reduce", "reduce_experts": "reduce",
    "replicas": "reduce", "a2a": "a2a", "tp": "tp", "cp": "gather",
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
measures: `hocket doctor --measure` (`measured_hardware.py`)."""


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
