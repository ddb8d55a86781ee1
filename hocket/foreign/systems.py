"""The systems that hocket understands, and what they do where nothing is given."""

from __future__ import annotations

from collections.abc import Callable

from hocket.foreign import bridge, deepspeed, torchtitan
from hocket.foreign.entry import Answer, Given
from hocket.foreign.megatron import (
    AXES,
    DATA_RANKS,
    EXPERT_RANKS,
    OVERLAP,
    PIPELINE,
    TENSOR_RANKS,
    VIRTUAL_LAYERS,
    VIRTUAL_STAGES,
)
from hocket.foreign.megatron_model import POSITIONS, REST
from hocket.foreign.read import Pairs, file, flags, flags_or_file, keys
from hocket.foreign.translate import RANKS, Assumed, Default, System

STRATEGIES = ("--use-distributed-optimizer", "--data-parallel-sharding-strategy", "--use-torch-fsdp2")
"""What says which strategy Megatron-LM shards by."""

REDUCED = {
    "--accumulate-allreduce-grads-in-fp32",
    "--grad-reduce-in-bf16",
    "--ddp-reduce-scatter-with-fp32-accumulation",
}
"""What says in which format Megatron-LM reduces gradients."""


def ranks(given: Given, sizes: tuple[str, ...]) -> Answer | None:
    """Data ranks: those that the other axes leave."""
    if not given.gpus and DATA_RANKS in given.values:
        return None
    if not given.gpus:
        return Answer("not there", words="without --gpus the number of data ranks, mesh.dp, is not known")
    other = given.product(sizes)
    if other < 1 or given.gpus % other:
        return Answer(
            "not there", words=f"{given.gpus} ranks cannot be split into {other}, the product of the other axes"
        )
    return Answer("becomes", {"mesh.dp": given.gpus // other}, f"{given.gpus} ranks, {other} for every data rank")


def started(given: Given) -> int:
    """Ranks that the words in front of a script start; 0 if they do not say."""
    a_host = given.number("--nproc-per-node", "--nproc_per_node", default=0)
    return a_host * given.number("--nnodes")


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


def _titan_wire(given: Given) -> Answer | None:
    """Torchtitan reduces in fp32, as long as it shards."""
    if f"{torchtitan.T}mixed_precision_reduce" in given.values:
        return None
    return Answer("becomes", {"precision.wire": "fp32"}, "hocket by itself sends them in what computes")


def _kv_heads(given: Given) -> Answer | None:
    heads = given.number("--num-attention-heads", default=0)
    return Answer("becomes", {"model.kv_heads": heads}) if heads and "--num-query-groups" not in given.values else None


def _head_dim(given: Given) -> Answer | None:
    heads, hidden = given.number("--num-attention-heads", default=0), given.number("--hidden-size", default=0)
    if not heads or not hidden or hidden % heads or "--kv-channels" in given.values:
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


def _epsilon(given: Given) -> Answer | None:
    there = "--norm-epsilon" in given.values or not _described(given)
    return None if there else Answer("becomes", {"model.norm_eps": 1e-5})


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


def _titan_ranks(given: Given) -> Answer | None:
    if given.number(torchtitan.DP_SHARD, default=-1) > 1 or given.number(torchtitan.DP_REPLICATE) > 1:
        return None  # it says itself how many there are
    return ranks(given, torchtitan.AXES)


def _stage_zero(given: Given) -> Answer | None:
    return None if "zero_optimization.stage" in given.values else deepspeed.stage(0, given)


_MESH: tuple[Assumed, ...] = (
    ("mesh.tp", (TENSOR_RANKS,)),
    ("mesh.pp", (PIPELINE,)),
    ("plan.chunks", (VIRTUAL_LAYERS, VIRTUAL_STAGES)),
    ("mesh.ep", (EXPERT_RANKS,)),
)

_MEGATRON_DEFAULTS: tuple[Default, ...] = (
    (RANKS, lambda given: ranks(given, AXES)),
    ("(no sharding flag)", _shards),
    ("(no --grad-reduce-in-bf16)", _wire),
    ("(no --expert-tensor-parallel-size)", _expert_tensors),
    ("(no --num-query-groups)", _kv_heads),
    ("(no --kv-channels)", _head_dim),
    ("(no --untie-embeddings-and-output-weights)", _tied),
)

_MEGATRON_MODEL: tuple[Default, ...] = (
    ("(no --ffn-hidden-size)", _dense_width),
    ("(no --moe-ffn-hidden-size)", _expert_width),
    ("(no --norm-epsilon)", _epsilon),
    ("(no --swiglu)", _unlike(("--swiglu",), "MLPs are SwiGLU, not GELU")),
    ("(no --normalization)", _unlike(("--normalization",), "norms are RMSNorm, not LayerNorm")),
    ("(no --position-embedding-type)", _unlike(POSITIONS, "positions are rotary, not learnt")),
    ("(no --disable-bias-linear)", _unlike(("--disable-bias-linear",), "linear layers have no bias")),
)
"""Not for Megatron Bridge, whose keys are said on top of a recipe that has a model."""

MEGATRON = System(
    "Megatron-LM", (*OVERLAP, *REST), (*_MEGATRON_DEFAULTS, *_MEGATRON_MODEL), assumed=_MESH, started=started
)

BRIDGE = System("Megatron Bridge", (*bridge.OWN, *MEGATRON.entries), _MEGATRON_DEFAULTS, bridge.spelled, _MESH)

TORCHTITAN = System(
    "torchtitan",
    torchtitan.ENTRIES,
    (
        (RANKS, _titan_ranks),
        ("(no parallelism.fsdp_reshard_after_forward)", torchtitan.sharded),
        ("(no training.mixed_precision_reduce)", _titan_wire),
    ),
    torchtitan.spelled,
    (
        ("mesh.tp", (torchtitan.TP,)),
        ("mesh.pp", (torchtitan.PP,)),
        ("plan.chunks", (torchtitan.SCHEDULE,)),
        ("mesh.ep", (torchtitan.EP,)),
    ),
)

DEEPSPEED = System(
    "DeepSpeed",
    deepspeed.ENTRIES,
    (
        (RANKS, lambda given: ranks(given, (deepspeed.TENSOR_RANKS,))),
        ("(no zero_optimization.stage)", _stage_zero),
    ),
    deepspeed.spelled,
    (("mesh.tp", (deepspeed.TENSOR_RANKS,)), ("mesh.pp", ()), ("plan.chunks", ()), ("mesh.ep", ())),
)


SYSTEMS: dict[str, tuple[System, Callable[[str], Pairs]]] = {
    "megatron": (MEGATRON, flags),
    "bridge": (BRIDGE, keys),
    "torchtitan": (TORCHTITAN, flags_or_file),
    "deepspeed": (DEEPSPEED, file),
}
"""By the word behind `--from-`, with the way to read what follows it."""
