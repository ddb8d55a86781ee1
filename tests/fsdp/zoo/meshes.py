"""Programs on two axes of ranks: replicas of shards, tensor-parallel layers, and experts, on 2 x 2 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    PrepareModuleOutput,
    SequenceParallel,
    parallelize_module,
)

from tests.fsdp.zoo.program import STEPS, WIDTH, Block, Run, distance, program

RANKS = 4


def steps(
    run: Run,
    model: nn.Module,
    microbatches: int = 1,
    clip: bool = False,
    choose: Callable[[int], None] | None = None,
    decay: float = 0.01,
) -> None:
    """The loop of all programs here. `choose` gets the seed of each microbatch."""
    updates = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=decay, foreach=True)
    for step in range(STEPS):
        for microbatch in range(microbatches):
            last = microbatch == microbatches - 1
            if run.form != "plain" and microbatches > 1:
                model.set_requires_all_reduce(last)  # pyrefly: ignore[not-callable]
            for seed in run.seeds(microbatches * step + microbatch):
                generator = torch.Generator().manual_seed(seed)
                x = torch.randn(4, 6, 8, generator=generator)
                if choose is not None:
                    choose(seed)
                run.backward(distance(model(x), generator) / microbatches)
        if clip:
            run.note(f"norm {step}", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        updates.step()
        updates.zero_grad()
    run.note_weights(model)


def mesh_of(run: Run, *names: str) -> DeviceMesh | None:
    """The two axes; none for the plain run."""
    return None if run.form == "plain" else init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def stack() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, WIDTH), *(Block() for _ in range(2)), nn.Linear(WIDTH, 4))


@program("HSDP: replicas of shards", world=RANKS)
def _(run: Run) -> None:
    steps(run, run.shard(stack(), Block, mesh=mesh_of(run, "replicate", "shard")), clip=True)


@program("HSDP: replicas exchange gradients with the last microbatch", world=RANKS)
def _(run: Run) -> None:
    steps(run, run.shard(stack(), Block, mesh=mesh_of(run, "replicate", "shard")), microbatches=3)


class Choosing(nn.Module):
    """A unit that uses one branch or the other, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.choice = 0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branches[self.choice](x)


@program("HSDP: branches that some steps leave out", world=RANKS)
def _(run: Run) -> None:
    model = nn.Sequential(nn.Linear(8, WIDTH), Choosing(), Choosing(), nn.Linear(WIDTH, 4))
    chosen = [one for one in model if isinstance(one, Choosing)]

    def choose(seed: int) -> None:
        for one in chosen:
            one.choice = seed // 1000 % 2

    steps(run, run.shard(model, Choosing, mesh=mesh_of(run, "replicate", "shard")), choose=choose, decay=0.5)


def parallel(
    run: Run, model: nn.Module, plan: Callable[[], dict[str, Any]], kind: type[nn.Module] = Block
) -> nn.Module:
    """Layers divided among the ranks of one axis by torch, then sharded over the other; those share their data."""
    mesh = mesh_of(run, "dp", "tp")
    run.share_data(2)
    for block in model.modules():
        if isinstance(block, kind) and mesh is not None:
            parallelize_module(block, mesh["tp"], plan())
    return run.shard(model, kind, mesh=None if mesh is None else mesh["dp"])


class Sequences(nn.Module):
    """The norm and the residual are of some positions on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.block = nn.LayerNorm(WIDTH), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.block(x))


@program("tensor-parallel layers, sequence-parallel norms", world=RANKS)
def _(run: Run) -> None:
    def plan() -> dict[str, Any]:
        whole = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        split = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        return {"block": split, "norm": SequenceParallel(use_local_output=True), "": whole}

    model = nn.Sequential(nn.Linear(8, WIDTH), *(Sequences() for _ in range(2)), nn.Linear(WIDTH, 4))
    steps(run, parallel(run, model, plan, Sequences), clip=True)
