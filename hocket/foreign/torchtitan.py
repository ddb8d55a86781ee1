"""torchtitan's settings, by section: `parallelism.tensor_parallel_degree`, from TOML or as flags."""

from __future__ import annotations

from typing import Any

from hocket.foreign.entry import (
    Answer,
    Entry,
    Given,
    always,
    choice,
    entry,
    expert_ranks,
    floats,
    never,
    no_use,
    only,
    same,
    tensor,
    to,
    when,
)

P, T = "parallelism.", "training."
TP = f"{P}tensor_parallel_degree"
EP, SCHEDULE = f"{P}expert_parallel_degree", f"{P}pipeline_parallel_schedule"
PP, DP_SHARD, DP_REPLICATE = (
    f"{P}pipeline_parallel_degree",
    f"{P}data_parallel_shard_degree",
    f"{P}data_parallel_replicate_degree",
)
AXES = (PP, TP, f"{P}context_parallel_degree")
LOCAL, MICRO = f"{T}local_batch_size", f"{P}pipeline_parallel_microbatch_size"

LAYOUT = "plan.layers_per_stage takes the layers of every stage, plan.chunks the stages of a rank"


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


SCHEDULES = {
    "1F1B": Answer("becomes", {"plan.order": "1f1b", "plan.chunks": 1}, "one stage per rank"),
    "Interleaved1F1B": Answer("becomes", {"plan.order": "interleaved", "plan.chunks": 2}, "two stages per rank"),
    "ZBVZeroBubble": Answer("becomes", {"plan.order": "zb_v", "plan.chunks": 2}),
    "DualPipeV": Answer("becomes", {"plan.order": "merged_v", "plan.chunks": 2}),
    "InterleavedZeroBubble": to(missing="zb_v, the one with two stages per rank, or zb_h1 with one"),
}

RECOMPUTATION = {
    "none": Answer("becomes", {"plan.recompute": ()}),
    "selective": to(missing="parts of all layers, not every n-th layer or some operators: plan.recompute"),
}


def async_tensor(value: Any, given: Given) -> Answer:
    """Off is a wish here: by itself a rule would put communication beside products."""
    return tensor({"overlap.tp.method": "auto" if value else "off"}, TP)(True, given)


def recomputed(value: Any, given: Given) -> Answer:
    """Whole layers; with expert ranks, those of a model whose layers all have experts."""
    if value == "full":
        experts = given.number(EP) > 1
        words = "attn, and of experts and mlp what the layers have"
        return Answer("becomes", {"plan.recompute": ("attn", "experts" if experts else "mlp")}, words)
    return choice(RECOMPUTATION, "none, or whole parts of all layers")(value, given)


PARALLEL: tuple[Entry, ...] = (
    entry(DP_REPLICATE, int, replicate),
    entry(DP_SHARD, int, shard),
    entry(f"{P}fsdp_reshard_after_forward", str, reshard),
    entry(TP, int, same("mesh.tp")),
    entry(f"{P}disable_loss_parallel", bool, never("with tensor ranks the vocabulary is always split")),
    entry(f"{P}enable_async_tensor_parallel", bool, async_tensor),
    entry(PP, int, same("mesh.pp")),
    entry(SCHEDULE, str, choice(SCHEDULES, "1f1b, interleaved, zb_h1, zb_v, merged_v alone")),
    entry(f"{P}pipeline_parallel_schedule_csv", str, never("plan.order names an order; it is not read from a file")),
    entry(MICRO, int, no_use(f"it goes with {LOCAL}")),
    entry(f"{P}pipeline_parallel_layers_per_stage", int, never(LAYOUT)),
    entry(
        f"{P}pipeline_parallel_first_stage_less_layers {P}pipeline_parallel_last_stage_less_layers", int, never(LAYOUT)
    ),
    entry(f"{P}pipeline_parallel_split_points {P}module_fqns_per_model_part", list, never(LAYOUT)),
    entry(f"{P}context_parallel_degree", int, only(1, "no context parallelism", "there is none")),
    entry(
        f"{P}context_parallel_rotate_method {P}context_parallel_load_balancer", str, no_use("no context parallelism")
    ),
    entry(EP, int, expert_ranks(_data_ranks)),
    entry(f"{P}expert_tensor_parallel_degree", int, only(1, "experts are not split over tensor ranks", "as in hocket")),
    entry(
        f"{P}expert_parallel_comm_backend",
        str,
        choice(
            {
                "standard": to(needless="rows travel by all-to-all"),
                "deepep": Answer("becomes", {"train.transport": "copy_engine"}, "copy engines move rows, in one host"),
                "hybridep": Answer(
                    "becomes", {"train.transport": "copy_engine"}, "copy engines move rows, in one host"
                ),
            },
            "rows travel by all-to-all alone",
        ),
    ),
    entry(f"{P}enable_compiled_autograd", bool, never("backward is operations of the plan, each with its own graph")),
)

