"""Replacements of torch functions that read all gradients or all state, for sharded models.

Note: [What torch sees on one rank]
These functions read `.grad` or `state_dict()`, of which a rank has a part: each rank would clip by its own norm, skip
steps for its own infinities, or save its elements as the whole. When hocket shards the first model, it replaces what
torch calls inside of them. Other models get torch's originals.

    torch.nn.utils.clip_grad_norm_, get_total_norm      the norm over all ranks
    torch.amp.GradScaler                                infinities of any rank
    torch.optim.Muon                                    whole matrices (Note: [How torch's Muon is replaced])
    torch.distributed.checkpoint.state_dict             as in `hocket.checkpoint`; whole, with full_state_dict
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from hocket.fsdp.checks import UNIT, refuse_early
from hocket.fsdp.dtensors import copies
from hocket.fsdp.muon import collect
from hocket.fsdp.part import plain
from hocket.fsdp.saving.inventory import FlatTensor, Inventory
from hocket.fsdp.saving.state import load_model_state, load_optimizer_state, model_state, optimizer_state, split
from hocket.fsdp.shard_grads import powers_of, squares_of
from hocket.fsdp.sharded_parameter import ShardedParameter
from hocket.runtime.world import broadcast_object, broadcast_tensor

if TYPE_CHECKING:
    from hocket.fsdp.module_context import ShardContext
    from hocket.fsdp.param_group import ParamGroup

_norm: Callable[..., Tensor] = clip_grad._get_total_norm
_unscale: Callable[..., dict[torch.device, Tensor]] = torch.amp.GradScaler._unscale_grads_
_get_model, _load_model = dcp._get_model_state_dict, dcp._load_model_state_dict
_get_optimizer, _load_optimizer = dcp._get_optim_state_dict, dcp._load_optim_state_dict
"""What torch has."""

_contexts: Iterable[ShardContext] = ()


def install(contexts: Iterable[ShardContext]) -> None:
    """Replace torch's functions. `contexts` are all sharded models, also later ones."""
    global _contexts
    _contexts = contexts
    clip_grad._get_total_norm = total_norm
    torch.nn.utils.get_total_norm = total_norm
    for owner, name, function in (
        (torch.amp.GradScaler, "_unscale_grads_", unscale_grads_),
        (torch.optim.Muon, "_init_group", collect),
        (dcp, "_get_model_state_dict", get_model),
        (dcp, "_load_model_state_dict", load_model),
        (dcp, "_get_optim_state_dict", get_optimizer),
        (dcp, "_load_optim_state_dict", load_optimizer),
    ):
        setattr(owner, name, function)


def _groups() -> list[tuple[ParamGroup, ShardContext]]:
    return [(group, context) for context in _contexts for group in context.param_groups]


# Gradients


@torch.no_grad()
def total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """`torch.nn.utils.get_total_norm`; for gradients of shards over all ranks, which all call this."""
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    tensors = [plain(one) for one in given]
    owners = {m.untyped_storage().data_ptr(): owner for owner in _groups() for m in owner[0].grads.memory}
    parts: dict[ShardContext | None, list[tuple[Tensor, int]]] = {}
    for one, tensor in zip(given, tensors, strict=True):
        has_memory = type(tensor) is Tensor  # a DTensor has none
        group, context = owners.get(tensor.untyped_storage().data_ptr() if has_memory else 0, (None, None))
        if group is None or context is None or _alike(group, context):
            parts.setdefault(None, []).append((tensor, 1))
        else:
            parts.setdefault(context, []).append((tensor, group.groups.replicas * _copies(context, one)))
    if not any(parts):
        return _norm(tensors, norm_type, error_if_nonfinite, foreach)
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type={norm_type!r} of sharded gradients must be above 0, or inf")
    total = torch.zeros(1, dtype=torch.float64, device=tensors[0].device)
    for context, several in parts.items():
        if p == torch.inf:
            largest = [tensor.abs().max().to(total) for tensor, _ in several if tensor.numel()]
            mine = torch.stack([*largest, torch.zeros_like(total[0])]).max().view(1)
        else:
            held = [tensor for tensor, _ in several]
            mine = squares_of(held) if p == 2 else powers_of(held, p)
            mine = (mine / torch.tensor([n for _, n in several], device=mine.device)).sum().view(1).to(total)
        if context is not None:
            refuse_early(context, "clip_grad_norm_")
            context.over_ranks(mine, "max" if p == torch.inf else "sum")
        total = torch.maximum(total, mine) if p == torch.inf else total + mine
    norm = (total if p == torch.inf else total ** (1 / p)).squeeze(0).to(tensors[0].dtype)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"The total norm of order {p} for gradients is non-finite, so it cannot be clipped")
    return norm


