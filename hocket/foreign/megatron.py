"""What `megatron.toml` and `bridge.toml` need of code: rules of their own, and what is done where nothing is given.

Megatron Bridge's keys, such as `comm_overlap.tp_comm_overlap=true`, are Megatron-LM's flags by other names. The section
in front says in which of Bridge's copies a setting stands. They mean the same thing here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from hocket.foreign.entry import (
    ALIASES,
    RECIPES,
    Answer,
    Given,
    Rule,
    entries,
    expert_ranks,
    file_of,
    model_of,
    ranks,
    started,
    when,
)
from hocket.foreign.stages import (
    PIPELINE,
    VIRTUAL_LAYERS,
    VIRTUAL_STAGES,
    chunks_of,
    counted,
    dense_layers,
    stages_of,
    uneven,
)
from hocket.foreign.translate import RANKS, Assumed, Default, System

TENSOR_RANKS = "--tensor-model-parallel-size"
AXES = (TENSOR_RANKS, PIPELINE, "--context-parallel-size")
"""What data ranks are multiplied by."""
DATA_RANKS, EXPERT_RANKS = "data_parallel_size", "--expert-model-parallel-size"
LATENTS, LATENT = "--multi-latent-attention", "--kv-lora-rank"


def data_ranks(given: Given) -> int:
    """Data ranks that the other axes leave, or as many as Bridge is told; 0 if that is not known."""
    data, rest = divmod(given.gpus, max(1, given.product(AXES)))
    return 0 if rest else data or given.number(DATA_RANKS, default=0)


def torch_fsdp2(value: Any, given: Given) -> Answer:
    """FSDP2 gives weights back after forward unless it is told not to."""
    keeps = bool(given.values.get("--torch-fsdp2-no-reshard-after-forward"))
    return Answer("becomes", {"overlap.dp.strategy": "optim_grads" if keeps else "optim_grads_params"})


RECOMPUTED = {"mlp": "mlp", "moe": "experts"}
"""Modules that Megatron recomputes -> parts in hocket."""


def all_parts(experts: bool, dense: bool) -> tuple[str, ...]:
    """The parts that layers have."""
    return ("attn", *(["experts"] if experts else []), *(["mlp"] if dense else []))


def granularity(value: Any, given: Given) -> Answer:
    """All parts of all layers, or of the first layers of each stage, or the modules that are named."""
    if value == "full":
        count, block = given.number("--recompute-num-layers"), given.values.get("--recompute-method") == "block"
        if count > 1 and not block:
            words = "every layer keeps its input: --recompute-num-layers 1, or --recompute-method block"
            return Answer("not there", words=words)
        experts = given.number("--num-experts", default=0) > 0
        parts = all_parts(experts, not experts or "--moe-layer-freq" in given.values)
        return Answer("becomes", {"plan.recompute": tuple(f"{part}:{count}" if block else part for part in parts)})
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
        "mla_up_proj": "only with the whole of attn",
    }
    words = "; ".join(f"{module}: {why.get(module, 'no such part')}" for module in rest)
    if parts:
        return Answer("becomes", {"plan.recompute": parts}, words)
    return Answer("not needed" if rest == ["core_attn"] else "not there", words=words or "it names no module")


def latent(value: Any, given: Given) -> Answer:
    """Latent attention: it is there as soon as its latent has a width."""
    if value and LATENT not in given.values:
        return Answer("not there", words=f"it needs {LATENT}")
    return Answer("not needed", words=f"{LATENT} says how wide its latent is, which always has a norm")


def head_norms(value: Any, given: Given) -> Answer:
    """Norms of queries and keys, which latent attention does not have."""
    if given.values.get(LATENTS):
        return Answer("not needed", words="latents always have norms")
    return when({"model.qk_norm": True})(value, given)


def top_groups(value: int, given: Given) -> Answer:
    """Groups are rated by as many scores as a token has experts in each."""
    count = given.number("--moe-router-topk", default=0) // max(1, value)
    if count not in (1, 2):
        return Answer("not there", words="groups are rated by their best score or best two: it needs --moe-router-topk")
    score = "best" if count == 1 else "best_two"
    return Answer("becomes", {"model.route_top_groups": value, "model.route_group_score": score})


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


def bias_rate(value: Any, given: Given) -> Answer:
    """A balance bias, and how fast it moves."""
    rate = float(given.values.get("--moe-router-bias-update-rate", 1e-3))
    return when({"model.bias_rate": rate})(value, given)


def rotary_part(value: Any, given: Given) -> Answer:
    """How many elements of a head rotate."""
    if value == 1:
        return Answer("not needed", words="whole heads rotate")
    if not 0 < value < 1:
        return Answer("not there", words="it is no share of a head")
    hidden, heads = given.number("--hidden-size"), given.number("--num-attention-heads")
    width = int(float(value) * (given.number("--kv-channels", default=0) or (hidden // heads if heads else 0)))
    if width < 2 or width % 2:
        return Answer("not there", words="it needs --kv-channels or the sizes that it follows from, and an even part")
    return Answer("becomes", {"model.rope.width": width})


def interpolated(value: Any, given: Given) -> Answer:
    """Positions divided by a number."""
    return Answer("becomes", {"model.rope.kind": "linear", "model.rope.factor": float(value)})


def rope_scaling(value: Any, given: Given) -> Answer:
    """Llama 3.1's, with the constants that Megatron-LM has for it."""
    factor = float(given.values.get("--rope-scaling-factor", 8.0))
    settings = {"kind": "llama3", "factor": factor, "original_positions": 8192}
    return when({f"model.rope.{name}": setting for name, setting in settings.items()})(value, given)


