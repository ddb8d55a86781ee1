"""FSDP2's arguments, policies and methods in terms of units.

Modules of units get the methods of FSDP2's `FSDPModule` and are instances of it, by which other code recognizes sharded
modules. Methods for what hocket always does are no-ops; methods without a counterpart raise an error that names the
fix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn, TypedDict, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
)
from torch.distributed.fsdp import (
    FSDPModule as TorchFSDPModule,
)
from torch.distributed.tensor import Shard

from hocket.config import Strategy
from hocket.fsdp.dtensors import SpmdMesh
from hocket.fsdp.members import UNIT
from hocket.fsdp.module_unit import Claim, Unit
from hocket.fsdp.options import Precision, ShardOptions, UnitOptions
from hocket.fsdp.shard_groups import Placement

Place = Callable[[str, nn.Parameter], Placement | None]


class Fsdp2Arguments(TypedDict, total=False):
    """Arguments of FSDP2's `fully_shard`, with the policies of `torch.distributed.fsdp`, and one of FSDP1's."""

    reshard_after_forward: bool | int | None
    """Whether units free gathered weights between forward and backward; None: those that contain no units."""
    shard_placement_fn: Callable[[nn.Parameter], Any] | None
    """Parameter -> None, a `Shard`, or a `ShardPlacementResult` with another mesh."""
    mp_policy: MixedPrecisionPolicy | None
    """Dtypes, and casts of inputs and outputs of each unit. Parameters keep the dtype in which they were built."""
    offload_policy: OffloadPolicy | None
    """`CPUOffloadPolicy`: see `ShardOptions.offload`."""
    ignored_params: set[nn.Parameter] | None
    """Parameters that stay as they are, each rank's own."""
    dp_mesh_dims: Any
    """A `DataParallelMeshDims`: which axes of `mesh`, on which all parameters are DTensors, are data-parallel."""
    sync_module_states: bool
    """Take the weights and buffers of the first rank, instead of comparing those of all."""


@dataclass(frozen=True)
class ShardRequest:
    mesh: DeviceMesh | None
    strategy: str
    precision: Precision
    place: Place | None
    options: ShardOptions
    unit: UnitOptions
    ignored: Iterable[nn.Parameter]
    nests: bool
    """Whether the model may become part of a larger one."""
    first_rank: bool
    """Whether all ranks take the weights of the first one."""
    spmd: SpmdMesh | None
    """The mesh of all parameters, of which `mesh` has some axes."""


def request_of(
    modules: Sequence[Any], mesh: DeviceMesh | None, own: Mapping[str, Any], fsdp2: Mapping[str, Any], nests: bool
) -> ShardRequest:
    """Combine hocket's own arguments and FSDP2's.

    Raises: TypeError for an unknown argument; ValueError for a bad one, for two that say the same, or for one without a
    counterpart.
    """
    for name in fsdp2:
        if name not in Fsdp2Arguments.__annotations__:
            raise TypeError(f"fully_shard() got an unexpected keyword argument {name!r}")
    given: dict[str, Any] = {**dict.fromkeys(Fsdp2Arguments.__annotations__), **fsdp2, **own, "mesh": mesh}
    _refuse_arguments(modules, given)
    policy, place, offload = given["mp_policy"], given["shard_placement_fn"], given["offload_policy"]
    precision, unit = given["precision"] or Precision(), UnitOptions(given["reshard_after_forward"])
    if policy is not None or nests:
        policy = policy or MixedPrecisionPolicy()
        precision = Precision(None, policy.param_dtype, policy.reduce_dtype, None)
        inputs = policy.param_dtype if policy.cast_forward_inputs else None
        unit = replace(unit, cast_inputs=inputs, cast_outputs=policy.output_dtype)
    dims, spmd, strategy = given["dp_mesh_dims"], None, given["strategy"] or "optim_grads_params"
    if dims is not None and mesh is not None:
        spmd = SpmdMesh(mesh, dims.replicate_names, dims.shard_names)
        mesh, strategy = spmd.data_mesh(), strategy if dims.shard_names else "no_shard"
    options = given["options"] or ShardOptions(device=_device(mesh) if nests else None)
    if isinstance(offload, CPUOffloadPolicy):
        if options.offload != "none":
            raise ValueError("offload_policy= and ShardOptions(offload=) say the same in two ways: give one of them")
        options = replace(options, offload="pinned" if offload.pin_memory else "pageable")
    return ShardRequest(
        mesh=mesh,
        strategy=strategy,
        precision=precision,
        place=given["place"] if place is None else _place_by(place),
        options=options,
        unit=unit,
        ignored=given["ignored_params"] or (),
        nests=nests,
        first_rank=bool(given["sync_module_states"]),
        spmd=spmd,
    )


