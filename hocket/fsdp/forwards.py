"""Modules whose forward in a sharded unit is another one, which writes weight gradients where they are sent from."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from hocket.runtime.functional import embedding_forward, linear_forward

FORWARDS: dict[type[nn.Module], Callable[..., Tensor]] = {nn.Linear: linear_forward, nn.Embedding: embedding_forward}
"""The forward that replaces the one of a class of modules in a sharded unit."""


def forward_of(cls: type[nn.Module]) -> Callable[..., Tensor] | None:
    """The replacement for a class of `FORWARDS` or a subclass that runs its forward unchanged, None for others."""
    return next((new for base, new in FORWARDS.items() if cls.forward is base.forward), None)
