"""Which hardware predictions are for."""

from __future__ import annotations

from hocket.config import Config
from hocket.plan.cost import HARDWARE, Hardware


def hardware_of(config: Config, name: str = "auto") -> Hardware:
    """The hardware to predict for: as named, or what fits the dtype of the run."""
    if name == "auto":
        name = "laptop" if config.precision.compute == "fp32" else "h200"
    return HARDWARE[name]