def yarn(value: Any, given: Given) -> Answer:
    """YaRN, with the constants that Megatron-LM has for it."""
    if value != "yarn":
        return (
            Answer("not needed", words="rotary positions") if value == "rope" else Answer("not there", words="no such")
        )
    if "--rotary-scaling-factor" not in given.values:
        return Answer("not there", words="it needs --rotary-scaling-factor")
    numbers = (("factor", "--rotary-scaling-factor", 1.0), ("mscale", "--mscale", 1.0))
    numbers += (("mscale_all_dim", "--mscale-all-dim", 0.0), ("beta_fast", "--beta-fast", 32.0))
    numbers += (("beta_slow", "--beta-slow", 1.0),)
    settings = {f"model.rope.{name}": float(given.values.get(flag, common)) for name, flag, common in numbers}
    positions = given.number("--original-max-position-embeddings", default=4096)
    return Answer("becomes", {"model.rope.kind": "yarn", "model.rope.original_positions": positions, **settings})


def bf16(value: Any, given: Given) -> Answer:
    """What products compute in, but for those in fp8."""
    if value and any(name in given.values for name in FP8):
        return Answer("not needed", words="what runs in no fp8 runs in bf16")
    return when({"precision.compute": "bf16"})(value, given)


def warmup_share(value: Any, given: Given) -> Answer:
    """Steps of the warm-up, as a share of the steps in which the rate decays."""
    steps = given.number("--lr-decay-iters", "--train-iters", default=0)
    if not steps or not 0 <= value <= 1:
        return Answer("not there", words="it needs --train-iters, and is between 0 and 1")
    return Answer("becomes", {"train.warmup": round(value * steps)}, f"of {steps} steps")


def decay_steps(value: Any, given: Given) -> Answer:
    """Steps in which the rate falls, which here are those of the run."""
    if value == given.number("--train-iters", default=0):
        return Answer("not needed", words="the rate falls until the last step")
    return Answer("not there", words="the rate falls until the last step of the run, train.steps")


def text(value: Any, given: Given) -> Answer:
    """Tokens of Megatron-LM, in a pair of files that has this name without its ending."""
    if isinstance(value, list):
        return Answer("not there", words="data.sources takes several, with weights: docs/data.md")
    return Answer("becomes", {"data.paths": (f"{value}.bin",)}, "tokens of data.tokenizer")


def split(value: Any, given: Given) -> Answer:
    """Shares of the text for training, validation and a test that hocket does not make."""
    parts = str(value).split(",")
    if len(parts) != 3 or not all(re.fullmatch(r"\d+(\.\d*)?", part) for part in parts):
        return Answer("not there", words="data.validation is the share of the text that is kept")
    train, validation, test = map(float, parts)
    if not train:
        return Answer("not there", words="nothing is left to train on")
    return Answer("becomes", {"data.validation": round(1 - train / (train + validation + test), 9)})


FIRST_BETA, SECOND_BETA = "--adam-beta1", "--adam-beta2"


def betas(value: Any, given: Given) -> Answer:
    """Both decay rates of AdamW, one of which may be Megatron-LM's own."""
    rates = (float(given.values.get(FIRST_BETA, 0.9)), float(given.values.get(SECOND_BETA, 0.999)))
    return Answer("becomes", {"train.betas": rates})


def _betas(given: Given) -> Answer | None:
    there = {FIRST_BETA, SECOND_BETA} & given.values.keys() or not _described(given)
    return None if there else betas(None, given)


def _unless(flags: str, setting: str, value: Any) -> Callable[[Given], Answer | None]:
    """What Megatron-LM takes for a whole model's run where none of these flags is given."""

    def make(given: Given) -> Answer | None:
        there = any(flag in given.values for flag in flags.split()) or not _described(given)
        return None if there else Answer("becomes", {setting: value})

    return make


