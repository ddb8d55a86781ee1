"""The bound: the plain stack with whole weights on every rank and no communication at all.

Note: [Two bounds]
`bound` issues its kernels one by one and waits for the counts of its rows, as an ordinary program does. On a slow host
its kernels come late, and a share of such a bound is flattering. `bound_graph` is the same program, whose passes are
recorded once and replayed as one CUDA graph: it waits for no host, and no host can slow it down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench.contender import Contender
from benchmarks.bench.plain import (
    Exchange,
    Kept,
    MainWeights,
    PlainModel,
    backward,
    materialize,
    optimizer_name,
    plain_model,
)
from benchmarks.bench.workload import Workload
from hocket.kernels import usable
from hocket.model.documents import Microbatch


def bound(workload: Workload, rank: int, device: torch.device) -> Contender:
    """Forward and backward over whole weights; the optimizer updates only what this rank would own if sharded."""
    mesh, where = workload.mesh, workload.mesh.coordinates(rank)
    return WholeWeights(*_parts(workload, rank, device, Exchange(None, mesh.ep, where.ep)))


def bound_graph(workload: Workload, rank: int, device: torch.device) -> Contender:
    """The same, forward and backward of all microbatches as one CUDA graph. See Note: [Two bounds]."""
    mesh, where = workload.mesh, workload.mesh.coordinates(rank)
    model, optimizers, settings = _parts(workload, rank, device, Kept(mesh.ep, where.ep))
    return Replayed(model, optimizers, {**settings, "host": "forward and backward are one CUDA graph"})


def _parts(
    workload: Workload, rank: int, device: torch.device, exchange: Exchange
) -> tuple[PlainModel, list[MainWeights], dict[str, str]]:
    """Model, optimizers and settings of a bound."""
    mesh, where = workload.mesh, workload.mesh.coordinates(rank)
    model = plain_model(workload, rank, exchange=exchange)
    materialize(model, workload, rank, device)
    optimizers = list[MainWeights]()
    if workload.optimizer:
        named = dict(model.named_parameters())
        experts = {name: param for name, param in named.items() if ".experts." in name}
        dense = {name: param for name, param in named.items() if name not in experts}
        for params, split in ((dense, (mesh.dp, where.dp)), (experts, (mesh.edp, where.edp))):
            if params:
                optimizers.append(OwnUpdate(params, workload, rank, split=split))
    settings = {
        "weights": f"whole on every rank, {workload.config.precision.compute}; gradients are neither cast nor copied",
        "communication": "none; experts work on the rows that this rank would have sent" if mesh.ep > 1 else "none",
        "optimizer": optimizer_name(workload, "on this rank's fp32 shard", kernel=True),
        "compile": "each layer" if workload.compile else "off",
    }
    return model, optimizers, settings


class OwnUpdate(MainWeights):
    """Main weights that hocket's kernel updates: a bound may be no slower than what it bounds."""

    def __init__(self, params: Mapping[str, torch.nn.Parameter], workload: Workload, rank: int, **how: Any) -> None:
        super().__init__(params, workload, rank, **how)
        self.averages = [(torch.zeros_like(main), torch.zeros_like(main)) for main in self.main]
        t, device = workload.config.train, self.main[0].device
        step_values = [1.0, t.lr, 1.0, 0.0, 1 - t.lr * t.weight_decay]  # without corrections
        self.step_values = torch.tensor(step_values, dtype=torch.float64, device=device)

    @torch.no_grad()
    def step(self) -> None:
        if not usable(*self.main):
            super().step()
            return
        from hocket.kernels.adamw import adamw

        t = self.workload.config.train
        for param, main, value, averages in zip(self.params, self.main, self.values, self.averages, strict=True):
            assert param.grad is not None
            grad = self._mine(param.grad.contiguous()).float()
            adamw(main, grad, averages, value, self.step_values, param.dim() > 1, (*t.betas, t.eps))
            param.grad = None


class WholeWeights:
    """Plain steps over a model that lies whole on this rank."""

    def __init__(self, model: PlainModel, optimizers: Sequence[MainWeights], settings: dict[str, str]) -> None:
        self.model, self.optimizers, self.settings = model, optimizers, settings

    def step(self, microbatches: Sequence[Microbatch]) -> Tensor:
        loss = self.passes(microbatches)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return loss

    def passes(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Forward and backward of all microbatches, which leave their gradients at the parameters; the mean loss."""
        losses = [backward(self.model, microbatch, len(microbatches)) for microbatch in microbatches]
        return torch.stack(losses).mean()

    def close(self) -> None:
        del self.model, self.optimizers


class Replayed(WholeWeights):
    """The same steps, from the third on with their passes replayed. Microbatches keep their number and shapes."""

    def __init__(self, model: PlainModel, optimizers: Sequence[MainWeights], settings: dict[str, str]) -> None:
        super().__init__(model, optimizers, settings)
        self.issued = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: list[Microbatch] = []
        self.loss = torch.zeros(())
        self.grads: list[tuple[torch.nn.Parameter, Tensor | None]] = []
        """Where the graph writes them, again and again."""

    def passes(self, microbatches: Sequence[Microbatch]) -> Tensor:
        if self.issued < 2:  # libraries choose their kernels, and allocate what they keep
            self.issued += 1
            return super().passes(microbatches)
        if self.graph is None:
            self.record(microbatches)
        assert self.graph is not None
        for mine, given in zip(self.inputs, microbatches, strict=True):
            mine.ids.copy_(given.ids)
            mine.targets.copy_(given.targets)
        self.graph.replay()
        for param, grad in self.grads:
            param.grad = grad
        return self.loss.clone()

    def record(self, microbatches: Sequence[Microbatch]) -> None:
        """Record the passes on copies of the microbatches. Nothing runs."""
        self.inputs = [replace(each, ids=each.ids.clone(), targets=each.targets.clone()) for each in microbatches]
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.loss = super().passes(self.inputs)
        self.grads = [(param, param.grad) for param in self.model.parameters()]

    def rest(self) -> None:
        """Give back the memory of the graph, which is recorded anew in the next step."""
        if self.graph is not None:
            self.graph.reset()
        self.inputs, self.grads, self.graph = [], [], None
        self.loss = torch.zeros(())

    def close(self) -> None:
        self.rest()
        super().close()
