"""Models that others wrote, in hocket's planned step: see docs/any-model.md."""

from hocket.layers.standin import grouped_linear

__all__ = ["grouped_linear"]
