"""Settings of `fully_shard` other than model, mesh and strategy."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch

FORMATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Precision:
    """Four separate choices. Parameters that aren't floating-point numbers stay as they are."""

    main: torch.dtype | None = torch.float32
    """The optimizer's weights: the shards that `module.parameters()` yields; None is the dtype of the module."""
    compute: torch.dtype | None = None
    """Gathered weights and compute; None is the dtype of the module."""
    wire: torch.dtype | None = None
    """Gradients on the wire; None is the compute dtype."""
    accumulate: torch.dtype | None = torch.float32
    """Sums of gradients over microbatches and ranks, except NCCL's own sum over ranks, which is in `wire`. None is the
    finer one of the wire and main dtypes."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if value not in FORMATS:
                choices = "torch.float32, torch.bfloat16, torch.float16 or torch.float64"
                raise ValueError(f"Precision({field.name}={value!r}) is no dtype to train in: use {choices}, or None")

    def of(self, dtype: torch.dtype) -> Formats:
        """The dtypes for parameters built in `dtype`."""
        if not dtype.is_floating_point:
            return Formats(dtype, dtype, dtype, dtype)
        main, compute = self.main or dtype, self.compute or dtype
        wire = self.wire or compute
        return Formats(main, compute, wire, self.accumulate or torch.promote_types(wire, main))


@dataclass(frozen=True)
class Formats:
    """The resolved dtypes of one group of parameters."""

    main: torch.dtype
    compute: torch.dtype
    wire: torch.dtype
    accumulate: torch.dtype


ShardTransport = Literal["auto", "nccl", "copy_engine", "copy_engine_gathers", "gloo", "null"]
Driver = Literal["hooks", "manual"]
Offload = Literal["none", "pinned", "pageable"]


@dataclass(frozen=True)
class ShardOptions:
    """Options of a sharded model. Raises ValueError for bad values."""

    bucket: int | None = None
    """Parameters up to which modules are joined into one unit. None joins no named units; without names it is 2**27."""
    prefetch: int = 1
    """How many units ahead weights are gathered."""
    staging: int = 2
    """Buffers for gradients being reduced; compute waits when all are in use."""
    transport: ShardTransport = "auto"
    """`auto` is copy_engine for GPUs of one host with peer access, else nccl, and gloo for CPUs. `copy_engine_gathers`
    leaves reductions to NCCL. `null` moves nothing, to measure the bound."""
    driver: Driver = "hooks"
    """`manual` installs no hooks: the caller makes the calls of `Unit`."""
    divide: float | None = None
    """Divisor of summed gradients; None is the number of ranks of the mesh, for a mean. 1 suits a loss that is a sum
    over tokens divided by the tokens of all ranks."""
    device: torch.device | str | None = None
    """Device of the shards. None: that of the parameters; required for a model on the meta device."""
    offload: Offload = "none"
    """Keep shards, gradients and optimizer state in host memory and run the optimizer there: `pinned`, copied to and
    from the device during compute, or `pageable`, where pages can't be pinned. `device` is still where compute runs.
    Not `pinned` if the CPU computes."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("transport", get_args(ShardTransport)),
            ("driver", get_args(Driver)),
            ("offload", get_args(Offload)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(choices)}")
        if self.device is not None:
            _check_device(self.device)
        if self.bucket is not None and (type(self.bucket) is not int or self.bucket < 1):
            raise ValueError(f"bucket={self.bucket!r} must be a number of parameters, at least 1, or None")
        if type(self.prefetch) is not int or self.prefetch < 0:
            raise ValueError(f"prefetch={self.prefetch!r} must be a number of units, 0 for none")
        if type(self.staging) is not int or self.staging < 1:
            raise ValueError(f"staging={self.staging!r} must be a number of buffers, at least 1 (2 overlaps)")


@dataclass
class UnitOptions:
    """Options of one unit, set by FSDP2's arguments and methods (`fsdp2.py`)."""

    reshard_after_forward: bool | None = None
    """Whether gathered weights may be freed between forward and backward. None: by the strategy, except for units
    around others."""
    reshard_after_backward: bool = True
    """Whether weights kept by `reshard_after_forward=False` are freed after backward."""
    sync: bool = True
    """Whether gradients are reduced rather than added up on this rank."""
    all_reduce: bool = True
    """Whether replicas all-reduce reduced gradients."""
    unshard_in_backward: bool = True
    """Whether backward needs the weights."""
    cast_inputs: torch.dtype | None = None
    """Dtype of a forward's floating-point inputs; None: unchanged."""
    cast_outputs: torch.dtype | None = None
    """Dtype of its outputs; None: unchanged."""


def _check_device(device: object) -> None:
    usable = isinstance(device, torch.device | str)
    try:
        usable = usable and torch.device(device).type in ("cpu", "cuda")  # pyrefly: ignore[bad-argument-type]
    except RuntimeError:
        usable = False
    if not usable:
        raise ValueError(f"device={device!r} is no place for shards: use 'cuda', 'cpu', or a torch.device of these")