_SAME = {"mp_policy": "precision", "reshard_after_forward": "strategy", "shard_placement_fn": "place"}
_KINDS: dict[str, Any] = {
    "mesh": DeviceMesh, "precision": Precision, "options": ShardOptions, "mp_policy": MixedPrecisionPolicy,
    "offload_policy": OffloadPolicy, "reshard_after_forward": bool, "sync_module_states": bool,
    "place": Callable, "shard_placement_fn": Callable,
}  # fmt: skip
"""What arguments are, if not None."""


def _refuse_arguments(modules: Sequence[Any], given: Mapping[str, Any]) -> None:
    for module in modules or [None]:
        if not isinstance(module, nn.Module):
            raise ValueError(f"module={module!r} is no Module: give one")
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "a model can't be sharded in torch.inference_mode(), where nothing can be trained: do it before"
        )
    if type(reshard := given["reshard_after_forward"]) is int:
        raise ValueError(
            f"reshard_after_forward={reshard}, a number of ranks that keep weights for backward, is not supported: "
            f"give True, or shard over fewer ranks with a mesh of two axes, (replicate, shard)"
        )
    for name, kind in _KINDS.items():
        if given[name] is not None and not isinstance(given[name], kind):
            what = "function" if kind is Callable else kind.__name__
            raise ValueError(f"{name}={given[name]!r} is no {what}: give one or None")
    if given["strategy"] not in (None, *get_args(Strategy)):
        raise ValueError(f"strategy={given['strategy']!r} is not one of {', '.join(get_args(Strategy))}")
    dims = given["dp_mesh_dims"]
    if dims is not None and (given["mesh"] is None or not hasattr(dims, "shard_names")):
        raise ValueError(f"dp_mesh_dims={dims!r}: give a DataParallelMeshDims, and the mesh of which it names axes")
    strange = [one for one in given["ignored_params"] or () if not isinstance(one, nn.Parameter)]
    if strange:
        raise ValueError(f"ignored_params has a {type(strange[0]).__name__}: give a set of parameters of the module")
    for name, other in _SAME.items():
        if given[name] is not None and given[other] is not None:
            raise ValueError(f"{name}= and {other}= say the same in two ways: give one of them")


def _place_by(shard_placement_fn: Callable[[nn.Parameter], Any]) -> Place:
    """FSDP2's `shard_placement_fn` as `place`: shards are rows, whatever the dimension."""

    def place(name: str, param: nn.Parameter) -> Placement | None:
        found = shard_placement_fn(param)
        if found is None or isinstance(found, Shard):
            return None
        mesh = getattr(getattr(found, "mesh_info", None), "mesh", None)
        if not isinstance(mesh, DeviceMesh):
            raise ValueError(
                f"shard_placement_fn returned {found!r} for {name}: return None, a Shard, or a ShardPlacementResult"
            )
        return Placement(mesh, None)

    return place


def _device(mesh: DeviceMesh | None) -> torch.device | None:
    """Where FSDP2 puts a module: on this rank's GPU, if the mesh or the group of all ranks uses GPUs."""
    if mesh is None and not dist.is_initialized():
        return None
    gpus = mesh.device_type == "cuda" if mesh is not None else "nccl" in dist.get_backend()
    if gpus and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return None if mesh is None else torch.device(mesh.device_type)


class _Handle(UnshardHandle):
    def __init__(self, claim: Claim) -> None:
        self._claim: Claim | None = claim

    def wait(self) -> None:
        if self._claim is not None:
            self._claim.wait()
        self._claim = None


