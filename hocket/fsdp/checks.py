"""Input checks of `fully_shard`: arguments, parameters, optimizers, and equal weights on all ranks."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hocket.fsdp.members import UNIT, Member, is_called, is_full
from hocket.fsdp.param_group import ParamGroup
from hocket.fsdp.shard_groups import ShardGroups
from hocket.fsdp.sharded_parameter import ShardedParameter


class Fingerprints:
    """Bit sums of parameters, compared between ranks in one collective at the end.

    Ranks with different values, for example without a common seed, would shard a mixture, and replicas would diverge.
    """

    def __init__(self) -> None:
        self._found: list[tuple[ShardGroups, list[str], Tensor]] = []

    @torch.no_grad()
    def add(self, members: Sequence[Member], groups: ShardGroups, device: torch.device) -> None:
        """Note the parameters of a group, which all ranks of `groups` hold whole."""
        compared = [member for member in members if member.param.is_floating_point() and member.param.numel()]
        if compared:
            names = [member.name for member in compared]
            sums = torch.stack([_fingerprint(member.param) for member in compared])
            self._found.append((groups, names, sums.to(device)))

    def compare(self) -> None:
        """Raise ValueError for the first parameter whose values differ between ranks. All ranks call this."""
        spreads = []
        for groups, _, sums in self._found:
            both = torch.stack([sums, -sums])
            for group in (groups.reduce, groups.outer):
                group.all_reduce(both, "max").wait()
            spreads.append(both.sum(0))  # the largest minus the smallest
        spread = torch.cat(spreads).tolist() if spreads else []
        names = [name for _, found, _ in self._found for name in found]
        for name, difference in zip(names, spread, strict=True):
            if difference != 0:
                raise ValueError(
                    f"ranks hold different values of {name}, and each would keep a part of its own: give all ranks the "
                    f"same weights, as by torch.manual_seed(0) before the model is made, or by loading a checkpoint"
                )


def refuse_valueless(groups: Sequence[ParamGroup]) -> None:
    """Before the first forward, raise ValueError for parameters from the meta device without values, or with different
    values on replicas. All ranks call this.
    """
    for group in groups:
        name = group.members[0].name
        if group.valueless:
            raise ValueError(
                f"{name} was sharded on the meta device and has no values: call "
                f"model.to_empty(device={str(group.main.device)!r}) and give initial values, or load a state dict"
            )
        both = torch.stack([_fingerprint(group.main), -_fingerprint(group.main)]).to(group.device)
        group.groups.same.all_reduce(both, "max").wait()
        if both.sum() != 0:
            raise ValueError(f"replicas gave {name} different initial values: seed all ranks alike before that")


def refuse_late_extensions(groups: Sequence[ParamGroup]) -> None:
    """Before the first forward, refuse FSDP2's protocol on shards that are gathered as they are."""
    for group in (group for group in groups if not group.extended):
        for shard in group.shards:
            if hasattr(getattr(shard, "_local_tensor", None), "fsdp_pre_all_gather"):
                raise ValueError(
                    f"{shard.full_name} got fsdp_pre_all_gather after it was sharded: give the module a parameter of a "
                    f"class with it before"
                )


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _fingerprint(param: Tensor) -> Tensor:
    """The sum of a parameter's bits as integers, independent of order. int64, 0-d."""
    return param.detach().contiguous().view(_BITS[param.dtype.itemsize]).sum(dtype=torch.int64)


@torch.no_grad()
def take_first_rank(tensors: Sequence[Tensor], groups: ShardGroups, device: torch.device) -> None:
    """Broadcast the tensors of the first rank of a placement. All of its ranks call this."""
    for tensor in tensors:
        values = tensor.to(device, torch.uint8 if tensor.dtype == torch.bool else None, copy=True)
        if groups.reduce.rank or groups.outer.rank:
            values.zero_()
        for group in (groups.reduce, groups.outer):
            group.all_reduce(values, "sum").wait()
        tensor.copy_(values)


