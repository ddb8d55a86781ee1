"""The settings `hardware` and `network`: what predictions assume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hocket.config.bounds import MOST_RANKS, Between, Form
from hocket.gpus import GpuName
from hocket.sizes import parse_rate, parse_time


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """The GPUs that predictions, and the choices made by them, assume."""

    gpu: Literal["auto", "laptop", GpuName] = "auto"
    """The GPU whose rates, links and memory count. auto is the GPU that the driver names on this host, and h200 on a
    host without one. For fp32 auto is laptop."""
    measured: str = "auto"
    """File that hocket doctor --measure wrote. Its rates take the place of the table's. auto is the file that was kept
    for the GPUs of this host, if all ranks are on this host. off is no file."""


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """The network between hosts that predictions, and the choices made by them, assume."""

    ranks_per_host: Annotated[int | Literal["auto"], Between(1, MOST_RANKS)] = "auto"
    """Ranks on each host. Every host has as many, and they have consecutive numbers. auto is the number that torchrun
    or Slurm started on this host, and all ranks if hocket starts them itself. hocket plan assumes 8 on GPUs, or the
    largest number below 8 that divides the ranks."""
    bandwidth: Annotated[str, Form(parse_rate, "50GB/s")] = "auto"
    """Rate at which a rank sends to other hosts, and receives at the same time, such as 50GB/s or 400Gb/s. It is the
    rank's share of the adapters, as NCCL reaches it. auto is 48GB/s: one adapter of 400 Gb/s for each rank."""
    latency: Annotated[str, Form(parse_time, "10us")] = "auto"
    """Time that a message to another host takes beyond one to a rank of the same host, such as 10us. auto is 10us."""
