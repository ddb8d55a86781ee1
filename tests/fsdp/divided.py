"""A model whose parameters tensor-parallel ranks divide, as DTensors, and how to train it beside a plain twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import hocket
from tests.helpers.parity import LINEAR

WIDTH, TOKENS, CLIP = 16, 8, 0.5
VOCABULARY = 33  # ranks have parts of other lengths


class Block(nn.Module):
    """A residual MLP with a norm, and biases on both sides."""

    recomputes: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes is not None:
            return x + checkpoint(self.mlp, x, use_reentrant=self.recomputes)
        return x + self.mlp(x)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def tie(model: Model) -> None:
    model.head.weight = model.embed.weight


class Model(nn.Module):
    recomputes: bool | None = None

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            tie(self)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) if self.recomputes is None else checkpoint(block, x, use_reentrant=self.recomputes)
        return self.head(self.norm(x))


def model(seed: int = 0, tied: bool = False) -> Model:
    torch.manual_seed(seed)
    return Model(tied).double()


def parallel(model: Model, mesh: DeviceMesh) -> Model:
    """As torchtitan does it: tokens are divided between the products (sequence parallel)."""
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.blocks:
        plan: dict[str, ParallelStyle] = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    return model


def batch(rank: int, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
    ids = torch.randint(VOCABULARY, (2, TOKENS + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def twin_steps(steps: int, dp: int, microbatches: int) -> tuple[list[float], list[float], Model]:
    """Losses of the last microbatches, norms of gradients, and the plain model that was trained."""
    plain, losses, norms = model(), list[float](), list[float]()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, eps=LINEAR, fused=True)
    for step in range(steps):
        optimizer.zero_grad()
        for microbatch in range(microbatches):
            loss = torch.stack([loss_of(plain, *batch(rank, step, microbatch)) for rank in range(dp)]).mean()
            (loss / microbatches).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP).item())
        losses.append(loss.item())
        optimizer.step()
    return losses, norms, plain


def like_fsdp2(made: Model, mesh: DeviceMesh) -> nn.Module:
    for block in made.blocks:
        hocket.fully_shard(block, mesh=mesh)
    return hocket.fully_shard(made, mesh=mesh)


def in_one_call(made: Model, mesh: DeviceMesh, **more: Any) -> nn.Module:
    precision = hocket.Precision(main=None, accumulate=None)
    hocket.fully_shard(made, units=Block, mesh=mesh, precision=precision, **more)
    return made


def under_fsdp2(made: Model, mesh: DeviceMesh) -> nn.Module:
    for block in made.blocks:
        fsdp2(block, mesh=mesh)
    fsdp2(made, mesh=mesh)
    return made


def compare(
    sharded: nn.Module, mesh: DeviceMesh, clip: Callable[[nn.Module], Tensor], microbatches: int = 1, steps: int = 3
) -> None:
    """Train beside a plain twin: losses, norms of gradients, and weights in the end."""
    dp = mesh.size()
    losses, norms, plain = twin_steps(steps, dp, microbatches)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1, eps=LINEAR, fused=True)
    for step in range(steps):
        optimizer.zero_grad()
        for microbatch in range(microbatches):
            loss = loss_of(sharded, *batch(mesh.get_local_rank(), step, microbatch)) / microbatches
            loss.backward()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean, group=mesh.get_group())
        torch.testing.assert_close(mean.item() / dp * microbatches, losses[step])
        torch.testing.assert_close(float(clip(sharded)), norms[step])
        optimizer.step()
    for name, value in whole(sharded).items():
        torch.testing.assert_close(value, plain.state_dict()[name], msg=lambda text, name=name: f"{name}: {text}")


def whole(sharded: nn.Module) -> dict[str, Any]:
    return get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))


def full(shard: Any) -> Tensor:
    return shard.full_tensor()


def by_hocket(sharded: nn.Module) -> Tensor:
    return hocket.clip_grad_norm_(sharded, CLIP)


def by_torch(sharded: nn.Module) -> Tensor:
    norm = torch.nn.utils.clip_grad_norm_(sharded.parameters(), CLIP)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
