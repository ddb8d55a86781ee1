"""Megatron-LM's flags of precision, recomputation, the model and the batch, and variables that are set with them."""

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
from hocket.foreign.megatron import data_ranks

RECOMPUTED = {"mlp": "mlp", "moe": "experts"}
"""Modules that Megatron recomputes -> parts in hocket."""


def all_parts(experts: bool, dense: bool) -> tuple[str, ...]:
    """The parts that layers have."""
    return ("attn", *(["experts"] if experts else []), *(["mlp"] if dense else []))


def granularity(value: Any, given: Given) -> Answer:
    """All parts of all layers, or the modules that are named."""
    if value == "full":
        if given.values.get("--recompute-method") == "block" or given.number("--recompute-num-layers") > 1:
            words = "parts of all layers, not of some: --recompute-method uniform --recompute-num-layers 1"
            return Answer("not there", words=words)
        experts = given.number("--num-experts", default=0) > 0
        return Answer(
            "becomes", {"plan.recompute": all_parts(experts, not experts or "--moe-layer-freq" in given.values)}
        )
    return Answer("not needed", words="--recompute-modules names the parts")


def modules(value: Any, given: Given) -> Answer:
    """Parts for those modules that are parts; the rest in words."""
    asked = value if isinstance(value, list) else [value]
    parts = tuple(RECOMPUTED[module] for module in asked if module in RECOMPUTED)
    rest = [module for module in asked if module not in RECOMPUTED]
    why = {
        "core_attn": "attention never keeps its scores",
        "moe_act": "only with the whole of experts",
        "layernorm": "norms keep one number per token and their input",
        "shared_experts": "only with the whole of attn",
        "mla_up_proj": "no latent attention",
    }
    words = "; ".join(f"{module}: {why.get(module, 'no such part')}" for module in rest)
    if parts:
        return Answer("becomes", {"plan.recompute": parts}, words)
    return Answer("not needed" if rest == ["core_attn"] else "not there", words=words or "it names no module")


def head_dim(value: Any, given: Given) -> Answer:
    return Answer("becomes", {"model.head_dim": value})


def dense_layers(value: Any, given: Given) -> Answer:
    """Every n-th layer, or a list of 0 and 1, or such a list as Python writes it, is a MoE layer."""
    layers = given.number("--num-layers", default=0)
    if isinstance(value, str):
        value = _pattern(value)
    if isinstance(value, int):
        value = [int(layer % value == 0) for layer in range(layers)] if value else []
    if not layers or not isinstance(value, list) or len(value) != layers:
        return Answer("not there", words="it needs --num-layers, and a number for each of them")
    return Answer("becomes", {"model.dense_layers": tuple(layer for layer in range(layers) if not value[layer])})


def _pattern(text: str) -> list[int]:
    """Lists as they are written in scripts: `[0]*3+[1]*58`."""
    found: list[int] = []
    for term in text.replace(" ", "").split("+"):
        inner, _, times = term.partition("*")
        numbers = [part for part in inner.strip("()[]").split(",") if part]
        if not all(part in ("0", "1") for part in numbers) or not (times or "1").isdigit():
            return []
        found += [int(part) for part in numbers] * int(times or 1)
    return found


