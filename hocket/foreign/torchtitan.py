"""What `torchtitan.toml` needs of code: rules of its own, and what is done where nothing is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hocket.foreign.entry import (
    RECIPES,
    Answer,
    Given,
    Rule,
    choice,
    entries,
    expert_ranks,
    file_of,
    model_of,
    ranks,
    tensor,
)
from hocket.foreign.translate import RANKS, System

P, T = "parallelism.", "training."
TP = f"{P}tensor_parallel_degree"
EP, SCHEDULE = f"{P}expert_parallel_degree", f"{P}pipeline_parallel_schedule"
PP, DP_SHARD, DP_REPLICATE = (
    f"{P}pipeline_parallel_degree",
    f"{P}data_parallel_shard_degree",
    f"{P}data_parallel_replicate_degree",
)
CP = f"{P}context_parallel_degree"
AXES = (PP, TP, CP)
LOCAL, MICRO = f"{T}local_batch_size", f"{P}pipeline_parallel_microbatch_size"


def reshard(value: Any, given: Given) -> Answer:
    """By default weights stay after forward in a pipeline, and are given back without one."""
    keeps = value == "never" or (value == "default" and given.number(PP) > 1)
    return Answer("becomes", {"overlap.dp.strategy": "optim_grads" if keeps else "optim_grads_params"})


def replicate(value: Any, given: Given) -> Answer:
    """Replicas alone are plain data parallelism; with shards inside they are hybrid."""
    if value == 1:
        return Answer("not needed", words="there is none")
    shards = given.number(DP_SHARD, default=-1)
    if shards == 1:
        return Answer("becomes", {"overlap.dp.strategy": "no_shard", "mesh.dp": value})
    if shards < 0 and not given.gpus:
        return Answer("not there", words=f"it needs --gpus, or {DP_SHARD}, to become mesh.shard")
    shards = shards if shards > 0 else _data_ranks(given) // max(1, value)
    return Answer("becomes", {"mesh.dp": value * shards, "mesh.shard": shards})


def shard(value: Any, given: Given) -> Answer:
    if value == -1:
        return Answer("not needed", words="as many as --gpus leaves")
    if given.number(DP_REPLICATE) > 1:
        return Answer("not needed", words=f"it goes with {DP_REPLICATE}")
    if given.gpus and value != _data_ranks(given):
        return Answer("not there", words=f"{given.gpus} ranks leave {_data_ranks(given)} data ranks, not {value}")
    return Answer("becomes", {"mesh.dp": value})


def decay(value: Any, given: Given) -> Answer:
    """The rate stays until so large a share of the steps is left."""
    return Answer("becomes", {"train.schedule": "wsd", "train.decay": value})


def decay_type(value: Any, given: Given) -> Answer:
    """The shape of the decay, which without a ratio is all of the way behind the warm-up."""
    shapes = {"linear": "linear", "cosine": "cosine", "sqrt": "1-sqrt"}
    shape = shapes.get(value) if isinstance(value, str) else None
    if "lr_scheduler.decay_ratio" in given.values and shape:
        return Answer("becomes", {"train.decay_shape": shape})
    if shape in ("linear", "cosine"):
        return Answer("becomes", {"train.schedule": shape})
    return Answer("not there", words="without a decay_ratio the rate falls along a line or as half a cosine")


def batch(value: Any, given: Given) -> Answer:
    """Sequences and microbatches of a data rank: in a pipeline the local batch is cut, without one it is one piece."""
    size = given.number(MICRO) if given.number(PP) > 1 else value
    if size < 1 or value % size:
        return Answer("not there", words=f"{size} sequences of a microbatch do not divide it")
    settings = {"train.sequences": size, "train.microbatches": value // size * _accumulated(given, value)}
    return Answer("becomes", settings)


def _accumulated(given: Given, local: int) -> int:
    total, dp = given.number(f"{T}global_batch_size", default=-1), _data_ranks(given)
    return max(1, total // (local * dp)) if total > 0 and dp else 1


def _data_ranks(given: Given) -> int:
    return given.gpus // max(1, given.product(AXES))


def accumulation(value: Any, given: Given) -> Answer:
    if value == -1:
        return Answer("not needed", words="the local batches together")
    if not given.gpus:
        return Answer("not there", words="it needs --gpus to become train.microbatches")
    return Answer("not needed", words=f"it goes with {LOCAL}")


def async_tensor(value: Any, given: Given) -> Answer:
    """Off is a wish here: by itself a rule would put communication beside products."""
    return tensor({"overlap.tp.method": "auto" if value else "off"}, TP)(True, given)


def recomputed(value: Any, given: Given) -> Answer:
    """Whole layers; with expert ranks, those of a model whose layers all have experts."""
    if value == "full":
        experts = given.number(EP) > 1
        words = "attn, and of experts and mlp what the layers have"
        return Answer("becomes", {"plan.recompute": ("attn", "experts" if experts else "mlp")}, words)
    return _NOT_FULL(value, given)


def flavor(value: Any, given: Given) -> Answer:
    """A model by family and size."""
    family = given.values.get("model.name")
    if not isinstance(family, str):
        return Answer("not there", words="it needs model.name")
    return model_of(f"{family} {value}", file_of("torchtitan")[RECIPES], "its newest version's")


def betas(value: Any, given: Given) -> Answer:
    """Both decay rates of AdamW, one of which may be torchtitan's own."""
    rates = (given.values.get(f"optimizer.beta{n}", rate) for n, rate in ((1, 0.9), (2, 0.95)))
    return Answer("becomes", {"train.betas": tuple(map(float, rates))})


