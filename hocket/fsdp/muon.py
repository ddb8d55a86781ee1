"""Muon for sharded parameters: the Newton-Schulz iteration on whole matrices, and `torch.optim.Muon` after
`fully_shard`.

Note: [Each matrix on one rank]
Muon's momentum is elementwise and stays sharded; the iteration needs whole matrices. For the matrices of one
`ParamGroup` a step

    all-gathers      the momenta in bf16, the format of the iteration
    iterates         each matrix on one rank, balanced over ranks
    reduce-scatters  the results: all ranks but one have zeros, so the sum is exact

This moves 4 bytes per element and needs a bf16 buffer of the largest group. Ranks with whole parameters iterate all of
them. For `torch.optim.Muon` it runs on the caller's stream and the reductions' group, after all reductions, since
gathers may be in flight on theirs.

Note: [How torch's Muon is replaced]
When hocket shards the first model, it replaces `Muon._init_group`, which collects a parameter group's tensors, by
`collect`, which updates shards itself and leaves other parameters to torch. So settings, state and closures are
torch's, and existing optimizers work too.

Formulas and constants are those of `torch.optim.Muon` (Jordan et al. 2024, "Muon: an optimizer for hidden layers in
neural networks"): a matrix moves by about the nearest orthogonal matrix to its momentum.

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
    """About the nearest orthogonal matrix to each: singular values between 0.5 and 1.5. bf16, from any dtype."""
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
    """Learning rate factor of a matrix [output, input], as in `torch.optim.Muon`, where None is `original`.

    match_rms_adamw (Liu et al. 2025, "Muon is scalable for LLM training") gives updates about as large as AdamW's.
    """
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if scale == "match_rms_adamw" else math.sqrt(max(1, rows / columns))


_init_group: Any = Muon._init_group  # pyrefly: ignore[missing-attribute]

_buffers: WeakKeyDictionary[Optimizer, dict[int, tuple[Tensor, Tensor]]] = WeakKeyDictionary()
"""(whole momenta in bf16, this rank's results in fp32) by groups of ranks."""


class WholeMatrices:
    """Matrices of some members of a group. See Note: [Each matrix on one rank]. Every rank makes the same calls."""

    def __init__(
        self,
        group: ParamGroup,
        taken: Sequence[int],
        matrices: Callable[[int, Tensor], list[Tensor]] = lambda index, weight: [weight],
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

    def iterate(self, whole: Tensor, *how: Any) -> None:
        """Orthogonalize this rank's matrices in `whole`, and zero the others."""
        found: list[tuple[Tensor, Tensor]] = []
        views = self.group.layout.views(whole)
        for i, owners in zip(self.taken, self._owners, strict=True):
            matrices = self._matrices(i, views[i])
            own = [m for m, rank in zip(matrices, owners, strict=True) if rank in (-1, self.group.position)]
            together = len(own) if whole.is_cuda else 1  # one by one on a CPU: the same bits on any mesh
            for first in range(0, len(own), max(1, together)):
                some = own[first : first + together]
                found += zip(some, orthogonal(torch.stack(some), *how), strict=True)
        whole.zero_()
        for place, matrix in found:
            place.copy_(matrix)

    def scatter(self, whole: Tensor, parts: Tensor) -> Pending:
        """Reduce-scatter the results into `parts`, fp32 [`main.numel()`]."""
        if self.group.keeps_all:
            parts.copy_(whole)
            return Pending()
        return self.group.groups.reduce.reduce_sum(whole, parts, 1.0, False, self.group.layout.pieces)


def refuse_no_matrices(optimizer: Muon) -> None:
    """Raise ValueError for shards that Muon can't update: vectors, complex numbers, parts of matrices."""
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
    """Update the shards of a parameter group; others go to torch's `lists`. Every rank calls this alike."""
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
    made = _buffers.setdefault(optimizer, {})
    for group in groups:
        if group.keeps_all:
            continue
        key, alike = id(group.groups), [other for other in groups if other.groups is group.groups]
        total, kept = max(g.layout.total for g in alike), max(g.main.numel() for g in alike)
        if key not in made or len(made[key][0]) < total or len(made[key][1]) < kept:
            whole = torch.zeros(total, dtype=torch.bfloat16, device=group.device)
            made[key] = whole, torch.empty(kept, dtype=torch.float32, device=group.device)


def _ahead(optimizer: Muon, shard: ShardedParameter, held: Mapping[str, Any]) -> Tensor:
    """Update the local momentum; return it, or Nesterov's lookahead."""
    assert shard.grad is not None
    state, momentum, grad = optimizer.state[shard], held["momentum"], plain(shard.grad)
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
    average = plain(state["momentum_buffer"])
    average.lerp_(grad, 1 - momentum)
    return grad.lerp(average, momentum) if held["nesterov"] else average


def _step(optimizer: Muon, group: ParamGroup, shards: Sequence[ShardedParameter], held: Mapping[str, Any]) -> None:
    how = tuple(held["ns_coefficients"]), held["ns_steps"], held["eps"]
    if group.keeps_all:  # one by one: no buffer is needed
        for shard in shards:
            ahead = _ahead(optimizer, shard, held).view(1, *shard.shape).to(group.device)
            _move(shard, orthogonal(ahead, *how).reshape(-1), held)
        return
    here = group.here
    matrices = WholeMatrices(group, [shard.position for shard in shards])
    whole, parts = _buffers[optimizer][id(group.groups)]
    whole, parts = whole[: group.layout.total], parts[: group.main.numel()]
    matrices.gather(whole, {shard.position: _ahead(optimizer, shard, held) for shard in shards}).wait()
    matrices.iterate(whole, *how)
    matrices.scatter(whole, parts).wait()
    for shard in shards:
        _move(shard, parts[here[shard.position]], held)


def _move(shard: ShardedParameter, update: Tensor, held: Mapping[str, Any]) -> None:
    lr, local = float(held["lr"]), shard.to_local()
    local.mul_(1 - lr * held["weight_decay"])
    local.add_(update.to(local.device), alpha=-lr * factor_of(shard.shape, held["adjust_lr_fn"]))
