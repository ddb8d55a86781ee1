"""Starting points of runs: models with their true sizes, named runs (recipes), and presets of several settings.

A recipe is a function that returns a `Config`; the first line of its docstring is its description. Any setting of a
recipe can be changed on the command line, as in `hocket train tiny --train.steps 50`.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from hocket.config import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    PlanConfig,
    PrecisionConfig,
    RopeConfig,
    RunConfig,
    TrainConfig,
)
from hocket.config.schema import ill_typed, meant
from hocket.problems import stop_if

# -- Models ------------------------------------------------------------------------------------------------------------
#
# Most authors publish only a standard deviation for the initial weights. So these use torchtitan's initialisation,
# which trains these families from scratch.

LLAMA3_8B = ModelConfig(
    vocab=128256, hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336,
    rope_theta=500000.0, norm_eps=1e-5, init="torchtitan",
)  # fmt: skip
"""Llama 3 8B: 8.03 billion parameters, dense."""


def llama3_1(hidden: int, layers: int, heads: int, ffn: int) -> ModelConfig:
    """Llama 3.1: Llama 3 with rotary positions scaled for sequences of 131,072 tokens."""
    rope = RopeConfig(kind="llama3", factor=8.0, original_positions=8192)
    return replace(LLAMA3_8B, hidden=hidden, layers=layers, heads=heads, ffn=ffn, rope=rope)


def qwen3(hidden: int, layers: int, heads: int, ffn: int, tied: bool = False) -> ModelConfig:
    """A dense Qwen3."""
    return ModelConfig(
        vocab=151936, hidden=hidden, layers=layers, heads=heads, kv_heads=8, head_dim=128, ffn=ffn, tied=tied,
        qk_norm=True, rope_theta=1e6, init="torchtitan",
    )  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> ModelConfig:
    """Windows in every other layer, sinks, and biases everywhere. Its authors do not say how they balance experts."""
    return ModelConfig(
        vocab=201088, hidden=2880, layers=layers, heads=64, kv_heads=8, head_dim=64, qkv_bias=True, o_bias=True,
        window=128, full_layers=tuple(range(1, layers, 2)), sinks=True,
        experts=experts, top_k=4, expert_ffn=2880, router_bias=True, expert_bias=True, swiglu_limit=7.0,
        aux_loss=0.001, rope_theta=150000.0, norm_eps=1e-5, init="torchtitan",
        rope=RopeConfig(kind="yarn", factor=32.0, original_positions=4096, truncate=False),
    )  # fmt: skip


MIXTRAL_8X7B = ModelConfig(
    vocab=32000, hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128,
    experts=8, top_k=2, expert_ffn=14336, aux_loss=0.02, rope_theta=1e6, norm_eps=1e-5,
    init="torchtitan",
)  # fmt: skip
"""Mixtral 8x7B: 46.7 billion parameters, 12.9 active, 8 experts of which 2 are used."""
QWEN3_30B_A3B = ModelConfig(
    vocab=151936, hidden=2048, layers=48, heads=32, kv_heads=4, head_dim=128,
    experts=128, top_k=8, expert_ffn=768, aux_loss=0.001, qk_norm=True, rope_theta=1e6,
    init="torchtitan",
)  # fmt: skip
"""Qwen3-30B-A3B: 30.5 billion parameters, 3.3 active, 128 small experts of which 8 are used."""
QWEN3_235B_A22B = replace(QWEN3_30B_A3B, hidden=4096, layers=94, heads=64, expert_ffn=1536)
"""Qwen3-235B-A22B: 235.1 billion parameters, 22.2 active, 128 experts of which 8 are used."""
GLM4_5_AIR = ModelConfig(
    vocab=151552, hidden=4096, layers=46, heads=96, kv_heads=8, head_dim=128, ffn=10944, dense_layers=(0,),
    experts=128, top_k=8, expert_ffn=1408, shared_ffn=1408, router="sigmoid", bias_rate=0.001, qkv_bias=True,
    rope_theta=1e6, rope=RopeConfig(width=64), norm_eps=1e-5, init="torchtitan",
)  # fmt: skip
"""GLM-4.5-Air: 106.9 billion parameters, 13.4 active, rotary positions on half of each head, a dense first layer."""
OLMO2_7B = ModelConfig(
    vocab=100352, hidden=4096, layers=32, heads=32, kv_heads=32, head_dim=128, ffn=11008, norms="after",
    qk_norm=True, qk_norm_over="whole", rope_theta=500000.0, init="torchtitan",
)  # fmt: skip
"""OLMo 2 7B: 7.3 billion parameters, dense, norms after attention and MLP."""
OLMOE_1B_7B = ModelConfig(
    vocab=50304, hidden=2048, layers=16, heads=16, kv_heads=16, head_dim=128, experts=64, top_k=8, expert_ffn=1024,
    normalize_top_k=False, aux_loss=0.01, qk_norm=True, qk_norm_over="whole", norm_eps=1e-5, init="torchtitan",
)  # fmt: skip
"""OLMoE-1B-7B: 6.9 billion parameters, 1.3 active, 64 small experts of which 8 are used."""
_NEXT: dict[str, Any] = dict(
    hidden=2048, heads=16, kv_heads=2, head_dim=256, qk_norm=True, attn_gate=True, norm_plus_one=True,
    delta_heads=32, expert_ffn=512, shared_ffn=512, shared_gate=True, aux_loss=0.001,
    rope_theta=1e7, rope=RopeConfig(width=64), init="torchtitan",
)  # fmt: skip
"""The sizes that Qwen3-Next-80B-A3B and Qwen3.5-35B-A3B share."""
_LATENT: dict[str, Any] = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
"""Sizes of latent attention in all DeepSeek models, and in those modelled on them."""
DEEPSEEK_V2_LITE = ModelConfig(
    vocab=102400, hidden=2048, layers=27, heads=16, ffn=10944, dense_layers=(0,), **_LATENT,
    experts=64, top_k=6, expert_ffn=1408, shared_ffn=2816, normalize_top_k=False, aux_loss=0.001,
    rope=RopeConfig(kind="yarn", factor=40.0, original_positions=4096, mscale=0.707, mscale_all_dim=0.707),
    init="torchtitan",
)  # fmt: skip
"""DeepSeek-V2-Lite: 15.7 billion parameters, 2.7 active. Two shared experts of width 1408 are one of 2816."""
MOONLIGHT_16B = ModelConfig(
    vocab=163840, hidden=2048, layers=27, heads=16, ffn=11264, dense_layers=(0,), **_LATENT,
    experts=64, top_k=6, expert_ffn=1408, shared_ffn=2816, router="sigmoid", route_scale=2.446,
    bias_rate=0.001, rope_theta=50000.0, norm_eps=1e-5, init="torchtitan",
)  # fmt: skip
"""Moonlight-16B-A3B: 16.0 billion parameters, 2.9 active. Two shared experts of width 1408 are one of 2816."""
DEEPSEEK_V3 = ModelConfig(
    vocab=129280, hidden=7168, layers=61, heads=128, ffn=18432, dense_layers=(0, 1, 2), q_lora_rank=1536, **_LATENT,
    experts=256, top_k=8, expert_ffn=2048, shared_ffn=2048, router="sigmoid", route_scale=2.5,
    route_groups=8, route_top_groups=4, bias_rate=0.001,
    rope=RopeConfig(kind="yarn", factor=40.0, original_positions=4096, mscale=1.0, mscale_all_dim=1.0),
    init="torchtitan",
)  # fmt: skip
"""DeepSeek-V3: 671 billion parameters, 37 active, without its multi-token prediction layer."""
KIMI_K2 = ModelConfig(
    vocab=163840, hidden=7168, layers=61, heads=64, ffn=18432, dense_layers=(0,), q_lora_rank=1536, **_LATENT,
    experts=384, top_k=8, expert_ffn=2048, shared_ffn=2048, router="sigmoid", route_scale=2.827,
    bias_rate=0.001, rope_theta=50000.0,
    rope=RopeConfig(
        kind="yarn", factor=32.0, original_positions=4096, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0
    ),
    init="torchtitan",
)  # fmt: skip
"""Kimi-K2, first release: 1.03 trillion parameters, 33 billion active."""
GPT_OSS_20B = _gpt_oss(layers=24, experts=32)
"""gpt-oss-20b: 20.9 billion parameters, 3.6 active without the embedding, 32 experts of which 4 are used."""
GPT_OSS_120B = _gpt_oss(layers=36, experts=128)
"""gpt-oss-120b: 116.8 billion parameters, 5.1 active without the embedding, 128 experts of which 4 are used."""
QWEN3_NEXT_80B_A3B = ModelConfig(
    vocab=151936, layers=48, experts=512, top_k=10, **_NEXT, full_layers=tuple(range(3, 48, 4))
)  # fmt: skip
"""Qwen3-Next-80B-A3B: 79.7 billion parameters, 3.9 active, three gated delta nets for each layer of attention."""
TINY = ModelConfig(
    vocab=256, hidden=128, layers=8, heads=4, kv_heads=2, head_dim=32, ffn=384, dense_layers=(0, 4),
    experts=8, top_k=2, expert_ffn=128, shared_ffn=128, aux_loss=0.01, init="torchtitan",
)  # fmt: skip
"""A model for a laptop that has every kind of part: dense and MoE layers, shared expert, grouped queries."""


# -- Recipes -----------------------------------------------------------------------------------------------------------


def tiny() -> Config:
    """A small MoE on 4 processes with every overlap on; minutes on two CPU cores."""
    return Config(
        model=TINY,
        mesh=MeshConfig(pp=2, dp=2, ep=2),
        plan=PlanConfig(chunks=2),
        data=DataConfig(sequence_length=128),
        train=TrainConfig(steps=150, microbatches=4, sequences=4, lr=4e-3, warmup=15, eval_every=50, save_every=50),
        run=RunConfig(name="tiny"),
    )


def moe_8gpu() -> Config:
    """A 3.3B MoE (0.7B active) on 8 GPUs: pipeline 2 x data 4 with experts over 4 ranks, every overlap on."""
    return Config(
        model=ModelConfig(
            hidden=2048,
            layers=16,
            heads=16,
            kv_heads=4,
            head_dim=128,
            ffn=5632,
            dense_layers=(0,),
            experts=32,
            top_k=4,
            expert_ffn=1024,
            shared_ffn=1024,
            aux_loss=0.01,
            init="torchtitan",
        ),
        mesh=MeshConfig(pp=2, dp=4, ep=4),
        plan=PlanConfig(chunks=2),
        data=DataConfig(sequence_length=2048),
        precision=PrecisionConfig(compute="bf16"),
        train=TrainConfig(steps=200, microbatches=8, sequences=8, lr=6e-4, warmup=20),
        run=RunConfig(name="moe_8gpu"),
    )


def llama3_8b() -> Config:
    """Llama-3 8B, a dense model, on 8 GPUs: fully sharded data parallel."""
    return large("llama3_8b", LLAMA3_8B, MeshConfig(dp=8), PlanConfig())


def mixtral_8x7b() -> Config:
    """Mixtral 8x7B (47B, 13B active) on 8 GPUs: pipeline 2 x data 4 with experts over 4 ranks."""
    return large("mixtral_8x7b", MIXTRAL_8X7B, MeshConfig(pp=2, dp=4, ep=4), PlanConfig(chunks=4), 2048)


def qwen3_30b_a3b() -> Config:
    """Qwen3-30B-A3B (3B active) on 8 GPUs: pipeline 2 x data 4 with experts over 4 ranks."""
    return large("qwen3_30b_a3b", QWEN3_30B_A3B, MeshConfig(pp=2, dp=4, ep=4), PlanConfig(chunks=4))


def large(name: str, model: ModelConfig, mesh: MeshConfig, plan: PlanConfig, length: int = 4096) -> Config:
    """The common settings of recipes of published models: bf16, 8 microbatches of one sequence of `length` tokens."""
    return Config(
        model=model,
        mesh=mesh,
        plan=plan,
        data=DataConfig(sequence_length=length),
        precision=PrecisionConfig(compute="bf16"),
        train=TrainConfig(steps=1000, microbatches=8, lr=3e-4, warmup=100, save_every=500),
        run=RunConfig(name=name),
    )


_DP8, _ONE = MeshConfig(dp=8), PlanConfig()
_MANY = MeshConfig(pp=8, dp=32, ep=32), PlanConfig(chunks=2, recompute=("auto",))
PUBLISHED: dict[str, tuple[str, ModelConfig, MeshConfig, PlanConfig]] = {
    "llama3_1_8b": ("Llama 3.1 8B on 8 GPUs.", llama3_1(4096, 32, 32, 14336), _DP8, _ONE),
    "llama3_1_70b": (
        "Llama 3.1 70B on 64 GPUs: pipeline 4 x data 16.",
        llama3_1(8192, 80, 64, 28672),
        MeshConfig(pp=4, dp=16),
        PlanConfig(chunks=4, recompute=("mlp",)),
    ),
    "qwen3_0_6b": ("Qwen3 0.6B on 8 GPUs.", qwen3(1024, 28, 16, 3072, tied=True), _DP8, _ONE),
    "qwen3_1_7b": ("Qwen3 1.7B on 8 GPUs.", qwen3(2048, 28, 16, 6144, tied=True), _DP8, _ONE),
    "qwen3_4b": ("Qwen3 4B on 8 GPUs.", qwen3(2560, 36, 32, 9728, tied=True), _DP8, _ONE),
    "qwen3_8b": ("Qwen3 8B on 8 GPUs.", qwen3(4096, 36, 32, 12288), _DP8, _ONE),
    "qwen3_14b": ("Qwen3 14B on 8 GPUs.", qwen3(5120, 40, 40, 17408), _DP8, _ONE),
    "qwen3_32b": ("Qwen3 32B on 8 GPUs.", qwen3(5120, 64, 64, 25600), _DP8, PlanConfig(recompute=("mlp",))),
    "qwen3_235b_a22b": (
        "Qwen3-235B-A22B on 128 GPUs: pipeline 8 x data 16 with experts over 8 ranks.",
        QWEN3_235B_A22B,
        MeshConfig(pp=8, dp=16, ep=8),
        PlanConfig(recompute=("auto",)),
    ),
    "qwen3_next_80b_a3b": (
        "Qwen3-Next-80B-A3B (4B active) on 32 GPUs: pipeline 4 x data 8 with experts over 8 ranks.",
        QWEN3_NEXT_80B_A3B,
        MeshConfig(pp=4, dp=8, ep=8),
        PlanConfig(chunks=2, recompute=("auto",)),
    ),
    "glm4_5_air": (
        "GLM-4.5-Air (107B, 13B active) on 32 GPUs: pipeline 4 x data 8 with experts over 8 ranks.",
        GLM4_5_AIR,
        MeshConfig(pp=4, dp=8, ep=8),
        PlanConfig(chunks=2, recompute=("experts",)),
    ),
    "gpt_oss_20b": (
        "gpt-oss-20b (4B active) on 8 GPUs: pipeline 2 x data 4 with experts over 4 ranks.",
        GPT_OSS_20B,
        MeshConfig(pp=2, dp=4, ep=4),
        PlanConfig(chunks=2),
    ),
    "gpt_oss_120b": (
        "gpt-oss-120b (5B active) on 64 GPUs: pipeline 4 x data 16 with experts over 8 ranks.",
        GPT_OSS_120B,
        MeshConfig(pp=4, dp=16, ep=8),
        PlanConfig(chunks=3),
    ),
    "olmo2_7b": ("OLMo 2 7B on 8 GPUs.", OLMO2_7B, _DP8, _ONE),
    "olmoe_1b_7b": (
        "OLMoE-1B-7B (1.3B active) on 8 GPUs with experts over 8 ranks.",
        OLMOE_1B_7B,
        MeshConfig(dp=8, ep=8),
        _ONE,
    ),
    "deepseek_v2_lite": (
        "DeepSeek-V2-Lite (16B, 3B active) on 8 GPUs: pipeline 2 x data 4 with experts over 4 ranks.",
        DEEPSEEK_V2_LITE,
        MeshConfig(pp=2, dp=4, ep=4),
        PlanConfig(chunks=2),
    ),
    "moonlight_16b": (
        "Moonlight-16B-A3B (3B active) on 8 GPUs: pipeline 2 x data 4 with experts over 4 ranks.",
        MOONLIGHT_16B,
        MeshConfig(pp=2, dp=4, ep=4),
        PlanConfig(chunks=2),
    ),
    "deepseek_v3": (
        "DeepSeek-V3 (671B, 37B active) on 256 GPUs: pipeline 8 x data 32 with experts over 32 ranks.",
        DEEPSEEK_V3,
        *_MANY,
    ),
    "kimi_k2": (
        "Kimi-K2 (1T, 33B active) on 256 GPUs: pipeline 8 x data 32 with experts over 32 ranks.",
        KIMI_K2,
        *_MANY,
    ),
}
"""Recipes that are a published model on a mesh: description, model, mesh, and plan."""


RECIPES: dict[str, Callable[[], Config]] = {
    **{recipe.__name__: recipe for recipe in (tiny, moe_8gpu, llama3_8b, mixtral_8x7b, qwen3_30b_a3b)},
    **{name: partial(large, name, model, mesh, plan) for name, (_, model, mesh, plan) in PUBLISHED.items()},
}
"""All recipes by name."""


def describe(name: str) -> str:
    """One line about a recipe."""
    return PUBLISHED[name][0] if name in PUBLISHED else (RECIPES[name].__doc__ or "").strip().splitlines()[0]


def recipe(name: str, origin: str = "command line") -> Config:
    """The configuration of a recipe, or of a function written as `module:function`.

    `origin` is where the name was given. Raises ValueError for an unknown name, with a suggestion.
    """
    if ":" in name:
        return _from_function(name, origin)
    if name in RECIPES:
        return RECIPES[name]()
    close = difflib.get_close_matches(name, RECIPES, n=1)
    hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(RECIPES)}, or module:function"
    raise ValueError(f"recipe = {name} ({origin}): there is no such recipe; fix: {hint}")


def _from_function(name: str, origin: str) -> Config:
    """The configuration that a user's function returns. Its module may be in the current folder."""
    module, _, function = name.partition(":")

    def refuse(reason: str, fix: str) -> NoReturn:
        raise ValueError(f"recipe = {name} ({origin}): {reason}; fix: {fix}")

    sys.path.insert(0, "")
    try:
        loaded = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # user code may fail in any way
        refuse(
            f"{module or 'nothing'} cannot be imported: {said(error)}",
            "module:function, as Python would import it from here",
        )
    finally:
        sys.path.remove("")
    make = getattr(loaded, function, None)
    if not callable(make):
        known = [each for each, value in vars(loaded).items() if callable(value) and not each.startswith("_")]
        close = difflib.get_close_matches(function, known, n=1)
        refuse(
            f"{module} has no function {function or '(empty)'}",
            f"did you mean {close[0]}?" if close else "name one that it has",
        )
    try:
        config = make()
    except (Exception, SystemExit) as error:
        refuse(f"it fails: {said(error)}", "a function without arguments that returns a hocket.config.Config")
    if not isinstance(config, Config):
        refuse(f"it returns {type(config).__name__}", "a function that returns a hocket.config.Config")
    stop_if(ill_typed(config, {"": f"recipe {name}"}))
    named = config.run.name != RunConfig().name
    return config if named else replace(config, run=replace(config.run, name=function))


