"""Muon's Newton-Schulz iteration on whole matrices of sharded parameters, for planned steps.

`torch.optim.Muon` on a sharded module is torch's own: it computes with DTensors.

Note: [Each matrix on one rank]
Muon's momentum is elementwise and stays sharded; the iteration needs whole matrices. For the matrices of one
`ParamGroup` a step

    all-gathers      the momenta in bf16, the format of the iteration
    iterates         each matrix on one rank, balanced over ranks
    reduce-scatters  the results: all ranks but one have zeros, so the sum is exact

This moves 4 bytes per element and needs a bf16 buffer of the largest group. Ranks with whole parameters iterate all of
them.

Formulas and constants are those of `torch.optim.Muon` (Jordan et al. 2024, "Muon: an optimizer for hidden layers in
neural networks"): a matrix moves by about the nearest orthogonal matrix to its momentum.

Shapes: N matrices, A rows, B columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hocket.fsdp.param_group import ParamGroup
from hocket.runtime.transports import Pending

COEFFICIENTS, ITERATIONS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7
"""Of the iteration: those of `torch.optim.Muon`, and of Jordan's."""


def orthogonal(x_NAB: Tensor) -> Tensor:
    """About the nearest orthogonal matrix to each: singular values between 0.5 and 1.5. bf16, from any dtype."""
    a, b, c = COEFFICIENTS
    x = x_NAB.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def factor_of(shape: Sequence[int], scale: str) -> float:
    """Learning rate factor of a matrix [output, input], as in `torch.optim.Muon`.

    match_rms_adamw (Liu et al. 2025, "Muon is scalable for LLM training") gives updates about as large as AdamW's.
    """
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if scale == "match_rms_adamw" else math.sqrt(max(1, rows / columns))


class WholeMatrices:
    """Matrices of some members of a group. See Note: [Each matrix on one rank]. Every rank makes the same calls."""

    def __init__(
        self,
        group: ParamGroup,
        taken: Sequence[int],
        matrices: Callable[[int, Tensor], list[Tensor]],
    ) -> None:
        """`taken` are member indices. `matrices` returns views of a member's matrices [output, input]."""
        self.group, self.taken, self._matrices = group, taken, matrices
        views = group.layout.views(torch.empty(group.layout.total, device="meta"))
        shapes = [[matrix.shape for matrix in matrices(i, views[i])] for i in taken]
        self._owners = [[-1] * len(several) for several in shapes]  # -1: every rank iterates it
        if group.keeps_all:
            return
        load = [0] * group.layout.world
        places = [(min(s) * s.numel(), k, n) for k, several in enumerate(shapes) for n, s in enumerate(several)]
        for products, k, n in sorted(places, key=lambda place: -place[0]):  # the largest first
            self._owners[k][n] = rank = load.index(min(load))
            load[rank] += products

    def gather(self, whole: Tensor, momenta: Mapping[int, Tensor]) -> Pending:
        """All-gather the local elements of momenta, by member, into `whole`, bf16 [`layout.total`]."""
        group = self.group
        if group.keeps_all:
            for i, momentum in momenta.items():
                whole[group.here[i]] = momentum
            return Pending()
        mine = torch.zeros_like(group.main, dtype=whole.dtype, device=whole.device)
        for i, momentum in momenta.items():
            mine[group.here[i]] = momentum
        return group.groups.reduce.all_gather(whole, mine, group.layout.pieces)

    def iterate(self, whole: Tensor) -> None:
        """Orthogonalize this rank's matrices in `whole`, and zero the others."""
        found: list[tuple[Tensor, Tensor]] = []
        views = self.group.layout.views(whole)
        for i, owners in zip(self.taken, self._owners, strict=True):
            matrices = self._matrices(i, views[i])
            own = [m for m, rank in zip(matrices, owners, strict=True) if rank in (-1, self.group.position)]
            together = len(own) if whole.is_cuda else 1  # one by one on a CPU: the same bits on any mesh
            for first in range(0, len(own), max(1, together)):
                some = own[first : first + together]
                found += zip(some, orthogonal(torch.stack(some)), strict=True)
        whole.zero_()
        for place, matrix in found:
            place.copy_(matrix)

    def scatter(self, whole: Tensor, parts: Tensor) -> Pending:
        """Reduce-scatter the results into `parts`, fp32 [`main.numel()`]."""
        if self.group.keeps_all:
            parts.copy_(whole)
            return Pending()
        return self.group.groups.reduce.reduce_sum(whole, parts, 1.0, False, self.group.layout.pieces)
