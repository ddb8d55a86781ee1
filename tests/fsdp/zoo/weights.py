"""Weights that are computed from parameters, shared, frozen, or of an odd kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

from tests.fsdp.zoo.program import WIDTH, Block, fit, loop, stack


class Normed(nn.Module):
    """A block whose linear layer some function has changed."""

    def __init__(self, change: object) -> None:
        super().__init__()
        assert callable(change)
        self.linear = change(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(x))


def of(change: object) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, WIDTH), Normed(change), Normed(change), nn.Linear(WIDTH, 4))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def symmetric(linear: nn.Linear) -> nn.Module:
    return parametrize.register_parametrization(linear, "weight", Symmetric())


loop("weight_norm (parametrization)", lambda: of(parametrizations.weight_norm), fit(4, 8), Normed)
loop("weight_norm (hook)", lambda: of(weight_norm), fit(4, 8), Normed)
loop("spectral_norm (parametrization)", lambda: of(parametrizations.spectral_norm), fit(4, 8), Normed)
loop("spectral_norm (hook)", lambda: of(spectral_norm), fit(4, 8), Normed)
loop("orthogonal", lambda: of(parametrizations.orthogonal), fit(4, 8), Normed)
loop("parametrization of one's own", lambda: of(symmetric), fit(4, 8), Normed)
loop("weight_norm, units inside", lambda: of(parametrizations.weight_norm), fit(4, 8), nn.Linear)


class Tied(nn.Module):
    """An embedding and an output layer with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(32, WIDTH), nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)))


def tokens(model: nn.Module, generator: torch.Generator) -> Tensor:
    ids = torch.randint(32, (2, 9), generator=generator)
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


loop("tied embedding", Tied, tokens, Block)


def frozen() -> nn.Module:
    model = stack()
    model[0].requires_grad_(False)
    model[1].norm.requires_grad_(False)
    return model


loop("frozen parts", frozen, fit(4, 8), Block)


class Lora(nn.Module):
    """A frozen linear layer with a trained product of low rank."""

    def __init__(self, linear: Any, rank: int = 2) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.a.T @ self.b.T


def adapted() -> nn.Module:
    model = stack()
    for block in model:
        if isinstance(block, Block):
            block.register_module("up", Lora(block.up))
            block.register_module("down", Lora(block.down))
    model[0].requires_grad_(False)
    return model


loop("LoRA by hand", adapted, fit(4, 8), Block)


class Scaled(nn.Module):
    """A block with a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = Block(), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.inner(x)


loop("scalar parameters", lambda: nn.Sequential(nn.Linear(8, WIDTH), Scaled(), Scaled()), fit(4, 8), Scaled)


class Complex(nn.Module):
    """A block with a filter in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH)


loop("complex parameters", lambda: nn.Sequential(nn.Linear(8, WIDTH), Complex(), Complex()), fit(4, 8), Complex)
