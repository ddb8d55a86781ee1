"""The bound: the plain stack with whole weights on every rank and no communication at all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hocket.bench.contender import Contender
from hocket.bench.plain import Exchange, MainWeights, PlainModel, backward, materialize, plain_model
from hocket.bench.workload import Workload
from hocket.runtime.actions import Microbatch


def bound(workload: Workload, rank: int, device: torch.device) -> Contender:
    """Forward and backward over whole weights; the optimizer updates only what this rank would own if sharded."""
    mesh, where = workload.mesh, workload.mesh.coordinates(rank)
    model = plain_model(workload, rank, exchange=Exchange(None, mesh.ep, where.ep))
    materialize(model, workload, rank, device)
    optimizers = []
    if workload.optimizer:
        named = dict(model.named_parameters())
        experts = {name: param for name, param in named.items() if ".experts." in name}
        dense = {name: param for name, param in named.items() if name not in experts}
        for params, split in ((dense, (mesh.dp, where.dp)), (experts, (mesh.edp, where.edp))):
            if params:
                optimizers.append(MainWeights(params, workload, rank, split=split))
    settings = {
        "weights": f"whole on every rank, {workload.config.precision.compute}; gradients are neither cast nor copied",
        "communication": "none; experts work on the rows that this rank would have sent" if mesh.ep > 1 else "none",
        "optimizer": "AdamW (foreach) on this rank's fp32 shard" if workload.optimizer else "none",
        "compile": "each layer" if workload.compile else "off",
    }
    return WholeWeights(model, optimizers, settings)


class WholeWeights:
    """Plain steps over a model that lies whole on this rank."""

    def __init__(self, model: PlainModel, optimizers: Sequence[MainWeights], settings: dict[str, str]) -> None:
        self.model, self.optimizers, self.settings = model, optimizers, settings

    def step(self, microbatches: Sequence[Microbatch]) -> Tensor:
        losses = [backward(self.model, microbatch, len(microbatches)) for microbatch in microbatches]
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return torch.stack(losses).mean()

    def close(self) -> None:
        del self.model, self.optimizers
