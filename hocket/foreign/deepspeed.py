"""What `deepspeed.toml` needs of code: rules of its own, and what is done where nothing is given."""

from __future__ import annotations

from typing import Any

from hocket.foreign.entry import Answer, Given, entries, ranks
from hocket.foreign.translate import RANKS, System
from hocket.typed import is_a

MICRO, ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
TENSOR_RANKS = "tensor_parallel.autotp_size"
STAGE = "zero_optimization.stage"


def total(value: Any, given: Given) -> Answer:
    """The whole batch: microbatches, where these are not given and ranks are known."""
    if ACCUMULATION in given.values:
        return Answer("not needed", words=f"{MICRO} and {ACCUMULATION} say it")
    size, ranks = given.number(MICRO), given.gpus // max(1, given.number(TENSOR_RANKS))
    if not ranks:
        return Answer("not there", words="it needs --gpus to become train.microbatches")
    if size < 1 or value % (size * ranks):
        return Answer("not there", words=f"{value} is no multiple of {size} sequences on {ranks} data ranks")
    return Answer("becomes", {"train.microbatches": value // (size * ranks)}, f"{size} sequences on {ranks} data ranks")


def shards(value: Any, given: Given) -> Answer:
    """Ranks that share one copy of the weights."""
    if value < 2:
        return Answer("not needed", words="there is one copy")
    return Answer("becomes", {"mesh.shard": value})


def betas(value: Any, given: Given) -> Answer:
    """Whole numbers are numbers, too."""
    if not isinstance(value, list) or not all(is_a(beta, float) for beta in value):
        return Answer("not there", words="train.betas is two numbers")
    return Answer("becomes", {"train.betas": tuple(map(float, value))})


def _stage_zero(given: Given) -> Answer | None:
    return None if STAGE in given.values else Answer("becomes", {"overlap.dp.strategy": "no_shard"})


def spelled(name: str) -> str:
    """A setting as the table has it; what has no row of its own belongs to that of a section around it."""
    if name in _EXACT:
        return name
    parts = name.split(".")
    sections = [".".join(parts[:count]) + ".*" for count in range(len(parts) - 1, 0, -1)]
    return next((section for section in sections if section in _EXACT), name)


_ENTRIES = entries("deepspeed", {"total": total, "betas": betas, "shards": shards})
_EXACT = {name for row in _ENTRIES for name in row.names}

DEEPSPEED = System(
    "DeepSpeed",
    _ENTRIES,
    ((RANKS, lambda given: ranks(given, (TENSOR_RANKS,))), (f"(no {STAGE})", _stage_zero)),
    spelled,
    (("mesh.tp", (TENSOR_RANKS,)), ("mesh.pp", ()), ("mesh.cp", ()), ("plan.chunks", ()), ("mesh.ep", ())),
    filled="auto",
)
