"""A decoder transformer, cut into chunks, layers and parts.

A `Chunk` has the consecutive layers of one virtual pipeline stage, and the embedding or the head if it is the first or
the last. Every part of a layer is a method that takes and returns tensors, so that a plan can run each as a separate
segment; modules keep no state between calls. A chunk with all layers is the whole model, `chunk.loss(chunk(ids),
targets)`, and runs the same parts in order.

Shapes: B sequences, S sequence length, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hocket.config import ModelConfig
from hocket.layers.linears import WHOLE, Linears, new_weight
from hocket.layers.norms import rms_norm
from hocket.layers.vocabulary import loss_in_pieces
from hocket.model.documents import Documents
from hocket.model.layers import DenseLayer
from hocket.model.moe import MoELayer
from hocket.model.parts import ONLY, ExpertPlace, cut_as
from hocket.runtime.comm import Group

Layer = DenseLayer | MoELayer


class Embed(nn.Module):
    """Token ids to hidden states."""

    def __init__(self, config: ModelConfig, linears: Linears = WHOLE) -> None:
        super().__init__()
        self.linears = linears
        self.weight = new_weight(config.vocab // linears.size, config.hidden)

    def forward(self, ids_BS: Tensor) -> Tensor:
        return self.linears.embedding(ids_BS, self.weight)


class Head(nn.Module):
    """Final norm and output projection."""

    def __init__(self, config: ModelConfig, linears: Linears = WHOLE) -> None:
        super().__init__()
        self.linears = linears
        self.eps, self.one = config.norm_eps, config.norm_plus_one
        self.norm = new_weight(config.hidden)
        self.weight = new_weight(config.vocab // linears.size, config.hidden)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Logits [B, S, V] in the compute dtype."""
        h_BSD = rms_norm(x_BSD, self.norm, self.eps, self.one)
        return self.linears.columns("head", h_BSD, (self.weight,))[0]

    def loss(self, x_BSD: Tensor, targets_BS: Tensor) -> Tensor:
        """Mean cross-entropy over the targets that are not `IGNORED`, fp32; 0 if there is none."""
        if self.linears.loss_pieces > 1:
            h_BSD = rms_norm(x_BSD, self.norm, self.eps, self.one)
            return loss_in_pieces(h_BSD.flatten(0, 1), self.weight, targets_BS.flatten(), self.linears.loss_pieces)
        return self.linears.cross_entropy(self(x_BSD).flatten(0, 1), targets_BS.flatten())


class Chunk(nn.Module):
    """The layers `layers` of the model, with the embedding if `first` and the head if `last`. A tied model with either
    end has the parameters of both, since they are one unit.

    Parameters are named as in the whole model (`layers.3.attn.wq`). Experts are only those of expert-parallel rank
    `ep.rank`, from global expert `ep.rank * E / ep.size`, and other weights are the slices of `linears`
    (`layers/slices.py`). Parameters are on the meta device, without values.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        first: bool = True,
        last: bool = True,
        *,
        ep: ExpertPlace = ONLY,
        aux_scale: float = 1.0,
        linears: Linears = WHOLE,
        shared: tuple[Group, str] | None = None,
    ) -> None:
        """`shared`: the context-parallel group, and the method of attention (`METHODS`)."""
        super().__init__()
        self.config = config
        self.first_expert = ep.rank * (config.experts // ep.size)
        self.first = first
        ends = config.tied and (first or last)
        self.embed = Embed(config, linears) if first or ends else None
        kinds = config.kinds()
        self.layers = nn.ModuleDict()
        for i in layers:
            kind: Any = MoELayer if kinds[i] == "moe" else DenseLayer
            experts = (ep, aux_scale) if kind is MoELayer else ()
            kind = kind if shared is None else cut_as(shared[1], kind)
            layer = kind(config, *experts, linears.of_layer(i, config.layers), i)
            layer.group = None if shared is None else shared[0]
            self.layers[str(i)] = layer
        self.head = Head(config, linears) if last or ends else None
        self.tie()

    def tie(self, ends: dict[str, nn.Parameter] | None = None) -> None:
        """Make a tied head use the embedding's parameter, whose only name is then `embed.weight`.

        `ends`: parameters of another chunk's embedding and head, which this chunk uses; if empty, it adds its own.
        """
        if not self.config.tied or self.embed is None or self.head is None:
            return
        if ends is not None:
            self.embed.weight = ends.setdefault("embed.weight", self.embed.weight)
            self.head.norm = ends.setdefault("head.norm", self.head.norm)
        self.head.weight = self.embed.weight

    def layer(self, number: int) -> Layer:
        """The layer of a global number."""
        return self.layers[str(number)]  # pyrefly: ignore[bad-return]

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """Hidden states [B, S, D] after this chunk's layers; the first chunk takes token ids. Needs all experts."""
        if self.first:
            assert self.embed is not None
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x, documents)
        return x

    def loss(self, x_BSD: Tensor, targets_BS: Tensor) -> Tensor:
        """Mean cross-entropy from the last layer's hidden states, fp32, without the load-balancing loss.

        Targets that are `IGNORED` do not count; 0 if none does.
        """
        assert self.head is not None
        return self.head.loss(x_BSD, targets_BS)


def parameter_counts(config: ModelConfig) -> tuple[int, int]:
    """(all parameters, those active per token) of a model. Allocates nothing."""
    total = active = 0
    for name, param in Chunk(config, range(config.layers)).named_parameters():
        total += param.numel()
        active += param.numel() * config.top_k // config.experts if ".experts." in name else param.numel()
    return total, active


# -- generation --------------------------------------------------------------------------------------------------------


def pick(logits_V: Tensor, generator: torch.Generator, temperature: float = 0.0) -> int:
    """A token from logits on a CPU: the likeliest, or with a temperature a sampled one."""
    if not temperature:
        return int(logits_V.argmax())
    return int(torch.multinomial((logits_V.float() / temperature).softmax(0), 1, generator=generator))


@torch.inference_mode()
def generate(
    model: Chunk, prompt: Sequence[int], count: int, ends: Collection[int] = (), seed: int = 0, temperature: float = 0.0
) -> Iterator[int]:
    """Up to `count` tokens that follow `prompt`, which must not be empty; stops before one of `ends`.

    `model` is the whole one with values. It reads all tokens again for each new one.
    """
    assert model.head is not None
    generator, tokens = torch.Generator().manual_seed(seed), list(prompt)
    for _ in range(count):
        x_1SD = model(torch.tensor([tokens], device=model.head.norm.device))
        token = pick(model.head(x_1SD[:, -1:])[0, 0].cpu(), generator, temperature)
        if token in ends:
            return
        tokens.append(token)
        yield token
