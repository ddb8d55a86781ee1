"""Models whose parameters tensor-parallel ranks divide, as DTensors: beside a plain twin, and beside FSDP2."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import hocket
from tests.helpers.ranks import run_ranks

WIDTH, TOKENS = 16, 8


class Block(nn.Module):
    """A residual MLP with a norm, and biases on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


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
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    return model


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(32, (2, TOKENS + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def twin_steps(steps: int, dp: int, clip: float) -> tuple[list[float], list[float], Model]:
    plain, losses, norms = model(), list[float](), list[float]()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        found = [loss_of(plain, *batch(rank, step)) for rank in range(dp)]
        (sum(found) / dp).backward()  # pyrefly: ignore[missing-attribute]
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), clip).item())
        losses.append(sum(found).item() / dp)  # pyrefly: ignore[missing-attribute]
        optimizer.step()
    return losses, norms, plain


def sharded_like_fsdp2(mesh: DeviceMesh) -> Model:
    sharded = parallel(model(), mesh["tp"])
    for block in sharded.blocks:
        hocket.fully_shard(block, mesh=mesh["dp"])
    return hocket.fully_shard(sharded, mesh=mesh["dp"])


def trains(rank: int, clipped_by: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sharded = sharded_like_fsdp2(mesh)
    assert {name: tuple(p.shape) for name, p in sharded.named_parameters()} == {
        name: tuple(p.shape) for name, p in model().named_parameters()
    }
    losses, norms, plain = twin_steps(4, 2, 0.5)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(sharded, *batch(mesh["dp"].get_local_rank(), step))
        loss.backward()
        if clipped_by == "hocket":
            norm = hocket.clip_grad_norm_(sharded, 0.5)
        else:
            norm = torch.nn.utils.clip_grad_norm_(sharded.parameters(), 0.5)
        torch.testing.assert_close(norm.item(), norms[step])
        optimizer.step()
    whole = torch.distributed.checkpoint.state_dict.get_model_state_dict(
        sharded, options=torch.distributed.checkpoint.state_dict.StateDictOptions(full_state_dict=True)
    )
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(whole[name], value, msg=lambda text, name=name: f"{name}: {text}")


def test_it_trains_as_a_plain_model() -> None:
    run_ranks(trains, 4, "hocket")


def test_torch_clips_by_the_norm_of_all_ranks() -> None:
    run_ranks(trains, 4, "torch")
