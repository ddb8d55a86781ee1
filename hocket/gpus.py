"""GPUs by name: figures from data sheets, and the patterns that match device names. Only data.

Sources are vendors' public data sheets and architecture papers, named in `Gpu.source`. Rates with sparsity are halved.
Link bandwidths are per direction, half of what vendors print. If no clock is published, `clock` is the one that gives
the printed rate (NVIDIA publishes none for data-centre Blackwell). SMs and FLOPs per cycle are from the architecture
papers; for Blackwell they are from the CUDA runtime.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Literal

GpuName = Literal[
    "a100-sxm-40", "a100-sxm", "a100-pcie-40", "a100-pcie", "l40s", "rtx4090", "rtx5090", "h100-sxm", "h100-pcie",
    "h100-nvl", "h800", "gh200", "h200", "h200-nvl", "b200", "b300", "gb200", "gb300", "mi300x",
]  # fmt: skip
"""The keys of `GPUS`."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU by its data sheet. Rates per second; bandwidths in bytes per second and direction."""

    pattern: str
    """Regular expression searched in the device's name, as drivers spell it."""
    flops: float
    """Dense bf16 FLOP/s of tensor cores, accumulated in fp32."""
    memory: int
    """In the vendor's GB: 80 for 80 GB."""
    memory_bandwidth: float
    link: float
    """NVLink or xGMI bandwidth to all other GPUs of the domain together; that of `pcie` without such links."""
    pair: float = 0.0
    """Bandwidth to one other GPU if GPUs are connected directly; 0: a switch gives all of `link`."""
    pcie: float
    host: float = 0.0
    """Bandwidth to the CPU on the same module; 0: `pcie` connects them."""
    domain: int = 8
    """GPUs that these links connect."""
    processors: int
    cycle: int
    """Dense bf16 FLOPs of one SM per cycle."""
    clock: float = 0.0
    """Highest clock in Hz; 0: not published."""
    watts: int
    capability: tuple[int, int]
    """torch's `capability`: CUDA's compute capability, and on ROCm the first digits of the architecture's name."""
    source: str

    @property
    def fp32_share(self) -> float:
        """FLOP/s of fp32 products over those of bf16 ones. hocket leaves TF32 off, so they run on the fp32 units: 64
        per SM of an A100, 128 per SM of newer GPUs and of MI300X.
        """
        return (128 if self.capability == (8, 0) else 256) / self.cycle

    @property
    def sheet_clock(self) -> float:
        """The clock in Hz that gives `flops`."""
        return self.flops / (self.processors * self.cycle)

    @property
    def full_clock(self) -> float:
        """The highest clock in Hz."""
        return max(self.clock, self.sheet_clock)


_AMPERE = "NVIDIA A100 data sheet (2021), A100 architecture paper"
_HOPPER = "NVIDIA H100 data sheet and architecture paper (2023)"
_BLACKWELL = "NVIDIA Blackwell architecture brief, data sheets of HGX and NVL72 (2024, 2025)"

