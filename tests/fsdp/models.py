"""A zoo of small modules, each with one trait that sharding could get wrong.

All take `(x, step)` and return one tensor. Widths are primes or odd, so that shards cut through parameters and rows.
`WIDTH` is the last dimension of float inputs; models that begin with an embedding take ids instead.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 11
ROWS, STEPS = 3, 5
"""Shape of an input: (ROWS, STEPS, WIDTH), or (ROWS, STEPS) ids."""
VOCAB = 19


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, hidden: int = 17, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, bias=bias)
        self.down = nn.Linear(hidden, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Blocks, and parameters of the root before and after them."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(13 + 2 * i) for i in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Chain(nn.Module):
    """Blocks one after the other, and no parameters of its own."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Outer(nn.Module):
    """A unit with units inside, and a parameter used after them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.inner = nn.ModuleList([Block(), Block()])
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.inner:
            x = block(x)
        return self.out(x) * self.scale


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outers = nn.ModuleList([Outer(), Outer()])
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        for outer in self.outers:
            x = outer(x)
        return x + self.bias


class TiedBlock(nn.Module):
    """Two layers of one unit share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.3)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.weight)


class TiedAcross(nn.Module):
    """The embedding and the head, two units, share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embed()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = Head()
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, step: int = 0) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ReadOutside(nn.Module):
    """The root reads the embedding's weight after the embedding's own forward is over, and its norm before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embed()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, ids: Tensor, step: int = 0) -> Tensor:
        size = self.embed.weight.square().sum()
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embed.weight) / (1 + size)


class Table(Embed):
    """Returns a part of its weight, as a table of positions does."""

    def forward(self, length: int) -> Tensor:  # type: ignore[override]
        return self.weight[:length]


class Lent(nn.Module):
    """What the table has returned is read when other units have run."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        positions = self.table(STEPS)
        for block in self.blocks:
            x = block(x + positions)
        return x * positions


class FrozenInput(nn.Module):
    """The first units are frozen: no gradient reaches them, so nothing of backward says that they are done."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embed().requires_grad_(False)
        self.encoder = nn.ModuleList([Block().requires_grad_(False), Block().requires_grad_(False)])
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, ids: Tensor, step: int = 0) -> Tensor:
        x = self.embed(ids)
        for block in [*self.encoder, *self.blocks]:
            x = block(x)
        return x


class Conditional(nn.Module):
    """Which blocks run depends on the step; all ranks agree."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i != 1 + step % 4:
                x = block(x)
        return x


class Reordered(nn.Module):
    """The order of blocks depends on the step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        for i in range(4):
            x = self.blocks[(i * (1 + 2 * (step % 2)) + step) % 4](x)
        return x


class Twice(nn.Module):
    """A block that runs twice in a row, and one that runs at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Block(), Block(), Block()

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        x = self.a(x)
        x = self.b(self.b(x))
        return self.a(self.c(x))


class Parallel(nn.Module):
    """Branches from one input; the third has no way to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.lost, self.last = Block(), Block(), Block(), Block()

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        left, right = self.left(x), self.right(x)
        self.lost(x)
        return self.last(left * torch.sigmoid(right))


class Unused(nn.Module):
    """A block that never runs, and unread parameters beside parameters that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.never, self.b = Block(), Block(), Block()
        self.a.extra = nn.Parameter(torch.randn(7))
        self.b.other = nn.Linear(3, 3)

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        return self.b(self.a(x))


class Wrapper(nn.Module):
    """A parent without parameters of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.inner(x))


class Parameterless(nn.Module):
    """Parents without parameters, which are units too, and a unit without any parameter below it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Wrapper(Block()), Wrapper(nn.Identity()), Wrapper(Wrapper(Block())))

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        return self.layers(x)


class ViewBlock(nn.Module):
    """Autograd saves views of a weight that are not the weight: a transpose, a slice, a flat view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.gain = nn.Parameter(torch.ones(2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight.view_as(self.weight)
        y = torch.matmul(x, w.t()) * self.gain[:WIDTH]
        top = self.weight[: WIDTH // 2]
        return x + y * self.gain.view(2, WIDTH)[1] + (x @ top.t()).sum(-1, keepdim=True)


class Recurrent(nn.Module):
    """nn.LSTM keeps a list of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 7, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(14, WIDTH)

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        return self.out(self.lstm(x)[0])


class AttentionBlock(nn.Module):
    """nn.MultiheadAttention reads the weight of its output projection without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.attn(h, h, h, need_weights=False)[0]


class Buffered(nn.Module):
    """Buffers stay what they are: whole, one's own, changed by forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(STEPS)
        self.block = Block()
        self.block.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        seen = self.block.get_buffer("seen")
        seen += 1
        return self.block(self.norm(x)) * seen


class OddBlock(nn.Module):
    """Parameters of every awkward size: no dimension, one element, fewer than ranks, primes; in lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.one = nn.Parameter(torch.ones(1))
        self.few = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.randn(3, 1, WIDTH))])
        self.named = nn.ParameterDict({"w": nn.Parameter(torch.randn(WIDTH, 1) * 0.1)})

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale + self.one * self.few[0].prod()
        return x + (x @ self.named["w"]) * self.few[1].sum(0)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OddBlock(), OddBlock()])
        self.shift = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.shift


class TwoDtypes(nn.Module):
    """A bf16 layer under a norm in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 17).bfloat16()
        self.down = nn.Linear(17, WIDTH).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x).bfloat16()))).float()


class Structured(nn.Module):
    """Takes and returns tensors inside of dicts, tuples and keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, pair: tuple[Tensor, int], *, more: dict[str, Tensor]) -> dict[str, object]:
        return {"x": self.block(pair[0]) + more["residual"], "rest": [more["residual"] * 0.5, None]}


class Structures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Structured(), Structured(), Structured()])

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        residual = x
        for layer in self.layers:
            out = layer((x, step), more={"residual": residual})
            x, residual = out["x"], out["rest"][0]
        return x + residual


class MoeBlock(nn.Module):
    """A dense block, and this rank's expert: experts of other ranks have other values."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = Block()
        self.experts = nn.Sequential(nn.Linear(WIDTH, 7), nn.ReLU(), nn.Linear(7, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x) + self.experts(x)


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([MoeBlock(), MoeBlock()])
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Recomputed(nn.Module):
    """Blocks whose activations are computed again in backward, in one of torch's two ways."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block(), Block(), Block()])

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class InsideRecomputed(nn.Module):
    """Recomputation inside of a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)
