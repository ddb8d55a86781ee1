"""Parameters that say themselves how they are gathered, by FSDP2's protocol: torchao's float8 and MXFP8 weights.

Such a parameter is a tensor subclass around a plain tensor. Its rows are in `main` like all others, so reductions,
optimizers and checkpoints compute with plain numbers; `_local_tensor` of its DTensor is the subclass around them. A
gather asks `fsdp_pre_all_gather` what to send, and moves the bytes of all members at once. `fsdp_post_all_gather` makes
a tensor of what arrived, and updates it after later gathers, in memory that comes and goes with the unit's weights.
Modules see this tensor. For autograd it comes from a stand-in without values, which gets the gradient.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from hocket.fsdp.buffers import FullBuffer
from hocket.fsdp.dtensors import Shown
from hocket.fsdp.layout import FlatLayout
from hocket.fsdp.members import Member
from hocket.fsdp.param_group import ParamGroup
from hocket.fsdp.shard_groups import Placement, ShardGroups
from hocket.runtime.transports import Pending

_METHODS = "fsdp_pre_all_gather", "fsdp_post_all_gather"


class Extension:
    """The protocol of one parameter."""

    local: Any
    """The subclass around this rank's rows."""

    def __init__(self, param: Tensor, inner: str, module: nn.Module) -> None:
        self._like = param.detach().new_zeros((0, *param.shape[1:]))  # the original, with its memory, goes
        self._inner, self._module, self.shape = inner, module, param.shape
        self._metadata: Any = None
        self._out: Any = None  # what modules see

    def wrap(self, rows: Tensor) -> Any:
        """Make `local`, around live memory."""
        if self._inner:
            self.local = self._like.new_zeros(rows.shape, dtype=rows.dtype, device=rows.device)
            setattr(self.local, self._inner, rows)
        else:
            self.local = rows.as_subclass(type(self._like))
        return self.local

    def sent(self, mesh: DeviceMesh, policy: MixedPrecisionPolicy, device: torch.device) -> Sequence[Tensor]:
        """What this rank sends."""
        ask = self.local.to(device).fsdp_pre_all_gather
        stride = torch.empty(self.shape, device="meta").stride()
        more = (self.shape, stride, self._module, policy) if len(inspect.signature(ask).parameters) > 1 else ()
        tensors, self._metadata = ask(mesh, *more)
        return (tensors,) if isinstance(tensors, Tensor) else tensors

    def arrived(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
        """Make or update what modules see. Returns tensors of which memory is freed with the gathered weights."""
        make = partial(self.local.fsdp_post_all_gather, tuple(tensors), self._metadata, dtype)
        if self._out is not None:
            make(out=self._out)
            return ()
        self._out, kept = make()
        assert self._out.shape == self.shape, f"{_METHODS[1]} made {self._out.shape} of {self.shape}"
        return kept

    def shown(self, stand_in: Tensor) -> Tensor:
        """What modules compute with: `stand_in`, for autograd."""
        return Shown.of(stand_in, lambda _: self._out.detach(), lambda grad: grad)


def extended(member: Member) -> Member:
    """A member with the protocol as a plain parameter with an `Extension`; others as they are.

    Raises: ValueError for a subclass that can't be served.
    """
    param, has = member.param, [hasattr(type(member.param), name) for name in _METHODS]
    if not any(has):
        return member
    inner = [key for key, x in vars(param).items() if isinstance(x, Tensor) and x.shape == param.shape]
    itself = type(param).__torch_dispatch__ is Tensor.__torch_dispatch__  # the subclass has the numbers
    if not all(has) or len(inner) != 1 - itself or not param.is_floating_point() or not param.ndim:
        raise ValueError(
            f"parameter {member.name} is a {type(param).__name__}, which hocket.fully_shard can't gather: it takes "
            f"subclasses with {' and '.join(_METHODS)} around one floating-point tensor with rows"
        )
    plain = getattr(param, inner[0]) if inner else param.as_subclass(Tensor)
    extension = Extension(param, inner[0] if inner else "", member.owners[0][0])
    return replace(
        member,
        param=nn.Parameter(plain.detach(), requires_grad=param.requires_grad),
        extension=extension,
        faces=(extension.shown, *member.faces),
        source=member.source or weakref.ref(param),
    )


def on_mesh(groups: ShardGroups, placement: Placement, device: torch.device) -> ShardGroups:
    """The groups with a mesh, of which the protocol is told, also on a single rank."""
    mesh = groups.mesh or placement.mesh
    if mesh is None and dist.is_initialized() and dist.get_world_size() == 1:
        mesh = DeviceMesh(device.type, [0])
    if mesh is None or mesh.shape[-1] != groups.gather.size:
        raise ValueError(
            f"parameters with {_METHODS[0]} are divided over ranks of a process group: make one, and don't say "
            f"'no_shard'"
        )
    return replace(groups, mesh=mesh)


class ExtendedGroup(ParamGroup):
    """Parameters with FSDP2's protocol."""

    extended = True

    def __init__(self, *args: Any, policy: MixedPrecisionPolicy) -> None:
        super().__init__(*args)
        mesh = self.groups.mesh
        assert mesh is not None
        self._mesh = mesh if mesh.ndim == 1 else DeviceMesh.from_group(mesh.get_group(mesh.ndim - 1), mesh.device_type)
        self._policy = policy
        self._extensions = [one.extension for one in self.members if one.extension is not None]
        self._buffer = FullBuffer(0, torch.uint8, self.device)
        self._layout: FlatLayout | None = None  # of the bytes
        self._arriving: list[list[Tensor]] = []

    @property
    def whole(self) -> bool:
        return False

    @property
    def edition(self) -> tuple[int, int]:
        return self.main._version, self._said + sum(one.local._version for one in self._extensions)

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self._layout is None else self._mine.nbytes)

    def new_buffer(self) -> FullBuffer:
        return self._buffer

    def bind(self, flat: Tensor) -> None:
        for member in self.members:
            nothing = torch.full((), torch.nan, dtype=self.compute_dtype, device=self.device)
            member.param.data = nothing.expand(member.param.shape)

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self, written: bool = False) -> None:
        """Ask for what is sent, once for all gathers of the same weights.

        So what else it returns, such as scales, which autograd may save, is replaced after all that has read it.
        """
        super().refresh(written)
        sent = [list(one.sent(self._mesh, self._policy, self.device)) for one in self._extensions]
        if self._layout is None:
            self._layout = self._lay_out(sent)
            self._mine = torch.empty(self._layout.shard, dtype=torch.uint8, device=self.device)
        for x, here in zip((x for some in sent for x in some), self._layout.slices(self.position), strict=True):
            values = x.reshape(-1).view(torch.uint8)
            self._mine[here][: len(values)] = values

    def gather(self, flat: Tensor) -> Pending:
        """Gather the bytes; `flat` is empty."""
        assert self._layout is not None
        return self.groups.gather.all_gather(self._bytes, self._mine, self._layout.pieces).then(self._arrived)

    def _lay_out(self, sent: Sequence[Sequence[Tensor]]) -> FlatLayout:
        """Allocate the bytes of the whole tensors, and make views of them."""
        world, chunks = self.layout.world, list[int]()
        for member, here, tensors in zip(self.members, self.here, sent, strict=True):
            rows, width = member.param.shape[0], member.param.shape[1:].numel()
            most, uneven = -(-rows // world), rows % world
            for x in tensors:
                if uneven and (not x.ndim or x.shape[0] not in (most, (here.stop - here.start) // max(width, 1))):
                    raise ValueError(
                        f"{_METHODS[0]} of {member.name} gives a tensor of shape {tuple(x.shape)}: of {rows} rows "
                        f"over {world} ranks it must have as many rows as the rank, or {most}"
                    )
                chunks.append(most * x.shape[1:].numel() * x.itemsize if uneven else x.nbytes)
        layout = FlatLayout.build(((str(i), (world, chunk)) for i, chunk in enumerate(chunks)), world)
        self._bytes = torch.empty(layout.total, dtype=torch.uint8, device=self.device)
        self._buffer.keep(self._bytes)
        views = iter(layout.views(self._bytes))
        for member, tensors in zip(self.members, sent, strict=True):
            rows = member.param.shape[0] if member.param.shape[0] % world else None
            whole = [next(views).flatten().view(x.dtype).view(-1, *x.shape[1:])[:rows] for x in tensors]
            self._arriving.append([x.data for x in whole])  # gathers don't count as changes
        return layout

    @torch.inference_mode(False)
    @torch.no_grad()
    def _arrived(self) -> None:
        for one, tensors in zip(self._extensions, self._arriving, strict=True):
            self._buffer.keep(*one.arrived(tensors, self.compute_dtype))
