"""Training whose communication costs nothing.

`fully_shard` and what belongs to it are loaded when first used, since they need torch and the command line does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.fsdp.api import clip_grad_norm_, fully_shard, param_groups, unit_of
    from hocket.fsdp.connect import Placement
    from hocket.fsdp.options import ShardOptions
    from hocket.fsdp.precision import Precision

__all__ = [
    "Placement",
    "Precision",
    "ShardOptions",
    "clip_grad_norm_",
    "fully_shard",
    "param_groups",
    "unit_of",
]

_HOMES = {"Placement": "connect", "Precision": "precision", "ShardOptions": "options"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hocket' has no attribute {name!r}")
    return getattr(import_module(f"hocket.fsdp.{_HOMES.get(name, 'api')}"), name)