def said(error: BaseException) -> str:
    """An error in one line, with its type if the text alone is unclear."""
    text = " ".join(str(error).split())
    return (
        text if isinstance(error, ImportError | TypeError | ValueError) and text else f"{type(error).__name__} {text}"
    )


# -- Presets: overridden by anything that a recipe, a file or a flag sets ----------------------------------------------

PLAIN: dict[str, Any] = {
    "overlap.ep.merge": "off",
    "overlap.ep.merge_ends": "off",
    "overlap.defer_wgrad": "off",
    "overlap.pp.defer_layers": 0,
}
"""Nothing is merged or deferred: microbatches run one by one, and weight gradients run where autograd has them."""


@dataclass(frozen=True)
class Preset:
    """Some settings, and their purpose."""

    description: str
    changes: dict[str, Any]


PRESETS: dict[str, Preset] = {
    "throughput": Preset(
        "short steps where memory is left: weights are gathered once a step, and gathers run far ahead",
        {"overlap.dp.strategy": "optim_grads", "overlap.dp.prefetch": 4},
    ),
    "memory": Preset(
        "what fits: weights are given back after every use, gathers run one layer ahead, parts run forward again",
        {
            "plan.recompute": ("auto",),
            "plan.graphs": "off",
            "overlap.dp.strategy": "optim_grads_params",
            "overlap.dp.prefetch": 1,
            "overlap.ep.merge_ends": "off",
            "overlap.pp.defer_layers": 0,
        },
    ),
    "debug": Preset(
        "one thing after another, and hangs reported soon: does a problem come from overlap?",
        {
            **PLAIN,
            "overlap.dp.prefetch": 0,
            "overlap.dp.update": "end",
            "plan.graphs": "off",
            "train.hang_timeout": 60.0,
        },
    ),
}


def preset(name: str, origin: str) -> dict[str, Any]:
    """The settings of a preset. Raises ValueError for an unknown name; `origin` is where it was named."""
    if name in PRESETS:
        return PRESETS[name].changes
    close = meant(name, PRESETS)
    fix = f"did you mean {close}?" if close else f"choose one of {', '.join(PRESETS)}"
    raise ValueError(f"preset = {name} ({origin}): there is no such preset; fix: {fix}")