GPUS: Mapping[GpuName, Gpu] = {
    "a100-sxm-40": Gpu(
        pattern=r"A100-SXM4-40GB", flops=312e12, memory=40, memory_bandwidth=1.555e12, link=300e9, pcie=32e9,
        processors=108, cycle=2048, clock=1.41e9, watts=400, capability=(8, 0), source=_AMPERE,
    ),
    "a100-sxm": Gpu(
        pattern=r"A100-SXM", flops=312e12, memory=80, memory_bandwidth=2.039e12, link=300e9, pcie=32e9,
        processors=108, cycle=2048, clock=1.41e9, watts=400, capability=(8, 0), source=_AMPERE,
    ),
    "a100-pcie-40": Gpu(
        pattern=r"A100-PCIE-40GB|A100 40GB PCIe", flops=312e12, memory=40, memory_bandwidth=1.555e12, link=32e9,
        pcie=32e9, processors=108, cycle=2048, clock=1.41e9, watts=250, capability=(8, 0), source=_AMPERE,
    ),
    "a100-pcie": Gpu(
        pattern=r"A100.*PCIe", flops=312e12, memory=80, memory_bandwidth=1.935e12, link=32e9, pcie=32e9,
        processors=108, cycle=2048, clock=1.41e9, watts=300, capability=(8, 0), source=_AMPERE,
    ),
    "l40s": Gpu(
        pattern=r"\bL40S\b", flops=362e12, memory=48, memory_bandwidth=0.864e12, link=32e9, pcie=32e9,
        processors=142, cycle=1024, clock=2.52e9, watts=350, capability=(8, 9), source="NVIDIA L40S data sheet (2023)",
    ),
    "rtx4090": Gpu(
        pattern=r"RTX 4090", flops=165.2e12, memory=24, memory_bandwidth=1.008e12, link=32e9, pcie=32e9,
        processors=128, cycle=512, clock=2.52e9, watts=450, capability=(8, 9),
        source="NVIDIA Ada architecture paper (2022)",
    ),
    "rtx5090": Gpu(
        pattern=r"RTX 5090", flops=209.5e12, memory=32, memory_bandwidth=1.792e12, link=64e9, pcie=64e9,
        processors=170, cycle=512, clock=2.407e9, watts=575, capability=(12, 0),
        source="NVIDIA RTX Blackwell architecture paper (2025)",
    ),
    "h100-sxm": Gpu(
        pattern=r"H100 (80GB|SXM|64GB|96GB)|H100-SXM", flops=989.4e12, memory=80, memory_bandwidth=3.35e12, link=450e9,
        pcie=64e9, processors=132, cycle=4096, clock=1.98e9, watts=700, capability=(9, 0), source=_HOPPER,
    ),
    "h100-pcie": Gpu(
        pattern=r"H100 PCIe", flops=756e12, memory=80, memory_bandwidth=2.0e12, link=64e9, pcie=64e9,
        processors=114, cycle=4096, clock=1.755e9, watts=350, capability=(9, 0), source=_HOPPER,
    ),
    "h100-nvl": Gpu(
        pattern=r"H100 NVL", flops=835.5e12, memory=94, memory_bandwidth=3.9e12, link=300e9, pcie=64e9, domain=2,
        processors=132, cycle=4096, clock=1.785e9, watts=400, capability=(9, 0),
        source="NVIDIA H100 NVL data sheet (2024)",
    ),
    "h800": Gpu(
        pattern=r"H800", flops=989.4e12, memory=80, memory_bandwidth=3.35e12, link=200e9, pcie=64e9,
        processors=132, cycle=4096, clock=1.98e9, watts=700, capability=(9, 0),
        source="H100 data sheet; NVLink of 400 GB/s as in DeepSeek-V3, arXiv 2412.19437",
    ),
    "gh200": Gpu(
        pattern=r"GH200", flops=989.4e12, memory=96, memory_bandwidth=4.0e12, link=450e9, pcie=64e9, host=450e9,
        processors=132, cycle=4096, clock=1.98e9, watts=700, capability=(9, 0), source="NVIDIA GH200 data sheet (2023)",
    ),
    "h200": Gpu(
        pattern=r"\bH200\b", flops=989.4e12, memory=141, memory_bandwidth=4.8e12, link=450e9, pcie=64e9,
        processors=132, cycle=4096, clock=1.98e9, watts=700, capability=(9, 0), source="NVIDIA H200 data sheet (2024)",
    ),
    "h200-nvl": Gpu(
        pattern=r"H200 NVL", flops=835.5e12, memory=141, memory_bandwidth=4.8e12, link=450e9, pcie=64e9, domain=4,
        processors=132, cycle=4096, clock=1.785e9, watts=600, capability=(9, 0), source="NVIDIA H200 data sheet (2024)",
    ),
    "b200": Gpu(
        pattern=r"\bB200\b", flops=2250e12, memory=180, memory_bandwidth=8e12, link=900e9, pcie=64e9,
        processors=148, cycle=8192, watts=1000, capability=(10, 0), source=_BLACKWELL,
    ),
    "b300": Gpu(
        pattern=r"\bB300\b", flops=2250e12, memory=270, memory_bandwidth=8e12, link=900e9, pcie=128e9,
        processors=148, cycle=8192, watts=1100, capability=(10, 3), source=_BLACKWELL,
    ),
    "gb200": Gpu(
        pattern=r"\bGB200\b", flops=2500e12, memory=186, memory_bandwidth=8e12, link=900e9, pcie=64e9, host=225e9,
        domain=72, processors=152, cycle=8192, watts=1200, capability=(10, 0), source=_BLACKWELL,
    ),
    "gb300": Gpu(
        pattern=r"\bGB300\b", flops=2500e12, memory=278, memory_bandwidth=8e12, link=900e9, pcie=128e9, host=225e9,
        domain=72, processors=152, cycle=8192, watts=1400, capability=(10, 3), source=_BLACKWELL,
    ),
    "mi300x": Gpu(
        pattern=r"MI300X", flops=1307.4e12, memory=192, memory_bandwidth=5.3e12, link=448e9, pair=64e9, pcie=64e9,
        processors=304, cycle=2048, clock=2.1e9, watts=750, capability=(9, 4), source="AMD MI300X data sheet (2023)",
    ),
}  # fmt: skip


def gpu_named(device: str) -> GpuName | None:
    """The GPU that a device's name matches, as torch or nvidia-smi spell it; None if it is not in the table.

    The longest match wins, so `NVIDIA H200 NVL` does not match as `NVIDIA H200`.
    """
    found = {name: match for name, gpu in GPUS.items() if (match := re.search(gpu.pattern, device, re.IGNORECASE))}
    return max(found, key=lambda name: len(found[name][0]), default=None)


def peak_flops(device: str) -> float:
    """Dense bf16 FLOP/s of a device by its name; 0 if it is not in the table.

    A slice of a partitioned GPU (MIG) has no data sheet of its own.
    """
    name = None if is_slice(device) else gpu_named(device)
    return GPUS[name].flops if name else 0.0


def is_slice(device: str) -> bool:
    """Whether the device is a MIG slice, by its name: `NVIDIA H200 MIG 1g.18gb`."""
    return bool(re.search(r"\bMIG\b", device))


def nearest(device: str, memory: int, processors: int, capability: tuple[int, int]) -> GpuName:
    """The GPU of the table most like an unknown one: same vendor and architecture first, then similar size.

    Distances are between logarithms of memory (bytes) and number of SMs; unknown values (0) are ignored.
    """
    amd = bool(re.search("AMD|Instinct|Radeon", device, re.IGNORECASE))

    def distance(name: GpuName) -> tuple[bool, bool, bool, float]:
        gpu = GPUS[name]
        apart = abs(log(memory / (gpu.memory * 2**30))) if memory else 0.0
        apart += abs(log(processors / gpu.processors)) if processors else 0.0
        other_vendor = amd != gpu.source.startswith("AMD")
        return other_vendor, gpu.capability != capability, gpu.capability[0] != capability[0], apart

    return min(GPUS, key=distance)
