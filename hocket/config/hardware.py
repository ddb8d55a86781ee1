"""Section `hardware`: the GPUs that predictions assume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, get_args

from hocket.config.rule import Form
from hocket.gpus import GpuName


def known_gpu(text: str) -> None:
    """Raise ValueError for an invalid value of `hardware.gpu`."""
    if text not in (names := ("laptop", *get_args(GpuName))) and not text.endswith(".json"):
        raise ValueError(f"is none of {', '.join(names)}, nor a .json file that hocket doctor --measure wrote")


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """The GPUs that predictions, and the choices made by them, assume."""

    gpu: Annotated[str, Form(known_gpu, "h200, or rates.json")] = "auto"
    """The GPU whose rates, links and memory count, by its name in the table, or the .json file of measured rates that
    hocket doctor --measure wrote, which replace the table's. auto is the measured file of this host's GPUs, if all
    ranks are on this host; else the GPU that the driver names here, or h200 on a host without one. For fp32 auto is
    laptop."""
