"""What is refused of stages, of orders with steps of weight gradients alone, of shards, of fp8, for `test_config.py`.

Each row: what differs from the recipe `tiny`, what a user asks for on the command line, the setting that the message
names, and words of its reason. Names are those of `test_config.changed`.
"""

from __future__ import annotations

from typing import Any

ZB: dict[str, Any] = {"plan__order": "zb_v", "merge": "off"}
V: dict[str, Any] = {"plan__order": "merged_v"}

FOUR: dict[str, Any] = {"mesh__dp": 4}
SHARED: dict[str, Any] = {"mesh__cp": 2}
HEADS: dict[str, Any] = {"overlap__cp__method": "heads"}
ODD: dict[str, Any] = {"model__heads": 9, "model__kv_heads": 3, "model__ffn": 48, "model__vocab": 96}
SIX: dict[str, Any] = {"mesh__cp": 6, "data__sequence_length": 48, "model__kv_heads": 4, "model__heads": 12}
FP8: dict[str, Any] = {"precision__compute": "fp8"}

REFUSED_ORDERS: tuple[tuple[dict[str, Any], dict[str, Any], str, str], ...] = (
    (FOUR, {"mesh__shard": 3}, "mesh.shard", "a mesh.shard that divides mesh.dp"),
    (FOUR, {"mesh__shard": 8}, "mesh.shard", "a mesh.shard that divides mesh.dp"),
    ({**FOUR, "mesh__ep": 1}, {"mesh__shard": 1}, "mesh.shard", "fix: overlap.dp.strategy = no_shard without"),
    ({**FOUR, "mesh__ep": 4}, {"mesh__shard": 2}, "mesh.shard", "has all experts"),
    ({**FOUR, "mesh__tp": 2, "mesh__ep": 8}, {"mesh__shard": 2}, "mesh.shard", "mesh.shard = 2 x mesh.tp = 2"),
    ({"data__sequence_length": 42}, SHARED, "mesh.cp", "2 of 2 x mesh.cp chunks"),
    ({"model__delta_heads": 4, "model__delta_key_heads": 2}, SHARED, "mesh.cp", "goes through a sequence token by"),
    ({"mesh__tp": 2, "model__kv_lora_rank": 8}, SHARED, "mesh.cp", "fix: mesh.tp = 1"),
    ({"model__aux_loss": 0.1, "model__aux_loss_over": "sequence"}, SHARED, "mesh.cp", "share the tokens of a sequence"),
    ({}, {"plan__offload": ("attn:99",)}, "plan.offload", "no stage can have as many layers: the longest has 6"),
    ({"plan__layers_per_stage": (2, 2, 3, 1)}, {"plan__offload": ("mlp", "attn:4")}, "plan.offload", "has 3 at most"),
    ({"mesh__pp": 1}, {"plan__recompute": ("attn:5",)}, "plan.recompute", "the longest has 4 at most"),
    ({"model__dense_layers": ()}, {"plan__offload": ("mlp:1",)}, "plan.offload", "has the part mlp"),
    ({}, {"plan__offload": ("",)}, "plan.offload", "'' is none of the parts attn, experts, mlp"),
    ({}, {"plan__recompute": ("attn", "kv")}, "plan.recompute", "no layer that it means has the part kv"),
    ({**SHARED, **HEADS}, {"plan__recompute": ("kv",)}, "plan.recompute", "has the part kv"),
    ({}, HEADS, "overlap.cp.method", "no effect with mesh.cp = 1"),
    ({**SHARED, "model__kv_lora_rank": 8}, HEADS, "overlap.cp.method", "latents of latent attention belong to no head"),
    ({**SHARED, "model__sinks": True}, HEADS, "overlap.cp.method", "sinks are weights of all heads"),
    ({**SHARED, **ODD, "mesh__tp": 3}, HEADS, "overlap.cp.method", "2 ranks cannot have as many of 9 / mesh.tp = 3"),
    (SIX, HEADS, "overlap.cp.method", "can neither share 4 heads of keys and values"),
    ({}, {"plan__offload": ("attn", "attn:2")}, "plan.offload", "each part is named once"),
    ({"model__dense_layers": tuple(range(8))}, {"plan__offload": ("experts",)}, "plan.offload", "has the part experts"),
    ({"model__dense_layers": ()}, {"plan__offload": ("mlp",)}, "plan.offload", "has the part mlp; fix: leave mlp out"),
    ({"plan__recompute": ("attn",)}, {"plan__offload": ("attn:1",)}, "plan.offload", "on the host, or made again"),
    ({}, {"overlap__tp__method": ("bulk",)}, "overlap.tp.method", "no effect with mesh.tp = 1"),
    ({"mesh__tp": 2}, {"plan__loss_pieces": 2}, "plan.loss_pieces", "a part of the vocabulary"),
    ({"data__sequence_length": 8, "train__sequences": 1}, {"plan__loss_pieces": 9}, "plan.loss_pieces", "has 8 tokens"),
    (SHARED, {"overlap__ep__merge_ends": "on"}, "overlap.ep.merge_ends", "have their sequences whole"),
    (SHARED, {"plan__layer_order": "early_release"}, "plan.layer_order", "leave plan.layer_order out, or mesh.cp = 1"),
    (SHARED, {"plan__graphs": "on", "data__packing": "on"}, "plan.graphs", "documents decide which keys"),
    ({"precision__averages": "bf16"}, {"train__betas": (0.9, 0.999)}, "train.betas", "lower train.betas"),
    (FP8, {"model__hidden": 40}, "model.hidden", "fix: make model.hidden a multiple of 16"),
    (
        FP8,
        {"model__head_dim": 4, "model__kv_heads": 2},
        "model.head_dim",
        "model.kv_heads x model.head_dim is none",
    ),
    (FP8, {"model__ffn": 40}, "model.ffn", "widths of a multiple of 16"),
    (FP8, {"model__shared_ffn": 8}, "model.shared_ffn", "widths of a multiple of 16"),
    (FP8, {"model__expert_ffn": 8}, "model.expert_ffn", "widths of a multiple of 16"),
    (FP8, {"data__sequence_length": 41}, "data.sequence_length", "a multiple of 16 tokens"),
    (FP8, {"mesh__tp": 2}, "mesh.tp", "do not run in fp8; fix: mesh.tp = 1"),
    (FP8, {"precision__fp8": ("forward", "forward")}, "precision.fp8", "names a product, or an end, twice"),
    (
        FP8,
        {"precision__fp8": ("but_first",)},
        "precision.fp8",
        "'but_first' is none of forward, dgrad, wgrad, but_first:1",
    ),
    (FP8, {"precision__fp8": ("wgrad:1",)}, "precision.fp8", "'wgrad:1' is none of"),
    (
        FP8,
        {"precision__fp8": ("but_first:4", "but_last:4")},
        "precision.fp8",
        "none of the model.layers = 8 layers is left",
    ),
    ({}, {"precision__fp8": ("forward",)}, "precision.fp8", "no effect with precision.compute = fp32"),
    ({}, {"precision__gather": "fp8"}, "precision.gather", "no effect with precision.compute = fp32"),
    (
        {**FP8, "strategy": "no_shard"},
        {"precision__gather": "fp8"},
        "precision.gather",
        "no effect with overlap.dp.strategy = no_shard",
    ),
    (
        {**FP8, "mesh__dp": 1, "mesh__ep": 1},
        {"precision__gather": "fp8"},
        "precision.gather",
        "without shared weights (mesh.dp = 1); fix: mesh.dp above 1",
    ),
    (
        {"mesh__pp": 1, "plan__chunks": 1, "merge": "on", "train__microbatches": 1},
        {"overlap__ep__merge_ends": "on"},
        "overlap.ep.merge_ends",
        "one microbatch has no other one to merge with",
    ),
    ({**FP8, "update": "next_step"}, {"precision__gather": "fp8"}, "precision.gather", "agree on scales of rows"),
    (
        {**FP8, "precision__fp8": ("forward", "wgrad")},
        {"precision__gather": "fp8"},
        "precision.gather",
        "not both of them run in fp8",
    ),
    ({}, {"plan__layers_per_stage": (4, 4)}, "plan.layers_per_stage", "needs 4 numbers"),
    ({}, {"plan__layers_per_stage": (2, 2, 2, 3)}, "plan.layers_per_stage", "do not add up to model.layers = 8"),
    ({}, {"plan__layers_per_stage": (4, 0, 4, 0)}, "plan.layers_per_stage", "only the first stage, with the embedding"),
    ({}, {"plan__layers_per_stage": ("auto", 2)}, "plan.layers_per_stage", "auto goes with no number"),
    ({"merge": "off"}, {"plan__order": "zb_h1"}, "plan.order", "plan.chunks is 1, not 2"),
    ({"merge": "off", "plan__chunks": 1}, {"plan__order": "zb_v"}, "plan.order", "plan.chunks is 2, not 1"),
    ({"plan__order": "zb_v"}, {"merge": "on"}, "overlap.ep.merge", "forwards and backwards run apart"),
    ({**ZB, "mesh__pp": 1}, {"plan__order": "zb_v"}, "plan.order", "no bubble to fill"),
    (ZB, {"defer_wgrad": "off"}, "overlap.defer_wgrad", "so they must be able to wait"),
    (ZB, {"train__microbatches": 1}, "train.microbatches", "made for 2 microbatches or more"),
    (ZB, {"defer_layers": 2}, "overlap.pp.defer_layers", "no effect with plan.order = zb_v"),
    (ZB, {"plan__group": 2}, "plan.group", "no effect with plan.order = zb_v"),
    (
        {**ZB, "model__dense_layers": ()},
        {"model__layers": 1},
        "model.layers",
        "4 virtual stages, too many for model.layers = 1",
    ),
    ({**V, "plan__chunks": 1}, {"plan__order": "merged_v"}, "plan.order", "plan.chunks is 2, not 1"),
    (V, {"merge": "off"}, "overlap.ep.merge", "forwards and backwards run merged"),
    (V, {"merge_ends": "on"}, "overlap.ep.merge_ends", "in the order merged_v no two microbatches"),
    (V, {"train__microbatches": 3}, "train.microbatches", "made for 4 microbatches or more"),
)
