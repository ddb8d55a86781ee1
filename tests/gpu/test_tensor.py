"""Tensor-parallel layers on GPUs: every way gives the same but for rounding, also when lanes are delayed at random."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from hocket.config import Config, DataConfig, MeshConfig, ModelConfig, PrecisionConfig, TrainConfig
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.layers.tensor import TensorParallel, Way, column_linear, row_linear
from hocket.model.documents import Microbatch
from hocket.program.mesh import Mesh
from hocket.runtime.comm import CommOptions, make_groups
from hocket.runtime.lanes import CudaLanes
from hocket.runtime.tokens import CopiedTokens
from hocket.runtime.weights import WgradQueue, collecting, manage
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.gpu

TOKENS, HIDDEN, WIDTH, TURNS = 1024, 512, 2048, 8
WAYS = {
    "bulk": (Way("off", "bulk"), Way()),
    "whole pieces": (Way("ring", "pipeline"), Way("pipeline", "ring")),
    "two pieces": (Way("ring", "pipeline", (2, 2)), Way("pipeline", "ring", (2, 2))),
}


def layers(rank: int, size: int) -> dict[str, float]:
    """By way: how far the worst of its results, in any turn, is from one thing after the other."""
    device = torch.device("cuda", rank)
    groups = make_groups(Mesh(tp=size), rank, device, "nccl", CommOptions(60.0, tokens=TOKENS * HIDDEN * 2))
    tp = TensorParallel.of(groups.tp, device)
    assert isinstance(tp.tokens, CopiedTokens)
    torch.manual_seed(rank)

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16) * 0.1

    up, down = nn.Parameter(new(WIDTH // size, HIDDEN)), nn.Parameter(new(HIDDEN, WIDTH // size))
    for name, param in (("up", up), ("down", down)):
        manage(param, name).value = param.detach()
    x, g = new(TOKENS // size, HIDDEN).requires_grad_(), new(TOKENS // size, HIDDEN)

    def both(column: Way, row: Way) -> list[Tensor]:
        queue, grads = WgradQueue(), {p: torch.empty_like(p.detach()) for p in (up, down)}
        with collecting(queue):
            y = row_linear(column_linear(x, (up,), tp, column)[0], down, tp, row)
        (dx,) = torch.autograd.grad(y, x, g)
        queue.drain(lambda weight: grads[up if weight.name == "up" else down])
        return [y.detach(), dx, *grads.values()]

    wanted = both(Way(), Way())
    worst = {}
    for name, ways in WAYS.items():
        found = [both(*ways) for _ in range(TURNS)]  # the host runs ahead: turns are side by side if nothing waits
        pairs = [(a, b) for one in found for a, b in zip(one, wanted, strict=True)]
        worst[name] = max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)
    groups.destroy()
    return worst


@pytest.mark.parametrize("size", [2, 4])
def test_every_way_gives_the_same(size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    for worst in run_ranks(layers, size, size, backend="nccl"):
        assert all(off < 0.02 for off in worst.values()), worst


BASE = Config(
    model=ModelConfig(
        vocab=512, hidden=256, layers=3, heads=4, kv_heads=4, head_dim=64, ffn=512, dense_layers=(0, 2), experts=8,
        top_k=2, expert_ffn=128, shared_ffn=128, aux_loss=0.01,
    ),
    mesh=MeshConfig(tp=2),
    data=DataConfig(sequence_length=256),
    precision=PrecisionConfig(compute="bf16"),
    train=TrainConfig(microbatches=4, sequences=2, transport="nccl", hang_timeout=60.0, device="cuda"),
)  # fmt: skip
ROLES = [f"{role}_{direction}" for role in ("qkv", "proj", "fc1", "fc2") for direction in ("forward", "backward")]
PIECES = ("ring", "pipeline", "pipeline", "ring") * 2
OFF = changed(BASE, {"overlap.tp.method": ("off",)})
ALL = changed(BASE, {"overlap.tp.method": tuple(map(":".join, zip(ROLES, PIECES, strict=True)))})
SPREAD = changed(ALL, {"mesh.ep": 2, "overlap.ep.merge": "on"})
STEPS = 4


def steps(rank: int, config: Config, delayed: bool = False) -> list[float]:
    """Losses of some steps."""
    device = torch.device("cuda", rank)
    engine = Engine(config, rank, device)
    engine.init_weights()
    draw = random.Random(rank)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(STEPS):
        ids = torch.randint(config.model.vocab, (4, 2, 257), generator=generator).to(device)
        batches = [Microbatch(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in ids]
        assert isinstance(engine.lanes, CudaLanes)
        if delayed:
            engine.lanes.delays = [draw.randrange(400_000) for _ in range(97)]
        losses.append(float(engine.train_step(batches, 1e-3).loss))
    engine.assert_clean()
    engine.close()
    return losses


def all_steps(rank: int) -> tuple[list[float], list[float], list[float]]:
    """Losses with collectives alone; with pieces; and with pieces on lanes that are late."""
    return steps(rank, OFF), steps(rank, ALL), steps(rank, ALL, delayed=True)


def steps_of_experts(rank: int) -> tuple[list[float], list[float], list[float]]:
    """Losses with all experts on each rank; with half of them; and with those on lanes that are late."""
    return steps(rank, ALL), steps(rank, SPREAD), steps(rank, SPREAD, delayed=True)


def test_experts_are_spread_over_tensor_parallel_ranks() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    for whole, spread, late in run_ranks(steps_of_experts, 2, backend="nccl"):
        assert spread == pytest.approx(whole, rel=0.01)
        assert late == pytest.approx(spread, rel=1e-3)


def test_steps_are_those_of_one_thing_after_the_other() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    ranks = run_ranks(all_steps, 2, backend="nccl")
    for off, pieces, late in ranks:
        assert pieces == pytest.approx(off, rel=0.01)
        assert late == pytest.approx(pieces, rel=1e-3)
    assert ranks[0][0] == ranks[1][0], "tensor-parallel ranks have one loss"
