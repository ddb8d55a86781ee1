"""Parameters that no rank uses have no gradient, as without sharding, so that no optimizer moves them."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hocket
from hocket.fsdp.unused import UnusedGradients, Usage
from tests.fsdp.test_parity import train
from tests.fsdp.twin import Case, mesh_of, naming, variants
from tests.helpers.parity import LINEAR
from tests.helpers.ranks import run_ranks

WIDTH, STEPS = 6, 4
Chosen = Callable[[int, int], list[int]]
"""(rank, step) -> which branches it goes through."""


class Branches(nn.Module):
    """A part that always runs, and some that run when they are chosen."""

    def __init__(self, branches: int = 3) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(branches))
        self.never = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        x = self.always(x)
        for i in chosen:
            x = x + self.branches[i](x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Branches(), Branches(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        return self.head(self.second(self.first(x, chosen), chosen))


CHOSEN: dict[str, Chosen] = {
    "by step": lambda rank, step: [step % 3],
    "by rank": lambda rank, step: [rank % 2],
    "one rank now and then": lambda rank, step: [0, 1] if (rank, step % 3) == (1, 1) else [0],
    "one rank less now and then": lambda rank, step: [0] if (rank, step % 3) == (0, 1) else [0, 1],
    "by rank and step": lambda rank, step: [(rank + step // 2) % 3],
    "all, then none": lambda rank, step: [0, 1, 2] if step < 2 else [],
}


def loss_of(model: nn.Module, chosen: list[int], seed: int) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    return model(x, chosen).square().mean()


def update(params: list[Any], name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)
    return torch.optim.AdamW(params, lr=0.5, weight_decay=0.1, eps=LINEAR, fused=True)


class Beside:
    """A sharded model, and one that one process trains with the data of all ranks."""

    def __init__(self, rank: int, optimizer: str = "adamw", build: Callable[[], nn.Module] = Model, **how: Any) -> None:
        self.rank, self.world = rank, dist.get_world_size()
        torch.manual_seed(0)
        self.plain = build()
        torch.manual_seed(0)
        self.model: Any = build()
        self.ctx = hocket.fully_shard(self.model, units=Branches, **how)
        self.wanted = update(list(self.plain.parameters()), optimizer)
        self.ours = update(list(self.model.parameters()), optimizer)

    def backward(self, chosen: Chosen, step: int, seed: int) -> None:
        for rank in range(self.world):
            (loss_of(self.plain, chosen(rank, step), 100 * seed + rank) / self.world).backward()
        loss_of(self.model, chosen(self.rank, step), 100 * seed + self.rank).backward()

    def compare_gradients(self) -> None:
        wanted = {name: p.grad is None for name, p in self.plain.named_parameters()}
        assert {name: p.grad is None for name, p in self.model.named_parameters()} == wanted

    def step(self, set_to_none: bool = True) -> None:
        self.wanted.step()
        self.ours.step()
        self.wanted.zero_grad(set_to_none)
        self.ours.zero_grad(set_to_none)
        with self.ctx.gathered():
            for name, param in self.plain.named_parameters():
                ours = self.model.get_parameter(name).detach()
                torch.testing.assert_close(ours, param.detach(), rtol=1e-4, atol=2e-5, msg=f"{name} differs")


STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


def steps(rank: int, number: int, how: dict[str, Any], every: int = 1) -> None:
    """All choices of branches, or one of `every`, under one optimizer after the other. The `number` says where they
    begin.
    """
    for i, (name, chosen) in list(enumerate(CHOSEN.items()))[number % every :: every]:
        optimizer = ("adamw", "sgd")[(i + number) % 2]
        pair = Beside(rank, optimizer, **how)
        for step in range(STEPS):
            try:
                pair.backward(chosen, step, step)
                pair.compare_gradients()
                pair.step()
            except BaseException as error:
                error.add_note(f"{name}, {optimizer}, step {step}, {how}")
                raise


def strategies(rank: int) -> None:
    """Each with half of the choices, and each choice under two of them."""
    for number, strategy in enumerate(STRATEGIES):
        steps(rank, number, {"strategy": strategy}, every=2)


def test_parameters_that_no_rank_uses_stay() -> None:
    run_ranks(strategies, 2)


def test_parameters_that_no_rank_uses_stay_beside_replicas_and_on_the_host() -> None:
    run_ranks(meshes, 4)


def meshes(rank: int) -> None:
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    all_of_them: list[dict[str, Any]] = [{}, {"offload": "pageable"}]
    for number, options in enumerate(all_of_them):
        steps(rank, number, {"mesh": mesh, "options": hocket.ShardOptions(**options)}, every=3)


def microbatches(rank: int, how: str, strategy: str) -> None:
    """Gradients of several microbatches, clipped; a parameter counts that any of them has used, on any rank."""
    pair = Beside(rank, strategy=strategy)
    defers = {"no_sync": pair.ctx.no_sync, "accumulating": pair.ctx.accumulating, "each": contextlib.nullcontext}[how]
    for step in range(STEPS):
        first: Chosen = lambda rank, step: [2] if (rank, step % 2) == (1, 0) else []  # noqa: E731
        with defers():
            pair.backward(first, step, 2 * step)
        pair.backward(lambda rank, step: [step % 2], step, 2 * step + 1)
        if step == 2:
            pair.compare_gradients()
        ours = hocket.clip_grad_norm_(pair.ctx, 0.1)
        wanted = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.1)
        torch.testing.assert_close(ours.float(), wanted)
        pair.compare_gradients()
        pair.step()


def all_microbatches(rank: int) -> None:
    for how, strategy in itertools.product(("no_sync", "accumulating", "each"), ("optim", "optim_grads_params")):
        with naming(f"{how} {strategy}"):
            microbatches(rank, how, strategy)


def test_unused_in_some_microbatches() -> None:
    run_ranks(all_microbatches, 2)


def kept_gradients(rank: int) -> None:
    """Gradients that were set to zero are there, and those that were never are not; one by hand counts."""
    pair = Beside(rank)
    for step in range(4):
        pair.backward(lambda rank, step: [step % 2], step, step)
        if step == 2:
            for model in (pair.plain, pair.model):
                model.get_parameter("first.never").grad = torch.ones(5)
        pair.compare_gradients()
        pair.step(set_to_none=False)


def test_gradients_that_are_set_to_zero_stay() -> None:
    run_ranks(kept_gradients, 2)


def one_by_one(rank: int) -> None:
    """`step_and_gather` reads gradients of units while others are on their way; one rank may read them alone."""
    pair = Beside(rank)
    for step in range(STEPS):
        pair.backward(CHOSEN["by rank and step"], step, step)
        if step % 2 and rank:
            assert pair.model.first.never.grad is None
        hocket.sharding.step_and_gather(pair.ctx, pair.ours)
        pair.wanted.step()
        pair.ours.zero_grad()
        pair.wanted.zero_grad()
        pair.step()


def test_unused_parameters_of_a_step_by_unit() -> None:
    run_ranks(one_by_one, 2)


def aborted(rank: int) -> None:
    """What an aborted step has used counts for nothing."""
    pair = Beside(rank)
    loss_of(pair.model, [0, 1, 2], rank).backward()
    pair.ctx.abort()
    for step in range(2):
        pair.backward(CHOSEN["by rank"], step, step)
        pair.compare_gradients()
        pair.step()


def test_unused_after_an_abort() -> None:
    run_ranks(aborted, 2)


def test_unused_parameters_beside_the_twin() -> None:
    """Bit for bit, with every optimizer that would move them, and several ways to shard."""
    cases = variants(Case("unused", microbatches=2), optimizer=["adamw", "adamw_fused", "momentum", "rmsprop"])
    cases += variants(Case("unused", optimizer="adamw"), sync=["no_sync"], by_unit=[True], set_to_none=[False])
    cases += variants(Case("unused", optimizer="adamw"), options=[{"bucket": 300}])
    train(2, [*cases, *variants(Case("conditional", optimizer="adamw"), strategy=["optim", "no_shard"])])


class Used(nn.Module):
    """A model whose branches may all be used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = Branches(), nn.Linear(WIDTH, 3)
        del self.first.never

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        return self.head(self.first(x, chosen))


