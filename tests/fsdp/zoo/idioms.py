"""Layers of torch, and ways to write a forward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.fsdp.zoo.program import WIDTH, Block, distance, fit, loop


class Recurrent(nn.Module):
    """Recurrent layers, then a linear one."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.rnn, self.head = kind(8, WIDTH, num_layers=2, batch_first=True), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


for _kind in (nn.LSTM, nn.GRU, nn.RNN):
    loop(_kind.__name__, lambda kind=_kind: Recurrent(kind), fit(4, 6, 8), _kind)


class Attended(nn.Module):
    """Attention of torch around a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x + self.attention(x, x, x, need_weights=False)[0])


loop("MultiheadAttention", lambda: nn.Sequential(Attended(), Attended()), fit(2, 5, WIDTH), Attended)
loop(
    "MultiheadAttention as units",
    lambda: nn.Sequential(Attended(), Attended()),
    fit(2, 5, WIDTH),
    nn.MultiheadAttention,
)
loop(
    "TransformerEncoder",
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True), 2),
    fit(2, 5, WIDTH),
    nn.TransformerEncoderLayer,
)


def _translate(model: nn.Module, generator: torch.Generator) -> Tensor:
    source, target = (torch.randn(2, 5, WIDTH, generator=generator) for _ in range(2))
    return distance(model(source, target), generator)


loop(
    "nn.Transformer",
    lambda: nn.Transformer(WIDTH, 2, 2, 2, 32, dropout=0.0, batch_first=True),
    _translate,
    (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)


class Checkpointed(nn.Module):
    """Blocks that are computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, WIDTH), nn.ModuleList(Block() for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


loop("checkpoint, reentrant", lambda: Checkpointed(True), fit(4, 8), Block)
loop("checkpoint, not reentrant", lambda: Checkpointed(False), fit(4, 8), Block)


class Convolved(nn.Module):
    """Convolutions with batch norms, as in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


loop("convolutions and batch norms", lambda: nn.Sequential(Convolved(), Convolved()), fit(2, 4, 6, 6), Convolved)
