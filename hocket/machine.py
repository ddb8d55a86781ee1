"""Which hosts plans and predictions are for."""

from __future__ import annotations

from hocket.config import BYTE_VOCAB, BYTES, Config
from hocket.settings.rule import Host

GPUS_OF_A_HOST = 8
"""Where a plan is looked at without its hosts."""


def host_for_plan(config: Config) -> Host:
    """Hosts with enough GPUs if a run is meant for GPUs, else one without: where a plan is looked at says nothing.

    A tokenizer's file is not looked for either, as it may be where the run will be.
    """
    wants_gpus = config.train.device == "cuda" or (config.train.device == "auto" and config.precision.compute == "bf16")
    vocab = BYTE_VOCAB if config.data.tokenizer == BYTES else 0
    world, each = config.mesh.world, _ranks_of_a_host(config, wants_gpus)
    if 0 < each < world:
        gpus = max(GPUS_OF_A_HOST, each) if wants_gpus else 0
        return Host(gpus=gpus, workers=world, local_workers=each, tokenizer_vocab=vocab)
    return Host(gpus=world if wants_gpus else 0, tokenizer_vocab=vocab)


def _ranks_of_a_host(config: Config, wants_gpus: bool) -> int:
    """As given; else as many as there are GPUs, or fewer, so that all hosts have the same number."""
    if config.network.ranks_per_host != "auto":
        return config.network.ranks_per_host
    world = config.mesh.world
    if not wants_gpus or world <= GPUS_OF_A_HOST:
        return world
    return max(n for n in range(1, GPUS_OF_A_HOST + 1) if world % n == 0)
