"""Training whose communication runs beside compute: by a plan of the step, or under a loop of your own.

`fully_shard` and what belongs to it are loaded when first used, since they need torch and the command line does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.adapters.step import plan_model
    from hocket.fsdp.api import clip_grad_norm_, fully_shard, param_groups, unit_of
    from hocket.fsdp.options import ShardOptions
    from hocket.fsdp.precision import Precision
    from hocket.fsdp.saving.checkpoint import load as load_checkpoint
    from hocket.fsdp.saving.checkpoint import save as save_checkpoint
    from hocket.fsdp.saving.optimizer_state import load_optimizer_state, optimizer_state
    from hocket.fsdp.saving.state import load_model_state, model_state
    from hocket.fsdp.shard_groups import Placement
    from hocket.fsdp.update import step_and_gather

__all__ = [
    "Placement",
    "Precision",
    "ShardOptions",
    "clip_grad_norm_",
    "fully_shard",
    "load_checkpoint",
    "load_model_state",
    "load_optimizer_state",
    "model_state",
    "optimizer_state",
    "param_groups",
    "plan_model",
    "save_checkpoint",
    "step_and_gather",
    "unit_of",
]

_HOMES = {
    "Placement": "fsdp.shard_groups:Placement",
    "Precision": "fsdp.precision:Precision",
    "ShardOptions": "fsdp.options:ShardOptions",
    "clip_grad_norm_": "fsdp.api:clip_grad_norm_",
    "fully_shard": "fsdp.api:fully_shard",
    "load_checkpoint": "fsdp.saving.checkpoint:load",
    "load_model_state": "fsdp.saving.state:load_model_state",
    "load_optimizer_state": "fsdp.saving.optimizer_state:load_optimizer_state",
    "model_state": "fsdp.saving.state:model_state",
    "optimizer_state": "fsdp.saving.optimizer_state:optimizer_state",
    "param_groups": "fsdp.api:param_groups",
    "plan_model": "adapters.step:plan_model",
    "save_checkpoint": "fsdp.saving.checkpoint:save",
    "step_and_gather": "fsdp.update:step_and_gather",
    "unit_of": "fsdp.api:unit_of",
}
"""Name -> the file that has it, and its name there."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hocket' has no attribute {name!r}")
    file, there = _HOMES[name].split(":")
    return getattr(import_module(f"hocket.{file}"), there)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