_NOT_FULL = choice(
    "none, or whole parts of all layers",
    ("none", {"plan.recompute": ()}),
    ("selective", {"missing": "plan.recompute names parts and first layers, not every n-th layer or operators"}),
)


def spelled(name: str) -> str:
    """A setting as the table has it: without dashes, and whole sections of fp8 as one."""
    name = name.lstrip("-").replace("-", "_")
    section = name.split(".")[0]
    return f"{section}.*" if f"{section}.*" in _SECTIONS else name


def sharded(given: Given) -> Answer | None:
    """What happens to weights after forward where nothing is said."""
    if f"{P}fsdp_reshard_after_forward" in given.values or given.number(DP_SHARD, default=-1) == 1:
        return None
    return reshard("default", given)


def _wire(given: Given) -> Answer | None:
    """Torchtitan reduces in fp32, as long as it shards."""
    if f"{T}mixed_precision_reduce" in given.values:
        return None
    return Answer("becomes", {"precision.wire": "fp32"}, "hocket by itself sends them in what computes")


def _ranks(given: Given) -> Answer | None:
    if given.number(DP_SHARD, default=-1) > 1 or given.number(DP_REPLICATE) > 1:
        return None  # it says itself how many there are
    return ranks(given, AXES)


_RULES: Mapping[str, Rule] = {
    "expert_ranks": expert_ranks(_data_ranks, (TP, CP)),
    **{
        rule.__name__: rule
        for rule in (
            replicate,
            shard,
            reshard,
            decay,
            decay_type,
            batch,
            accumulation,
            async_tensor,
            recomputed,
            flavor,
            betas,
        )
    },
}
_ENTRIES = entries("torchtitan", _RULES)
_SECTIONS = {name for row in _ENTRIES for name in row.names if name.endswith(".*")}

TORCHTITAN = System(
    "torchtitan",
    _ENTRIES,
    (
        (RANKS, _ranks),
        ("(no parallelism.fsdp_reshard_after_forward)", sharded),
        ("(no training.mixed_precision_reduce)", _wire),
    ),
    spelled,
    (("mesh.tp", (TP,)), ("mesh.cp", (CP,)), ("mesh.pp", (PP,)), ("plan.chunks", (SCHEDULE,)), ("mesh.ep", (EP,))),
)
