"""The plain stack: hocket's layers as an ordinary model, with ordinary parameters and ordinary autograd.

hocket's functions are stock torch functions or hocket's kernels, the same for parameters that it does not manage
(`layers/functional.py`), so contenders built from this stack run the same kernels; only what moves weights, gradients
and rows differs. MoE layers with experts on other ranks exchange rows by synchronous all-to-alls; with `null` they keep
splits and kernels, and every rank takes back the rows that it would have sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from benchmarks.bench.workload import Workload
from hocket.layers.dispatch import Splits, counts_to_send, exchange_counts
from hocket.layers.linears import linears_of
from hocket.layers.routing import Routing
from hocket.model.documents import Documents, Microbatch
from hocket.model.moe import MoELayer
from hocket.model.parts import ExpertPlace
from hocket.model.source import init_tensor
from hocket.model.transformer import Chunk
from hocket.runtime.transports import RowTable


class Exchange:
    """Moves rows between expert-parallel ranks, synchronously. Without a group it only pretends to (see the module)."""

    def __init__(self, group: dist.ProcessGroup | None, size: int, rank: int) -> None:
        self.group, self.size, self.rank = group, size, rank

    def all_counts(self, counts: Tensor) -> Tensor:
        """Every rank's `counts` [P, L] of what it sends to each: [P, P, L]."""
        every = counts.new_zeros(self.size, *counts.shape)
        if self.group is None:
            every[:, self.rank] = every[self.rank] = counts
            return every
        dist.all_gather_into_tensor(every.view(-1), counts.contiguous().view(-1), group=self.group)
        return every

    def splits(self, routing: Routing) -> Splits:
        """How many rows go from whom to whom. Stops the host until the counts are known."""
        return exchange_counts(routing, self, placed=self.group is None)

    def move(self, rows: Tensor, receive: Sequence[int], send: Sequence[int]) -> Tensor:
        """Rows [R, D] to where they belong; backward moves their gradients back."""
        return _Move.apply(rows, self, receive, send)

    def now(self, rows: Tensor, receive: Sequence[int], send: Sequence[int]) -> Tensor:
        if self.group is None:
            return rows.view_as(rows)
        out = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), list(receive), list(send), group=self.group)
        return out


