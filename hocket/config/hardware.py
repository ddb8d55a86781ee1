"""Section `hardware`: the GPUs that predictions assume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, get_args

from hocket.config.rule import Form
from hocket.gpus import GpuName


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