TRAINING: tuple[Entry, ...] = (
    entry(LOCAL, int, batch),
    entry(f"{T}global_batch_size", int, accumulation),
    entry(f"{T}seq_len", int, same("data.sequence_length")),
    entry(f"{T}steps", int, same("train.steps")),
    entry(f"{T}max_norm", float, floats("train.clip")),
    entry(f"{T}seed debug.seed", int, same("train.seed")),
    entry(f"debug.moe_force_load_balance {T}debug_moe_force_load_balance", bool, when({"model.routing": "even"})),
    entry(
        f"{T}mixed_precision_param",
        str,
        choice(
            {
                "bfloat16": Answer("becomes", {"precision.compute": "bf16"}),
                "float32": Answer("becomes", {"precision.compute": "fp32"}),
            },
            "fp32 and bf16 alone",
        ),
    ),
    entry(
        f"{T}mixed_precision_reduce",
        str,
        choice(
            {
                "bfloat16": Answer("becomes", {"precision.wire": "bf16"}),
                "float32": Answer("becomes", {"precision.wire": "fp32"}),
            },
            "fp32 and bf16 alone",
        ),
    ),
    entry(f"{T}dtype", str, only("float32", "main weights are fp32", "main weights are fp32")),
    entry(f"{T}enable_cpu_offload", bool, never("nothing is offloaded")),
    entry(f"{T}gc_freq", int, no_use("the garbage collector runs as Python wants")),
    entry("activation_checkpoint.mode", str, recomputed),
    entry("activation_checkpoint.selective_ac_option", str, no_use("it goes with activation_checkpoint.mode")),
    entry("compile.enable", bool, never("planned steps run eagerly, on kernels of their own")),
    entry("compile.components", list, no_use("it goes with compile.enable")),
    entry("float8.* mx.* quantize.*", object, never("no fp8")),
    entry("model.converters", list, never("no fp8, no converters")),
    entry("comm.init_timeout_seconds", int, no_use("train.hang_timeout holds from the start")),
    entry("comm.train_timeout_seconds", int, floats("train.hang_timeout")),
    entry("comm.trace_buf_size", int, always("the last operations are always recorded")),
    entry("optimizer.name", str, only("AdamW", "AdamW alone", "as in hocket")),
    entry("optimizer.lr", float, floats("train.lr")),
    entry("optimizer.eps", float, floats("train.eps")),
    entry("optimizer.weight_decay", float, floats("train.weight_decay")),
    entry("optimizer.implementation", str, no_use("updates are made on shards, all at once")),
    entry("lr_scheduler.warmup_steps", int, same("train.warmup")),
)

ENTRIES: tuple[Entry, ...] = (*PARALLEL, *TRAINING)


def spelled(name: str) -> str:
    """A setting as the table has it: without dashes, and whole sections of fp8 as one."""
    name = name.lstrip("-").replace("-", "_")
    section = name.split(".")[0]
    return f"{section}.*" if section in ("float8", "mx", "quantize") else name


def sharded(given: Given) -> Answer | None:
    """What happens to weights after forward where nothing is said."""
    if f"{P}fsdp_reshard_after_forward" in given.values or given.number(DP_SHARD, default=-1) == 1:
        return None
    return reshard("default", given)