class Kept(Exchange):
    """Only pretends to move rows, and stops no host: all of them stay here, so their number is known."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__(None, size, rank)

    def splits(self, routing: Routing) -> Splits:
        return Splits(RowTable([[routing.tokens * routing.top_k]], 0), counts_to_send(routing, self.size))


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange, receive: Sequence[int], send: Sequence[int]) -> Tensor:
        ctx.exchange, ctx.receive, ctx.send = exchange, receive, send
        return exchange.now(rows, receive, send)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        return ctx.exchange.now(g, ctx.send, ctx.receive), None, None, None


class SyncMoELayer(MoELayer):
    """A MoE layer that moves its rows itself, waiting for them."""

    exchange: Exchange

    def forward(self, x_BSD: Tensor, documents: Documents | None = None) -> Tensor:
        rows_RD, residual_BSD, shared_BSD, weights_R, probs_TK, routing = self.forward_attn(x_BSD, documents)
        splits = self.exchange.splits(routing)
        if (sent := sum(splits.table.send)) < len(rows_RD):  # backward of a cut fills and copies a gradient
            rows_RD = rows_RD[:sent]
        rows_RD = self.exchange.move(rows_RD, splits.table.receive, splits.table.send)
        rows_RD = self.forward_experts(rows_RD, weights_R, splits)
        rows_RD = self.exchange.move(rows_RD, splits.table.send, splits.table.receive)
        return self.forward_unpermute(rows_RD, residual_BSD, shared_BSD, probs_TK, routing)


class PlainModel(nn.Module):
    """Embedding, layers and head of a chunk, any of the outer two possibly missing, called as one module.

    Parameters are named as in the whole model. With a head it returns the mean loss, else hidden states [B, S, D].
    """

    def __init__(self, chunk: Chunk) -> None:
        super().__init__()
        self.embed, self.layers, self.head = chunk.embed, chunk.layers, chunk.head

    def forward(self, x: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        if self.head is None:
            return x
        assert targets_BS is not None
        return self.head.loss(x, targets_BS)


def plain_model(
    workload: Workload,
    rank: int,
    *,
    layers: range | None = None,
    first: bool = True,
    last: bool = True,
    exchange: Exchange | None = None,
) -> PlainModel:
    """The plain stack of a rank on the meta device, without values: all layers, or those of one virtual stage.

    With mesh.ep above 1 its MoE layers hold this rank's experts and use `exchange`. `workload.compile` is obeyed.
    """
    config, where = workload.config, workload.mesh.coordinates(rank)
    numbers = range(config.model.layers) if layers is None else layers
    stays = exchange is not None and exchange.group is None
    scale, ep = 1.0 / config.train.microbatches, ExpertPlace(workload.mesh.ep, where.ep, stays=stays)
    linears = linears_of(config)
    chunk = Chunk(config.model, numbers, first, last, ep=ep, aux_scale=scale, linears=linears)
    if ep.size > 1:
        for number in [n for n, layer in chunk.layers.items() if isinstance(layer, MoELayer)]:
            assert exchange is not None, "experts on other ranks need an exchange"
            layer = SyncMoELayer(config.model, ep, scale, linears.of_layer(int(number), config.model.layers))
            layer.exchange = exchange
            chunk.layers[number] = layer
    model = PlainModel(chunk)
    if workload.compile:
        compile_layers(model)
    return model


def compile_layers(model: PlainModel) -> None:
    """Compile each layer's forward, inside its hooks. The rows' way to the experts stays outside of any graph."""
    for layer in model.layers.values():
        if isinstance(layer, MoELayer):
            layer.attn.forward = torch.compile(layer.attn.forward, fullgraph=True, dynamic=False)
        else:
            layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False)


def backward(model: nn.Module, microbatch: Microbatch, count: int) -> Tensor:
    """Forward and backward of one of `count` microbatches, the mean of whose losses counts. Returns its loss, 0-dim."""
    loss = model(microbatch.ids, microbatch.targets)
    (loss / count).backward()
    return loss.detach()


def first_value(name: str, shape: Sequence[int], workload: Workload, rank: int, device: torch.device) -> Tensor:
    """First value of a parameter by its name in the whole model, fp32: the same for all contenders.

    `shape` is that of the parameter on this rank; of experts it has those of this rank's expert-parallel position.
    """
    config = workload.config
    first_expert = workload.mesh.coordinates(rank).ep * (config.model.experts // workload.mesh.ep)
    return init_tensor(name, shape, config.model, config.train.seed, first_expert=first_expert, device=str(device))


def fill(model: nn.Module, workload: Workload, rank: int, device: torch.device) -> None:
    """Give every parameter its first value, cast to the parameter's dtype, and balance biases theirs, which is 0.

    Parameters are named as in the whole model and lie on `device`; of a `DTensor` only this rank's part is kept.
    """
    with torch.no_grad():
        for name, param in model.named_parameters():
            value = first_value(name, param.shape, workload, rank, device).to(param.dtype)
            if isinstance(param, DTensor):
                part = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
                param.to_local().copy_(part.to_local())
            else:
                param.copy_(value)
        for bias in model.buffers():  # a router's balance bias
            bias.zero_()


def materialize(model: nn.Module, workload: Workload, rank: int, device: torch.device) -> None:
    """Turn a model of the meta device into one with first values on `device`, in the compute dtype."""
    model.to(workload.dtype)
    model.to_empty(device=device)
    fill(model, workload, rank, device)


def adamw(params: Iterable[Tensor], dims: Iterable[int], workload: Workload) -> torch.optim.AdamW:
    """The optimizer of all contenders: hocket's numbers; tensors whose whole parameter is a vector have no decay.

    `dims` holds the number of dimensions of each tensor's whole parameter.
    """
    t = workload.config.train
    params = list(params)
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for param, dim in zip(params, dims, strict=True):
        groups[dim >= 2].append(param)
    made = [
        {"params": tensors, "weight_decay": t.weight_decay if matrix else 0.0}
        for matrix, tensors in groups.items()
        if tensors
    ]
    return torch.optim.AdamW(made, lr=t.lr, betas=t.betas, eps=t.eps, **{implementation(workload): True})


def implementation(workload: Workload) -> Literal["foreach", "fused"]:
    """Which of torch's implementations of AdamW to ask for.

    `fused` reads and writes all that there is once, also on a host for GPUs; `foreach` does so for every operation, and
    has the bits of the plain formula, which CPU runs compare.
    """
    return "fused" if workload.config.train.device == "cuda" else "foreach"


def optimizer_name(workload: Workload, of: str, kernel: bool = False) -> str:
    """What `adamw` makes, and of what, for settings; on a GPU hocket's `kernel`."""
    how: str = implementation(workload)
    how = "hocket's kernel" if kernel and how == "fused" else how
    return f"AdamW ({how}) {of}" if workload.optimizer else "none"


class MainWeights:
    """fp32 main weights with AdamW beside parameters in the compute dtype, which lie whole on this rank.

    `split` is (parts, part): every parameter, flattened, is split, and only that part is updated here, which is the
    share of the work that a sharded optimizer has. Gradients are multiplied by `scale`.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        workload: Workload,
        rank: int,
        *,
        split: tuple[int, int] = (1, 0),
        scale: float = 1.0,
    ) -> None:
        self.workload, self.params, self.split, self.scale = workload, list(params.values()), split, scale
        with torch.no_grad():
            firsts = (first_value(n, p.shape, workload, rank, p.device) for n, p in params.items())
            self.main = [self._mine(first).clone() for first in firsts]
        self.values = [self._mine(param) for param in self.params]
        self.optimizer = adamw(self.main, [param.dim() for param in self.params], workload)

    def _mine(self, tensor: Tensor) -> Tensor:
        parts, part = self.split
        return tensor.detach().view(-1).tensor_split(parts)[part]

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights from the parameters' gradients, cast them, and drop the gradients."""
        for param, main in zip(self.params, self.main, strict=True):
            if param.grad is not None:
                main.grad = self._mine(param.grad.contiguous()).float()
                param.grad = None
        if self.scale != 1.0:
            torch._foreach_mul_([main.grad for main in self.main if main.grad is not None], self.scale)
        self.optimizer.step()
        torch._foreach_copy_(self.values, self.main)
        for main in self.main:
            main.grad = None
