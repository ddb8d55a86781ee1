"""Muon's iteration on whole matrices of sharded parameters, and `torch.optim.Muon` on parameters of `fully_shard`.

Note: [Each matrix on one rank]
Muon's average is elementwise, so each rank keeps the average of its own elements. The iteration needs whole matrices.
So for the matrices of one group of parameters (`ParamGroup`), a step

    gathers       the averages in bf16, the format in which the iteration begins
    iterates      each matrix on one rank, so that all ranks have about as much to do
    scatters      the results: a reduce-scatter in which all ranks but one have zeros, so the sum is exact

That moves 4 bytes for each element and holds a buffer of the largest group in bf16. With two levels of shards
(`ShardOptions.outer`) both levels do so in turn. Ranks that keep parameters whole iterate all of them. For
`torch.optim.Muon` all of it runs on the caller's stream, after all reductions, on the group of the reductions: gathers
of weights may be under way on theirs.

Note: [How torch's Muon comes here]
Its step collects parameters, gradients and averages of each parameter group by `_init_group`, and updates these. When
hocket shards the first model it replaces `_init_group` by `collect`, which updates shards itself and leaves the others
to torch. So settings, state and closures are torch's, and optimizers made before are served, too.

Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks") keeps one average of gradients, and
moves a matrix by the nearest orthogonal one to it, about: five steps of a Newton-Schulz iteration in bf16. Formulas and
numbers are those of `torch.optim.Muon`.

Shapes: N matrices, A rows, B columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Muon, Optimizer

from hocket.fsdp.param_group import ParamGroup
from hocket.fsdp.part import plain
from hocket.fsdp.sharded_parameter import ShardedParameter
from hocket.runtime.transports import Pending

COEFFICIENTS, ITERATIONS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7
"""Of the iteration: those of `torch.optim.Muon`, and of Jordan's."""


def orthogonal(
    x_NAB: Tensor,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    iterations: int = ITERATIONS,
    eps: float = EPS,
) -> Tensor:
    """About the nearest orthogonal matrix to each: singular values between 0.5 and 1.5. bf16, of any dtype."""
    a, b, c = coefficients
    x = x_NAB.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def factor_of(shape: Sequence[int], scale: str | None) -> float:
    """Factor of the learning rate for a matrix of [output, input]: as in `torch.optim.Muon`, where None is `original`.

    match_rms_adamw is that of Liu et al. 2025, "Muon is scalable for LLM training": an update is about as large as one
    of AdamW, and can have its learning rate.
    """
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if scale == "match_rms_adamw" else math.sqrt(max(1, rows / columns))


_init_group: Any = Muon._init_group  # pyrefly: ignore[missing-attribute]
"""What torch has."""

_buffers: WeakKeyDictionary[Optimizer, dict[int, tuple[Tensor, Tensor]]] = WeakKeyDictionary()
"""Whole averages in bf16, and this rank's results in fp32, by groups of ranks."""


class WholeMatrices:
    """The matrices of some members of a group. See Note: [Each matrix on one rank]. Every rank makes the same calls."""

    def __init__(
        self,
        group: ParamGroup,
        taken: Sequence[int],
        matrices: Callable[[int, Tensor], list[Tensor]] = lambda index, weight: [weight],
    ) -> None:
        """`taken` are indices of members. `matrices` gives views of the matrices [output, input] of a member."""
        self.group, self.taken, self._matrices = group, taken, matrices
        views = group.layout.views(torch.empty(group.layout.total, device="meta"))
        shapes = [[matrix.shape for matrix in matrices(i, views[i])] for i in taken]
        self._owners = [[-1] * len(several) for several in shapes]  # -1: every rank iterates it
        if group.keeps_all:
            return
        load = [0] * group.shard_layout.world
        places = [(min(s) * s.numel(), k, n) for k, several in enumerate(shapes) for n, s in enumerate(several)]
        for products, k, n in sorted(places, key=lambda place: -place[0]):  # the largest first
            self._owners[k][n] = rank = load.index(min(load))
            load[rank] += products

    def mine(self, whole: Tensor) -> Tensor:
        """The elements of this rank in a buffer of all, bf16 [`layout.total`]. Write averages there before `gather`."""
        size = self.group.main.numel()
        return whole if self.group.keeps_all else whole[self.group.position * size :][:size]

    def gather(self, whole: Tensor) -> Pending:
        """Complete the averages in `whole`."""
        group = self.group
        if group.keeps_all:
            return Pending()
        groups, size = group.groups, group.layout.shard
        inner = whole[size * groups.gather.rank :][:size]
        if groups.outer_shards:
            groups.outer.all_gather(inner, self.mine(whole)).wait()
        return groups.reduce.all_gather(whole, inner)

    def iterate(self, whole: Tensor, *how: Any) -> None:
        """Replace all averages by this rank's matrices, made orthogonal as `how` says, and zeros for the others."""
        found: list[tuple[Tensor, Tensor]] = []
        views = self.group.layout.views(whole)
        for i, owners in zip(self.taken, self._owners, strict=True):
            matrices = self._matrices(i, views[i])
            own = [m for m, rank in zip(matrices, owners, strict=True) if rank in (-1, self.group.position)]
            together = len(own) if whole.is_cuda else 1  # on a CPU one by one: the same bits on any mesh
            for first in range(0, len(own), max(1, together)):
                some = own[first : first + together]
                found += zip(some, orthogonal(torch.stack(some), *how), strict=True)
        whole.zero_()
        for place, matrix in found:
            place.copy_(matrix)

    def scatter(self, whole: Tensor, parts: Tensor) -> Pending:
        """Give each rank its elements of all results: `parts`, fp32 [`main.numel()`]."""
        groups = self.group.groups
        if self.group.keeps_all:
            parts.copy_(whole)
            return Pending()
        if not groups.outer_shards:
            return groups.reduce.reduce_sum(whole, parts, 1.0, add=False)
        inner = torch.empty(self.group.layout.shard, dtype=parts.dtype, device=parts.device)
        groups.reduce.reduce_sum(whole, inner, 1.0, add=False).wait()
        return groups.outer.reduce_sum(inner, parts, 1.0, add=False)