def counted(rank: int, chosen: Sequence[int]) -> list[int]:
    """How often a rank writes what it leaves out, in each step."""
    pair, found = Beside(rank, build=Used), list[int]()
    for step in range(STEPS):
        with patch("json.dumps", side_effect=json.dumps) as told:
            pair.backward(lambda rank, step: list(chosen), step, step)
            pair.step()
        found.append(told.call_count)
    return found


@pytest.mark.parametrize("chosen", [[0, 1, 2], [0, 1]], ids=["all", "some"])
def test_what_is_left_out_is_written_once_per_backward(chosen: list[int]) -> None:
    assert run_ranks(counted, 2, chosen) == [[1] * STEPS] * 2


class Told:
    """The ranks of a model, as `UnusedGradients` asks for them."""

    def __init__(self, rank: int, ranks: int, store: dist.Store) -> None:
        self.rank, self.ranks, self.store = rank, tuple(range(ranks)), store


class Host:
    """A rank without a device: it issues reductions of one group with two members, and asks what nobody has used."""

    def __init__(self, rank: int, ranks: int, store: dist.Store) -> None:
        groups = SimpleNamespace(part=(0, 1), holders=tuple(range(ranks)))
        members, self.usage = [SimpleNamespace(name="w")], Usage([True, True])
        group: Any = SimpleNamespace(usage=self.usage, members=members, groups=groups, is_divided=False)
        told: Any = Told(rank, ranks, store)
        self.group = group
        self.unused = UnusedGradients(told, "", [group])

    def send(self, *used: int) -> None:
        """Gradients of one backward."""
        for member in range(2):
            self.usage.forget(member)
        self.unused.about_to_send(self.group, [member in used for member in range(2)])

    def unused_by_all(self) -> list[int]:
        self.unused.find([self.group])
        return [member for member in range(2) if self.usage.unused_by_all(member)]


