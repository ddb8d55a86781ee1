"""Models of transformers whose sequences ranks can share, with a plan and without one."""

from __future__ import annotations

from typing import Any

from torch import nn

FAMILIES = ("llama", "mistral", "mixtral", "olmo2", "olmo3", "qwen2", "qwen3", "qwen3_moe", "smollm3")
"""Model types whose tokens meet in attention alone, each tested against the model on one process."""

ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding that depend on a token's position alone."""

LAYERS = ("full_attention", "sliding_attention")


def unshareable(model: nn.Module) -> str:
    """Why ranks with a part of the tokens would compute something else than the model; empty if they would not."""
    config: Any = getattr(model, "config", None)
    kind, name = getattr(config, "model_type", None), type(model).__name__
    if kind not in FAMILIES or not any(c.__name__.endswith("ForCausalLM") for c in type(model).__mro__):
        return (
            f"{name} of type {kind} is no causal language model of {', '.join(FAMILIES)}, and its tokens may meet "
            "elsewhere than in attention"
        )
    rope = config.rope_parameters or {}
    kinds = [each.get("rope_type", "default") for each in ([rope] if "rope_type" in rope else rope.values())]
    wrong = {
        "attention_dropout": getattr(config, "attention_dropout", 0),
        "dropout": any(isinstance(m, nn.Dropout) and m.p for m in model.modules()),
        "output_router_logits": getattr(config, "output_router_logits", False),
        "output_attentions": getattr(config, "output_attentions", False),
        "output_hidden_states": getattr(config, "output_hidden_states", False),
        "is_causal=False": not getattr(config, "is_causal", True),
        "rope_type": next((each for each in kinds if each not in ROTARY), None),
        "layer_types": next((t for t in getattr(config, "layer_types", None) or () if t not in LAYERS), None),
        "loss_type": getattr(model, "loss_type", None) != "ForCausalLM",
    }
    return next((f"{what} of {name} is {value}" for what, value in wrong.items() if value), "")


def windows_of(config: Any) -> list[int]:
    """The window of every layer; 0 for none."""
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else 0 for kind in kinds]
