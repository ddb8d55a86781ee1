"""The plain sequential training step, in one process: what planned runs must equal bit for bit.

Ordinary parameters, stock torch functions, ordinary autograd, `torch.optim.AdamW`. It plays all
data-parallel ranks: each has parameters of its own, and the experts of an expert-parallel rank see the rows
of all ranks of its group in the order in which the exchange delivers them, so that every matrix product has
the operands it has in a planned run. Gradients are summed as `add` and `reduce` sum them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hocket.config import ModelConfig, Strategy
from hocket.kernels import IGNORED
from hocket.layers.dispatch import counts_to_send, splits_of
from hocket.layers.linears import WHOLE, Linears
from hocket.layers.routing import balance_bias
from hocket.model.documents import PADDING, Documents, Microbatch, documents_of
from hocket.model.moe import MoELayer
from hocket.model.parts import ExpertPlace
from hocket.model.source import init_biases, init_tensor
from hocket.model.transformer import Chunk, DenseLayer
from hocket.runtime.transports import RowTable

Batch = tuple[Any, ...]
"""Token ids and targets of one microbatch of one data-parallel rank, both [B, S], and documents if there are some."""


def adamw(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=True)


@dataclass
class Result:
    """What a run gave. Weights and gradients are whole fp32 tensors by name; experts are stacked over all ranks."""

    losses: list[list[list[float]]] = field(default_factory=list)
    """By step, microbatch and data-parallel rank; not divided by the number of microbatches."""
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    """By step, before clipping."""
    norms: list[float] = field(default_factory=list)
    """Gradient norm by step."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """After the last step."""
    biases: dict[str, Tensor] = field(default_factory=dict)
    """Balance biases after the last step, by name."""


@dataclass(frozen=True)
class Reference:
    """A plain run: sizes, and how to train. `optimizer` makes the optimizer of a list of fp32 tensors."""

    config: ModelConfig
    dp: int = 1
    ep: int = 1
    dtype: torch.dtype = torch.float32
    seed: int = 0
    clip: float = math.inf
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] = adamw
    strategy: Strategy = "optim_grads_params"
    per_rank: bool = False
    wire: torch.dtype | None = None
    """In which gradients travel, where they do; None is `dtype`."""
    shard: int = 0
    """So many ranks share a copy of the weights: their gradients of a step are summed first, then those of copies."""
    linears: Linears = WHOLE
    """What layers ask of their weights."""
    apart: bool = False
    """Whether a tied head is on another rank than the embedding: then the gradients of either are summed as those of
    any other parameter, over microbatches and ranks, and these two sums are added up at the end, in fp32."""

    def run(self, steps: Sequence[Sequence[Sequence[Batch]]]) -> Result:
        """Train on `steps[step][microbatch][dp rank]`, one optimizer step each."""
        whole = Chunk(self.config, range(self.config.layers))
        main = {n: init_tensor(n, p.shape, self.config, self.seed) for n, p in whole.named_parameters()}
        for name, value in main.items():
            value.stacked = ".experts." in name  # pyrefly: ignore[missing-attribute]
        init_biases(whole, "cpu")
        result = Result(weights=main, biases=dict(whole.named_buffers()))
        optimizer = self.optimizer(list(main.values()))
        for microbatches in steps:
            shard = self.shard or self.dp
            rows: dict[int, Tensor] = {}
            sizes = {**main, **({HEAD: main[TIED]} if self.config.tied and self.apart else {})}
            of_copies = [{n: torch.zeros_like(value) for n, value in sizes.items()} for _ in range(0, self.dp, shard)]
            result.losses.append([])
            held: list[dict[tuple[int, str], Tensor]] = [{} for _ in of_copies]
            ranks = [self._rank(result, r, len(microbatches)) for r in range(self.dp)]
            for m, batches in enumerate(microbatches):
                for chunk in ranks:
                    chunk.zero_grad()
                losses = self._forward(ranks, batches, rows)
                torch.autograd.backward(losses, self._factors(microbatches, m))
                result.losses[-1].append([loss.item() for loss in losses])
                for i, grads in enumerate(of_copies):
                    mine = ranks[i * shard : (i + 1) * shard]
                    self._reduce(mine, grads, held[i], last=m == len(microbatches) - 1)
            grads = {name: rank_sum([each[name] for each in of_copies]) for name in sizes}
            if HEAD not in main and HEAD in grads:
                grads[TIED] += grads.pop(HEAD)
            result.grads.append({name: grad.clone() for name, grad in grads.items()})
            result.norms.append(self._step(optimizer, main, grads))
            for name in result.biases:
                result.biases[name] = balance_bias(result.biases[name], rows[layer_of(name)], self.config.bias_rate)
        return result

    def _factors(self, microbatches: Sequence[Sequence[Batch]], m: int) -> list[Tensor]:
        """Factor of every rank's loss of microbatch m: its share of the targets of the step."""
        counts = [[int((batch[1] != IGNORED).sum()) for batch in batches] for batches in microbatches]
        total = max(1, sum(map(sum, counts)))
        return [torch.tensor(count * self.dp / total) for count in counts[m]]

    def _rank(self, result: Result, rank: int, microbatches: int) -> Chunk:
        """The model of one data-parallel rank, with parameters of its own in the compute dtype."""
        c, ep_rank = self.config, rank % self.ep
        ep = ExpertPlace(self.ep, ep_rank, self.per_rank)
        chunk = Chunk(c, range(c.layers), ep=ep, aux_scale=1 / microbatches, linears=self.linears)
        for name, _ in list(chunk.named_parameters(remove_duplicate=False)):
            value = result.weights[TIED if c.tied and name == HEAD else name]
            if ".experts." in name:
                value = value.chunk(self.ep)[ep_rank]
            owner, _, last = name.rpartition(".")
            # A parameter for each name: a tied head's two gradients are added up in the format that travels.
            setattr(chunk.get_submodule(owner), last, nn.Parameter(value.to(self.dtype).clone()))
        for name, bias in result.biases.items():
            chunk.get_submodule(name.removesuffix(".bias")).bias = bias  # pyrefly: ignore
        return chunk

    def _forward(self, ranks: list[Chunk], batches: Sequence[Batch], rows: dict[int, Tensor]) -> list[Tensor]:
        """Loss of every rank; rows by expert of every layer are added to `rows`. Expert-parallel groups are consecutive
        ranks.
        """
        losses = []
        for first in range(0, self.dp, self.ep):
            group, inputs = ranks[first : first + self.ep], batches[first : first + self.ep]
            xs = [chunk.embed(batch[0]) for chunk, batch in zip(group, inputs, strict=True)]  # pyrefly: ignore
            documents = [batch[2] if len(batch) == 3 else None for batch in inputs]
            for i in range(self.config.layers):
                layers = [chunk.layer(i) for chunk in group]
                if isinstance(layers[0], DenseLayer):
                    xs = [layer(x, d) for layer, x, d in zip(layers, xs, documents, strict=True)]
                else:
                    xs, load = moe_layer(layers, xs, documents)  # pyrefly: ignore
                    rows[i] = rows.get(i, 0) + load
            losses += [chunk.loss(x, batch[1]) for chunk, x, batch in zip(group, xs, inputs, strict=True)]
        return losses

    def _reduce(
        self, ranks: list[Chunk], grads: dict[str, Tensor], held: dict[tuple[int, str], Tensor], last: bool
    ) -> None:
        """Add one microbatch's gradients: in rank order, in fp32, divided by dp.

        Where gradients stay whole they are first added up on each rank, in fp32 in `held`, and rounded at the `last`
        microbatch, before they travel; without sharding the sum of ranks is rounded too. A tied embedding's two
        gradients of a microbatch meet in a slot, where they are rounded, and so are those of its unit.
        """
        params = [dict(chunk.named_parameters()) for chunk in ranks]
        for name in grads:
            parts = self.ep if ".experts." in name else 1
            late = self.strategy in ("no_shard", "optim") and len(ranks) > parts
            wire = (self.wire or self.dtype) if len(ranks) > parts else self.dtype
            meet = self.config.tied and not self.apart
            slotted = not late or (meet and name in TIED_UNIT)
            all_grads = [grad_of(of_rank[name], wire if slotted else self.dtype) for of_rank in params]
            if meet and name == TIED:
                all_grads = [
                    grad_of(of_rank[HEAD], wire).add_(grad_of(of_rank[name], self.dtype)) for of_rank in params
                ]
            if late:
                for r, grad in enumerate(all_grads):
                    held[r, name] = held[r, name] + grad if (r, name) in held else grad.float()
                if not last:
                    continue
                all_grads = [held[r, name].to(wire) for r in range(len(ranks))]
            for part, out in enumerate(grads[name].chunk(parts)):
                total = rank_sum(all_grads[part::parts])
                total = total.to(wire).float() if late and self.strategy == "no_shard" else total
                out += total * (1 / self.dp)

    def _step(self, optimizer: torch.optim.Optimizer, main: dict[str, Tensor], grads: dict[str, Tensor]) -> float:
        norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads.values()))
        coefficient = min(1.0, self.clip / (norm + 1e-6))
        for name, grad in grads.items():
            main[name].grad = grad * coefficient
        optimizer.step()
        return norm


