"""DeepSpeed's settings, from its JSON file: `zero_optimization.stage` and the others."""

from __future__ import annotations

from typing import Any

from hocket.foreign.entry import (
    Answer,
    Entry,
    Given,
    always,
    choice,
    entry,
    floats,
    never,
    no_use,
    only,
    same,
    to,
    when,
)
from hocket.settings.leaves import is_a

Z, A = "zero_optimization.", "activation_checkpointing."
MICRO, ACCUMULATION, TOTAL = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
TENSOR_RANKS = "tensor_parallel.autotp_size"

STAGES = {0: "no_shard", 1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
UNITS = "what is gathered and reduced as one is a layer, and overlap.dp.prefetch says how far ahead"
QUANTIZED = "weights travel in precision.compute and gradients in precision.wire: fp32 or bf16"


def stage(value: Any, given: Given) -> Answer:
    """ZeRO's stages have names in hocket."""
    if value not in STAGES:
        return Answer("not there", words="stages are 0 to 3")
    return Answer("becomes", {"overlap.dp.strategy": STAGES[value]})


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


def betas(value: Any, given: Given) -> Answer:
    """Whole numbers are numbers, too."""
    if not isinstance(value, list) or not all(is_a(beta, float) for beta in value):
        return Answer("not there", words="train.betas is two numbers")
    return Answer("becomes", {"train.betas": tuple(map(float, value))})


ZERO: tuple[Entry, ...] = (
    entry(f"{Z}stage", int, stage),
    entry(f"{Z}overlap_comm", bool, always("every kind of communication has a lane and groups of its own")),
    entry(f"{Z}contiguous_gradients", bool, always("a unit's gradients are one buffer, written where it is reduced")),
    entry(f"{Z}reduce_scatter", bool, always("gradients of shards are reduced to where they are kept")),
    entry(f"{Z}allgather_partitions", bool, always("weights are gathered, never broadcast")),
    entry(f"{Z}reduce_bucket_size {Z}allgather_bucket_size", int, no_use(UNITS)),
    entry(f"{Z}stage3_prefetch_bucket_size {Z}prefetch_bucket_size", int, no_use(UNITS)),
    entry(f"{Z}stage3_max_live_parameters {Z}max_live_parameters", int, no_use("slots bound what is gathered at once")),
    entry(f"{Z}stage3_max_reuse_distance {Z}max_reuse_distance", int, no_use("the plan knows who is read next")),
    entry(
        f"{Z}stage3_param_persistence_threshold {Z}param_persistence_threshold",
        int,
        no_use("small parameters travel with their layer"),
    ),
    entry(f"{Z}stage3_module_granularity_threshold", int, no_use(UNITS)),
    entry(f"{Z}sub_group_size", int, no_use("a rank's shards are updated all at once")),
    entry(f"{Z}round_robin_gradients", bool, no_use("shards are ranges of elements, equally long on all ranks")),
    entry(f"{Z}use_multi_rank_bucket_allreduce", bool, no_use("shards are reduced straight to their owner")),
    entry(f"{Z}offload_param.device {Z}offload_optimizer.device", str, never("nothing is offloaded")),
    entry(f"{Z}offload_param.* {Z}offload_optimizer.*", object, no_use("it goes with device")),
    entry(f"{Z}cpu_offload", bool, never("nothing is offloaded")),
    entry(
        f"{Z}zero_hpz_partition_size {Z}mics_shard_size",
        int,
        only(1, "no second level of shards in planned steps; hocket.fully_shard has replicas", "there is one level"),
    ),
    entry(
        f"{Z}zero_quantized_weights {Z}zero_quantized_gradients {Z}zero_quantized_nontrainable_weights",
        bool,
        never(QUANTIZED),
    ),
    entry(f"{Z}stage3_gather_16bit_weights_on_model_save", bool, never("checkpoints are sharded")),
    entry(f"{Z}ignore_unused_parameters", bool, always("what has no gradient is not updated")),
    entry(f"{Z}elastic_checkpoint", bool, always("checkpoints load on any number of ranks")),
    entry(f"{Z}memory_efficient_linear", bool, always("linear layers keep their input alone")),
)

REST: tuple[Entry, ...] = (
    entry(TOTAL, int, total),
    entry(MICRO, int, same("train.sequences")),
    entry(ACCUMULATION, int, same("train.microbatches")),
    entry("gradient_clipping", float, floats("train.clip")),
    entry("prescale_gradients", bool, never("sums are scaled once, where they arrive")),
    entry("gradient_predivide_factor", float, only(1.0, "sums are scaled once, where they arrive", "no factor")),
    entry(
        "communication_data_type",
        str,
        choice(
            {
                None: to(needless="as in hocket: what computes"),
                "bf16": Answer("becomes", {"precision.wire": "bf16"}),
                "bfp16": Answer("becomes", {"precision.wire": "bf16"}),
                "fp32": Answer("becomes", {"precision.wire": "fp32"}),
            },
            "fp32 and bf16 alone",
        ),
    ),
    entry("data_types.grad_accum_dtype", str, only("fp32", "gradients at rest are fp32", "fp32 too")),
    entry("bf16.enabled bfloat16.enabled", bool, when({"precision.compute": "bf16"})),
    entry("bf16.immediate_grad_update", bool, always("a gradient is added up in fp32 as soon as it is reduced")),
    entry("bf16.*", object, no_use("it goes with bf16.enabled")),
    entry("fp16.enabled", bool, never("fp32 and bf16 alone: bf16 needs no loss scale")),
    entry("fp16.*", object, no_use("it goes with fp16.enabled")),
    entry("amp.*", object, never("no apex: precision.compute")),
    entry("sparse_gradients", bool, never("gradients of the embedding are dense")),
    entry(f"{A}partition_activations", bool, never("no recomputation across ranks: plan.recompute names parts")),
    entry(f"{A}cpu_checkpointing", bool, never("nothing is offloaded")),
    entry(
        f"{A}contiguous_memory_optimization {A}synchronize_checkpoint_boundary {A}profile", bool, no_use("no use here")
    ),
    entry(f"{A}number_checkpoints", int, no_use("plan.recompute names parts of all layers")),
    entry(TENSOR_RANKS, int, same("mesh.tp")),
    entry("sequence_parallel_size", int, only(1, "no context parallelism", "there is none")),
    entry(
        "optimizer.type",
        str,
        choice(dict.fromkeys(("AdamW", "Adam", "FusedAdam"), to(needless="AdamW")), "AdamW alone"),
    ),
    entry("optimizer.params.lr", float, floats("train.lr")),
    entry("optimizer.params.eps", float, floats("train.eps")),
    entry("optimizer.params.weight_decay", float, floats("train.weight_decay")),
    entry("optimizer.params.betas", list, betas),
    entry("scheduler.*", object, no_use("train.lr, train.min_lr and train.warmup say it")),
    entry(
        "zero_allow_untested_optimizer steps_per_print wall_clock_breakdown zero_force_ds_cpu_optimizer dump_state",
        object,
        no_use("nothing about overlap"),
    ),
    entry(
        "comms_logger.* flops_profiler.* tensorboard.* csv_monitor.* wandb.* aio.*",
        object,
        no_use("nothing about overlap"),
    ),
)

ENTRIES: tuple[Entry, ...] = (*ZERO, *REST)
_EXACT = {name for row in ENTRIES for name in row.names}


def spelled(name: str) -> str:
    """A setting as the table has it; what has no row of its own belongs to that of a section around it."""
    if name in _EXACT:
        return name
    parts = name.split(".")
    sections = [".".join(parts[:count]) + ".*" for count in range(len(parts) - 1, 0, -1)]
    return next((section for section in sections if section in _EXACT), name)
