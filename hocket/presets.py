"""Named settings of several switches at once."""

from __future__ import annotations

from typing import Any

PLAIN: dict[str, Any] = {"overlap.ep.merge": "off", "overlap.defer_wgrad": "off", "overlap.pp.defer_layers": 0}
"""Nothing merged and nothing deferred: every microbatch alone, and weight gradients where autograd would have them."""
