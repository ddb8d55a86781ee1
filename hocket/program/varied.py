"""Costs of ops of microbatches whose documents, and so whose attention, differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from hocket.program.cost import CostTable
from hocket.program.ops import Op
from hocket.program.schedule import Time


@dataclass(frozen=True)
class Varied(CostTable):
    """Costs where each microbatch has a share of the attention of whole sequences. Made by `varied`.

    Costs of attention are linear in the keys that a token meets, so those of a microbatch lie on the line through two
    sequence lengths. Memory does not depend on documents.
    """

    half: CostTable | None = None
    """The costs with sequences half as long, and twice as many."""
    shares: Sequence[float] = ()
    """Of every microbatch: 1 is a whole sequence, which has twice the attention of two halves."""

    def seconds(self, rank: int, op: Op) -> Time:
        whole = super().seconds(rank, op)
        if op.verb not in ("fwd", "bwd", "recompute") or self.half is None:
            return whole
        per_share = 2 * (float(whole) - float(self.half.seconds(rank, op)))
        return float(whole) - (1 - self.shares[op.microbatch]) * per_share


def varied(whole: CostTable, half: CostTable, shares: Sequence[float]) -> Varied:
    """The costs of microbatches with these shares of attention."""
    same: dict[str, Any] = {field.name: getattr(whole, field.name) for field in fields(CostTable)}
    return Varied(**same, half=half, shares=shares)
