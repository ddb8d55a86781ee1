"""What `fully_shard` can be told beyond the model, the mesh and the strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

from hocket.fsdp.buckets import parse_bucket
from hocket.fsdp.home import Offload
from hocket.fsdp.layout import Granularity
from hocket.fsdp.strategy import Prefetch

Outer = Literal["replicate", "shard"]
ShardTransport = Literal["auto", "nccl", "copy_engine", "copy_engine_gathers", "gloo", "null"]
Driver = Literal["hooks", "manual"]


@dataclass(frozen=True)
class ShardOptions:
    """How the work of a sharded model is arranged. Raises ValueError for values that mean nothing."""

    outer: Outer = "replicate"
    """On a mesh of two axes, what the first one does: `replicate` keeps as many copies of everything (HSDP), `shard`
    shards the optimizer's state over it too (HFSDP)."""
    bucket: str = "auto"
    """The most that modules are joined to, to be gathered and reduced as one: "128M params", or "256MiB" in the dtype
    in which they are gathered. `auto` joins no units that are named; without names it is 128Mi params."""
    prefetch: int | str = 1
    """How far ahead weights are gathered: a number of units, or a size such as "512MiB"."""
    staging: int = 2
    """Buffers for gradients on their way: compute waits when all are being reduced."""
    transport: ShardTransport = "auto"
    """How bytes move: `auto` is copy_engine for GPUs of one host that reach each other's memory, nccl for others, and
    gloo for CPUs. `copy_engine_gathers` leaves reductions to NCCL. `null` moves none, for measuring the bound."""
    driver: Driver = "hooks"
    """`manual` installs no hooks: the caller makes the calls of `Unit` itself."""
    divide: float | None = None
    """Summed gradients are divided by this; None is the number of ranks of the mesh, for a mean. 1 suits a loss that is
    a sum over tokens, divided by the tokens of all ranks."""
    granularity: Granularity = "element"
    """What is never split between ranks: nothing, a row of a parameter's dimension 0, or a whole parameter."""
    device: torch.device | str | None = None
    """Where shards live. Without it, where the parameters are; for parameters on the meta device it must be given."""
    offload: Offload = "none"
    """Whether weights, gradients and the optimizer's state of shards lie in the host's memory, and the optimizer runs
    there: `pinned`, which the device copies from and to while it computes, or `pageable`, where pages cannot be pinned.
    `device` still says what computes; a model on the CPU stays there while it is sharded. Where the CPU computes,
    nothing can be pinned."""
    init: Callable[[nn.Module], None] | None = None
    """Gives the parameters of a module on the meta device their values; `module.reset_parameters()` without it. It is
    called for one module at a time, which is on `device` by then."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("outer", get_args(Outer)),
            ("transport", get_args(ShardTransport)),
            ("driver", get_args(Driver)),
            ("granularity", get_args(Granularity)),
            ("offload", get_args(Offload)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(choices)}")
        if self.device is not None:
            _check_device(self.device)
        if self.init is not None and not callable(self.init):
            raise ValueError(f"init={self.init!r} is no function of a module: give one, or None")
        parse_bucket(self.bucket)
        Prefetch.parse(self.prefetch)
        if isinstance(self.staging, bool) or not isinstance(self.staging, int) or self.staging < 1:
            raise ValueError(f"staging={self.staging!r} must be a number of buffers, at least 1 (2 overlaps)")


@dataclass
class UnitOptions:
    """What one unit does in its own way. FSDP2's arguments and the methods of its modules set it (`fsdp2.py`)."""

    reshard_after_forward: bool | None = None
    """Whether gathered weights may go between forward and backward. None: as the strategy has it, and those of a unit
    around others stay."""
    reshard_after_backward: bool = True
    """Whether weights that `reshard_after_forward=False` has kept go when backward is over."""
    sync: bool = True
    """Whether gradients are reduced, instead of only added up on this rank."""
    all_reduce: bool = True
    """Whether replicas exchange what was reduced."""
    unshard_in_backward: bool = True
    """Whether backward needs the weights."""
    cast_inputs: torch.dtype | None = None
    """In which dtype a forward gets its floating-point tensors; None leaves them."""
    cast_outputs: torch.dtype | None = None
    """In which dtype it returns them."""


def _check_device(device: object) -> None:
    usable = isinstance(device, torch.device | str)
    try:
        usable = usable and torch.device(device).type in ("cpu", "cuda")  # pyrefly: ignore[bad-argument-type]
    except RuntimeError:
        usable = False
    if not usable:
        raise ValueError(f"device={device!r} is no place for shards: use 'cuda', 'cpu', or a torch.device of these")
