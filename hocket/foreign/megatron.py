"""Megatron-LM's flags of parallelism, sharding and overlap. Its other ones are in `megatron_model.py`.

Flags that are only in Megatron-LM#4268, a draft, are marked so.
"""

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
    never,
    no_use,
    only,
    same,
    switch,
    tensor,
    to,
    when,
)

LAYERS, PIPELINE, TENSOR_RANKS = "--num-layers", "--pipeline-model-parallel-size", "--tensor-model-parallel-size"
AXES = (TENSOR_RANKS, PIPELINE, "--context-parallel-size")
"""What data ranks are multiplied by."""
DATA_RANKS, EXPERT_RANKS = "data_parallel_size", "--expert-model-parallel-size"
VIRTUAL_LAYERS, VIRTUAL_STAGES = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"

LAYOUT_BY_HAND = "plan.layers_per_stage takes the layers of every stage; hocket plan --search finds them"
OWN_LANES = "every kind of communication has a lane and groups of its own"


def chunks_of(value: Any, given: Given) -> Answer:
    """Virtual stages per rank from the layers of one of them."""
    layers, pp = given.number(LAYERS, default=0), given.number(PIPELINE)
    if not layers or pp * value < 1 or layers % (pp * value):
        why = f"it needs {LAYERS}, a multiple of {PIPELINE} x {value}, to become plan.chunks"
        return Answer("not there", words=why)
    return Answer("becomes", {"plan.chunks": layers // (pp * value)}, f"{layers} layers over {pp} ranks")


def uneven(value: Any, given: Given) -> Answer:
    """Layers of every stage, where the first or the last has another number."""
    layers, pp = given.number(LAYERS, default=0), given.number(PIPELINE)
    ends = {at: given.number(name, default=0) for at, name in ((0, FIRST), (pp - 1, LAST))}
    fixed = {at: count for at, count in ends.items() if count}
    rest, others = layers - sum(fixed.values()), pp - len(fixed)
    virtual = given.number(VIRTUAL_STAGES) > 1 or VIRTUAL_LAYERS in given.values
    if not layers or pp < 2 or virtual or rest < 0 or (rest % others if others else rest):
        return Answer("not there", words=f"only with {LAYERS} and one stage per rank: {LAYOUT_BY_HAND}")
    stages = tuple(fixed.get(rank, rest // others if others else 0) for rank in range(pp))
    return Answer("becomes", {"plan.layers_per_stage": stages})


def data_ranks(given: Given) -> int:
    """Data ranks that the other axes leave, or as many as Bridge is told; 0 if that is not known."""
    data, rest = divmod(given.gpus, max(1, given.product(AXES)))
    return 0 if rest else data or given.number(DATA_RANKS, default=0)


def strategy(value: Any, given: Given) -> Answer:
    """Megatron-FSDP's strategies have hocket's names."""
    return Answer("becomes", {"overlap.dp.strategy": value})


def torch_fsdp2(value: Any, given: Given) -> Answer:
    """FSDP2 gives weights back after forward unless it is told not to."""
    keeps = bool(given.values.get("--torch-fsdp2-no-reshard-after-forward"))
    return Answer("becomes", {"overlap.dp.strategy": "optim_grads" if keeps else "optim_grads_params"})


PARALLEL: tuple[Entry, ...] = (
    entry(TENSOR_RANKS, int, same("mesh.tp")),
    entry(PIPELINE, int, same("mesh.pp")),
    entry(VIRTUAL_LAYERS, int, chunks_of),
    entry(VIRTUAL_STAGES, int, same("plan.chunks")),
    entry("--microbatch-group-size-per-virtual-pipeline-stage", int, same("plan.group")),
    entry(f"{FIRST} {LAST}", int, uneven),
    entry("--pipeline-model-parallel-layout", str, never(LAYOUT_BY_HAND)),
    entry("--account-for-embedding-in-pipeline-split", bool, never(LAYOUT_BY_HAND)),
    entry("--account-for-loss-in-pipeline-split", bool, never(LAYOUT_BY_HAND)),
    entry("--context-parallel-size", int, only(1, "no context parallelism", "there is none")),
    entry("--cp-comm-type", str, never("no context parallelism")),
    entry("--hierarchical-context-parallel-sizes", list, never("no context parallelism")),
    entry(EXPERT_RANKS, int, expert_ranks(data_ranks)),
    entry("--expert-tensor-parallel-size", int, only(1, "experts are not split over tensor ranks", "as in hocket")),
    entry("--sequence-parallel", bool, always("with tensor parallelism the residual stream is split over tokens")),
    entry("--use-tp-pp-dp-mapping", bool, never("the order of ranks is fixed: tp varies fastest, then dp, then pp")),
    entry(
        "--num-distributed-optimizer-instances",
        int,
        only(1, "mesh.shard takes the ranks that share a copy of the weights", "one"),
    ),
    entry("--outer-dp-sharding-strategy", str, only("no_shard", "no replicas of shards in planned steps", "one")),
    entry(
        "--distributed-backend",
        str,
        choice(
            {
                "nccl": to(needless="groups of GPUs are NCCL's; train.transport leaves to copies what they can move"),
                "gloo": Answer("becomes", {"train.transport": "gloo"}),
            },
            "groups are of nccl or gloo",
        ),
    ),
    entry(
        "--distributed-timeout-minutes",
        int,
        lambda value, given: Answer("becomes", {"train.hang_timeout": 60.0 * value}, "in seconds"),
    ),
    entry("--use-sharp", bool, never("no reductions inside switches")),
    entry("--nccl-communicator-config-path", str, never("hocket bounds the SMs of every group itself")),
    entry("--high-priority-stream-groups", list, no_use("all communication lanes have a higher priority")),
    entry("--nproc-per-node --nproc_per_node", int, no_use("ranks of a host: --gpus is their number over all hosts")),
    entry("--nnodes", int, no_use("hosts: --gpus is the number of ranks over all of them")),
)

DATA: tuple[Entry, ...] = (
    entry("--use-distributed-optimizer", bool, when({"overlap.dp.strategy": "optim"}, otherwise="weights are whole")),
    entry("--data-parallel-sharding-strategy", str, strategy),
    entry("--use-megatron-fsdp --use-custom-fsdp", bool, no_use("--data-parallel-sharding-strategy decides")),
    entry("--use-torch-fsdp2", bool, torch_fsdp2),
    entry("--torch-fsdp2-no-reshard-after-forward", bool, no_use("it goes with --use-torch-fsdp2")),
    entry("--overlap-grad-reduce", bool, always(f"{OWN_LANES}: reduces run beside backward")),
    entry("--overlap-param-gather", bool, always(f"{OWN_LANES}: gathers run ahead by overlap.dp.prefetch")),
    entry(
        "--overlap-param-gather-with-optimizer-step",
        bool,
        when({"overlap.dp.update": "next_step"}),
    ),
    entry("--no-align-grad-reduce", bool, no_use("the plan issues a reduce where its weight gradients are done")),
    entry("--no-align-param-gather", bool, no_use("the plan issues a gather ahead of its reader, on every stage")),
    entry("--align-param-gather", bool, no_use("the plan issues a gather ahead of its reader, on every stage")),
    entry("--delay-grad-reduce", bool, no_use("the plan issues a reduce where its weight gradients are done")),
    entry("--delay-param-gather", bool, no_use("the plan issues a gather ahead of its reader")),
    entry("--ddp-bucket-size", int, never("in a plan what is gathered and reduced as one is a layer")),
    entry("--ddp-num-buckets", int, never("in a plan what is gathered and reduced as one is a layer")),
    entry(
        "--suggested-communication-unit-size", int, never("in a plan what is gathered and reduced as one is a layer")
    ),
    entry("--ddp-average-in-collective", bool, no_use("sums are scaled once, where they arrive")),
    entry("--ddp-pad-buckets-for-high-nccl-busbw", bool, never("shards are padded to equal length, no further")),
    entry(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        bool,
        when({"train.transport": "copy_engine"}, "gradients travel in bf16 and are summed in fp32, in rank order"),
    ),
    entry("--use-nccl-ub", bool, when({"train.transport": "copy_engine"}, "buffers in symmetric windows")),
    entry("--disable-symmetric-registration", bool, never("with copy engines buffers are always in such windows")),
    entry("--fsdp-double-buffer", bool, always("full weights lie in slots that are allocated once")),
    entry("--init-model-with-meta-device", bool, always("no rank ever holds a whole model")),
    entry("--keep-fp8-transpose-cache --keep-fp8-transpose-cache-when-using-custom-fsdp", bool, never("no fp8")),
)

GATHERS_OFF = {f"overlap.tp.{at}": "off" for at in ("qkv_forward", "fc1_forward", "proj_backward", "fc2_backward")}
SUMS_OFF = {f"overlap.tp.{at}": "off" for at in ("proj_forward", "fc2_forward")}
BULK_OFF = {f"overlap.tp.{at}": "off" for at in ("qkv_backward", "fc1_backward")}
SUMS_BACKWARD = {f"overlap.tp.{at}": "pipeline" for at in ("qkv_backward", "fc1_backward")}

TENSOR: tuple[Entry, ...] = (
    entry("--tp-comm-overlap", bool, tensor({"overlap.tp.method": "auto"}, TENSOR_RANKS)),
    entry("--tp-comm-overlap-cfg", str, no_use("a rule chooses for each product and direction from sizes and rates")),
    entry("--disable-tp-comm-overlap-ag", bool, tensor(GATHERS_OFF, TENSOR_RANKS)),
    entry("--disable-tp-comm-overlap-rs", bool, tensor(SUMS_OFF, TENSOR_RANKS)),
    entry("--disable-tp-comm-bulk-dgrad", bool, tensor(BULK_OFF, TENSOR_RANKS)),
    entry("--disable-tp-comm-bulk-wgrad", bool, no_use("a weight gradient waits for nobody: overlap.defer_wgrad")),
    entry("--tp-comm-overlap-rs-dgrad", bool, tensor(SUMS_BACKWARD, TENSOR_RANKS)),
    entry("--tp-comm-bootstrap-backend", str, no_use("there is no backend of its own to start")),
    entry("--no-async-tensor-model-parallel-allreduce", bool, never("gradients are always reduced beside compute")),
)

PIPELINE_SENDS: tuple[Entry, ...] = (
    entry("--overlap-p2p-communication", bool, always(f"{OWN_LANES}: sends need no virtual stages to overlap")),
    entry("--no-overlap-p2p-communication", bool, never("sends are always on lanes of their own")),
    entry("--overlap-p2p-communication-warmup-flush", bool, always("sends of warm-up and flush are no different")),
    entry(
        "--batch-p2p-communication --batch-p2p-comm",
        bool,
        never("sends are never batched: they would wait for each other"),
    ),
    entry("--overlap-p2p-backward-on-comm-stream", bool, switch("overlap.pp.backward_lane", "of Megatron-LM#4268")),
    entry("--overlap-p2p-wgrad-delayed-layer-number", int, same("overlap.pp.defer_layers")),
    entry(
        "--overlap-p2p-with-transformer-layer-wgrad",
        bool,
        lambda value, given: Answer("becomes", {"overlap.pp.defer_parts": "all" if value else "attn"}),
    ),
    entry("--no-scatter-gather-tensors-in-pipeline", bool, no_use("each tensor rank sends its own part of the tokens")),
    entry(
        "--defer-embedding-wgrad-compute",
        bool,
        lambda value, given: (
            Answer("becomes", {"overlap.pp.defer_head": given.number("--wgrad-deferral-limit", default=0) or -1})
            if value
            else Answer("not needed", words="that is how it is without it")
        ),
    ),
    entry("--wgrad-deferral-limit", int, no_use("it goes into overlap.pp.defer_head, where anything is deferred")),
)

EXPERTS: tuple[Entry, ...] = (
    entry("--overlap-moe-expert-parallel-comm", bool, switch("overlap.ep.merge")),
    entry("--delay-wgrad-compute", bool, switch("overlap.defer_wgrad")),
    entry("--ep-overlap-early-attn-memory-release", bool, when({"plan.layer_order": "early_release"})),
    entry(
        "--moe-shared-expert-overlap",
        bool,
        no_use("the shared expert is computed in front of the dispatch, under the other half's all-to-all"),
    ),
    entry(
        "--moe-token-dispatcher-type",
        str,
        choice(
            {
                "alltoall": to(needless="rows travel by all-to-all"),
                "flex": Answer("becomes", {"train.transport": "copy_engine"}, "in one host copy engines move the rows"),
            },
            "rows travel by all-to-all alone",
        ),
    ),
    entry(
        "--moe-enable-deepep", bool, when({"train.transport": "copy_engine"}, "in one host copy engines move the rows")
    ),
    entry(
        "--moe-flex-dispatcher-backend",
        str,
        no_use("it does nothing without --moe-token-dispatcher-type flex, which becomes train.transport"),
    ),
    entry("--moe-deepep-num-sms --moe-hybridep-num-sms", int, no_use("copy engines hold no SM; NCCL's are bounded")),
    entry("--moe-grouped-gemm", bool, always("products of experts are grouped")),
    entry("--moe-permute-fusion", bool, always("moving rows is one kernel")),
    entry("--moe-router-fusion", bool, always("choosing experts is one kernel")),
    entry("--moe-expert-capacity-factor", float, never("no row is ever dropped")),
    entry("--moe-pad-expert-input-to-capacity", bool, never("no row is ever dropped, and none is padded")),
    entry("--moe-token-drop-policy", str, never("no row is ever dropped")),
    entry("--moe-layer-recompute", bool, when({"plan.recompute": ("experts",)})),
)

OVERLAP: tuple[Entry, ...] = (*PARALLEL, *DATA, *TENSOR, *PIPELINE_SENDS, *EXPERTS)
