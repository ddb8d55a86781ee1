"""The settings `hardware` and `network`: what predictions assume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from hocket.config.bounds import MOST_RANKS, Between, Form, OnlyWith
from hocket.gpus import GpuName
from hocket.sizes import parse_rate, parse_time


def known_gpu(text: str) -> None:
    """Raise ValueError for a text that is no value of `hardware.gpu`."""
    if text not in (names := ("laptop", *get_args(GpuName))) and not text.endswith(".json"):
        raise ValueError(f"is none of {', '.join(names)}, nor a .json file that hocket doctor --measure wrote")


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """The GPUs that predictions, and the choices made by them, assume."""

    gpu: Annotated[str, Form(known_gpu, "h200, or rates.json")] = "auto"
    """The GPU whose rates, links and memory count, by its name in the table, or the .json file in which hocket doctor
    --measure has kept rates, which take the place of the table's. auto is the file that was kept for the GPUs of this
    host, if all ranks are on this host; else the GPU that the driver names here, and h200 on a host without one. For
    fp32 auto is laptop."""


def link_of(text: str) -> None:
    """Raise ValueError for a text that is no rate, and no rate and time."""
    rate, comma, late = text.partition(",")
    parse_rate(rate)
    if comma:
        parse_time(late)


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """The network between hosts that predictions, and the choices made by them, assume."""

    ranks_per_host: Annotated[int | Literal["auto"], Between(1, MOST_RANKS)] = "auto"
    """Ranks on each host. Every host has as many, and they have consecutive numbers. auto is the number that torchrun
    or Slurm started on this host, and all ranks if hocket starts them itself. hocket plan assumes 8 on GPUs, or the
    largest number below 8 that divides the ranks."""
    link: Annotated[str, Form(link_of, "50GB/s, or 50GB/s,10us"), OnlyWith("several hosts", remark=True)] = "auto"
    """Rate at which a rank sends to other hosts, and receives at the same time, such as 50GB/s or 400Gb/s, and behind a
    comma, if it is known, the time that a message to another host takes beyond one to a rank of the same host. The rate
    is the rank's share of the adapters, as NCCL reaches it. auto is 48GB/s,10us: one adapter of 400 Gb/s for each rank,
    and what NCCL reckons with on InfiniBand."""

    @property
    def adapter(self) -> tuple[str, str]:
        """Rate and time of `link`, as texts; empty where it does not say."""
        rate, _, late = ("" if self.link == "auto" else self.link).partition(",")
        return rate, late