def microbatches(value: Any, given: Given) -> Answer:
    """A step's microbatches on one data-parallel rank."""
    size, dp = given.number("--micro-batch-size"), data_ranks(given)
    if not dp:
        words = "it needs --gpus, a multiple of the other axes, to become train.microbatches"
        return Answer("not there", words=words)
    if size < 1 or value % (dp * size):
        return Answer(
            "not there", words=f"{value} sequences cannot be split over {dp} data ranks in microbatches of {size}"
        )
    return Answer("becomes", {"train.microbatches": value // (dp * size)}, f"{dp} data ranks, {size} sequences each")


def in_fp32(value: Any, given: Given) -> Answer:
    """Where gradients travel in fp32; otherwise in what computes. At rest they are fp32 anyway."""
    return Answer("becomes", {"precision.wire": "fp32" if value else "auto"})


GRAPH = "the whole step is one graph, not parts of it"

PRECISION: tuple[Entry, ...] = (
    entry("--bf16", bool, when({"precision.compute": "bf16"})),
    entry("--fp16", bool, never("fp32 and bf16 alone: bf16 needs no loss scale")),
    entry("--fp8-format --fp8", str, never("no fp8")),
    entry("--fp8-recipe", str, never("no fp8")),
    entry("--fp8-param-gather", bool, never("no fp8")),
    entry("--fp4-format", str, never("no fp4")),
    entry("--first-last-layers-bf16", bool, no_use("all layers are bf16")),
    entry("--accumulate-allreduce-grads-in-fp32", bool, in_fp32),
    entry("--grad-reduce-in-bf16", bool, when({"precision.wire": "bf16"})),
    entry("--no-gradient-accumulation-fusion", bool, no_use("a weight gradient is written where the reduce reads it")),
    entry("--use-precision-aware-optimizer", bool, never("main weights and both averages of AdamW are fp32")),
    entry("--main-grads-dtype", str, only("fp32", "gradients at rest are fp32", "fp32 too")),
    entry("--main-params-dtype", str, only("fp32", "main weights are fp32", "fp32 too")),
    entry("--exp-avg-dtype", str, only("fp32", "AdamW's averages are fp32", "fp32 too")),
    entry("--exp-avg-sq-dtype", str, only("fp32", "AdamW's averages are fp32", "fp32 too")),
    entry("--moe-router-dtype", str, only("fp32", "the router computes in fp32", "fp32 too")),
    entry("--fp32-residual-connection", bool, never("the residual stream is in the compute dtype")),
)

RECOMPUTATION: tuple[Entry, ...] = (
    entry("--recompute-granularity", str, granularity),
    entry("--recompute-modules", list, modules),
    entry("--recompute-activations", bool, no_use("it means core_attn, and attention never keeps its scores")),
    entry("--recompute-method", str, no_use("it goes with --recompute-granularity full")),
    entry("--recompute-num-layers", int, no_use("it goes with --recompute-granularity full")),
    entry("--distribute-saved-activations", bool, never("what is kept is split over tensor ranks where it is made")),
    entry("--cpu-offloading --optimizer-cpu-offload --offload-optimizer-states", bool, never("nothing is offloaded")),
    entry("--cpu-offloading-num-layers", int, never("nothing is offloaded")),
    entry("--enable-cuda-graph --external-cuda-graph", bool, when({"plan.graphs": "on"}, GRAPH)),
    entry(
        "--cuda-graph-impl",
        str,
        choice(
            {
                "none": to(needless="it is off by itself"),
                "local": Answer("becomes", {"plan.graphs": "on"}, GRAPH),
                "transformer_engine": Answer("becomes", {"plan.graphs": "on"}, GRAPH),
            },
            "plan.graphs is on or off",
        ),
    ),
    entry("--cuda-graph-scope", list, no_use(GRAPH)),
)

POSITIONS = ("--position-embedding-type", "--use-rotary-position-embeddings")

MODEL: tuple[Entry, ...] = (
    entry("--num-layers", int, same("model.layers")),
    entry("--hidden-size", int, same("model.hidden")),
    entry("--ffn-hidden-size", int, same("model.ffn")),
    entry("--num-attention-heads", int, same("model.heads")),
    entry("--num-query-groups", int, same("model.kv_heads")),
    entry("--group-query-attention", bool, no_use("--num-query-groups says how many")),
    entry("--kv-channels", int, head_dim),
    entry("--padded-vocab-size --vocab-size", int, same("model.vocab")),
    entry("--untie-embeddings-and-output-weights", bool, when({"model.tied": False})),
    entry("--qk-layernorm", bool, when({"model.qk_norm": True})),
    entry("--rotary-base", float, floats("model.rope_theta")),
    entry("--norm-epsilon", float, floats("model.norm_eps")),
    entry("--init-method-std", float, floats("model.init_std")),
    entry("--swiglu", bool, always("MLPs are SwiGLU")),
    entry("--normalization", str, only("RMSNorm", "norms are RMSNorm", "as in hocket")),
    entry(POSITIONS[0], str, only("rope", "positions are rotary", "as in hocket")),
    entry(POSITIONS[1], bool, always("positions are rotary")),
    entry("--disable-bias-linear", bool, always("linear layers have no bias")),
    entry("--add-qkv-bias", bool, never("linear layers have no bias")),
    entry("--num-experts", int, same("model.experts")),
    entry("--moe-router-topk", int, same("model.top_k")),
    entry("--moe-ffn-hidden-size", int, same("model.expert_ffn")),
    entry("--moe-shared-expert-intermediate-size", int, same("model.shared_ffn")),
    entry("--moe-layer-freq", str, dense_layers),
    entry("--moe-aux-loss-coeff", float, floats("model.aux_loss")),
    entry("--moe-z-loss-coeff", float, never("no loss on the router's logits")),
    entry(
        "--moe-router-load-balancing-type",
        str,
        choice(
            {"aux_loss": to(needless="the auxiliary loss is one"), "none": to(needless="model.aux_loss = 0 is none")},
            "an auxiliary loss over each microbatch, or a bias, alone",
        ),
    ),
    entry(
        "--moe-router-force-load-balancing",
        bool,
        when({"model.routing": "even"}, "exactly even, where random logits are so on average"),
    ),
    entry("--moe-router-score-function", str, same("model.router")),
    entry("--moe-router-pre-softmax", bool, when({"model.normalize_top_k": False})),
    entry("--moe-router-topk-scaling-factor", float, floats("model.route_scale")),
    entry(
        "--moe-router-enable-expert-bias",
        bool,
        lambda value, given: when({"model.bias_rate": float(given.values.get("--moe-router-bias-update-rate", 1e-3))})(
            value, given
        ),
    ),
    entry("--moe-router-bias-update-rate", float, no_use("it goes with --moe-router-enable-expert-bias")),
    entry("--mtp-num-layers", int, never("no layers that predict further tokens")),
    entry("--multi-latent-attention", bool, never("no latent attention")),
)

BATCH: tuple[Entry, ...] = (
    entry("--micro-batch-size", int, same("train.sequences")),
    entry("--global-batch-size", int, microbatches),
    entry("--rampup-batch-size", list, never("the batch keeps its size")),
    entry("--seq-length", int, same("data.sequence_length")),
    entry("--max-position-embeddings", int, no_use("rotary positions have no end")),
    entry("--reset-position-ids --reset-attention-mask --eod-mask-loss", bool, when({"data.packing": "on"})),
    entry("--train-iters", int, same("train.steps")),
    entry("--lr", float, floats("train.lr")),
    entry("--min-lr", float, floats("train.min_lr")),
    entry("--lr-warmup-iters", int, same("train.warmup")),
    entry("--lr-decay-style", str, only("cosine", "the way down is half a cosine", "as in hocket")),
    entry("--weight-decay", float, floats("train.weight_decay")),
    entry("--clip-grad", float, floats("train.clip")),
    entry("--adam-eps", float, floats("train.eps")),
    entry("--seed", int, same("train.seed")),
)

VARIABLES: tuple[Entry, ...] = (
    entry(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        int,
        no_use("hocket wants 32 whatever is on: no order of its ops relies on the order of launches; leave it out"),
    ),
    entry(
        "NVTE_FWD_LAYERNORM_SM_MARGIN NVTE_BWD_LAYERNORM_SM_MARGIN",
        int,
        no_use("there is no Transformer Engine, and no norm that holds all SMs"),
    ),
    entry("NCCL_P2P_NET_CHUNKSIZE", int, no_use("NCCL reads it itself: set it as before")),
    entry("TORCH_NCCL_AVOID_RECORD_STREAMS", int, no_use("the plan says when memory is free")),
    entry("NCCL_NVLS_ENABLE", int, only(0, "NVLink multicast stays off", "hocket sets it too")),
    entry("NCCL_CTA_POLICY", int, never("train.transport = copy_engine asks for it, group by group")),
    entry("NCCL_ALGO", str, no_use("NCCL reads it itself; hocket's sums in rank order do not need it")),
    entry("PYTORCH_CUDA_ALLOC_CONF", str, no_use("torch reads it itself: set it as before")),
    entry("CUBLAS_WORKSPACE_CONFIG", str, no_use("cuBLAS reads it itself: set it as before")),
)

REST: tuple[Entry, ...] = (*PRECISION, *RECOMPUTATION, *MODEL, *BATCH, *VARIABLES)