def _dropout(flag: str) -> Callable[[Given], Answer | None]:
    """What Megatron-LM drops of a whole model where it is not told otherwise."""

    def make(given: Given) -> Answer | None:
        there = flag in given.values or not _described(given)
        return None if there else Answer("not there", words=f"Megatron-LM drops 0.1 without {flag} 0; hocket nothing")

    return make


def bridge_recipe(value: Any, given: Given) -> Answer:
    """A recipe of Bridge by its name, such as `llama3_8b_pretrain_config`: the model that it has."""
    name = re.sub(r"_(pretrain|sft|peft|finetune)?_?config$", "", str(value))
    words = "its model; what else Bridge's recipe sets must be given here, too"
    return model_of(name, file_of("bridge")[RECIPES], words)


def late_head(value: Any, given: Given) -> Answer:
    """How many of the head's weight gradients wait."""
    limit = given.number("--wgrad-deferral-limit", default=0) or -1
    return when({"overlap.pp.defer_head": limit})(value, given)


FP8 = ("--fp8-format", "--fp8")
"""What says that products are in fp8."""


def data_parallel(value: Any, given: Given) -> Answer:
    """What --gpus says otherwise."""
    if given.gpus:
        return Answer("not needed", words="it follows from --gpus")
    return Answer("becomes", {"mesh.dp": value})


STRATEGIES = ("--use-distributed-optimizer", "--data-parallel-sharding-strategy", "--use-torch-fsdp2")
"""What says which strategy Megatron-LM shards by."""

REDUCED = {
    "--accumulate-allreduce-grads-in-fp32",
    "--grad-reduce-in-bf16",
    "--ddp-reduce-scatter-with-fp32-accumulation",
}
"""What says in which format Megatron-LM reduces gradients."""


def _ranks(given: Given) -> Answer | None:
    return None if not given.gpus and DATA_RANKS in given.values else ranks(given, AXES)


def _shards(given: Given) -> Answer | None:
    if any(given.values.get(name) for name in STRATEGIES):
        return None
    return Answer("becomes", {"overlap.dp.strategy": "no_shard"}, "hocket by itself shards the weights, too")


def _wire(given: Given) -> Answer | None:
    """With bf16 alone Megatron-LM reduces in fp32, and Bridge with its bf16_mixed."""
    said = REDUCED & given.values.keys()
    mixed = given.values.get("mixed_precision") in ("bf16_mixed", "bf16-mixed")
    if said or not (given.values.get("--bf16") or mixed):
        return None
    return Answer("becomes", {"precision.wire": "fp32"}, "hocket by itself sends gradients in bf16")


def _kv_heads(given: Given) -> Answer | None:
    heads = given.number("--num-attention-heads", default=0)
    said = "--num-query-groups" in given.values or given.values.get(LATENTS)
    return None if said or not heads else Answer("becomes", {"model.kv_heads": heads})


