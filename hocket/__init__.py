"""Training whose communication is hidden: an optimizer step is a plan, written down as data before it runs.

A plan lists everything that each rank does in a step: gathers of sharded weights, reductions of gradients, expert
all-to-alls, pipeline sends, deferred weight gradients. It is checked for deadlocks and races, simulated, drawn, run.

    import hocket

    step = hocket.plan("moe_8gpu")                       # needs no GPU
    hocket.check(step)                                   # [] if nothing is wrong
    hocket.simulate(step).makespan                       # predicted seconds
    print(hocket.draw(step))                             # what overlaps with what, on every lane of every rank

    step = hocket.plan_model(model, {"mesh.dp": 8})      # a model of transformers, or your own
    loss, norm = step((ids, targets))                    # one optimizer step

    hocket.fully_shard(model, units=Block)               # any module, in your own training loop, without a plan

plan            a step of hocket's own transformer: settings, decisions and program; `.start()` makes it train
plan_model      the same for a model of your own
check           every rule that a step breaks, with the ops involved
simulate        when each op would run, what is exposed, and the memory it takes
draw            the predicted timeline as text, SVG or an HTML page
fully_shard     shards the weights of any module; used with ShardOptions, Precision and clip_grad_norm_
context_parallel  shards the sequences of a model of transformers over ranks
checkpoint      saves and loads what `fully_shard` has sharded, on any number of ranks
sharding        other names for `fully_shard`: parameter groups, updates that overlap gathers, placement

Names are loaded on first use, so only those that run a model import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket import checkpoint, sharding
    from hocket.adapters.context_parallel import context_parallel
    from hocket.adapters.step import plan_model
    from hocket.fsdp.api import clip_grad_norm_, fully_shard
    from hocket.fsdp.options import Precision, ShardOptions
    from hocket.planned import check, draw, plan, simulate

__all__ = [
    "Precision",
    "ShardOptions",
    "check",
    "checkpoint",
    "clip_grad_norm_",
    "context_parallel",
    "draw",
    "fully_shard",
    "plan",
    "plan_model",
    "sharding",
    "simulate",
]

_MODULES = {
    "Precision": "fsdp.options",
    "ShardOptions": "fsdp.options",
    "check": "planned",
    "clip_grad_norm_": "fsdp.api",
    "context_parallel": "adapters.context_parallel",
    "draw": "planned",
    "fully_shard": "fsdp.api",
    "plan": "planned",
    "plan_model": "adapters.step",
    "simulate": "planned",
}
"""Name -> the module that defines it. `checkpoint` and `sharding` are modules themselves."""


def __getattr__(name: str) -> Any:
    if name in ("checkpoint", "sharding"):
        return import_module(f"hocket.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'hocket' has no attribute {name!r}")
    return getattr(import_module(f"hocket.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
