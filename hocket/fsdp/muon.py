"""What `torch.optim.Muon` does with parameters of `fully_shard`.

Note: [Whole matrices on one rank each]
Muon's average is elementwise, so each rank keeps that of its elements. Its iteration needs whole matrices. So for the
matrices that lie in one group of parameters (`ParamGroup`), a step

    all-gathers       the averages in bf16, in which the iteration begins anyway
    iterates          each matrix on one rank, so that all ranks have about as much to do
    reduce-scatters   the results: a sum in which all ranks but one have zeros, so it is exact

That moves 4 bytes for each element and holds two buffers of the largest group in bf16. With parts in two levels of
groups (`ShardOptions.outer`) both levels do so in turn. Ranks that keep parameters whole iterate all of them. All of it
runs on the caller's stream, behind all reductions, over the group of the reductions: gathers of weights may be under
way on theirs.

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
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Muon, Optimizer

from hocket.fsdp.param_group import ParamGroup
from hocket.fsdp.part import plain
from hocket.fsdp.sharded_parameter import ShardedParameter

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
"""Room for averages and results, by groups of ranks."""


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
    """Room for averages and results of the largest group on each group of ranks. Every rank calls this alike."""
    made = _buffers.setdefault(optimizer, {})
    for group in groups:
        key = id(group.groups)
        if group.keeps_all:
            continue
        length = max(other.layout.total for other in groups if other.groups is group.groups)
        if key in made and len(made[key][0]) >= length:
            continue
        gathered, results = (torch.zeros(length, dtype=torch.bfloat16, device=group.device) for _ in range(2))
        made[key] = gathered, results


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
    ahead = [_ahead(optimizer, shard, held) for shard in shards]
    if group.keeps_all:
        for shard, x in zip(shards, ahead, strict=True):
            _move(shard, _iterated(x.view(shard.shape).to(group.device), held).reshape(-1), held)
        return
    here = group.kept.slices(group.position)
    gathered, results = (buffer[: group.layout.total] for buffer in _buffers[optimizer][id(group.groups)])
    size = group.main.numel()
    mine = gathered[group.position * size :][:size]
    for shard, x in zip(shards, ahead, strict=True):
        mine[here[shard.position]] = x
    _gather(group, gathered)
    results.zero_()
    sources, targets = group.layout.views(gathered), group.layout.views(results)
    for shard, rank in zip(shards, _shared_out(shards, group.kept.world), strict=True):
        if rank == group.position:
            targets[shard.position].copy_(_iterated(sources[shard.position], held))
    update = _scatter(group, results)
    for shard in shards:
        _move(shard, update[here[shard.position]], held)


def _iterated(x_AB: Tensor, held: Mapping[str, Any]) -> Tensor:
    how = tuple(held["ns_coefficients"]), held["ns_steps"], held["eps"]
    return orthogonal(x_AB.unsqueeze(0), *how).squeeze(0)


def _move(shard: ShardedParameter, update: Tensor, held: Mapping[str, Any]) -> None:
    """Decay, and move by an update of the same elements."""
    lr, local = float(held["lr"]), shard.to_local()
    local.mul_(1 - lr * held["weight_decay"])
    local.add_(update.to(local.device), alpha=-lr * factor_of(shard.shape, held["adjust_lr_fn"]))


def _shared_out(shards: Sequence[ShardedParameter], ranks: int) -> list[int]:
    """Which rank iterates each matrix: the longest first, to the one with the least to do."""
    load, chosen = [0] * ranks, [0] * len(shards)
    work = [shard.shape[0] * shard.shape[1] * min(shard.shape) for shard in shards]
    for i in sorted(range(len(shards)), key=lambda i: (-work[i], i)):
        chosen[i] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[chosen[i]] += work[i]
    return chosen


def _gather(group: ParamGroup, flat: Tensor) -> None:
    """Complete `flat`, of which this rank's elements are there. See Note: [Whole matrices on one rank each]."""
    groups, size = group.groups, group.layout.shard
    mine = flat[size * groups.gather.rank :][:size]
    if groups.outer_shards:
        groups.outer.all_gather(mine, mine[group.main.numel() * groups.outer.rank :][: group.main.numel()]).wait()
    groups.reduce.all_gather(flat, mine).wait()


def _scatter(group: ParamGroup, flat: Tensor) -> Tensor:
    """The sum over ranks of `flat`, of which each has some, in fp32: this rank's elements."""
    groups = group.groups
    part = torch.empty(group.layout.shard, dtype=torch.float32, device=group.device)
    groups.reduce.reduce_sum(flat, part, 1.0, add=False).wait()
    if not groups.outer_shards:
        return part
    kept = torch.empty(group.main.numel(), dtype=torch.float32, device=group.device)
    groups.outer.reduce_sum(part, kept, 1.0, add=False).wait()
    return kept
