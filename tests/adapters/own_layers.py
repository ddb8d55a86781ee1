"""Layers of one's own. Other processes import this module: it has no tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.adapters import grouped_linear

HIDDEN, EXPERTS = 16, 4
Told = tuple[Tensor, None]


class Mixer(nn.Module):
    """Each position adds up what is before it, with factors that its context tells."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x_BSD: Tensor, factors_SS: Tensor) -> Tensor:
        return x_BSD + self.out(factors_SS @ self.into(self.norm(x_BSD)))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.up, self.down = Mixer(), nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN, bias=False)
        self.scale = nn.Parameter(torch.rand(HIDDEN))

    def attention(self, x_BSD: Tensor, context: Tensor) -> Tensor:
        return self.mixer(x_BSD, context)

    def mlp(self, x_BSD: Tensor) -> Tensor:
        return x_BSD + self.scale * self.down(F.gelu(self.up(x_BSD)))

    def forward(self, x_BSD: Tensor, context: Tensor) -> Tensor:
        return self.mlp(self.attention(x_BSD, context))


class Experts(nn.Module):
    """Parameters of all experts, or of those of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 24, HIDDEN) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 24) * 0.3)

    def forward(self, rows_RD: Tensor, ends_L: Tensor) -> Tensor:
        return grouped_linear(F.silu(grouped_linear(rows_RD, self.up, ends_L)), self.down, ends_L)


class Routed(nn.Module):
    expert_weights = "stacked"

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.stacked, self.shared = Mixer(), Experts(), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)

    def attention(self, x_BSD: Tensor, context: Tensor) -> Tensor:
        return self.mixer(x_BSD, context)

    def route(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
        rows_TD = x_BSD.flatten(0, 1)
        weights_TK, ids_TK = self.router(rows_TD).softmax(-1).topk(2)
        return rows_TD, ids_TK, weights_TK, (x_BSD, self.shared(x_BSD))

    def experts(self, rows_RD: Tensor, ends_L: Tensor) -> Tensor:
        return self.stacked(rows_RD, ends_L)

    def merge(self, rows_TD: Tensor, keep: tuple[Tensor, Tensor]) -> Tensor:
        x_BSD, shared_BSD = keep
        return x_BSD + shared_BSD * 0.5 + rows_TD.view_as(x_BSD)

    def forward(self, x_BSD: Tensor, context: Tensor) -> Tensor:
        """One expert after the other, on the tokens that chose it."""
        rows_TD, ids_TK, weights_TK, keep = Routed.route(self, self.attention(x_BSD, context))
        outputs = [F.silu(rows_TD @ up.T) @ down.T for up, down in zip(self.stacked.up, self.stacked.down, strict=True)]
        out_TED = torch.stack(outputs, 1)
        chosen_TKD = out_TED.gather(1, ids_TK.unsqueeze(-1).expand(-1, -1, HIDDEN))
        return self.merge((chosen_TKD * weights_TK.unsqueeze(-1)).sum(1), keep)


def context(x_BSD: Tensor) -> Tensor:
    """Of shape [S, S]."""
    length = x_BSD.shape[1]
    return (torch.ones(length, length).tril() / length).to(x_BSD)


class Model(nn.Module):
    """A model of such layers."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, HIDDEN), nn.Linear(HIDDEN, 32, bias=False)
        self.layers = nn.ModuleList(layers)

    def context(self, x_BSD: Tensor) -> Tensor:
        return context(x_BSD)

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSD = self.embed(ids_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, self.context(x_BSD))
        return self.head(x_BSD)
