"""A schedule of one's own, instead of hooks: the five calls of a unit."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hocket
from hocket.fsdp.sharded_parameter import ShardedParameter
from tests.fsdp.kinds import batch, loss_of
from tests.fsdp.models import WIDTH, Block, Chain
from tests.fsdp.twin import Case, Pair, naming
from tests.helpers.ranks import run_ranks

MANUAL = {"driver": "manual"}
VARIANTS = [MANUAL, {**MANUAL, "staging": 3, "prefetch": 2}]


def forward(pair: Pair, x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Blocks as segments: the (detached input, output) of each."""
    pair.ctx.begin_forward()
    segments = []
    for block in pair.module.blocks:
        claim = hocket.sharding.unit_of(block).acquire()
        claim.wait()
        x = x.detach().requires_grad_()
        y = block(x)
        claim.release()
        segments.append((x, y))
        x = y
    return segments


def backward(pair: Pair, segments: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Segment by segment; gradients are handed over and reduced by hand. Returns the loss."""
    pair.ctx.begin_backward()
    x, y = segments[-1]
    loss = loss_of(y)
    grad = torch.autograd.grad(loss, y)[0]
    for block, (x, y) in zip(reversed(pair.module.blocks), reversed(segments), strict=True):
        unit = hocket.sharding.unit_of(block)
        claim = unit.acquire()
        claim.wait()
        torch.autograd.backward(y, grad)
        claim.release()
        grad = x.grad
        for group in unit.groups:
            for member in group.members:
                unit.grad_ready(member.param)
        unit.reduce()
    pair.ctx.end_backward()
    return loss


def manual(rank: int) -> None:
    for strategy in ("no_shard", "optim", "optim_grads_params"):
        for options in VARIANTS:
            with naming((strategy, options)):
                pair = Pair(Case("deep", strategy, 2, options=options, optimizer="adamw"), rank, dist.get_world_size())
                for _ in range(3):
                    for _ in range(2):
                        pair.expect(backward(pair, forward(pair, batch(pair.case.kind, 1000 * pair.seed + rank))))
                    pair.step()


def test_manual_equals_the_twin():
    run_ranks(manual, 2)


def in_flight(rank: int) -> None:
    """Two microbatches in flight: one gather serves both readers, as long as one of them holds on."""
    pair = Pair(Case("deep", options=MANUAL), rank, 2)
    for _ in range(2):
        first = forward(pair, batch(pair.case.kind, rank))
        second = forward(pair, batch(pair.case.kind, 1000 + rank))
        pair.expect(backward(pair, first), seed=0)
        pair.expect(backward(pair, second), seed=1)
        pair.step()


def test_two_microbatches_in_flight():
    run_ranks(in_flight, 2)


def shared(rank: int) -> None:
    pair = Pair(Case("deep", options=MANUAL), rank, 2)
    unit = hocket.sharding.unit_of(pair.module.blocks[0])
    before = unit.gathers
    one, two = unit.acquire(), unit.acquire()
    one.wait()
    two.wait()
    assert unit.gathers == before + 1
    one.release()
    assert pair.module.blocks[0].up.weight.shape == (17, WIDTH)  # the second claim still holds it
    two.release()
    assert isinstance(pair.module.blocks[0].up.weight, ShardedParameter)
    with pytest.raises(ValueError, match="released twice"):
        one.release()
    three = unit.acquire()
    three.wait()
    three.release()
    assert unit.gathers == before + 1  # no other unit needed the room


def test_claims():
    run_ranks(shared, 2)


def twice(rank: int) -> None:
    """Reducing in the middle, and with nothing to send, changes nothing but the number of collectives."""
    pair = Pair(Case("deep", options=MANUAL), rank, 2)
    pair.exact = False
    for _ in range(2):
        pair.ctx.begin_forward()
        losses = []
        claims = [hocket.sharding.unit_of(block).acquire() for block in pair.module.blocks]
        for claim in claims:
            claim.wait()
        loss = pair.forward()
        loss.backward()
        losses.append(loss)
        for block, claim in zip(pair.module.blocks, claims, strict=True):
            unit = hocket.sharding.unit_of(block)
            for group in unit.groups:
                for member in group.members:
                    unit.grad_ready(member.param)
                    unit.reduce()
            unit.reduce()
            claim.release()
        pair.ctx.end_backward()
        pair.expect(loss)
        pair.step()


def test_reducing_in_parts():
    run_ranks(twice, 2)


def no_hooks(rank: int) -> None:
    model = Chain(Block(), Block())
    hocket.fully_shard(model, units=Block, options=hocket.ShardOptions(driver="manual"))
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks


def test_manual_installs_no_hooks():
    run_ranks(no_hooks, 2)


def submodules(rank: int) -> None:
    """A schedule that runs parts of a unit finds its owner."""
    for case in (Case("stack"), Case("nested"), Case("tied_across"), Case("attention")):
        pair = Pair(case, rank, 2)
        for unit in pair.ctx.units:
            assert hocket.sharding.unit_of(unit.module) is unit
            for group in unit.groups:
                for member in group.members:
                    if len(member.owners) == 1:
                        owner = hocket.sharding.unit_of(member.owners[0][0])
                        inside = {id(m) for m in unit.module.modules()}
                        assert owner is unit or id(owner.module) in inside, member.name


def test_unit_of_submodules():
    run_ranks(submodules, 2)


def released_early(rank: int) -> None:
    """Weights are released after the gradients of inputs, before those of parameters."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    twin = copy.deepcopy(layers)
    context = hocket.fully_shard(layers, units=nn.Linear, options=hocket.ShardOptions(driver="manual"))
    x, gradient, kept = torch.randn(4, 8), torch.ones(4, 8), []
    twin(x).sum().backward()
    context.begin_forward()
    for layer in layers:
        unit = hocket.sharding.unit_of(layer)
        claim = unit.acquire()
        claim.wait()
        x = x.detach().requires_grad_()
        kept.append((unit, x, x := layer(x)))
        claim.release()
    context.begin_backward()
    for unit, given, made in reversed(kept):
        claim = unit.acquire()
        claim.wait()
        (back,) = torch.autograd.grad(made, given, gradient, retain_graph=True)
        claim.release()
        torch.autograd.backward(made, gradient, inputs=list(unit.parameters))
        for param in unit.parameters:
            unit.grad_ready(param)
        unit.reduce()
        gradient = back
    context.end_backward()
    for param, plain in zip(layers.parameters(), twin.parameters(), strict=True):
        grad: Any = param.grad
        assert plain.grad is not None
        assert torch.equal(grad.full_tensor(), plain.grad)


def test_weights_may_go_after_the_gradients_of_inputs():
    run_ranks(released_early, 2)
