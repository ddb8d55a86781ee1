"""What `fully_shard` refuses, in words, before anything is changed."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hocket.fsdp.elementwise import is_elementwise
from hocket.fsdp.members import UNIT, Member, is_called
from hocket.fsdp.muon import refuse_no_matrices
from hocket.fsdp.options import ShardOptions
from hocket.fsdp.precision import Precision
from hocket.fsdp.sharded_parameter import ShardedParameter
from hocket.runtime.weights import sink_of

IGNORED = "_hocket_ignored"
"""An attribute of parameters that are to stay as they are."""


def refuse_types(modules: Sequence[Any], mesh: Any, precision: Any, place: Any, options: Any) -> None:
    """Refuse arguments of another type."""
    for name, value, kind in (
        *(("module", one, nn.Module) for one in modules or [None]),
        ("mesh", mesh, DeviceMesh),
        ("precision", precision, Precision),
        ("options", options, ShardOptions),
    ):
        if not isinstance(value, kind) and (value is not None or name == "module"):
            raise ValueError(f"{name}={value!r} is no {kind.__name__}: give one" + (" or None" * (name != "module")))
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "a model can't be sharded in torch.inference_mode(), where nothing can be trained: do it before"
        )
    if place is not None and not callable(place):
        raise ValueError(f"place={place!r} is no function of (name, parameter): give one, or None")


def refuse_uncalled(module: nn.Module) -> None:
    """Refuse a module whose forward nobody calls: nothing would gather its weights."""
    if not is_called(module):
        raise ValueError(
            f"fully_shard of a {type(module).__name__}, which is never called itself: call it on each of the modules "
            f"in it"
        )


def refuse_foreign(module: nn.Module, known: Container[int]) -> None:
    """Refuse a module that TorchScript has compiled, and parameters of other sharded models but `known` ones."""
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


def is_full(param: Tensor | None) -> bool:
    """Whether it is a full parameter of a sharded model."""
    return param is not None and sink_of(param) is not None


def refuse_strange(module: nn.Module, params: Sequence[Member]) -> None:
    """Refuse parameters of a module that can't be taken apart, and none at all."""
    if not params:
        raise ValueError(f"the {type(module).__name__} has no parameters to shard")
    for found in params:
        param = found.param
        if is_lazy(param):
            raise ValueError(f"parameter {found.name} has no shape yet: run a forward of the model before sharding it")
        if is_traceable_wrapper_subclass(param):
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
    """Parameters in the same memory would be two after sharding."""
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


def refuse_matrices(optimizer: Optimizer) -> None:
    """Refuse optimizers that are not elementwise, which would take a shard for a weight: but Muon, see `muon.py`."""
    if isinstance(optimizer, torch.optim.Muon):
        refuse_no_matrices(optimizer)
        return
    for number, held in enumerate(optimizer.param_groups):
        shards = [param for param in held["params"] if isinstance(param, ShardedParameter) and param.group is not None]
        if not shards:
            continue
        parts = [shard for shard in shards if not shard.keeps_all]
        refused = isinstance(optimizer, torch.optim.Adafactor) or (
            isinstance(optimizer, torch.optim.LBFGS) and bool(parts)
        )
        if not refused and not type(optimizer).__module__.startswith("torch.optim."):
            refused = any(shard.splits for shard in shards) and not is_elementwise(
                optimizer, number, (parts or shards)[0].to_local(), keeps_all=not parts
            )
        if refused:
            raise ValueError(
                f"{type(optimizer).__name__} computes with whole weights, and sharded parameters are 1-D parts of "
                f"them: use an elementwise optimizer, such as torch.optim.AdamW, or torch.optim.Muon"
            )


def refuse_newcomers(root: nn.Module) -> None:
    """Refuse parameters that joined a sharded model afterwards: ranks would train different copies."""
    for name, param in root.named_parameters():
        if param.requires_grad and not isinstance(param, ShardedParameter) and not hasattr(param, IGNORED):
            raise ValueError(
                f"{name} joined the {type(root).__name__} after it was sharded, so its "
                f"gradients are not averaged over ranks: complete the model before hocket.fully_shard"
            )


def refuse_early(context: Any, what: str) -> None:
    """Refuse to look at all gradients before all are there. `context` is a `ShardContext`."""
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
