"""Habits of training loops: what they share, keep, freeze, call twice, and catch."""

# pyrefly: ignore-errors
from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.fsdp.zoo.program import WIDTH, Block, Run, distance, program, stack

Step = Callable[[nn.Module, Tensor, torch.Generator, int], Tensor]


def plain_loss(model: nn.Module, x: Tensor, generator: torch.Generator, step: int) -> Tensor:
    return distance(model(x), generator)


def train(
    run: Run,
    model: nn.Module,
    units: Any = Block,
    loss: Step = plain_loss,
    microbatches: int = 1,
    between: Callable[[nn.Module, int], None] | None = None,
    none: bool = True,
) -> None:
    model = run.shard(model, units)
    updates = torch.optim.AdamW(model.parameters(), lr=0.03, weight_decay=0.3, foreach=True)
    for step in range(4):
        for microbatch in range(microbatches):
            for seed in run.seeds(10 * step + microbatch):
                generator = torch.Generator().manual_seed(seed)
                run.backward(loss(model, torch.randn(4, 8, generator=generator), generator, step) / microbatches)
            if between is not None:
                between(model, step)
        updates.step()
        updates.zero_grad(set_to_none=none)
    run.note_weights(model)


class Shared(nn.Module):
    """One block in several places, called by one forward several times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, WIDTH), Block(), nn.Linear(WIDTH, 4)
        self.again = nn.ModuleList([self.block, Block(), self.block])

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        x = self.first(x)
        for _ in range(times):
            for block in self.again:
                x = block(x)
        return self.last(self.block(x))


@program("a block called a different number of times in each step")
def _(run: Run) -> None:
    train(run, Shared(), loss=lambda model, x, g, step: distance(model(x, step % 3), g))


@program("layers dropped by chance, alike on all ranks")
def _(run: Run) -> None:
    class Dropping(nn.Sequential):
        def forward(self, x: Tensor, step: int) -> Tensor:
            for i, layer in enumerate(self):
                if i in (0, len(self) - 1) or (i + step) % 2:
                    x = layer(x)
            return x

    train(run, Dropping(*stack(4)), loss=lambda m, x, g, s: distance(m(x, s), g))


@program("an exception in a forward is caught, and the batch is left out")
def _(run: Run) -> None:
    class Strict(Block):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 3:
                raise KeyError("three rows")
            return super().forward(x)

    def loss(model: nn.Module, x: Tensor, g: torch.Generator, step: int) -> Tensor:
        with contextlib.suppress(KeyError):
            model(x[:3])
        return distance(model(x), g)

    train(run, nn.Sequential(nn.Linear(8, WIDTH), Block(), Strict(), Block(), nn.Linear(WIDTH, 4)), loss=loss)


@program("optimizers made again in the midst, groups added")
def _(run: Run) -> None:
    model = run.shard(stack(), Block)
    updates: Any = torch.optim.AdamW(model[0].parameters(), lr=0.03, weight_decay=0.3)
    for step in range(5):
        if step == 1:
            updates.add_param_group({"params": list(model[1].parameters()), "lr": 0.01})
        if step == 3:
            updates = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        for seed in run.seeds(step):
            g = torch.Generator().manual_seed(seed)
            run.backward(distance(model(torch.randn(4, 8, generator=g)), g))
        updates.step()
        model.zero_grad()
    run.note_weights(model)


@program("gradients that no optimizer clears add up")
def _(run: Run) -> None:
    model = run.shard(stack(), Block)
    updates = torch.optim.SGD(model[1].parameters(), lr=0.05, momentum=0.9)
    others = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.02, weight_decay=0.1)
    for step in range(5):
        for seed in run.seeds(step):
            g = torch.Generator().manual_seed(seed)
            run.backward(distance(model(torch.randn(4, 8, generator=g)), g))
        updates.step()
        updates.zero_grad()
        if step % 2:
            others.step()
            others.zero_grad()
    run.note_weights(model)


@program("part of the model without gradients, inside of forward")
def _(run: Run) -> None:
    class Half(nn.Sequential):
        def forward(self, x: Tensor, step: int) -> Tensor:
            with torch.set_grad_enabled(step % 2 == 0):
                x = self[1](self[0](x))
            return self[-1](self[2](x))

    train(run, Half(*stack()), loss=lambda m, x, g, s: distance(m(x, s), g))


@program("detached hidden states, truncated backward")
def _(run: Run) -> None:
    def loss(model: nn.Module, x: Tensor, g: torch.Generator, step: int) -> Tensor:
        state, total = torch.zeros(4, 8), torch.zeros(())
        for i in range(3):
            out = model(x + state)
            total = total + distance(out, g)
            state = F.pad(out.detach() if i == 1 else out, (0, 4))
        return total

    train(run, stack(), loss=loss)


@program("a loss that misses the last layers in some steps")
def _(run: Run) -> None:
    class Early(nn.Sequential):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self[1](self[0](x))
            return hidden, self[-1](self[3](self[2](hidden)))

    def loss(model: nn.Module, x: Tensor, g: torch.Generator, step: int) -> Tensor:
        hidden, y = model(x)
        return hidden.square().mean() if step % 2 else distance(y, g)

    train(run, Early(*stack()), loss=loss)


@program("gradients of inputs by autograd.grad, then backward")
def _(run: Run) -> None:
    def loss(model: nn.Module, x: Tensor, g: torch.Generator, step: int) -> Tensor:
        x = x.requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return distance(model(x.detach() + 0.1 * slope.sign()), g) + distance(y, g)

    train(run, stack(), loss=loss)


@program("gradient penalty in every other step")
def _(run: Run) -> None:
    def loss(model: nn.Module, x: Tensor, g: torch.Generator, step: int) -> Tensor:
        x = x.requires_grad_()
        y = model(x)
        if step % 2:
            return distance(y, g)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return distance(y, g) + (slope.norm(dim=1) - 1).square().mean()

    train(run, stack(), loss=loss)


@program("hooks that change gradients of activations")
def _(run: Run) -> None:
    def loss(model: nn.Module, x: Tensor, g: torch.Generator, step: int) -> Tensor:
        y = model(x)
        y.register_hook(lambda grad: 0.5 * grad.flip(0))
        return distance(y, g)

    model = stack()
    model[2].register_full_backward_hook(lambda module, grads, of_output: tuple(2 * one for one in grads))
    train(run, model, loss=loss)


@program("forward hooks that collect activations for the loss")
def _(run: Run) -> None:
    kept: list[Tensor] = []

    def loss(model: nn.Module, x: Tensor, g: torch.Generator, step: int) -> Tensor:
        kept.clear()
        y = model(x)
        return distance(y, g) + sum(one.square().mean() for one in kept)

    model = stack()
    for block in model[1:4]:
        block.up.register_forward_hook(lambda module, args, out: kept.append(out))
        block.register_forward_hook(lambda module, args, out: kept.append(out.tanh()))
    train(run, model, loss=loss)


@program("an orthogonality penalty on weights, inside of a forward")
def _(run: Run) -> None:
    class Penalized(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.penalty = (self.up.weight.T @ self.up.weight - torch.eye(WIDTH)).square().mean()
            return y

    def loss(model: nn.Module, x: Tensor, g: torch.Generator, step: int) -> Tensor:
        return distance(model(x), g) + sum(one.penalty for one in model.modules() if isinstance(one, Penalized))

    train(run, nn.Sequential(nn.Linear(8, WIDTH), Penalized(), Penalized(), nn.Linear(WIDTH, 4)), loss=loss)


@program("a module's list of losses, checkpointed")
def _(run: Run) -> None:
    class Collects(Block):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(super().forward, x, use_reentrant=False)
            self.losses.append(self.up(y).square().mean())
            return y

    def loss(model: nn.Module, x: Tensor, g: torch.Generator, step: int) -> Tensor:
        total = distance(model(x), g)
        for one in model.modules():
            if isinstance(one, Collects):
                total = total + torch.stack(one.losses).sum()
                one.losses.clear()
        return total

    train(run, nn.Sequential(nn.Linear(8, WIDTH), Collects(), Collects(), nn.Linear(WIDTH, 4)), loss=loss)


class Hidden:
    """Tensors as attributes, with slots and without, and in a container of its own that holds itself."""

    __slots__ = ("deep", "x")

    def __init__(self, x: Tensor, deep: Any) -> None:
        self.x, self.deep = x, deep


class Bag:
    def __init__(self, *values: Any) -> None:
        self.values = {"some": [*values], "myself": self}
        self.parts = [range(3), contextlib, self.first, lambda: values]

    def first(self) -> Any:
        return self.values["some"][0]


@program("outputs that are objects of any class")
def _(run: Run) -> None:
    class Returning(Block):
        def forward(self, x: Any) -> Any:
            x = x.x + x.deep.values["some"][1] if isinstance(x, Hidden) else x
            return Hidden(super().forward(x), Bag(3, self.down(self.up(x))))

    def loss(model: nn.Module, x: Tensor, g: torch.Generator, step: int) -> Tensor:
        out = model(x)
        return distance(out.x + out.deep.values["some"][1], g)

    train(run, nn.Sequential(nn.Linear(8, WIDTH), Returning(), Returning(), Returning()), Returning, loss)


@program("in-place operations on activations")
def _(run: Run) -> None:
    class InPlace(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.up(self.norm(x))
            y.relu_()
            return self.down(y).add_(x)

    def loss(model: nn.Module, x: Tensor, g: torch.Generator, step: int) -> Tensor:
        y = model(x)
        y += 1
        return distance(y, g)

    train(run, nn.Sequential(nn.Linear(8, WIDTH), InPlace(), InPlace(), nn.Linear(WIDTH, 4)), InPlace, loss)


@program("a teacher that is another sharded model")
def _(run: Run) -> None:
    teacher = run.shard(stack(2), Block).requires_grad_(False)

    def loss(model: nn.Module, x: Tensor, g: torch.Generator, step: int) -> Tensor:
        return F.mse_loss(model(x), teacher(x)) + distance(model(x), g)

    train(run, stack(), loss=loss)


@program("half of the batch through one branch, half through another")
def _(run: Run) -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.router = nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor) -> Tensor:
            weights = self.router(x).softmax(-1)
            out, chosen = torch.zeros_like(x), weights.argmax(-1)
            for i, expert in enumerate(self.experts):
                rows = (chosen == i).nonzero().flatten()
                if len(rows):
                    out = out.index_add(0, rows, expert(x[rows]) * weights[rows, i, None])
            return x + out

    train(run, nn.Sequential(nn.Linear(8, WIDTH), Routed(), Routed(), nn.Linear(WIDTH, 4)), Routed)
