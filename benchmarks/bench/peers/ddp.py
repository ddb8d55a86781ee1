"""torch DistributedDataParallel: whole weights on every rank, gradients all-reduced in buckets during backward."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.bench.contender import Contender
from benchmarks.bench.plain import MainWeights, backward, materialize, optimizer_name, plain_model
from benchmarks.bench.workload import Workload
from hocket.model.documents import Microbatch

BUCKET_MB = 100
"""Larger than torch's default of 25, which is too small for fast links."""


def ddp(workload: Workload, rank: int, device: torch.device) -> Contender:
    """DDP over all ranks."""
    model = plain_model(workload, rank)
    materialize(model, workload, rank, device)
    optimizer = MainWeights(dict(model.named_parameters()), workload, rank) if workload.optimizer else None
    return Ddp(DistributedDataParallel(model, **_OPTIONS), optimizer, workload)


_OPTIONS = dict(bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True, init_sync=False)


class Ddp:
    """Plain steps; gradients are reduced in the backward of the last microbatch."""

    def __init__(self, model: DistributedDataParallel, optimizer: MainWeights | None, workload: Workload) -> None:
        self.model, self.optimizer = model, optimizer
        dtype = workload.config.precision.compute
        self.settings = {
            "ddp": ", ".join(f"{name} = {value}" for name, value in _OPTIONS.items()),
            "weights": f"whole on every rank, {dtype}",
            "reduce": f"{dtype}, once a step (no_sync for all microbatches but the last)",
            "optimizer": optimizer_name(workload, "on whole fp32 main weights, on every rank"),
            "compile": "each layer" if workload.compile else "off",
        }

    def step(self, microbatches: Sequence[Microbatch]) -> Tensor:
        losses = []
        for number, microbatch in enumerate(microbatches, 1):
            last = number == len(microbatches)
            with contextlib.nullcontext() if last else self.model.no_sync():
                losses.append(backward(self.model, microbatch, len(microbatches)))
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return torch.stack(losses).mean()

    def close(self) -> None:
        del self.model, self.optimizer
