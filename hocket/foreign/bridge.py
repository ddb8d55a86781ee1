"""Megatron Bridge's keys, such as `comm_overlap.tp_comm_overlap=true`: Megatron-LM's flags by other names.

The section in front says in which of Bridge's copies a setting stands. They mean the same thing here.
"""

from __future__ import annotations

from typing import Any

from hocket.foreign.entry import Answer, Entry, Given, choice, entry, no_use, tensor, to
from hocket.foreign.megatron import (
    BULK_OFF,
    DATA_RANKS,
    FIRST,
    GATHERS_OFF,
    LAST,
    SUMS_OFF,
    TENSOR_RANKS,
    VIRTUAL_STAGES,
)

ALIASES = {
    "virtual_pipeline_model_parallel_size": VIRTUAL_STAGES,
    "num_layers_in_first_pipeline_stage": FIRST,
    "num_layers_in_last_pipeline_stage": LAST,
    "num_moe_experts": "--num-experts",
    "sequence_length": "--seq-length",
    "layernorm_epsilon": "--norm-epsilon",
    "bucket_size": "--ddp-bucket-size",
    "num_buckets": "--ddp-num-buckets",
    "average_in_collective": "--ddp-average-in-collective",
    "pad_buckets_for_high_nccl_busbw": "--ddp-pad-buckets-for-high-nccl-busbw",
    "reduce_scatter_with_fp32_accumulation": "--ddp-reduce-scatter-with-fp32-accumulation",
    "grad_reduce_in_fp32": "--accumulate-allreduce-grads-in-fp32",
    "nccl_ub": "--use-nccl-ub",
    "overlap_p2p_comm": "--overlap-p2p-communication",
    "batch_p2p_comm": "--batch-p2p-communication",
    "overlap_p2p_comm_warmup_flush": "--overlap-p2p-communication-warmup-flush",
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
    "fp8": "--fp8-format",
    "kv_channels": "--kv-channels",
}
"""Bridge's name, without its section -> Megatron-LM's flag, where it is not the same word."""


def tied(value: Any, given: Given) -> Answer:
    return Answer("becomes", {"model.tied": bool(value)})


def data_parallel(value: Any, given: Given) -> Answer:
    """What --gpus says otherwise."""
    if given.gpus:
        return Answer("not needed", words="it follows from --gpus")
    return Answer("becomes", {"mesh.dp": value})


def _off(role: str) -> dict[str, str]:
    return {f"overlap.tp.{role}_{direction}": "off" for direction in ("forward", "backward")}


OWN: tuple[Entry, ...] = (
    entry("share_embeddings_and_output_weights", bool, tied),
    entry("gradient_accumulation_fusion", bool, no_use("a weight gradient is written where the reduce reads it")),
    entry("batch_p2p_sync", bool, no_use("sends are never batched, and the host waits for none")),
    entry("tp_comm_overlap_ag", bool, tensor(GATHERS_OFF, TENSOR_RANKS, negative=True)),
    entry("tp_comm_overlap_rs", bool, tensor(SUMS_OFF, TENSOR_RANKS, negative=True)),
    entry("tp_comm_bulk_dgrad", bool, tensor(BULK_OFF, TENSOR_RANKS, negative=True)),
    entry("tp_comm_bulk_wgrad", bool, no_use("a weight gradient waits for nobody: overlap.defer_wgrad")),
    entry("tp_comm_overlap_disable_qkv", bool, tensor(_off("qkv"), TENSOR_RANKS)),
    entry("tp_comm_overlap_disable_fc1", bool, tensor(_off("fc1"), TENSOR_RANKS)),
    entry(DATA_RANKS, int, data_parallel),
    entry(
        "mixed_precision",
        str,
        choice(
            {
                "bf16_mixed": Answer("becomes", {"precision.compute": "bf16"}),
                "bf16-mixed": Answer("becomes", {"precision.compute": "bf16"}),
                "32": Answer("becomes", {"precision.compute": "fp32"}),
                "16-mixed": to(missing="fp32 and bf16 alone: bf16 needs no loss scale"),
                "fp16_mixed": to(missing="fp32 and bf16 alone: bf16 needs no loss scale"),
            },
            "fp32 and bf16 alone, no fp8",
        ),
    ),
)


def spelled(name: str) -> str:
    """Megatron-LM's flag for a key, or the key's last word where it has an entry of its own."""
    last = name.split(".")[-1]
    own = {word for row in OWN for word in row.names}
    if last in own or last.isupper():
        return last
    return ALIASES.get(last, "--" + last.replace("_", "-"))
