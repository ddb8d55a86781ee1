"""The hosts that plans and predictions assume, and what the installed kernels support."""

from __future__ import annotations

import re
from importlib import metadata
from importlib.util import find_spec

from hocket.config import BYTE_VOCAB, BYTES, Config
from hocket.config.rule import Host
from hocket.gpus import GPUS
from hocket.predict.hardware import read_measured

GPUS_OF_A_HOST = 8
"""GPUs per host that plans assume."""


def host_for_plan(config: Config, kinds: tuple[str, ...] = ()) -> Host:
    """The host that a plan assumes: with enough GPUs if the run is meant for GPUs, else with none.

    It does not depend on the host that makes the plan, except for the `kinds` of its GPUs: they price plans for GPUs if
    no setting names a GPU. A tokenizer's file is not read either, since it may exist only where the run will be.
    """
    wants_gpus = config.train.device == "cuda" or (config.train.device == "auto" and config.precision.dtype == "bf16")
    vocab = BYTE_VOCAB if config.data.tokenizer == BYTES else 0
    world, each = config.mesh.world, _ranks_of_a_host(config, wants_gpus)
    kinds = kinds if wants_gpus else ()
    if 0 < each < world:
        gpus = max(GPUS_OF_A_HOST, each) if wants_gpus else 0
        return Host(gpus=gpus, kinds=kinds, workers=world, local_workers=each, tokenizer_vocab=vocab)
    return Host(gpus=world if wants_gpus else 0, kinds=kinds, tokenizer_vocab=vocab)


def _ranks_of_a_host(config: Config, wants_gpus: bool) -> int:
    """As configured; else the GPUs of a host, or fewer, so that all hosts have the same number of ranks."""
    if config.network.ranks_per_host != "auto":
        return config.network.ranks_per_host
    world, gpu = config.mesh.world, config.hardware.gpu
    gpu = read_measured(gpu).gpu if gpu.endswith(".json") else gpu
    most = max(GPUS_OF_A_HOST, GPUS[gpu].domain if gpu in GPUS else 0)
    if not wants_gpus or world <= most:
        return world
    return max(n for n in range(1, most + 1) if world % n == 0)


def why_no_delta_kernels(capability: tuple[int, int]) -> str:
    """Why flash-linear-attention's kernels (fla-core) do not work on this compute capability; empty if they do.

    Triton 3.4 up to 3.7.1 (excluded) compiles them to wrong gradients on Hopper. fla refuses this (its issue 640)
    unless tilelang is installed, whose kernels it uses instead.
    """
    if find_spec("fla") is None or find_spec("triton") is None:
        return "fla-core is not installed"
    triton = metadata.version("triton")
    version = tuple(int(part) for part in re.findall(r"\d+", triton)[:3])
    if capability == (9, 0) and (3, 4) <= version < (3, 7, 1) and find_spec("tilelang") is None:
        return f"fla-core is wrong on Hopper with triton {triton}, and right from 3.7.1 on, or with tilelang"
    return ""
