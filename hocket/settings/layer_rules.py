"""Rules for windows, delta nets, sinks and biases: part of the table in `rules.py`."""

from __future__ import annotations

import re
from importlib import metadata
from importlib.util import find_spec

from hocket.settings.rule import Rule


def why_no_delta_kernels(capability: tuple[int, int]) -> str:
    """Why flash-linear-attention's kernels (fla-core) do not serve a GPU of this compute capability; empty if they do.

    Triton from 3.4 on, below 3.7.1, makes wrong gradients of them on Hopper. fla refuses it (its issue 640), unless
    tilelang is there, whose kernels it takes instead.
    """
    if find_spec("fla") is None or find_spec("triton") is None:
        return "fla-core is not installed"
    triton = metadata.version("triton")
    version = tuple(int(part) for part in re.findall(r"\d+", triton)[:3])
    if capability == (9, 0) and (3, 4) <= version < (3, 7, 1) and find_spec("tilelang") is None:
        return f"fla-core is wrong on Hopper with triton {triton}, and right from 3.7.1 on, or with tilelang"
    return ""


LAYER_RULES: tuple[Rule, ...] = (
    Rule(
        ("model.full_layers", "model.layers"),
        lambda c, h: any(layer >= c.model.layers for layer in c.model.full_layers),
        "model.full_layers names layers that do not exist; they are numbered 0 to {last_layer}",
        "model.full_layers with smaller numbers, or more model.layers",
    ),
    Rule(
        ("model.full_layers", "model.window", "model.delta_heads"),
        lambda c, h: c.model.window == 0 and c.model.delta_heads == 0 and bool(c.model.full_layers),
        "no effect: no layer has a window or a delta net",
        "set model.window, set model.delta_heads, or leave it out",
        only_if_set=True,
    ),
    Rule(
        ("model.delta_heads", "model.window"),
        lambda c, h: c.model.delta_heads > 0 and c.model.window > 0,
        "layers that are not model.full_layers have either a window or a delta net",
        "model.window = 0, or model.delta_heads = 0",
    ),
    Rule(
        ("model.delta_heads", "model.full_layers"),
        lambda c, h: c.model.delta_heads > 0 and not any(c.model.deltas()),
        "no effect: model.full_layers names every layer",
        "model.delta_heads = 0, or fewer model.full_layers",
        only_if_set=True,
    ),
    Rule(
        ("model.delta_heads", "model.delta_key_heads"),
        lambda c, h: c.model.delta_heads % c.model.delta_key_heads != 0,
        "{model.delta_heads} value heads cannot share {model.delta_key_heads} key heads evenly",
        "make model.delta_heads a multiple of model.delta_key_heads",
    ),
    *(
        Rule(
            (f"model.delta_{name}", "model.delta_heads"),
            lambda c, h: c.model.delta_heads == 0,
            "no effect: model.delta_heads = 0, so no layer has a delta net",
            "model.delta_heads above 0, or leave it out",
            only_if_set=True,
        )
        for name in ("key_heads", "key_dim", "value_dim", "conv")
    ),
    Rule(
        ("model.delta_heads", "train.device"),
        lambda c, h: any(c.model.deltas()) and c.train.device == "cuda" and bool(h.no_delta_kernels),
        "torch's operations compute gated delta nets, which is slow: {host.no_delta_kernels}",
        "pip install hocket[linear], and what it needs here",
        remark=True,
    ),
    Rule(
        ("model.delta_heads", "train.device", "precision.compute"),
        lambda c, h: any(c.model.deltas()) and c.train.device == "cuda" and c.precision.compute == "fp32",
        "torch's operations compute gated delta nets in fp32, which is slow: kernels take bf16",
        "precision.compute = bf16",
        remark=True,
    ),
    Rule(
        ("model.shared_gate", "model.shared_ffn"),
        lambda c, h: c.model.shared_gate and (c.model.shared_ffn == 0 or "moe" not in c.model.kinds()),
        "no effect: no layer has a shared expert",
        "model.shared_ffn = 1 or more in a model with experts, or leave it out",
        only_if_set=True,
    ),
    Rule(
        ("model.window", "model.full_layers"),
        lambda c, h: c.model.window > 0 and not any(c.model.windows()),
        "no effect: model.full_layers names every layer",
        "model.window = 0, or fewer model.full_layers",
        only_if_set=True,
    ),
    Rule(
        ("model.window",),
        lambda c, h: c.model.window == 1,
        "a token that attends to itself alone needs no queries and keys, and flash attention has no such window",
        "model.window = 0, which means all tokens before it, or model.window = 2 or more",
    ),
    Rule(
        ("model.window", "data.sequence_length"),
        lambda c, h: any(c.model.windows()) and c.model.window >= c.data.sequence_length,
        "no effect: sequences have {data.sequence_length} tokens",
        "data.sequence_length above model.window, or leave it as the model has it",
        remark=True,
    ),
    Rule(
        ("model.rope.plain_windows", "model.window", "model.rope.kind"),
        lambda c, h: c.model.rope.plain_windows and (c.model.rope.kind == "default" or not any(c.model.windows())),
        "no effect: model.rope.kind = {model.rope.kind}, and model.window = {model.window}",
        "another model.rope.kind and model.window above 0, or leave it out",
        only_if_set=True,
    ),
    Rule(
        ("model.swiglu_alpha", "model.swiglu_limit"),
        lambda c, h: c.model.swiglu_limit == 0,
        "no effect: model.swiglu_limit = 0 is silu",
        "set model.swiglu_limit, or leave it out",
        only_if_set=True,
    ),
)