def _alike(group: ParamGroup, context: ShardContext) -> bool:
    """Whether all ranks of the model hold the same whole gradients; false for experts."""
    return group.keeps_all and set(context.groups.holders) <= set(group.groups.holders)


def _copies(context: ShardContext, one: Tensor) -> int:
    """How many tensor-parallel ranks hold the same elements of a gradient."""
    place = getattr(one, "place", None)
    return copies(context.tensor_mesh, None if place is None else place.span.part)


def unscale_grads_(scaler: Any, optimizer: Optimizer, *rest: Any) -> dict[torch.device, Tensor]:
    """`GradScaler._unscale_grads_`, with infinities of any rank."""
    found = _unscale(scaler, optimizer, *rest)
    held = {id(p.group) for group in optimizer.param_groups for p in group["params"] if isinstance(p, ShardedParameter)}
    contexts = {context: None for group, context in _groups() if id(group) in held and not _alike(group, context)}
    for context in contexts:
        for infinite in found.values():
            context.over_ranks(infinite.view(1), "max")
    return found


# State


def _context(model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> ShardContext | None:
    """The context of a sharded model; None for a plain model, or inside of `gathered()`, unless optimizers hold shards.

    Raises: ValueError for a part of a sharded model, or a module around one.
    """
    held = (param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"])
    model = getattr(model, "_orig_mod", model)
    unit = model.__dict__.get(UNIT)
    context = None if unit is None else unit.context
    if context is not None and context.root is model:
        shards = any(isinstance(param, ShardedParameter) for param in held)
        return None if context.is_gathered and not shards else context
    if context is None and not any(UNIT in one.__dict__ for one in model.modules()):
        return None
    raise ValueError(
        f"torch.distributed.checkpoint.state_dict of a {type(model).__name__}, which is a part of a sharded model or "
        f"around one, would mix parts and whole weights: give the module that hocket.fully_shard was given"
    )


def get_model(model: nn.Module, info: Any) -> dict[str, Any]:
    """`get_model_state_dict`."""
    context = _context(model) if info.handle_model else None
    if context is None:
        return _get_model(model, info)
    _refuse_submodules(info)
    state = model_state(context)
    if info.full_state_dict:
        state = _whole(context, state, info.cpu_offload)
        state |= {other: state[name] for other, name in Inventory(context).others.items() if name in state}
    elif info.cpu_offload:
        state = tree_map(_on_cpu, state)
    if info.ignore_frozen_params:
        frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
        state = {name: value for name, value in state.items() if name not in frozen}
    return state


def load_model(model: nn.Module, state: dict[str, Any], info: Any) -> Any:
    """`set_model_state_dict`."""
    context = _context(model) if info.handle_model else None
    if context is None or (not state and not info.broadcast_from_rank0):
        return _load_model(model, state, info)
    mine = model_state(context)
    if info.broadcast_from_rank0:
        state = _from_first_rank(context, state)
    missing = [name for name in mine if name not in state]
    aliases = Inventory(context).others
    unexpected = [name for name in state if name not in mine and name not in aliases]
    if not info.strict:
        state = {name: state.get(name, own) for name, own in mine.items()}
    load_model_state(context, state)
    return nn.modules.module._IncompatibleKeys(missing, unexpected)


def get_optimizer(model: nn.Module, optimizers: Sequence[Optimizer], info: Any) -> dict[str, Any]:
    """`get_optimizer_state_dict`."""
    context = _context(model, optimizers) if info.handle_optim else None
    if context is None:
        return _get_optimizer(model, tuple(optimizers), info)
    _refuse_submodules(info)
    merged: dict[str, Any] = {}
    for optimizer in optimizers:
        dcp._init_optim_state(optimizer)
        found = optimizer_state(context, optimizer, flatten=info.flatten_optimizer_state_dict)
        if info.full_state_dict:
            found = _whole(context, found, info.cpu_offload)
        elif info.cpu_offload:
            found = tree_map(_on_cpu, found)
        if info.flatten_optimizer_state_dict:
            merged.update(found)
        else:
            merged.setdefault("state", {}).update(found.get("state", {}))
            merged.setdefault("param_groups", []).extend(found.get("param_groups", []))
    return merged


def load_optimizer(model: nn.Module, optimizers: Sequence[Optimizer], state: dict[str, Any], info: Any) -> None:
    """`set_optimizer_state_dict`."""
    context = _context(model, optimizers) if info.handle_optim else None
    if context is None:
        _load_optimizer(model, tuple(optimizers), state, info)
        return
    if info.broadcast_from_rank0:
        state = _from_first_rank(context, state)
    for optimizer in optimizers:
        load_optimizer_state(context, optimizer, state)


class _Sent(NamedTuple):
    """Announces a tensor that the first rank sends next."""

    shape: torch.Size
    dtype: torch.dtype


def _from_first_rank(context: ShardContext, state: Any) -> dict[str, Any]:
    """The first rank's state; one tensor at a time is whole on the other ranks."""
    own = Inventory(context)
    known = {**{name: name for name in own.shards}, **own.others}

    def announced(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.cpu() if value.numel() == 1 else _Sent(value.shape, value.dtype)

    def received(value: Any, mine: Any, name: str) -> Any:
        if isinstance(value, dict):
            at = {key: key if key in known else split(str(key), known)[1] or name for key in value}
            return {key: received(one, mine and mine[key], at[key]) for key, one in value.items()}
        if isinstance(value, list):
            return [received(one, mine and mine[i], name) for i, one in enumerate(value)]
        if not isinstance(value, _Sent):
            return value
        whole = torch.empty(value.shape, dtype=value.dtype, device=context.device)
        if mine is not None:
            whole.copy_(mine)
        broadcast_tensor(whole)
        one = own.shards.get(known.get(name, ""))
        return whole if one is None or one.shape != whole.shape else one.tensor(one.part_of(whole).clone())

    return received(broadcast_object(tree_map(announced, state)), state if dist.get_rank() == 0 else None, "")


def _whole(context: ShardContext, state: dict[str, Any], offload: bool) -> dict[str, Any]:
    """A state with whole tensors; with `offload` on the CPU of the first rank only. Every rank calls this."""

    def whole(value: Any) -> Any:
        if isinstance(value, FlatTensor):
            flat = torch.zeros(value.numel(), dtype=value.dtype, device=value.flat.device)
            if value.writes:
                value.span.put(value.flat, flat)
            context.over_ranks(flat, "sum")
            value = flat.view(value.shape)
        return value.cpu() if offload and isinstance(value, Tensor) else value

    found = tree_map(whole, state)
    return {} if offload and dist.get_rank() else found


def _on_cpu(value: Any) -> Any:
    if isinstance(value, FlatTensor):
        return value.with_elements(value.flat.cpu())
    return value.cpu() if isinstance(value, Tensor) else value


def _refuse_submodules(info: Any) -> None:
    if info.submodule_prefixes:
        raise ValueError(
            "torch.distributed.checkpoint.state_dict with submodule of a sharded model is not supported: leave it out, "
            "or use hocket.checkpoint.save and load"
        )
