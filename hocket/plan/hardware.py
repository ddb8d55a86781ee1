"""What ops are priced for: the rates that one rank reaches, and the links between ranks of one host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hocket.config import Purpose
from hocket.plan.formulas import FUSED, STOCK, Formulas
from hocket.plan.schedule import Kind


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
    peak_flops: float
    """Data-sheet rate of dense matmuls: the denominator of MFU."""
    gemm_flops: float
    grouped_flops: float
    """Rate of grouped matmuls, one per expert."""
    attention_fwd_flops: float
    attention_bwd_flops: float
    memory_bandwidth: float
    """Bytes read and written together."""
    links: Mapping[Kind | Purpose, Link]
    """Of every kind of communication, and of groups for a purpose that have another one: see `network.py`."""
    host_gap: float
    """Least seconds from one compute op to the next, however small: the host's own cost."""
    memory: int = 0
    """Bytes that one rank can use; 0 means not known."""
    copies: Link = Link(0.0, 1e12)
    """Of pieces of tokens that copy engines move between tensor-parallel ranks."""
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
    "a2a": "a2a", "tp": "tp", "pp_fwd": "pp", "pp_bwd": "pp", "control": "reduce",
}  # fmt: skip
"""What their communication is like."""


H200 = Hardware(
    name="h200",
    peak_flops=989.4e12,
    gemm_flops=697e12,
    grouped_flops=670e12,
    attention_fwd_flops=600e12,
    attention_bwd_flops=457e12,
    memory_bandwidth=4.3e12,
    links={
        "a2a": Link(74e-6, 323e9),
        "pp": Link(222e-6, 346e9),
        "gather": Link(55e-6, 316e9),
        "reduce": Link(58e-6, 321e9),
        "tp": Link(30e-6, 312e9),
    },
    host_gap=50e-6,
    memory=139 * 2**30,
    copies=Link(18e-6, 400e9),
    processors=132,
    wave_flops=730e12,
    formulas=FUSED,
)
"""One H200 of an 8-GPU NVLink host. Measured on 8x H200, torch 2.11.0, NCCL 2.28.9, multicast off: the GEMM
4096x28672x4096, the grouped GEMM 16 x 4096 rows of 2048x1536, cuDNN attention at 8k tokens, a device copy; the links
are fits of latency and bandwidth to 1 MB .. 1 GB (within 12 %), for pp to ring sends of 16 and 256 MB, for tp, whose
collectives follow each other closely, to 50 and 100 MB of four ranks, and `copies` to pieces of 17 and 34 MB beside
their products; `wave_flops` is the median of what products alone reach there. `peak_flops` is the data sheet's dense
bf16 rate. `host_gap` is an estimate: about ten kernel launches."""

LAPTOP = Hardware(
    name="laptop",
    peak_flops=50e9,
    gemm_flops=50e9,
    grouped_flops=40e9,
    attention_fwd_flops=25e9,
    attention_bwd_flops=25e9,
    memory_bandwidth=20e9,
    links=dict.fromkeys(("a2a", "pp", "gather", "reduce", "tp"), Link(2e-3, 0.7e9)),
    host_gap=200e-6,
    copies=Link(2e-3, 0.7e9),
)
"""One of four single-threaded processes that share two CPU cores, talking over gloo. Rounded from one measurement:
matmuls of 512x128x384, all-to-alls of 3 KB .. 3 MB. There is no data sheet, so MFU is relative to the matmul rate."""

HARDWARE: Mapping[str, Hardware] = {"h200": H200, "laptop": LAPTOP}
