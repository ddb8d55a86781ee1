"""Training whose communication costs nothing: the optimizer step is a plan, written down as data before it runs.

A plan lists, for every rank, all that a step does: gathers of sharded weights, reductions of gradients, expert
all-to-alls, pipeline sends, deferred weight gradients. It is checked for deadlocks and races, simulated, drawn, run.

    import hocket

    step = hocket.plan("moe_8gpu")                       # needs no GPU
    hocket.check(step)                                   # [] if nothing is wrong
    hocket.simulate(step).makespan                       # predicted seconds
    print(hocket.draw(step))                             # what runs beside what, on every lane of every rank

    step = hocket.plan_model(model, {"mesh.dp": 8})      # a model of transformers, or your own
    loss, norm = step((ids, targets))                    # one optimizer step

    hocket.fully_shard(model, units=Block)               # any module, under a loop of your own, without a plan

plan            a step of hocket's own transformer: settings, decisions and program; `.start()` makes it train
plan_model      the same for a model of your own
check           every broken rule of a step, with the ops involved
simulate        when each op would run, what is exposed, and how much memory it takes
draw            the predicted timeline as text, SVG or a page
fully_shard     shards the weights of any module; ShardOptions, Precision and clip_grad_norm_ go with it
context_parallel  has ranks share the sequences of a model of transformers
checkpoint      saving and loading what `fully_shard` has sharded, on any number of ranks
sharding        what else belongs to `fully_shard`: parameter groups, the update beside gathers, placement

Names are loaded when they are first used: torch is needed by those that run, and by no other.
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

_HOMES = {
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
"""Name -> the file that has it. The others are modules."""


def __getattr__(name: str) -> Any:
    if name in ("checkpoint", "sharding"):
        return import_module(f"hocket.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'hocket' has no attribute {name!r}")
    return getattr(import_module(f"hocket.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
