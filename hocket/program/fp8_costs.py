"""What products in fp8 cost, beside what they would cost in bf16.

A product in fp8 is faster, and its operands are half as large. Casts read and write more: the input of a product when
it runs forward, its output's gradient before backward, transposed copies of both before the weight gradient, and each
gathered copy of a weight. SwiGLU writes fp8 itself. Experts' weight gradients stay bf16 (`runtime/fp8_experts.py`).

Rates are ratios to bf16 on an H200 (benchmarks/results/fp8_products.json): of Llama-3 8B's products at 8,192 tokens
1.86 to 1.91 forward and backward and 1.74 to 1.87 for weight gradients; of grouped ones 1.32 to 1.72. What layers are
predicted to gain stands beside what they gained in tests/plan/test_fp8_costs.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hocket.program.formulas import PartSize

PRODUCTS = {"fwd": "forward", "recompute": "forward", "bwd": "dgrad", "wgrad": "wgrad"}
"""Verb -> the product that it computes, as `precision.fp8` names it."""
RATES = {"forward": 1.88, "dgrad": 1.88, "wgrad": 1.78}
GROUPED = {"forward": 1.6, "dgrad": 1.6, "wgrad": 1.0}
"""How much faster a product is than in bf16: of linear layers, and of experts."""
ISSUED = 4 / 3
"""How much longer the host issues an op, for the kernels of casts: a traced step of six layers of Qwen3-30B-A3B has
2,636 kernels in fp8 and 1,976 in bf16."""
DRAWN = 0.5
"""Power that a product's FLOP draws, of what one in bf16 does: about, as half of the bits are multiplied."""


@dataclass(frozen=True)
class Fp8:
    """Which products run in fp8."""

    products: tuple[str, ...]
    """Some of forward, dgrad and wgrad."""
    ends: tuple[int, int] = (0, 0)
    """The first and the last layers without."""
    casts: float = 2.0
    """How often a microbatch has to cast a weight: at each of its two gathers, or its share of once a step."""
    gathered: tuple[str, ...] = ()
    """Units that are gathered in fp8: nothing of them is cast but shards, once a step."""

    def share(self, kinds: Sequence[str], kind: str, verb: str) -> float:
        """Share of the layers of a kind whose op of a verb runs products in fp8. `kinds` has those of all layers."""
        if PRODUCTS.get(verb) not in self.products:
            return 0.0
        first, last = self.ends
        numbers = [number for number, other in enumerate(kinds) if other == kind]
        return sum(first <= number < len(kinds) - last for number in numbers) / max(1, len(numbers))

    def beside(self, kinds: Sequence[str], kind: str, unit: str) -> float:
        """Bytes of fp8 beside each weight that is there: its cast, if it is none itself, and a transposed copy."""
        copies = 1 if unit in self.gathered else 2
        return copies * max(self.share(kinds, kind, "fwd"), self.share(kinds, kind, "bwd"))

    def travelling(self, kinds: Sequence[str], kind: str, unit: str) -> float:
        """Share of a unit's weights, in all layers of a kind, that are gathered in fp8."""
        return self.share(kinds, kind, "fwd") if unit in self.gathered else 0.0

    def seconds(self, dense: float, grouped: float, verb: str) -> float:
        """Of products that take `dense` and `grouped` seconds in bf16."""
        product = PRODUCTS[verb]
        return dense / RATES[product] + grouped / GROUPED[product]

    def moved(self, size: PartSize, tokens: int, verb: str) -> float:
        """Bytes that casts read and write in an op."""
        if verb == "wgrad":  # transposed copies of both operands
            return 2.0 * tokens * size.rows if size.gemm else 0.0
        weights = 5 if verb == "fwd" or not size.grouped else 3  # a transposed copy too
        weights -= 3 if ("experts" if size.grouped else "dense") in self.gathered else 0
        return 3.0 * tokens * size.casts + weights * size.weights * self.casts / 2

    def saved(self, size: PartSize, tokens: int, verb: str) -> int:
        """Bytes that an op keeps less of than in bf16: operands of weight gradients of linear layers."""
        if size.grouped or "wgrad" not in self.products:
            return 0
        return tokens * (size.casts if verb == "fwd" else size.kept)
