"""Units are updated one by one, behind their reductions and before their gathers: the same bits, and more is hidden."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import hocket
from benchmarks.history import CALLER, Entry, History
from tests.fsdp.noted import Model, Run, named
from tests.fsdp.test_parity import optimizer_for, train
from tests.fsdp.twin import OPTIMIZERS, Case, Pair, naming
from tests.helpers.ranks import run_ranks

L = 6
STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


def test_bits_are_those_of_a_plain_step():
    """Any optimizer, strategy, residency and deferral, and models that do not run their units once each, in order: each
    of them under two strategies.
    """
    cases = [Case("stack", optimizer=one, by_unit=True) for one in OPTIMIZERS]
    models = ["nested", "tied_across", "read_on_demand", "conditional", "unused", "frozen", "mixed_dtypes"]
    cases += [
        Case(model, strategy, 2, sync="no_sync", optimizer=optimizer_for(model), by_unit=True)
        for i, strategy in enumerate(STRATEGIES)
        for model in models[i % 2 :: 2]
    ]
    options: list[dict[str, Any]] = [{"prefetch": 2}, {"prefetch": 0}]
    cases += [Case("deep", microbatches=2, options=one, by_unit=True) for one in options]
    cases += [Case("stack", "optim", mesh=(2, 1), by_unit=True)]
    train(2, [replace(case, steps=2) for case in cases])


class NotingSGD(torch.optim.SGD):
    """Notes which unit it updates."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.model.parameters(), lr=0.1)
        self.run = run
        self.fails_at = ""

    def step(self, closure: Any = None) -> Any:
        (name,) = {param.full_name.split(".")[1] for group in self.param_groups for param in group["params"]}
        if self.run.model.log:
            self.run.model.log[0].note(f"U {name}")
        if name == self.fails_at:
            raise RuntimeError("no")
        return super().step(closure)


def run_of(strategy: str, clip: bool, prefetch: int = 1) -> tuple[Run, NotingSGD]:
    run = Run(Model(L), strategy=strategy, options=hocket.ShardOptions(prefetch=prefetch))
    optimizer = NotingSGD(run)

    def update() -> None:
        if clip:
            hocket.clip_grad_norm_(run.ctx, 1.0)
        hocket.sharding.step_and_gather(run.model, optimizer)

    run.update = update
    return run, optimizer


def between(history: History) -> tuple[list[Entry], list[Entry]]:
    """What the optimizer did, and the gathers that were issued meanwhile."""
    updates = [e for e in history.entries if e.queue == CALLER and e.name.startswith("U ")]
    return updates, [e for e in named(history, "gather ") if e.index > updates[0].index]


def structure(rank: int, clip: bool) -> None:
    for strategy, count in (("optim", L), ("optim_grads", L), ("optim_grads_params", 2)):
        with naming((strategy, clip)):
            history = run_of(strategy, clip)[0].step()
            updates, gathers = between(history)
            wanted = [0, 1, 2, 3, 4, 5] if clip else [5, 4, 3, 0, 1, 2]
            assert [e.name for e in updates] == [f"U {i}" for i in wanted]
            assert [e.name for e in gathers] == [f"gather layers.{i}" for i in range(count)]
            for gather in gathers:  # behind the update of its own unit, beside all later ones
                own = history.one(gather.name.replace("gather layers.", "U "))
                assert history.before(own, gather)
                later = [e for e in updates if e.index > gather.index]
                assert all(history.concurrent(gather, e) for e in later)
            last = history.one("reduce layers.0")
            beside = [e.name for e in updates if history.concurrent(last, e)]
            assert beside == ([] if clip else ["U 5", "U 4", "U 3"])
            if strategy != "optim_grads_params":  # every unit is there when the next forward begins
                assert len(named(history, "gather ")) == L


@pytest.mark.parametrize("clip", [False, True])
def test_reductions_and_gathers_run_beside_updates(clip):
    run_ranks(structure, 2, clip)


def prefetched(rank: int) -> None:
    history = run_of("optim_grads_params", clip=True, prefetch=3)[0].step()
    assert [e.name for e in between(history)[1]] == [f"gather layers.{i}" for i in range(4)]


def test_as_many_are_gathered_as_a_forward_would_gather_ahead():
    run_ranks(prefetched, 2)


def failing(rank: int) -> None:
    """An optimizer that fails leaves itself as it was, and gradients that may be read."""
    run, optimizer = run_of("optim", clip=False)
    x = torch.ones(3, 11)
    run.model(x).square().sum().backward()
    optimizer.fails_at = "3"
    with pytest.raises(RuntimeError, match="no"):
        run.update()
    assert [len(group["params"]) for group in optimizer.param_groups] == [2 * L]
    assert all(param.grad is not None for param in run.model.parameters())


def test_an_exception_in_the_optimizer():
    run_ranks(failing, 2)


def others(rank: int) -> None:
    """Parameters that are in no sharded model are updated, too; weights changed by hand are gathered again."""
    pair = Pair(Case("stack", by_unit=True), rank, 2)
    own = torch.nn.Parameter(torch.ones(3))
    pair.optimizer.add_param_group({"params": [own]})
    own.grad = torch.ones(3)
    pair.microbatch()
    pair.step()
    assert bool((own != 1).all())
    with torch.no_grad():
        for param in pair.module.parameters():
            param.mul_(0.5)
        for param, main in pair.twin.main.items():
            main.mul_(0.5)
            param.copy_(main)
    pair.optimizer.zero_grad()
    pair.microbatch()
    pair.step()


def test_parameters_of_others_and_weights_changed_by_hand():
    run_ranks(others, 2)


def bad(rank: int) -> None:
    pair = Pair(Case("stack"), rank, 2)
    with pytest.raises(ValueError, match="no torch optimizer"):
        hocket.sharding.step_and_gather(pair.module, pair.module)
    whole = [torch.nn.Parameter(torch.ones(2))]
    for lbfgs in (torch.optim.LBFGS(whole), torch.optim.LBFGS(pair.module.parameters())):
        with pytest.raises(ValueError, match="the step of LBFGS takes a closure"):
            hocket.sharding.step_and_gather(pair.module, lbfgs)
    pair.module.zero_grad()
    late = torch.nn.Linear(2, 2)
    both = torch.optim.SGD(late.parameters(), lr=0.1)
    hocket.fully_shard(late)
    both.add_param_group({"params": list(late.parameters())})
    late(torch.ones(2)).sum().backward()
    before = [param.detach().clone() for param in late.parameters()]
    with pytest.raises(ValueError, match="was built before"):
        hocket.sharding.step_and_gather(late, both)
    assert all(torch.equal(a, b) for a, b in zip(before, late.parameters(), strict=True)), "nothing has been updated"
    pair.microbatch()

    def clip(*_: object) -> None:
        hocket.clip_grad_norm_(pair.ctx, 1.0)

    hook = pair.optimizer.register_step_pre_hook(clip)
    with pytest.raises(ValueError, match="clip_grad_norm_ is called inside of step_and_gather"):
        hocket.sharding.step_and_gather(pair.module, pair.optimizer)
    hook.remove()
    assert hocket.clip_grad_norm_(pair.ctx, 1.0) > 0, "all have come behind it"
    pair.ctx.begin_backward()
    with pytest.raises(ValueError, match="inside of a backward"):
        hocket.sharding.step_and_gather(pair.module, pair.optimizer)


def test_misuse():
    run_ranks(bad, 2)
