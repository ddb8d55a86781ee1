"""What can happen inside of a training step, told to a sharded model and its twin alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import pytest
import torch
from torch import nn

from tests.fsdp.kinds import batch, loss_of
from tests.fsdp.twin import Pair


def two_forwards(pair: Pair) -> None:
    first, second = pair.forward(0), pair.forward(1)
    first.backward()
    second.backward()
    pair.expect(first, seed=0)
    pair.expect(second, seed=1)


def two_forwards_reversed(pair: Pair) -> None:
    first, second = pair.forward(0), pair.forward(1)
    second.backward()
    pair.expect(second, seed=1)
    first.backward()
    pair.expect(first, seed=0)


def interleaved(pair: Pair) -> None:
    """As in a pipeline: one forward ahead of each backward."""
    losses = [pair.forward(0)]
    for seed in range(1, 4):
        losses.append(pair.forward(seed))
        losses[seed - 1].backward()
    losses[-1].backward()
    for seed, loss in enumerate(losses):
        pair.expect(loss, seed=seed)


def backward_twice(pair: Pair) -> None:
    loss = pair.forward(0)
    loss.backward(retain_graph=True)
    loss.backward()
    pair.expect(loss, seed=0)
    pair.expect(loss, seed=0)


def forward_alone(pair: Pair) -> None:
    """Forwards whose losses are dropped, and one that is kept without a backward."""
    pair.forward(7)
    kept = pair.forward(8)
    pair.microbatch()
    del kept
    pair.forward(9)


def evaluations(pair: Pair) -> None:
    """In every gap of a step."""
    pair.evaluate()
    loss = pair.forward()
    pair.evaluate()
    loss.backward()
    pair.evaluate()
    pair.expect(loss)
    pair.microbatch()
    pair.evaluate()


def input_gradients(pair: Pair) -> None:
    """`torch.autograd.grad` for an input touches no gradient of a parameter."""
    x = batch(pair.case.kind, 1).requires_grad_()
    ours = torch.autograd.grad(loss_of(pair.module(x, pair.steps)), x)[0]
    wanted = torch.autograd.grad(loss_of(pair.twin.module(pair.rank)(x, pair.steps)), x)[0]
    pair.same(ours, wanted, "gradient of the input")
    pair.microbatch()


class Boom(Exception):
    pass


def fail(*_: object) -> None:
    raise Boom


def fail_in_backward(module: nn.Module, args: object, output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(fail)


def failing_forward(pair: Pair, block: nn.Module) -> None:
    handle = block.register_forward_pre_hook(fail)
    with pytest.raises(Boom):
        pair.forward(5)
    handle.remove()


def failing_after(pair: Pair, block: nn.Module) -> None:
    handle = block.register_forward_hook(fail)
    with pytest.raises(Boom):
        pair.forward(5)
    handle.remove()


def failing_backward(pair: Pair, block: nn.Module) -> None:
    handle = block.register_forward_hook(fail_in_backward)
    with pytest.raises(Boom):
        pair.forward(5).backward()
    handle.remove()


def failed_steps(pair: Pair) -> None:
    """Exceptions in forward, and in backward after a microbatch, if the chosen block runs; then an ordinary one."""
    blocks = [unit.module for unit in pair.ctx.units if unit.module is not pair.module] or [pair.module]
    handle = blocks[pair.steps % len(blocks)].register_forward_pre_hook(fail)
    with suppress(Boom):
        pair.forward()
    handle.remove()
    pair.ctx.abort()
    pair.microbatch()
    handle = blocks[-1 - pair.steps % len(blocks)].register_forward_hook(fail_in_backward)
    with suppress(Boom):
        pair.forward().backward()
    handle.remove()
    pair.ctx.abort()
    pair.forget()
    pair.microbatch()


STORIES: Mapping[str, Callable[[Pair], None]] = {
    story.__name__: story
    for story in (two_forwards, two_forwards_reversed, interleaved, backward_twice, forward_alone, evaluations)
}