def test_a_reader_waits_for_hosts_that_are_behind() -> None:
    early, late = (Host(rank, 2, store) for store in [dist.HashStore()] for rank in range(2))
    for host in (early, late):
        host.send(0)
        host.unused.all_sent()
    assert [host.unused_by_all() for host in (early, late)] == [[1], [1]]
    with ThreadPoolExecutor(1) as pool:
        for used, found in (((0,), [1]), ((1,), []), ((0, 1), []), ((), [1]), ((0,), [1])):
            early.send(0)
            early.unused.all_sent()
            answer = pool.submit(early.unused_by_all)
            late.send(*used)
            time.sleep(0.05)
            assert not answer.done(), "the other one is in the midst of its backward"
            late.unused.all_sent()
            assert answer.result(20) == found, used
            late.send(*used)  # it is a backward ahead
            late.unused.all_sent()
            early.send(0)
            early.unused.all_sent()
            assert early.unused_by_all() == found


def test_a_rank_that_never_comes_is_an_error() -> None:
    early, late = (Host(rank, 2, store) for store in [dist.HashStore()] for rank in range(2))
    for host in (early, late):
        host.send(0)
    late.unused.all_sent()
    assert early.unused_by_all() == [1]
    early.send(0)
    words = r"rank 0 reads gradients, and ranks \[1\] have not ended that backward"
    with patch("hocket.runtime.world.GIVE_UP", timedelta(seconds=0.1)), pytest.raises(ValueError, match=words):
        early.unused_by_all()