IGNORED = "_hocket_ignored"
"""Attribute that marks parameters to leave alone."""


def refuse_uncalled(module: nn.Module) -> None:
    """Refuse a module without a forward, whose weights would never be gathered."""
    if not is_called(module):
        raise ValueError(
            f"fully_shard of a {type(module).__name__}, which is never called itself: call it on each of the modules "
            f"in it"
        )


def refuse_foreign(module: nn.Module, known: Container[int]) -> None:
    """Refuse TorchScript modules, and parameters of other sharded models except `known` ones."""
    for name, one in module.named_modules():
        if isinstance(one, torch.jit.ScriptModule):
            raise ValueError(
                f"{name or 'the module'} is compiled by TorchScript, which keeps parameters where they can't be "
                f"replaced: shard the plain module; torch.compile works"
            )
        for key, param in one._parameters.items():
            foreign = isinstance(param, ShardedParameter) or (is_full(param) and id(param) not in known)
            if UNIT not in one.__dict__ and foreign:
                raise ValueError(
                    f"parameter {name}.{key} belongs to another sharded model: a parameter is sharded once"
                )


def refuse_strange(module: nn.Module, params: Sequence[Member]) -> None:
    """Refuse parameters that can't be sharded, and modules without any."""
    if not params:
        raise ValueError(f"the {type(module).__name__} has no parameters to shard")
    for found in params:
        param = found.param
        if is_lazy(param):
            raise ValueError(f"parameter {found.name} has no shape yet: run a forward of the model before sharding it")
        if hasattr(param, "__tensor_flatten__"):
            raise ValueError(
                f"parameter {found.name} is a {type(param).__name__}, which is divided or packed already: "
                f"hocket.fully_shard takes plain parameters"
            )
        if param.is_inference():
            raise ValueError(f"parameter {found.name} was made in torch.inference_mode(): make the model outside of it")
        if param._post_accumulate_grad_hooks:
            raise ValueError(
                f"parameter {found.name} has a hook by register_post_accumulate_grad_hook, which would see one rank's "
                f"gradient: remove it, and look at .grad after backward"
            )
    _refuse_shared_memory(params)


def _refuse_shared_memory(params: Sequence[Member]) -> None:
    """Refuse overlapping parameters, which sharding would separate."""
    spans = []
    for found in params:
        if not found.param.is_meta and found.param.numel():
            reach = sum(
                (size - 1) * stride for size, stride in zip(found.param.shape, found.param.stride(), strict=True)
            )
            first = found.param.data_ptr()
            spans.append((first, first + (reach + 1) * found.param.element_size(), found))
    spans.sort(key=lambda span: span[:2])
    for (_, end, one), (start, _, other) in pairwise(spans):
        if start < end and one.param.device == other.param.device:
            raise ValueError(
                f"parameters {one.name} and {other.name} lie in the same memory, but are two objects, which sharding "
                f"would part: tie them as one nn.Parameter, or clone() one of them"
            )


def refuse_newcomers(root: nn.Module) -> None:
    """Refuse parameters added after sharding, whose gradients would not be averaged."""
    for name, param in root.named_parameters():
        if param.requires_grad and not isinstance(param, ShardedParameter) and not hasattr(param, IGNORED):
            raise ValueError(
                f"{name} joined the {type(root).__name__} after it was sharded, so its "
                f"gradients are not averaged over ranks: complete the model before hocket.fully_shard"
            )


def refuse_early(context: Any, what: str) -> None:
    """Refuse to read all gradients before all are there. `context` is a `ShardContext`."""
    if context.in_backward:
        raise ValueError(
            f"{what} is called inside of a backward, before all gradients are there: call it afterwards; after "
            f"a backward that ended with an exception, call abort() of the ShardContext on all ranks"
        )
    if context.arriving:
        raise ValueError(
            f"{what} is called inside of step_and_gather, as by a hook of the optimizer's step, before all "
            f"gradients are there: call it before"
        )
