"""A model with a bit of everything, sharded in any way, and values that tell every element of its state from others."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import hocket
from tests.fsdp.elements import local
from tests.fsdp.models import WIDTH, Block, Embed, Head, OddBlock

EXPERTS = 4
IDS = torch.arange(12).view(3, 4)


class Experts(nn.Module):
    """Some of the experts of a layer."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, WIDTH, 5))
        self.gate = nn.Parameter(torch.ones(count))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.einsum("bsd,edf,e->bs", x, self.weight, self.gate).unsqueeze(-1)


class Everything(nn.Module):
    """Tied and frozen weights, unread ones, every awkward size, buffers, and experts."""

    def __init__(self, experts: int = EXPERTS, reads_all: bool = False) -> None:
        super().__init__()
        self.reads_all = reads_all
        self.embed = Embed()
        self.blocks = nn.ModuleList([Block(), Block(7)])
        self.frozen = Block().requires_grad_(False)
        self.odd = OddBlock()
        self.experts = Experts(experts)
        self.head = Head()
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.zeros(3, 5))
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("seen", torch.zeros(2, 2))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.odd(self.frozen(self.embed(ids)))
        for block in self.blocks:
            x = block(x)
        x = self.head(self.experts(x))
        return x + self.unused.sum() + F.pad(self.none, (0, 0, 1, 0)).sum() if self.reads_all else x


@dataclass(frozen=True)
class Way:
    """A way to shard it."""

    world: int
    strategy: str = "optim_grads_params"
    mesh: tuple[int, int] | None = None
    main: torch.dtype = torch.float32
    ep: int = 1

    def __str__(self) -> str:
        return " ".join(str(value) for value in vars(self).values())


def shard(way: Way, reads_all: bool = False) -> tuple[Everything, Any]:
    """The module of this rank and its context."""
    module = Everything(EXPERTS // way.ep, reads_all)
    for param in module.parameters():
        dist.broadcast(param.data, 0)
    grid = init_device_mesh("cpu", (way.world // way.ep, way.ep), mesh_dim_names=("edp", "ep"))

    def place(name: str, param: nn.Parameter) -> hocket.sharding.Placement | None:
        if way.ep == 1 or not name.startswith("experts."):
            return None
        return hocket.sharding.Placement(grid["edp"], divide=way.world, part=(grid["ep"].get_local_rank(), way.ep))

    mesh = init_device_mesh("cpu", way.mesh, mesh_dim_names=("replicate", "shard")) if way.mesh else None
    ctx = hocket.fully_shard(
        module,
        units=(Block, OddBlock, Experts),
        mesh=mesh,
        strategy=way.strategy,
        precision=hocket.Precision(main=way.main),
        place=place,
    )
    return module, ctx


def adamw(module: nn.Module) -> torch.optim.AdamW:
    """Two groups, as usual. Experts, which are DTensors in some ways to shard and not in others, have their own."""
    experts = [param for name, param in module.named_parameters() if name.startswith("experts.")]
    rest = [param for name, param in module.named_parameters() if not name.startswith("experts.")]
    return torch.optim.AdamW([{"params": experts, "weight_decay": 0.5}, {"params": rest}], lr=0.25, foreach=True)


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """A training step; returns the loss of before."""
    loss = module(IDS).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def truth(name: str, key: str, shape: tuple[int, ...]) -> Tensor:
    """The values of a tensor of the whole state: integers that bf16 holds exactly."""
    start = zlib.crc32(f"{name} {key}".encode())
    return ((torch.arange(prod(shape)) * 7 + start % 1000) % 251).float().view(shape)


def parts(ctx: Any, way: Way) -> Iterator[tuple[str, tuple[int, ...], int, Tensor]]:
    """Of all that this rank keeps: name, whole shape, first element, shard."""
    for unit in ctx.units:
        for group in unit.groups:
            for one in group.shards:
                shape, lo = tuple(one.shape), group.spans[one.position].lo
                if one.full_name.startswith("experts."):
                    lo += dist.get_rank() % way.ep * prod(shape)
                    shape = (EXPERTS, *shape[1:])
                yield one.full_name, shape, lo, one


@torch.no_grad()
def fill(module: Everything, ctx: Any, optimizer: torch.optim.Optimizer, way: Way) -> None:
    """Give all of the state its true values."""
    for name, shape, lo, one in parts(ctx, way):
        local(one).copy_(truth(name, "main", shape).flatten()[lo : lo + len(local(one))])
        for key, value in optimizer.state.get(one, {}).items():
            if key == "step":
                value.fill_(len(name))
            else:
                local(value).copy_(truth(name, key, shape).flatten()[lo : lo + len(local(one))])
    module.seen.copy_(truth("seen", "buffer", (2, 2)))
    module.scratch.fill_(dist.get_rank())


def check(module: Everything, ctx: Any, optimizer: torch.optim.Optimizer | None, way: Way) -> int:
    """Everything has its true value. Returns how many tensors of the optimizer were looked at."""
    looked = 0
    for name, shape, lo, one in parts(ctx, way):
        assert one.dtype == way.main
        assert torch.equal(local(one), truth(name, "main", shape).flatten()[lo : lo + len(local(one))].to(way.main)), (
            name
        )
        for key, value in optimizer.state.get(one, {}).items() if optimizer else ():
            looked += 1
            if key == "step":
                assert value.item() == len(name), (name, value)
            else:
                assert local(value).shape == local(one).shape
                assert torch.equal(
                    local(value), truth(name, key, shape).flatten()[lo : lo + len(local(one))].to(value.dtype)
                ), name
    assert torch.equal(module.seen, truth("seen", "buffer", (2, 2)))
    return looked
