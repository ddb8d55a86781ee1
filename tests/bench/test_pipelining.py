"""The pipelining contenders have the loss curve of the plain stack on one rank."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bench.contender import load
from benchmarks.bench.peers.pipelining import INTERLEAVED, ONE_F_ONE_B, ZERO_BUBBLE, Order, layout
from benchmarks.bench.workload import Workload, batches
from hocket.config import Config, DataConfig, MeshConfig, ModelConfig, PlanConfig, PrecisionConfig, TrainConfig
from tests.helpers.plans import small
from tests.helpers.ranks import run_ranks
from tests.reference import Reference

STEPS, LR = 4, 3e-2
EPS = 1e-2
"""So large that the size of a gradient matters: AdamW would not notice one that is wrong by a factor."""
DENSE = small(layers=4, experts=0)
MOE = small(layers=4, shared_ffn=16, dense_layers=(0,), aux_loss=0.1)


def workload(model: ModelConfig, mesh: MeshConfig, microbatches: int = 4, chunks: int = 2) -> Workload:
    train = TrainConfig(
        microbatches=microbatches, sequences=2, transport="gloo", device="cpu", lr=LR,
        betas=(0.9, 0.95), eps=EPS, weight_decay=0.0, clip=0.0,
    )  # fmt: skip
    plan, precision, data = PlanConfig(chunks=chunks), PrecisionConfig(compute="fp32"), DataConfig(sequence_length=8)
    return Workload(Config(model=model, mesh=mesh, plan=plan, precision=precision, data=data, train=train))


def losses(rank: int, names: list[str], work: Workload) -> dict[str, list[float]]:
    """Mean loss of every step on this rank, by contender: one after the other, as in the benchmark."""
    device, found = torch.device("cpu"), {}
    for name in names:
        contender = load(name)(work, rank, device)
        assert contender.settings
        found[name] = [float(contender.step(batches(work, rank, step, device))) for step in range(STEPS)]
        contender.close()
    return found


def plain(work: Workload) -> list[list[float]]:
    """Mean loss of every step and data-parallel rank, by the reference in one process."""
    c, mesh = work.config, work.mesh
    device = torch.device("cpu")
    steps = []
    for step in range(STEPS):
        ranks = [batches(work, rank, step, device) for rank in range(mesh.dp)]
        steps.append([[(m.ids, m.targets) for m in microbatch] for microbatch in zip(*ranks, strict=True)])

    def adamw(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=LR, betas=c.train.betas, eps=c.train.eps, weight_decay=0.0)

    result = Reference(c.model, mesh.dp, mesh.ep, seed=c.train.seed, optimizer=adamw).run(steps)
    return [torch.tensor(step).mean(0).tolist() for step in result.losses]


NAMES = ["pipelining_1f1b", "pipelining_interleaved", "pipelining_zb"]


@pytest.mark.parametrize(
    ("model", "mesh"),
    [(DENSE, MeshConfig(pp=2)), pytest.param(MOE, MeshConfig(pp=2, dp=2, ep=2), marks=pytest.mark.full)],
    ids=["dense-pp2", "moe-pp2-ep2"],
)
def test_losses_are_those_of_the_plain_stack(model: ModelConfig, mesh: MeshConfig) -> None:
    work = workload(model, mesh)
    found = run_ranks(losses, work.mesh.world, NAMES, work)
    expected = plain(work)
    for rank, curves in enumerate(found):
        for name, curve in curves.items():
            last = work.mesh.pp - 1 if name != "pipelining_zb" else 0  # the V ends where it begins
            where = work.mesh.coordinates(rank)
            wanted = [step[where.dp] if where.pp == last else 0.0 for step in expected]
            assert curve == pytest.approx(wanted, abs=2e-5), f"{name}, rank {rank}"


@pytest.mark.full
def test_experts_sharded_over_replicas() -> None:
    work = workload(MOE, MeshConfig(pp=2, dp=4, ep=2), microbatches=2, chunks=1)
    found = run_ranks(losses, work.mesh.world, ["pipelining_1f1b"], work)
    expected = plain(work)
    for rank in range(4, 8):
        assert found[rank]["pipelining_1f1b"] == pytest.approx([step[rank - 4] for step in expected], abs=2e-5)


@pytest.mark.parametrize(
    ("order", "work", "match"),
    [
        (ONE_F_ONE_B, workload(DENSE, MeshConfig(pp=1)), "needs a pipeline, and mesh.pp = 1; fix: "),
        (ONE_F_ONE_B, workload(DENSE, MeshConfig(pp=4), microbatches=2), "train.microbatches = 2; fix: .* = 4 or more"),
        (INTERLEAVED, workload(DENSE, MeshConfig(pp=2), chunks=1), "plan.chunks = 1; fix: plan.chunks = 2"),
        (INTERLEAVED, workload(DENSE, MeshConfig(pp=2), microbatches=5), "a multiple of mesh.pp = 2"),
        (ZERO_BUBBLE, workload(DENSE, MeshConfig(pp=4)), "needs 8 stages, and the model has 4 layers"),
    ],
)
def test_refusals_name_the_fix(order: Order, work: Workload, match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        layout(work, order)
    assert str(caught.value).startswith(f"against = {order.name} (command line): ")
