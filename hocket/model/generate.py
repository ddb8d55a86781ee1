"""Tokens that a model goes on with, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.model.transformer import Chunk


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 0.0
    """What logits are divided by; 0 takes the likeliest token."""
    top_k: int = 0
    """Draw from that many of the likeliest tokens; 0 means all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens that have this probability together (Holtzman et al. 2020)."""
    seed: int = 0
    """Of the draws."""

    def pick(self, logits_V: Tensor, generator: torch.Generator) -> int:
        """A token, of logits on a CPU."""
        if not self.temperature:
            return int(logits_V.argmax())
        logits_V, token_V = (logits_V.float() / self.temperature).sort(descending=True)
        if self.top_k:
            logits_V = logits_V[: self.top_k]
        share_V = logits_V.softmax(0)
        share_V[share_V.cumsum(0) - share_V >= self.top_p] = 0.0
        return int(token_V[torch.multinomial(share_V, 1, generator=generator)])


@torch.inference_mode()
def generate(
    model: Chunk, prompt: Sequence[int], count: int, sampling: Sampling, ends: frozenset[int] = frozenset()
) -> Iterator[int]:
    """Up to `count` tokens that follow `prompt`, which has one at least; ends before one of `ends`.

    `model` is the whole one with values. Each layer keeps what it needs of the tokens before.
    """
    assert model.embed is not None
    assert model.head is not None
    device = model.embed.weight.device
    generator = torch.Generator().manual_seed(sampling.seed)
    attentions = [model.layer(int(number)).attn for number in model.layers]
    for attention in attentions:
        attention.remember()
    try:
        new = list(prompt)
        for _ in range(count):
            x_1SD = model(torch.tensor([new], device=device))
            token = sampling.pick(model.head(x_1SD[:, -1:])[0, 0].cpu(), generator)
            if token in ends:
                return
            yield token
            new = [token]
    finally:
        for attention in attentions:
            attention.cache = None
