"""What a part's operations beside its matmuls move and keep: as torch's own operations, or as one kernel each.

"Elements" count numbers, whatever their dtype. Backward moves twice as many as forward.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class PartSize:
    """One part of one layer, or embed or head. All but `weights` are elements (or FLOPs) per token."""

    gemm: int = 0
    """Weights of ordinary matmuls that a token meets."""
    grouped: int = 0
    """Weights of its experts that a token meets."""
    weights: int = 0
    """Weights of the part on one expert-parallel rank."""
    rows: int = 0
    """Elements that its matmuls read and write beside weights, in each direction."""
    casts: int = 0
    """Elements of their inputs that a cast reads, if they run in fp8, forward; about as many backward."""
    core: int = 0
    """FLOPs of the attention core, forward."""
    masked: int = 0
    """FLOPs that the core does and then masks, forward: blocks on the diagonal are computed whole."""
    traffic: int = 0
    """Elements read and written outside matmuls, forward."""
    back: int = 0
    """Those backward, beyond twice as many."""
    routes: int = 0
    """How often experts are chosen, in each direction."""
    output: int = 0
    """Elements of the value that fwd produces."""
    grad: int = 0
    """Elements of the value that bwd produces."""
    saved: int = 0
    """Elements that fwd keeps for bwd, its input included."""
    lent: int = 0
    """Of these, elements of what is gathered for the part: what is gathered again need not be kept."""
    handed: int = 0
    """Elements of its value that something saved keeps anyway; the value alone does if the part is recomputed."""
    kept: int = 0
    """Elements that bwd keeps for wgrad: inputs of matmuls and gradients of their outputs."""


_NAMES = tuple(field.name for field in fields(PartSize))


def plus(*sizes: PartSize) -> PartSize:
    return PartSize(*(sum(getattr(size, name) for size in sizes) for name in _NAMES))


@dataclass(frozen=True, kw_only=True)
class Formulas:
    """Elements that each formula moves forward, and keeps for its backward, for every element of its width."""

    norm_traffic: int
    norm_saved: int
    """Its input, and everything up to the scaled one that a matmul reads."""
    norm_kept: int
    swiglu_traffic: int
    """For every element of the inner width."""
    swiglu_saved: int
    weighted_saved: int
    """More of these, where each row has a weight."""
    rotary_traffic: int
    """For every element of queries and keys."""
    rotary_with_norm: bool
    """Whether the norm of each head is made on the way, from which one more tensor is saved."""
    loss_traffic: int
    """For every word."""
    loss_saved: int

    def norm(self, width: int) -> PartSize:
        """RMSNorm and its scale."""
        kept = self.norm_kept * width
        return PartSize(weights=width, traffic=self.norm_traffic * width, saved=self.norm_saved * width, kept=kept)

    def swiglu(self, width: int, inner: int) -> PartSize:
        """Values of a gated MLP but for its input, which a norm keeps.

        wgrad needs gradients of gate and up, and the product with the gradient of what is made of it.
        """
        return PartSize(traffic=self.swiglu_traffic * inner, saved=self.swiglu_saved * inner, kept=3 * inner + width)

    def positions(self, width: int, normed: bool) -> PartSize:
        """Rotary positions of queries and keys, `width` elements together, and the norm of each head before them.

        All heads share one scale, whose few weights are left out.
        """
        rotary = PartSize(traffic=self.rotary_traffic * width)
        if not normed:
            return rotary
        if self.rotary_with_norm:
            return plus(rotary, PartSize(saved=width))
        norm = self.norm(width)
        return plus(rotary, PartSize(traffic=norm.traffic, saved=norm.saved, kept=norm.kept))

    def loss(self, words: int) -> PartSize:
        """Cross-entropy of logits. Their gradient is what wgrad reads."""
        return PartSize(traffic=self.loss_traffic * words, saved=self.loss_saved * words, kept=words)


STOCK = Formulas(
    norm_traffic=4, norm_saved=3, norm_kept=3, swiglu_traffic=5, swiglu_saved=4, weighted_saved=1,
    rotary_traffic=12, rotary_with_norm=False, loss_traffic=8, loss_saved=2,
)  # fmt: skip
"""torch's operations: norms keep input, normed and scaled; SwiGLU keeps gate, up, silu(gate) and product; rotary
positions and the loss are computed in fp32."""
FUSED = Formulas(
    norm_traffic=2, norm_saved=2, norm_kept=1, swiglu_traffic=3, swiglu_saved=3, weighted_saved=0,
    rotary_traffic=2, rotary_with_norm=True, loss_traffic=1, loss_saved=1,
)  # fmt: skip
"""One kernel each (`hocket/kernels/`): what is read and written once. The loss leaves its gradient in the logits."""


def orthogonal_flops(elements: int, rows: int, columns: int) -> float:
    """FLOPs of Muon's iteration of matrices of [rows, columns] that have so many elements together.

    Each of five rounds multiplies a matrix of [a, b], a <= b, by itself, the square by itself, and that by the matrix:
    `4 a a b + 2 a a a` (Jordan et al. 2024).
    """
    a, b = sorted((rows, columns))
    return 5 * elements * (4 * a + 2 * a * a / b)
