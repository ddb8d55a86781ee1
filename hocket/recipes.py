"""Named runs. A recipe is a function that returns a `Config`; the first line of its docstring is its description.

Any setting of a recipe can be changed on the command line, as in `hocket train tiny --train.steps 50`.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NoReturn

from hocket.config import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    PlanConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
)
from hocket.problems import stop_if
from hocket.settings import families
from hocket.settings.schema import ill_typed


def tiny() -> Config:
    """A small MoE on 4 processes with every overlap on; minutes on two CPU cores."""
    return Config(
        model=families.TINY,
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
    return large("llama3_8b", families.LLAMA3_8B, MeshConfig(dp=8), PlanConfig())


def mixtral_8x7b() -> Config:
    """Mixtral 8x7B (47B, 13B active) on 8 GPUs: pipeline 2 x data 4 with experts over 4 ranks."""
    return large("mixtral_8x7b", families.MIXTRAL_8X7B, MeshConfig(pp=2, dp=4, ep=4), PlanConfig(chunks=4), 2048)


def qwen3_30b_a3b() -> Config:
    """Qwen3-30B-A3B (3B active) on 8 GPUs: pipeline 2 x data 4 with experts over 4 ranks."""
    return large("qwen3_30b_a3b", families.QWEN3_30B_A3B, MeshConfig(pp=2, dp=4, ep=4), PlanConfig(chunks=4))


def large(name: str, model: ModelConfig, mesh: MeshConfig, plan: PlanConfig, length: int = 4096) -> Config:
    """What the recipes of published models have in common: bf16, 8 microbatches of one sequence of `length` tokens."""
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
    "llama3_1_8b": ("Llama 3.1 8B on 8 GPUs.", families.llama3_1(4096, 32, 32, 14336), _DP8, _ONE),
    "llama3_1_70b": (
        "Llama 3.1 70B on 64 GPUs: pipeline 4 x data 16.",
        families.llama3_1(8192, 80, 64, 28672),
        MeshConfig(pp=4, dp=16),
        PlanConfig(chunks=4, recompute=("mlp",)),
    ),
    "qwen3_0_6b": ("Qwen3 0.6B on 8 GPUs.", families.qwen3(1024, 28, 16, 3072, tied=True), _DP8, _ONE),
    "qwen3_1_7b": ("Qwen3 1.7B on 8 GPUs.", families.qwen3(2048, 28, 16, 6144, tied=True), _DP8, _ONE),
    "qwen3_4b": ("Qwen3 4B on 8 GPUs.", families.qwen3(2560, 36, 32, 9728, tied=True), _DP8, _ONE),
    "qwen3_8b": ("Qwen3 8B on 8 GPUs.", families.qwen3(4096, 36, 32, 12288), _DP8, _ONE),
    "qwen3_14b": ("Qwen3 14B on 8 GPUs.", families.qwen3(5120, 40, 40, 17408), _DP8, _ONE),
    "qwen3_32b": ("Qwen3 32B on 8 GPUs.", families.qwen3(5120, 64, 64, 25600), _DP8, PlanConfig(recompute=("mlp",))),
    "qwen3_235b_a22b": (
        "Qwen3-235B-A22B on 128 GPUs: pipeline 8 x data 16 with experts over 8 ranks.",
        families.QWEN3_235B_A22B,
        MeshConfig(pp=8, dp=16, ep=8),
        PlanConfig(recompute=("auto",)),
    ),
    "qwen3_next_80b_a3b": (
        "Qwen3-Next-80B-A3B (4B active) on 32 GPUs: pipeline 4 x data 8 with experts over 8 ranks.",
        families.QWEN3_NEXT_80B_A3B,
        MeshConfig(pp=4, dp=8, ep=8),
        PlanConfig(chunks=2, recompute=("auto",)),
    ),
    "glm4_5_air": (
        "GLM-4.5-Air (107B, 13B active) on 32 GPUs: pipeline 4 x data 8 with experts over 8 ranks.",
        families.GLM4_5_AIR,
        MeshConfig(pp=4, dp=8, ep=8),
        PlanConfig(chunks=2, recompute=("experts",)),
    ),
    "gpt_oss_20b": (
        "gpt-oss-20b (4B active) on 8 GPUs: pipeline 2 x data 4 with experts over 4 ranks.",
        families.GPT_OSS_20B,
        MeshConfig(pp=2, dp=4, ep=4),
        PlanConfig(chunks=2),
    ),
    "gpt_oss_120b": (
        "gpt-oss-120b (5B active) on 64 GPUs: pipeline 4 x data 16 with experts over 8 ranks.",
        families.GPT_OSS_120B,
        MeshConfig(pp=4, dp=16, ep=8),
        PlanConfig(chunks=3),
    ),
    "olmo2_7b": ("OLMo 2 7B on 8 GPUs.", families.OLMO2_7B, _DP8, _ONE),
    "olmoe_1b_7b": (
        "OLMoE-1B-7B (1.3B active) on 8 GPUs with experts over 8 ranks.",
        families.OLMOE_1B_7B,
        MeshConfig(dp=8, ep=8),
        _ONE,
    ),
    "deepseek_v2_lite": (
        "DeepSeek-V2-Lite (16B, 3B active) on 8 GPUs: pipeline 2 x data 4 with experts over 4 ranks.",
        families.DEEPSEEK_V2_LITE,
        MeshConfig(pp=2, dp=4, ep=4),
        PlanConfig(chunks=2),
    ),
    "moonlight_16b": (
        "Moonlight-16B-A3B (3B active) on 8 GPUs: pipeline 2 x data 4 with experts over 4 ranks.",
        families.MOONLIGHT_16B,
        MeshConfig(pp=2, dp=4, ep=4),
        PlanConfig(chunks=2),
    ),
    "deepseek_v3": (
        "DeepSeek-V3 (671B, 37B active) on 256 GPUs: pipeline 8 x data 32 with experts over 32 ranks.",
        families.DEEPSEEK_V3,
        *_MANY,
    ),
    "kimi_k2": (
        "Kimi-K2 (1T, 33B active) on 256 GPUs: pipeline 8 x data 32 with experts over 32 ranks.",
        families.KIMI_K2,
        *_MANY,
    ),
}
"""Recipes that are no more than a published model on a mesh: a line about each, the model, the mesh, and the plan."""


RECIPES: dict[str, Callable[[], Config]] = {
    **{recipe.__name__: recipe for recipe in (tiny, moe_8gpu, llama3_8b, mixtral_8x7b, qwen3_30b_a3b)},
    **{name: partial(large, name, model, mesh, plan) for name, (_, model, mesh, plan) in PUBLISHED.items()},
}
"""All recipes by name."""


def describe(name: str) -> str:
    """One line about a recipe."""
    return PUBLISHED[name][0] if name in PUBLISHED else (RECIPES[name].__doc__ or "").strip().splitlines()[0]


def recipe(name: str, origin: str = "command line") -> Config:
    """The configuration of a recipe, or of a function written `module:function`.

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
    """The configuration that a user's function returns. Its module is looked for in the current folder too."""
    module, _, function = name.partition(":")

    def refuse(reason: str, fix: str) -> NoReturn:
        raise ValueError(f"recipe = {name} ({origin}): {reason}; fix: {fix}")

    sys.path.insert(0, "")
    try:
        loaded = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # what runs is the user's, and may fail in any way
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
    """An error in one line, with its kind if its text alone is not enough."""
    text = " ".join(str(error).split())
    return (
        text if isinstance(error, ImportError | TypeError | ValueError) and text else f"{type(error).__name__} {text}"
    )
