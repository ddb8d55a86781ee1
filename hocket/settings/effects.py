"""What a step does because of a setting, in a sentence: for reports, beside the reason why it was chosen."""

from __future__ import annotations

from typing import Any

EFFECTS: dict[tuple[str, Any], str] = {
    ("train.transport", "copy_engine"): "copies move what kernels would: they take no SM from compute",
    ("train.transport", "nccl"): "what is communicated runs in NCCL's kernels, which take a few SMs from compute",
    ("overlap.ep.merge", "on"): "the all-to-alls of one microbatch run under another's compute",
    ("overlap.ep.merge", "off"): "forwards and backwards run apart",
    ("overlap.ep.merge_ends", "on"): "two forwards, or two backwards, run as one at the ends of the step",
    ("overlap.ep.merge_ends", "off"): "the first forwards and the last backwards run alone",
    ("overlap.ep.copies", "per_expert"): "a token is sent once for each of its experts",
    ("overlap.ep.copies", "per_rank"): "a token is sent once for each rank that has some of its experts",
    ("overlap.cp.method", "gather"): "keys and values of all ranks are gathered while queries are made",
    ("overlap.cp.method", "heads"): "each rank attends with some heads in all tokens; queries and results travel too",
    ("overlap.defer_wgrad", "on"): "weight gradients are ops of their own, which can wait",
    ("overlap.defer_wgrad", "off"): "each weight gradient is computed beside its input gradient",
    ("overlap.pp.defer_layers", 0): "no weight gradient is put behind a send",
    ("overlap.pp.defer_layers", -1): "all weight gradients of a chunk run behind its send",
    ("overlap.dp.update", "next_step"): "the next step updates weights, beside its first gathers and forwards",
    ("overlap.dp.update", "end"): "a step ends with its update, and the next one begins with gathers",
    ("precision.gather", "fp8"): "weights are cast once a step and travel in fp8: the same bits with half the bytes",
    ("precision.gather", "bf16"): "weights travel in bf16 and are cast where they arrive",
    ("overlap.pp.defer_head", 0): "the head's weight gradient follows its input gradient",
    ("overlap.pp.defer_head", -1): "the head's weight gradients run at the end, while other ranks finish",
    ("overlap.dp.strategy", "no_shard"): "every rank keeps everything; gradients are summed once a step",
    ("overlap.dp.strategy", "optim"): "optimizer state is shared out; gradients are reduced once a step",
    ("overlap.dp.strategy", "optim_grads"): "gradients are shared out too, and reduced in every microbatch",
    ("overlap.dp.strategy", "optim_grads_params"): "weights are shared out too, and gathered for every use",
}
"""By setting and value; what speaks for itself is not here."""


def effect_of(setting: str, value: Any) -> str:
    """The sentence, or nothing."""
    return EFFECTS.get((setting, value), "")
