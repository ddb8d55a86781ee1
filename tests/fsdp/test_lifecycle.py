"""Forwards and backwards in every order that autograd allows, beside the twin."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hocket
from tests.fsdp import stories
from tests.fsdp.elements import local
from tests.fsdp.kinds import batch, loss_of
from tests.fsdp.stories import STORIES, failing_after, failing_backward, failing_forward
from tests.fsdp.twin import Case, Pair, naming
from tests.helpers.ranks import run_ranks


def cases(*models: str) -> list[Case]:
    """Each model, and everything that decides how long weights stay, at least once."""
    kinds: list[dict[str, Any]] = [
        *({"strategy": strategy} for strategy in ("no_shard", "optim", "optim_grads_params")),
        *({"options": one} for one in ({"prefetch": 0}, {"prefetch": 2, "staging": 1})),
    ]
    return [Case(models[i % len(models)], **kinds[i % len(kinds)]) for i in range(len(kinds))]


def in_all(rank: int, told: Sequence[tuple[Callable[[Pair], None], Sequence[Case]]], times: int = 3) -> None:
    """Run each story for its cases: some times, each ending with a step. The first one shows the order of units."""
    for do, cases in told:
        for case in cases:
            with naming((do.__name__, case)):
                pair = Pair(case, rank, dist.get_world_size())
                for _ in range(times):
                    do(pair)
                    pair.step()
                pair.compare_gathered()


def test_stories():
    # A graph that is used again is reduced unit by unit as it goes: both halves of a module called twice on their own.
    told = [
        (story, cases("stack", "nested", "tied_across", "parallel" if story is stories.backward_twice else "twice"))
        for story in STORIES.values()
    ]
    run_ranks(in_all, 2, told, 2)


def test_stories_of_models_that_change_with_the_step():
    models = cases("conditional", "reordered", "reentrant", "recomputed", "frozen_input")
    run_ranks(in_all, 2, [(stories.forward_alone, models), (stories.evaluations, models)])


def test_input_gradients():
    run_ranks(in_all, 2, [(stories.input_gradients, cases("stack", "nested", "twice", "structures"))])


def summed(pair: Pair) -> None:
    """One backward through two forwards."""
    losses = [pair.forward(0), pair.forward(1)]
    (losses[0] + losses[1]).backward()
    for seed, loss in enumerate(losses):
        pair.expect(loss, seed=seed)


def one_backward(rank: int) -> None:
    for case in cases("stack", "nested", "twice"):
        with naming(case):
            pair = Pair(case, rank, 2)
            pair.exact = False  # the two microbatches of a rank may be added up before ranks are
            summed(pair)
            pair.step()


def test_one_backward_through_two_forwards():
    run_ranks(one_backward, 2)


def parts(rank: int) -> None:
    """Units are called on their own, and the root not at all."""
    pair = Pair(Case("deep"), rank, 2)
    for _ in range(3):
        x = batch(pair.case.kind, rank)
        loss = loss_of(pair.module.blocks[2](pair.module.blocks[1](x)))
        loss.backward()
        losses = []
        for other in range(2):
            x = batch(pair.case.kind, other)
            module: Any = pair.twin.modules[0]
            losses.append(loss_of(module.blocks[2](module.blocks[1](x))))
            losses[-1].backward()
        pair.same(loss, losses[rank], "loss of two blocks")
        for param, gradient in pair.twin.gradients.items():
            gradient.total = None if param.grad is None else param.grad / 2
            param.grad = None
        pair.exact = False
        pair.step()


def test_units_without_their_root():
    run_ranks(parts, 2)


def read_between(rank: int) -> None:
    """Reading gradients between microbatches is allowed, and orders nothing wrongly."""
    pair = Pair(Case("stack", microbatches=2), rank, 2)
    for _ in range(2):
        pair.microbatch()
        first = [(p.grad + 0) for p in pair.module.parameters()]
        pair.microbatch()
        second = [p.grad for p in pair.module.parameters()]
        assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
        pair.step()


def test_gradients_may_be_read_between_microbatches():
    run_ranks(read_between, 2)


def changed_by_hand(rank: int) -> None:
    """The next forward sees weights that the user changed between steps, with and without a trace."""
    pair = Pair(Case("deep"), rank, 2)
    pair.microbatch()
    pair.step()
    with torch.no_grad():
        for param in pair.module.parameters():
            param.mul_(0.5)
        for twin, main in pair.twin.main.items():
            main.mul_(0.5)
            twin.copy_(main)
    pair.evaluate()
    pair.microbatch()
    pair.step()
    for param in pair.module.parameters():
        param.data.mul_(4)
        param.data = param.data / 2
    with torch.no_grad():
        for twin, main in pair.twin.main.items():
            main.mul_(2)
            twin.copy_(main)
    pair.evaluate()
    pair.microbatch()
    pair.step()
    with pair.ctx.gathered(changed=True), torch.no_grad():
        for name, _ in pair.module.named_parameters():
            pair.module.get_parameter(name).add_(0.25)
    with torch.no_grad():
        for twin, main in pair.twin.main.items():
            main.add_(0.25)
            twin.copy_(main)
    pair.compare()
    pair.microbatch()
    pair.step()


def test_weights_may_be_changed_between_steps():
    run_ranks(changed_by_hand, 2)


def abort(rank: int, told: Sequence[tuple[Callable[[Pair, nn.Module], None], Case]]) -> None:
    """Exceptions at every block, at the beginning of a step and after a microbatch: then a correct step."""
    for fail, case in told:
        with naming((fail.__name__, case)):
            pair = Pair(case, rank, dist.get_world_size())
            blocks = [unit.module for unit in pair.ctx.units if unit.module is not pair.module]
            for i, block in enumerate(blocks):
                if i % 2:
                    pair.microbatch(last=False)
                fail(pair, block)
                pair.ctx.abort()
                pair.forget()
                pair.microbatch(last=False)
                pair.microbatch()
                pair.step()
            pair.compare_gathered()


def test_a_step_after_an_exception():
    """Each way to fail in three or four of the cases."""
    chosen = [Case("stack", "no_shard"), Case("stack", "optim", sync="accumulating"), Case("nested")]
    chosen += [Case("recomputed", options={"prefetch": 2}), Case("stack", options={"staging": 1}, sync="accumulating")]
    ways = (failing_forward, failing_after, failing_backward)
    told = [(fail, case) for i, fail in enumerate(ways) for j, case in enumerate(chosen) if (i + j) % 3 != 2]
    run_ranks(abort, 2, told)


def test_a_step_after_an_exception_with_replicas():
    chosen = [Case("stack", mesh=(2, 2), sync=sync) for sync in ("accumulating", "each")]
    run_ranks(abort, 4, [(failing_backward, case) for case in chosen])


def abort_inside(pair: Pair, error: type[Exception] | None = None) -> None:
    """Claims that an abort has forgotten are given back all the same; what was written through them is lost."""
    with pair.ctx.gathered(changed=True):
        pair.ctx.abort()
        if error is not None:
            raise error


def abort_anywhere(rank: int) -> None:
    """An abort with nothing to forget is allowed, and leaves optimizer state and weights alone."""
    pair = Pair(Case("stack", optimizer="adamw"), rank, 2)
    pair.ctx.abort()
    for _ in range(2):
        pair.microbatch()
        pair.step()
        pair.ctx.abort()
    pair.compare_gathered()
    with pytest.raises(MemoryError):
        abort_inside(pair, MemoryError)
    with pytest.raises(ValueError, match="from before abort"):
        abort_inside(pair)
    pair.microbatch()
    pair.step()


def test_abort_between_steps():
    run_ranks(abort_anywhere, 2)


def no_memory(*_: object) -> None:
    raise MemoryError


def abort_without_memory(rank: int) -> None:
    """An exception between backward and a reduction takes no staging memory with it."""
    pair = Pair(Case("stack", options={"staging": 1}), rank, 2)
    pair.microbatch()
    pair.step()
    before = pair.ctx.stats().staging_bytes
    group = pair.ctx.units[1].groups[0]
    make = group.make_grads
    for _ in range(2):
        group.make_grads = no_memory
        with pytest.raises(MemoryError):
            pair.forward().backward()
        group.make_grads = make
        pair.ctx.abort()
        pair.microbatch()
        pair.step()
    assert pair.ctx.stats().staging_bytes == before


def test_abort_when_there_is_no_memory_for_gradients():
    run_ranks(abort_without_memory, 2)


def offloaded(rank: int) -> None:
    """After an abort, and gradients that were dropped before anybody read them, the next step is right."""
    found = []
    for offload in ("pageable", "none"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        ctx = hocket.fully_shard(model, units=nn.Linear, options=hocket.ShardOptions(offload=offload))
        away = [group.memory.on_host for unit in ctx.units for group in unit.groups]
        assert set(away) == {offload == "pageable"}, "else this compares a way with itself"
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
        x = torch.arange(10.0).view(2, 5) + rank
        for step in range(4):
            model(x).square().mean().backward()
            if step == 1:
                ctx.abort()
                continue
            if step == 2:
                optimizer.zero_grad()
                model(x).square().mean().backward()
            norm = hocket.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.99)
            found.append([norm, *(param.detach().clone() for param in model.parameters())])
    half = len(found) // 2
    for ours, wanted in zip(found[:half], found[half:], strict=True):
        assert all(torch.equal(local(a), local(b)) for a, b in zip(ours, wanted, strict=True))


def test_interrupted_steps_with_shards_on_the_host() -> None:
    run_ranks(offloaded, 2)
