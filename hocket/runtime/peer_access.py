"""Whether ranks can use each other's memory, as copy engines and some kernels do: they are on one host of GPUs."""

from __future__ import annotations

import platform
from collections.abc import Collection

import torch

Place = tuple[str, str]
"""Of one rank: its host, and why its GPUs cannot do what is asked of them; empty if they can."""


def problem() -> str:
    """Why this host's GPUs cannot use copy engines, and empty if they can. Touches CUDA."""
    if not torch.cuda.is_available() or not hasattr(torch.distributed, "ProcessGroupNCCL"):
        return "torch finds no usable GPU, or was built without NCCL"
    return unreachable()


def unreachable() -> str:
    """Why the GPUs of this host cannot use each other's memory, and empty if they can. Touches CUDA."""
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    return f"GPU {apart[0][0]} cannot reach the memory of GPU {apart[0][1]}" if apart else ""


def place(problem: str) -> Place:
    """Where a rank with such a problem, or with none, is."""
    return platform.node(), problem


def apart(places: Collection[Place]) -> str:
    """Why the ranks, whose places these are, cannot use each other's memory; empty if they can."""
    hosts, reasons = {host for host, _ in places}, sorted({reason for _, reason in places} - {""})
    if len(hosts) > 1:
        reasons.append(f"the ranks are on {len(hosts)} hosts, and only GPUs of one reach each other's memory")
    return "; ".join(reasons)


def refuse(places: Collection[Place], setting: str, fix: str) -> None:
    """Raise ValueError unless the ranks, whose places these are, can use each other's memory."""
    if reason := apart(places):
        raise ValueError(f"{setting}: {reason}; fix: {fix}")
