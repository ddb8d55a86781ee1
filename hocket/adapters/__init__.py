"""Other people's models in hocket's planned step: see docs/models.md."""

from hocket.layers.weight_proxy import grouped_linear

__all__ = ["grouped_linear"]
