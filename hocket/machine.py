"""Which host and hardware plans and predictions are for."""

from __future__ import annotations

from hocket.config import BYTE_VOCAB, BYTES, Config
from hocket.plan.hardware import HARDWARE, Hardware
from hocket.settings.rule import Host

GPUS_OF_A_HOST = 8
"""Where a plan is looked at without its hosts."""


def host_for_plan(config: Config) -> Host:
    """Hosts with enough GPUs if a run is meant for GPUs, else one without: where a plan is looked at says nothing.

    A tokenizer's file is not looked for either, as it may be where the run will be.
    """
    wants_gpus = config.train.device == "cuda" or (config.train.device == "auto" and config.precision.compute == "bf16")
    vocab = BYTE_VOCAB if config.data.tokenizer == BYTES else 0
    world = config.mesh.world
    if wants_gpus and world > GPUS_OF_A_HOST:
        return Host(gpus=GPUS_OF_A_HOST, workers=world, local_workers=GPUS_OF_A_HOST, tokenizer_vocab=vocab)
    return Host(gpus=world if wants_gpus else 0, tokenizer_vocab=vocab)


def hardware_of(config: Config, name: str = "auto") -> Hardware:
    """The hardware to predict for: as named, or what fits the dtype of the run."""
    if name == "auto":
        name = "laptop" if config.precision.compute == "fp32" else "h200"
    return HARDWARE[name]