def refuse_no_matrices(optimizer: Muon) -> None:
    """Raise ValueError for shards that Muon cannot update: of vectors, of complex numbers, of parts of matrices."""
    for shard in (param for held in optimizer.param_groups for param in held["params"]):
        if not isinstance(shard, ShardedParameter) or not isinstance(shard.group, ParamGroup):
            continue
        if shard.ndim != 2 or shard.is_complex():
            raise ValueError(
                f"Muon updates matrices, and {shard.full_name} has the shape {tuple(shard.shape)} and dtype "
                f"{shard.dtype}: give real ones with two dimensions, and the others to torch.optim.AdamW"
            )
        if shard.group.groups.part[1] > 1 or shard.span.part is not None:
            by = "Placement.part" if shard.span.part is None else "a DTensor"
            raise ValueError(
                f"{shard.full_name} is a part of a matrix that ranks split among them ({by}), "
                f"and Muon needs whole ones: give it to torch.optim.AdamW"
            )


def collect(optimizer: Muon, held: Mapping[str, Any], *lists: list[Tensor]) -> bool:
    """Update the shards of a parameter group; the others go to torch's `lists`. Every rank calls this alike."""
    together: dict[ParamGroup, list[ShardedParameter]] = {}
    others = []
    for param in held["params"]:
        group = param.group if isinstance(param, ShardedParameter) else None
        if isinstance(group, ParamGroup):
            together.setdefault(group, []).append(param)
        else:
            others.append(param)
    if together:
        refuse_no_matrices(optimizer)
        _make_buffers(optimizer, list(together))
    for group, shards in together.items():
        there = [shard for shard in shards if shard.grad is not None]
        if there:
            _step(optimizer, group, there, held)
    return _init_group(optimizer, {**held, "params": others}, *lists)


def _make_buffers(optimizer: Muon, groups: Sequence[ParamGroup]) -> None:
    """Buffers for the largest group on each group of ranks. Every rank calls this alike."""
    made = _buffers.setdefault(optimizer, {})
    for group in groups:
        key, alike = id(group.groups), [other for other in groups if other.groups is group.groups]
        total, kept = max(g.layout.total for g in alike), max(g.main.numel() for g in alike)
        if key not in made or len(made[key][0]) < total or len(made[key][1]) < kept:
            whole = torch.zeros(total, dtype=torch.bfloat16, device=group.device)
            made[key] = whole, torch.empty(kept, dtype=torch.float32, device=group.device)


def _ahead(optimizer: Muon, shard: ShardedParameter, held: Mapping[str, Any]) -> Tensor:
    """Move the average of the elements here, and return Nesterov's look ahead of it, or the average."""
    assert shard.grad is not None
    state, momentum, grad = optimizer.state[shard], held["momentum"], plain(shard.grad)
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
    average = plain(state["momentum_buffer"])
    average.lerp_(grad, 1 - momentum)
    return grad.lerp(average, momentum) if held["nesterov"] else average


def _step(optimizer: Muon, group: ParamGroup, shards: Sequence[ShardedParameter], held: Mapping[str, Any]) -> None:
    here = group.shard_layout.slices(group.position)
    matrices = WholeMatrices(group, [shard.position for shard in shards])
    whole, parts = _buffers[optimizer][id(group.groups)]
    whole, parts = whole[: group.layout.total], parts[: group.main.numel()]
    mine = matrices.mine(whole)
    for shard in shards:
        mine[here[shard.position]] = _ahead(optimizer, shard, held)
    matrices.gather(whole).wait()
    matrices.iterate(whole, tuple(held["ns_coefficients"]), held["ns_steps"], held["eps"])
    matrices.scatter(whole, parts).wait()
    for shard in shards:
        _move(shard, parts[here[shard.position]], held)


def _move(shard: ShardedParameter, update: Tensor, held: Mapping[str, Any]) -> None:
    """Decay, and move by an update of the same elements."""
    lr, local = float(held["lr"]), shard.to_local()
    local.mul_(1 - lr * held["weight_decay"])
    local.add_(update.to(local.device), alpha=-lr * factor_of(shard.shape, held["adjust_lr_fn"]))
