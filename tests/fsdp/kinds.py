"""The zoo of models: how each is built, what its units are, and what it is fed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.fsdp import models as m


def frozen() -> m.Chain:
    """A frozen bias in every block, and one block frozen whole."""
    blocks = m.Block(), m.Block(), m.Block()
    for block in blocks:
        block.up.bias.requires_grad_(False)
    blocks[1].requires_grad_(False)
    return m.Chain(*blocks)


def _blocks(*kinds: type[nn.Module]) -> Callable[[str, nn.Module], bool]:
    return lambda name, module: isinstance(module, kinds)


@dataclass(frozen=True)
class Kind:
    """A kind of model: how to build it, and which of its modules are units (None: the root alone)."""

    build: Callable[[], nn.Module]
    units: Callable[[str, nn.Module], bool] | None
    ids: bool = False
    """Whether it takes ids."""
    skips: bool = False
    """Whether some parameters get no gradient in some steps. What optimizers with a state do then is their affair."""


ZOO: dict[str, Kind] = {
    "stack": Kind(m.Stack, _blocks(m.Block)),
    "one_unit": Kind(m.Stack, None),
    "deep": Kind(lambda: m.Chain(*(m.Block() for _ in range(7))), _blocks(m.Block)),
    "fine": Kind(m.Stack, _blocks(nn.Linear, nn.LayerNorm)),
    "nested": Kind(m.Nested, _blocks(m.Outer, m.Block)),
    "tied_inside": Kind(lambda: m.Chain(m.TiedBlock(), m.TiedBlock()), _blocks(m.TiedBlock)),
    "tied_across": Kind(m.TiedAcross, _blocks(m.Embed, m.Block, m.Head), ids=True),
    "read_on_demand": Kind(m.ReadOutside, _blocks(m.Embed, m.Block), ids=True),
    "lent": Kind(m.Lent, _blocks(m.Table, m.Block)),
    "frozen": Kind(frozen, _blocks(m.Block)),
    "frozen_input": Kind(m.FrozenInput, _blocks(m.Embed, m.Block), ids=True),
    "conditional": Kind(m.Conditional, _blocks(m.Block), skips=True),
    "reordered": Kind(m.Reordered, _blocks(m.Block)),
    "twice": Kind(m.Twice, _blocks(m.Block)),
    "parallel": Kind(m.Parallel, _blocks(m.Block), skips=True),
    "unused": Kind(m.Unused, _blocks(m.Block), skips=True),
    "parameterless": Kind(m.Parameterless, _blocks(m.Wrapper)),
    "views": Kind(lambda: m.Chain(m.ViewBlock(), m.ViewBlock(), m.ViewBlock()), _blocks(m.ViewBlock)),
    "lstm": Kind(m.Recurrent, _blocks(nn.LSTM)),
    "attention": Kind(lambda: m.Chain(m.AttentionBlock(), m.AttentionBlock()), _blocks(m.AttentionBlock)),
    "attention_unit": Kind(lambda: m.Chain(m.AttentionBlock(), m.AttentionBlock()), _blocks(nn.MultiheadAttention)),
    "buffers": Kind(m.Buffered, _blocks(m.Block)),
    "odd": Kind(m.Odd, _blocks(m.OddBlock)),
    "mixed_dtypes": Kind(lambda: m.Chain(m.TwoDtypes(), m.TwoDtypes(), m.TwoDtypes()), _blocks(m.TwoDtypes)),
    "structures": Kind(m.Structures, _blocks(m.Structured)),
    "reentrant": Kind(lambda: m.Recomputed(True), _blocks(m.Block)),
    "recomputed": Kind(lambda: m.Recomputed(False), _blocks(m.Block)),
    "recomputed_inside": Kind(lambda: m.Chain(m.InsideRecomputed(), m.InsideRecomputed()), _blocks(m.InsideRecomputed)),
    "moe": Kind(m.Moe, _blocks(m.MoeBlock)),
}


def batch(kind: Kind, seed: int) -> Tensor:
    """One microbatch of one rank."""
    generator = torch.Generator().manual_seed(seed)
    if kind.ids:
        return torch.randint(m.VOCAB, (m.ROWS, m.STEPS), generator=generator)
    return torch.randn(m.ROWS, m.STEPS, m.WIDTH, generator=generator)


def loss_of(out: Tensor) -> Tensor:
    """A loss with gradients of some size for any output."""
    target = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    return (out.float() - target).square().mean()
