"""First values of weights by scheme: how widely each weight is spread, and who draws it that way."""

from __future__ import annotations

from hocket.config import ModelConfig

SOURCES = {
    "gpt2": "Radford et al. 2019, GPT-2, section 2.3",
    "torchtitan": "torchtitan's Llama 3, Qwen3 and DeepSeek-V3, torchtitan/models/common/param_init.py",
}


def spreads(name: str, model: ModelConfig) -> tuple[float, float]:
    """Standard deviation of a weight; of gate and up stacked in one weight, of each of the two.

    With `gpt2` all weights have `init_std`, but for projections onto the residual stream, which have it divided by
    sqrt(2 * layers). So the stream's variance does not grow with depth.

    With `torchtitan` embeddings have 1. Those much smaller drown in what the first layers add to all tokens alike, and
    then routers send all tokens to the same experts. The head has hidden ** -0.5, and so has an embedding that is the
    head too. Layer i, counted from 0, draws `wo`, `w_down`, the up half of `w_gate_up`, and its router with `init_std`
    / sqrt(2 * (i + 1)). The original also cuts the head's values off at three standard deviations, which this does not.
    """
    std, leaf = model.init_std, name.rsplit(".", 1)[-1]
    if model.init == "gpt2":
        return (std / (2 * model.layers) ** 0.5 if leaf in ("wo", "w_out", "w_down") else std,) * 2
    unit, number, *_ = name.split(".")
    if unit in ("embed", "head"):
        return (1.0 if unit == "embed" and not model.tied else model.hidden**-0.5,) * 2
    deep = std / (2 * (int(number) + 1)) ** 0.5
    first = deep if leaf in ("wo", "w_out", "w_down") or name.endswith("router.weight") else std
    return first, deep if leaf == "w_gate_up" else first


def described(model: ModelConfig) -> str:
    """Where first values come from, for explanations."""
    if model.weights:
        return f"no effect: first values are read from {model.weights}"
    outs = ["w_out" if delta else "wo" for delta in model.deltas()]
    known = ["embed.weight", "head.weight", *(f"layers.{i}.attn.{outs[i]}" for i in (0, model.layers - 1))]
    known += ["layers.0.router.weight"] if len(set(model.kinds()) - {"dense"}) else []
    each = ", ".join(f"{name} {spreads(name, model)[0]:.3g}" for name in dict.fromkeys(known))
    return f"standard deviations are {model.init_std:g}, but {each} ({SOURCES[model.init]})"