class _State:
    """The part of FSDP2's state that torch's `register_fsdp_forward_method` and `share_comm_ctx` use."""

    _fsdp_param_groups, _fsdp_param_group = (), None  # torch 2.11 reads the latter
    _comm_ctx = None

    def __init__(self, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        self._pre_forward, self._after = before, after

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._after(module, args, {}, output)


class FSDPModule(TorchFSDPModule):
    """Methods of a module that is a unit. `recurse` includes the units inside of it."""

    _hocket_original: ClassVar[type[nn.Module]]
    """The module's class before sharding."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A plain module of the same class, as for slices of an `nn.Sequential`."""
        plain = cls._hocket_original.__new__(cls._hocket_original, *args, **kwargs)
        plain.__init__(*args, **kwargs)  # Python does not call it, since this is no instance of `cls`
        return plain

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the weights and show them, until `reshard`, the end of the module's next forward, or an update."""
        unit = _unit(self)
        context = unit.context
        context.forget_old_forwards()  # not in a later forward that reads these weights
        handle = _Handle(context.held_claims.unshard(unit))
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the gathered weights, unless a forward or backward uses them."""
        unit = _unit(self)
        unit.context.held_claims.reshard(unit)
        unit.reshard()

    def reset_iter_state(self) -> None:
        """After an exception in a step: forget its claims and gradients. See `ShardContext.abort`."""
        _unit(self).context.abort()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients, or adds them up on this rank until they are reduced or read."""
        _set(self, recurse, "set_requires_gradient_sync", sync=requires_gradient_sync)
        self.set_requires_all_reduce(requires_gradient_sync, recurse=recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether replicas all-reduce after backward, or leave it to a later backward."""
        _set(self, recurse, "set_requires_all_reduce", all_reduce=requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether to free gathered weights between forward and backward. Not while they are in use."""
        units = _units(self, recurse)
        busy = [unit for unit in units if unit.claims]
        if busy:
            raise ValueError(
                f"set_reshard_after_forward while {busy[0]} is in use: call it before a forward or after a backward"
            )
        for unit in units:
            unit.reshard()  # the next gather applies the new option
        _set(self, recurse, "set_reshard_after_forward", reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether weights kept after forward are freed after backward."""
        _set(self, recurse, "set_reshard_after_backward", reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether the module's backward needs its weights. An embedding's does not."""
        _set(self, False, "set_unshard_in_backward", unshard_in_backward=unshard_in_backward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the unit's summed gradients by `factor` instead of the number of ranks."""
        Placement(None, factor)  # validates the factor
        for group in _unit(self).groups:
            group.divide = float(factor)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Gather these modules when this module's forward begins, instead of predicting from the last pass."""
        unit = _unit(self)
        unit.context.prefetch_of(unit, _all_units(modules, "set_modules_to_forward_prefetch"), backward=False)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Gather these modules when this module's backward begins, instead of predicting from the last pass."""
        unit = _unit(self)
        unit.context.prefetch_of(unit, _all_units(modules, "set_modules_to_backward_prefetch"), backward=True)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many units of the model may be reducing gradients at once; 2 by default."""
        if type(max_input_buffers) is not int or max_input_buffers < 1:
            raise ValueError(f"max_input_buffers={max_input_buffers!r} must be a number of buffers, at least 1")
        _unit(self).context.staging_count(max_input_buffers)

    def _get_fsdp_state(self) -> Any:
        module: Any = self
        return _State(*_unit(module).calls[module])


_NOTHING_TO_DO = {
    "set_is_last_backward": "the end of a backward waits for nothing, in no case",
    "set_post_optim_event": "gathers come after all that was issued when the forward begins, so after this event",
    "set_force_sum_reduction_for_comms": "ranks' gradients are summed, then divided",
    "set_reduce_scatter_unused_params": "a unit is reduced whole, and ranks may use other parameters of it",
    "set_separate_reduce_scatter_group": "reductions have a group of their own",
    "_set_unshard_async_op": "gathers never wait",
}
"""Methods that do nothing, and why."""
_REFUSED = {
    "set_custom_all_gather": "choose how bytes move with ShardOptions(transport=...)",
    "set_custom_reduce_scatter": "choose how bytes move with ShardOptions(transport=...)",
    "set_all_reduce_hook": "give a mesh of two axes, (replicate, shard), or change .grad after backward",
    "set_allocate_memory_from_process_group_for_comm": 'use ShardOptions(transport="copy_engine")',
    "set_symm_mem_for_comm": 'use ShardOptions(transport="copy_engine")',
}
"""Methods that are errors, and the fix."""


def _refusing(name: str, fix: str) -> Callable[..., NoReturn]:
    def refuse(self: FSDPModule, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(f"{name} does not work on a module that hocket.fully_shard has sharded: {fix}")

    return refuse


for _name in _NOTHING_TO_DO:
    setattr(FSDPModule, _name, lambda self, *_, **__: None)
for _name, _fix in _REFUSED.items():
    setattr(FSDPModule, _name, _refusing(_name, _fix))


def _unit(module: Any) -> Unit:
    return module.__dict__[UNIT]


def _units(module: Any, recurse: bool) -> list[Unit]:
    mine = _unit(module)
    inside = {one for one in module.modules() if isinstance(one, FSDPModule)} if recurse else set()
    return [unit for unit in mine.context.units if unit is mine or any(one in inside for one in unit.modules)]


def _all_units(modules: Any, what: str) -> list[Unit]:
    strange = [one for one in modules if not isinstance(one, FSDPModule)]
    if strange:
        raise ValueError(f"{what} got a {type(strange[0]).__name__}, which is no unit: give modules that are sharded")
    return list(dict.fromkeys(_unit(one) for one in modules))


def _set(module: Any, recurse: bool, what: str, **changes: Any) -> None:
    for value in changes.values():
        if not isinstance(value, bool):
            raise ValueError(f"{what}({value!r}): give True or False")
    for unit in _units(module, recurse):
        unit.options = replace(unit.options, **changes)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method of a unit's module gather its weights, as forward does. No-op for other modules."""
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"a {module._hocket_original.__name__} has no method {method_name!r}: name one that it has")
    before, after = _unit(module).calls[module]
    method = getattr(module, method_name)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = before(module, args, kwargs)
        try:
            output = method(*args, **kwargs)
        except BaseException:
            after(module, args, kwargs, None)
            raise
        return after(module, args, kwargs, output)

    setattr(module, method_name, wrapped)