def _head_dim(given: Given) -> Answer | None:
    heads, hidden = given.number("--num-attention-heads", default=0), given.number("--hidden-size", default=0)
    said = "--kv-channels" in given.values or given.values.get(LATENTS)
    if not heads or not hidden or hidden % heads or said:
        return None
    return Answer("becomes", {"model.head_dim": hidden // heads})


def _tied(given: Given) -> Answer | None:
    asked = "--untie-embeddings-and-output-weights" in given.values
    return None if asked or "--num-layers" not in given.values else Answer("becomes", {"model.tied": True})


def _described(given: Given) -> bool:
    """Whether the sizes of a model are given, rather than a few settings of one."""
    return {"--num-layers", "--hidden-size"} <= given.values.keys()


def _ffn(given: Given) -> int:
    """Width of a dense MLP in Megatron-LM; 0 if that is not known."""
    if "--ffn-hidden-size" in given.values or not _described(given):
        return given.number("--ffn-hidden-size", default=0)
    hidden = given.number("--hidden-size", default=0)
    return hidden * 8 // 3 // 64 * 64 if given.values.get("--swiglu") else 4 * hidden


def _dense_width(given: Given) -> Answer | None:
    there = "--ffn-hidden-size" in given.values or not _ffn(given)
    return None if there else Answer("becomes", {"model.ffn": _ffn(given)})


def _expert_width(given: Given) -> Answer | None:
    experts, there = given.number("--num-experts", default=0), "--moe-ffn-hidden-size" in given.values
    return None if there or not experts or not _ffn(given) else Answer("becomes", {"model.expert_ffn": _ffn(given)})


def _unlike(flags: tuple[str, ...], words: str) -> Callable[[Given], Answer | None]:
    """What a model is in Megatron-LM without these flags, and never here."""

    def make(given: Given) -> Answer | None:
        there = any(given.values.get(name) for name in flags) or not _described(given)
        return None if there else Answer("not there", words=words)

    return make


def _expert_tensors(given: Given) -> Answer | None:
    experts, tp = given.number("--num-experts", default=0), given.number(TENSOR_RANKS)
    if not experts or tp == 1 or "--expert-tensor-parallel-size" in given.values:
        return None
    return Answer("not there", words=f"Megatron-LM splits each expert over its {tp} tensor ranks; hocket none of them")


_MESH: tuple[Assumed, ...] = (
    *zip(("mesh.tp", "mesh.pp", "mesh.cp"), ((axis,) for axis in AXES), strict=True),
    ("plan.chunks", (VIRTUAL_LAYERS, VIRTUAL_STAGES)),
    ("mesh.ep", (EXPERT_RANKS,)),
)

_MEGATRON_DEFAULTS: tuple[Default, ...] = (
    (RANKS, _ranks),
    ("(no sharding flag)", _shards),
    ("(no --grad-reduce-in-bf16)", _wire),
    ("(no --expert-tensor-parallel-size)", _expert_tensors),
    ("(no --num-query-groups)", _kv_heads),
    ("(no --kv-channels)", _head_dim),
    ("(no --untie-embeddings-and-output-weights)", _tied),
)

_POSITIONS = "--position-embedding-type", "--use-rotary-position-embeddings"

_MEGATRON_MODEL: tuple[Default, ...] = (
    ("(no --ffn-hidden-size)", _dense_width),
    ("(no --moe-ffn-hidden-size)", _expert_width),
    ("(no --norm-epsilon)", _unless("--norm-epsilon", "model.norm_eps", 1e-5)),
    ("(no --rotary-base)", _unless("--rotary-base", "model.rope_theta", 10000.0)),
    ("(no --weight-decay)", _unless("--weight-decay", "train.weight_decay", 0.01)),
    ("(no --adam-beta2)", _betas),
    ("(no --clip-grad)", _unless("--clip-grad", "train.clip", 1.0)),
    ("(no --min-lr)", _unless("--min-lr", "train.min_lr", 0.0)),
    ("(no --lr-decay-style)", _unless("--lr-decay-style", "train.schedule", "linear")),
    (
        "(no --lr-warmup-iters)",
        _unless("--lr-warmup-iters --lr-warmup-fraction --lr-warmup-samples", "train.warmup", 0),
    ),
    ("(no --init-method-std)", _unless("--init-method-std", "model.init_std", 0.02)),
    ("(no --hidden-dropout)", _dropout("--hidden-dropout")),
    ("(no --attention-dropout)", _dropout("--attention-dropout")),
    ("(no --swiglu)", _unlike(("--swiglu",), "MLPs are SwiGLU, not GELU")),
    ("(no --normalization)", _unlike(("--normalization",), "norms are RMSNorm, not LayerNorm")),
    ("(no --position-embedding-type)", _unlike(_POSITIONS, "positions are rotary, not learnt")),
    ("(no --disable-bias-linear)", _unlike(("--disable-bias-linear",), "linear layers have no bias")),
)
"""Not for Megatron Bridge, whose keys are said on top of a recipe that has a model."""


def spelled(name: str) -> str:
    """Megatron-LM's flag for a key of Bridge, or the key's last word where it has an entry of its own."""
    last = name.split(".")[-1].lstrip("-")
    own = {word for row in BRIDGE_OWN for word in row.names}
    if last in own or last.isupper():
        return last
    return BRIDGE_ALIASES.get(last, "--" + last.replace("_", "-"))


_RULES: Mapping[str, Rule] = {
    "expert_ranks": expert_ranks(data_ranks, (TENSOR_RANKS, *AXES[2:])),
    **{
        rule.__name__: rule
        for rule in (
            chunks_of, uneven, counted, stages_of, torch_fsdp2, granularity, modules, dense_layers, microbatches,
            latent, head_norms, top_groups, bias_rate, late_head, data_parallel, rotary_part, interpolated,
            rope_scaling, betas, bridge_recipe, yarn, bf16, warmup_share, decay_steps, text, split,
        )
    },
}  # fmt: skip

MEGATRON = System(
    "Megatron-LM",
    entries("megatron", _RULES),
    (*_MEGATRON_DEFAULTS, *_MEGATRON_MODEL),
    assumed=_MESH,
    started=started(("--nproc-per-node", "--nproc_per_node", "--ntasks-per-node"), ("--nnodes", "--nodes")),
    sizes=("model.layers", "model.hidden", "model.heads", "model.vocab"),
)

BRIDGE_OWN = entries("bridge", _RULES)
BRIDGE_ALIASES: Mapping[str, str] = file_of("bridge")[ALIASES]
"""Bridge's name, without its section -> Megatron-LM's flag, where it is not the same word."""
BRIDGE = System("Megatron Bridge", (*BRIDGE_OWN, *MEGATRON.entries), _MEGATRON_DEFAULTS, spelled, _MESH)
