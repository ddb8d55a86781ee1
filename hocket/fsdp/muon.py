"""`hocket.sharding.Muon`: torch's Muon for models under `fully_shard`.

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
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor, nn

from hocket.fsdp.orthogonal import COEFFICIENTS, EPS, ITERATIONS, factor_of, orthogonal
from hocket.fsdp.param_group import ParamGroup
from hocket.fsdp.part import plain
from hocket.fsdp.sharded_parameter import ShardedParameter
from hocket.runtime.transports import Window

SCALES = {None: "original", "original": "original", "match_rms_adamw": "match_rms_adamw"}


class Iteration(TypedDict, total=False):
    """Settings of the iteration, as those of `torch.optim.Muon`."""

    ns_coefficients: tuple[float, float, float]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None
    """How the learning rate depends on a matrix's shape: `match_rms_adamw` or `original`, which None means too."""


class _Matrix(NamedTuple):
    """A matrix of one step."""

    param: nn.Parameter
    settings: dict[str, Any]
    """Of its group of the optimizer."""


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon`, whose arguments it takes, for parameters of `fully_shard` and for others.

    Every rank calls `step` alike. Weights and averages are those that torch's has without sharding: on CPUs bit for
    bit. State has the layout of torch's, `momentum_buffer`, of the elements that are here.

    Raises: ValueError for parameters that are no matrices, and for settings that torch's refuses.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | Iterable[tuple[str, nn.Parameter]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        **iteration: Unpack[Iteration],
    ) -> None:
        how = {"ns_coefficients": COEFFICIENTS, "eps": EPS, "ns_steps": ITERATIONS, "adjust_lr_fn": None, **iteration}
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("momentum", momentum)):
            if not float(value) >= 0:
                raise ValueError(f"{name} = {value}: it must be 0 or more")
        if how["adjust_lr_fn"] not in SCALES:
            raise ValueError(f"adjust_lr_fn = {how['adjust_lr_fn']!r}: there is None, original, match_rms_adamw")
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, **how}
        self._buffers: dict[int, tuple[Tensor, Tensor, Window]] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As that of other optimizers. Raises ValueError for parameters that are no whole matrices."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.ndim != 2:
                raise ValueError(
                    f"Muon updates matrices, and a parameter has the shape {tuple(param.shape)}: give those with "
                    f"two dimensions, and the others to torch.optim.AdamW"
                )
            if isinstance(param, ShardedParameter) and isinstance(param.group, ParamGroup):
                if param.group.groups.part[1] > 1:
                    raise ValueError(
                        f"{param.full_name} is a part of a matrix that ranks split among them (Placement.part), "
                        f"and Muon needs whole ones: give it to torch.optim.AdamW"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyrefly: ignore[bad-override]
        """Update all matrices that have a gradient. Returns what the closure does, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        together: dict[ParamGroup, list[_Matrix]] = {}
        for held in self.param_groups:
            for param in held["params"]:
                group = param.group if isinstance(param, ShardedParameter) else None
                if isinstance(group, ParamGroup):
                    together.setdefault(group, []).append(_Matrix(param, held))
                elif param.grad is not None:
                    self._alone(_Matrix(param, held))
        self._make_buffers(list(together))
        for group, matrices in together.items():
            there = [one for one in matrices if one.param.grad is not None]
            if there:
                self._step(group, there)
        return loss

    def _alone(self, one: _Matrix) -> None:
        """A parameter of no sharded model."""
        assert one.param.grad is not None
        ahead = self._ahead(one, one.param, one.param.grad)
        _move(one.param, _iterated(ahead, one.settings), one.settings, one.param.shape)

    def _make_buffers(self, groups: Sequence[ParamGroup]) -> None:
        """Room for averages and results of the largest group on each group of ranks. Every rank calls this alike."""
        for group in groups:
            key = id(group.groups)
            if group.keeps_all:
                continue
            length = max(other.layout.total for other in groups if other.groups is group.groups)
            if key in self._buffers and len(self._buffers[key][0]) >= length:
                continue
            with group.groups.reduce.window(2 * length) as window:
                made = [torch.zeros(length, dtype=torch.bfloat16, device=group.device) for _ in range(2)]
            self._buffers[key] = made[0], made[1], window

    def _ahead(self, one: _Matrix, like: Tensor, grad: Tensor) -> Tensor:
        """Move the average of the elements here, and return Nesterov's look ahead of it, or the average."""
        state, momentum = self.state[one.param], one.settings["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(plain(grad), memory_format=torch.preserve_format)
        average = plain(state["momentum_buffer"])
        average.lerp_(plain(grad), 1 - momentum)
        return plain(grad).lerp(average, momentum) if one.settings["nesterov"] else average

    def _step(self, group: ParamGroup, matrices: Sequence[_Matrix]) -> None:
        here = group.kept.slices(group.position)
        shards = [one.param for one in matrices]
        assert all(isinstance(shard, ShardedParameter) for shard in shards)
        places = [shard.position for shard in shards]  # pyrefly: ignore[missing-attribute]
        ahead = [self._ahead(one, one.param.to_local(), one.param.grad) for one in matrices]  # pyrefly: ignore
        if group.keeps_all:
            for one, x in zip(matrices, ahead, strict=True):
                made = _iterated(x.view(one.param.shape), one.settings)
                _move(one.param.to_local(), made.reshape(-1), one.settings, one.param.shape)  # pyrefly: ignore
            return
        gathered, results = (buffer[: group.layout.total] for buffer in self._buffers[id(group.groups)][:2])
        size = group.main.numel()
        mine = gathered[group.position * size :][:size]
        for place, x in zip(places, ahead, strict=True):
            mine[here[place]] = x
        _gather(group, gathered)
        results.zero_()
        sources, targets = group.layout.views(gathered), group.layout.views(results)
        for one, place, rank in zip(matrices, places, _shared_out(matrices, group.kept.world), strict=True):
            if rank == group.position:
                targets[place].copy_(_iterated(sources[place], one.settings))
        update = _scatter(group, results)
        for one, place in zip(matrices, places, strict=True):
            _move(one.param.to_local(), update[here[place]], one.settings, one.param.shape)  # pyrefly: ignore


def _iterated(x_AB: Tensor, settings: dict[str, Any]) -> Tensor:
    how = tuple(settings["ns_coefficients"]), settings["ns_steps"], settings["eps"]
    return orthogonal(x_AB.unsqueeze(0), *how).squeeze(0)


def _move(param: Tensor, update: Tensor, settings: dict[str, Any], shape: Sequence[int]) -> None:
    """Decay, and move by an update of the same elements."""
    lr = float(settings["lr"])
    param.mul_(1 - lr * settings["weight_decay"])
    param.add_(update, alpha=-lr * factor_of(shape, SCALES[settings["adjust_lr_fn"]]))


def _shared_out(matrices: Sequence[_Matrix], ranks: int) -> list[int]:
    """Which rank iterates each matrix: the longest first, to the one with the least to do."""
    load, chosen = [0] * ranks, [0] * len(matrices)
    work = [one.param.shape[0] * one.param.shape[1] * min(one.param.shape) for one in matrices]
    for i in sorted(range(len(matrices)), key=lambda i: (-work[i], i)):
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