def layer_of(name: str) -> int:
    """The number in the name of a layer's parameter."""
    return int(name.split(".")[1])


def moe_layer(
    layers: list[MoELayer], xs: list[Tensor], documents: Sequence[Documents | None] = ()
) -> tuple[list[Tensor], Tensor]:
    """One MoE layer on all ranks of an expert-parallel group. Returns their outputs, and the rows by expert."""
    ep = len(layers)
    inputs = zip(layers, xs, documents or [None] * ep, strict=True)
    made = [layer.forward_attn(x, d) for layer, x, d in inputs]
    rows, residuals, shared, weights, probs, routings = zip(*made, strict=True)
    # By source rank, destination rank and local expert; with one copy per rank the rows behind them.
    every = torch.stack([counts_to_send(routing, ep) for routing in routings])
    splits = [splits_of(every, rank, routing) for rank, routing in enumerate(routings)]
    sent = []
    for source, at in enumerate(splits):
        assert isinstance(at.table, RowTable)
        sent.append(rows[source][: sum(at.table.send)].split(at.table.send))
    returned = []
    for rank, layer in enumerate(layers):
        received = torch.cat([sent[source][rank] for source in range(ep)])
        returned.append(
            layer.forward_experts(received, *weights[rank : rank + (ep == 1)], splits[rank]).split(
                splits[rank].table.receive
            )
        )
    outputs = []
    for source, layer in enumerate(layers):
        back = torch.cat([returned[rank][source] for rank in range(ep)])
        outputs.append(
            layer.forward_unpermute(back, residuals[source], shared[source], probs[source], routings[source])
        )
    return outputs, torch.stack([routing.load_E for routing in routings]).sum(0)


