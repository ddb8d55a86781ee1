"""Costs for simulated programs: any table, and those of the published model of merged 1F1B."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from hocket.predict.simulate import OpCost, Time
from hocket.program.ops import Op, Program


@dataclass
class Table:
    """Costs by verb and part; missing ones are zero."""

    times: Mapping[tuple[str, str], Time]
    output: Mapping[tuple[str, str], int] = field(default_factory=dict)
    saved: Mapping[tuple[str, str], int] = field(default_factory=dict)
    fixed: int = 0
    grads: Mapping[tuple[str, str], int] = field(default_factory=dict)
    inner: Mapping[tuple[str, str], Time] = field(default_factory=dict)

    def of(self, op: Op) -> OpCost:
        key = op.verb, op.part
        return OpCost(
            self.times.get(key, 0),
            output_bytes=self.output.get(key, 0),
            saved_bytes=self.saved.get(key, 0),
            grad_bytes=self.grads.get(key, 0),
            inner_seconds=self.inner.get(key, 0),
        )

    def fixed_bytes(self, program: Program, rank: int) -> int:
        return self.fixed


def published(p2p: Fraction, fold: bool = False) -> dict[tuple[str, str], Time]:
    """Costs of the published model; `fold` makes each weight gradient part of its backward."""
    texts = {
        ("fwd", "attn"): "1.0", ("bwd", "attn"): "1.3", ("wgrad", "attn"): "0.7",
        ("fwd", "experts"): "1.0", ("bwd", "experts"): "1.0", ("wgrad", "experts"): "1.0",
    }  # fmt: skip
    table = {key: Fraction(text) for key, text in texts.items()}
    table |= {(verb, part): Fraction("0.7") for verb in ("fwd", "bwd") for part in ("dispatch", "combine")}
    table |= {("recv", "act"): p2p, ("recv", "grad"): p2p}
    if fold:
        for part in ("attn", "experts"):
            table["bwd", part] += table.pop(("wgrad", part))
    return dict(table)