TIED, HEAD = "embed.weight", "head.weight"
"""The name of a parameter that embedding and head share, and the head's where they do not."""
TIED_UNIT = (TIED, "head.norm")
"""What is reduced with it."""


def grad_of(param: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of a parameter, rounded to a dtype if that is narrower."""
    assert param.grad is not None
    return param.grad.to(dtype)


def rank_sum(grads: Sequence[Tensor]) -> Tensor:
    """fp32 sum in the order given."""
    total = grads[0].float().clone()
    for grad in grads[1:]:
        total += grad.float()
    return total


def random_batches(config: ModelConfig, steps: int, microbatches: int, dp: int, shape: tuple[int, int]) -> list:
    """Random token ids and targets as `Reference.run` takes them; `shape` is (sequences, length)."""
    generator = torch.Generator().manual_seed(1)

    def batch() -> Batch:
        ids = torch.randint(config.vocab, (shape[0], shape[1] + 1), generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return [[[batch() for _ in range(dp)] for _ in range(microbatches)] for _ in range(steps)]


def awkward_batches(config: ModelConfig, steps: int, microbatches: int, dp: int) -> list[list[list[Batch]]]:
    """Batches of two sequences of eight tokens that have everything: documents of one token, masked targets, padding at
    the end, a sequence of padding, a microbatch of which no target counts, a step of which none does.
    """
    chooser, generator = random.Random(0), torch.Generator().manual_seed(1)

    def batch(step: int, m: int, rank: int) -> Batch:
        ids = torch.randint(config.vocab, (2, 9), generator=generator)
        numbers = torch.tensor([sorted(chooser.choices(range(5), k=8)) for _ in range(2)])
        numbers[0, 5 + m % 4 :] = PADDING
        if (m + rank) % 3 == 2:
            numbers[1] = PADDING
        targets = ids[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=generator) < 0.2] = IGNORED
        targets[numbers == PADDING] = IGNORED
        if (m, rank) == (1, 0) or step == steps - 1:
            targets[:] = IGNORED
        return ids[:, :-1].contiguous(), targets, documents_of(numbers)

    return [[[batch(s, m, r) for r in range(dp)] for m in range(microbatches)] for s in range(steps)]


def microbatch(batch: Batch) -> Microbatch:
    """A batch as an engine takes it."""
    ids, targets, *documents = batch
    return Microbatch(ids, targets, documents=documents[0] if documents else None)
