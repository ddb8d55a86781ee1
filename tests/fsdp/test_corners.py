"""Where two features meet: each of these was wrong once."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import hocket
from hocket.fsdp.param_group import ParamGroup
from hocket.fsdp.sharded_parameter import ShardedParameter
from hocket.runtime.queue import Ticket
from tests.fsdp.elements import here, local
from tests.helpers.ranks import run_ranks

WIDTH = 8


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))


def pair_of(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The model, and a copy that stays whole."""
    return model, copy.deepcopy(model)


def expect_gradients(model: nn.Module, plain: nn.Module) -> None:
    for (name, shard), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(shard, ShardedParameter)
        assert shard.grad is not None
        assert whole.grad is not None
        torch.testing.assert_close(local(shard.grad), here(shard, whole.grad).to(shard.dtype), msg=name)


class TwoGroups(nn.Module):
    """Two dtypes, so two groups in the unit; the second is used on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.maybe = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor, both: bool) -> Tensor:
        y = self.always(x)
        return y + self.maybe(y.double()).float() if both else y


def group_of_one_rank(rank: int) -> None:
    model, plain = pair_of(TwoGroups())
    hocket.fully_shard(model)
    for other in range(2):
        (plain(inputs(other), other == 0).square().sum() / 2).backward()
    model(inputs(rank), rank == 0).square().sum().backward()
    expect_gradients(model, plain)


def test_a_rank_may_have_no_gradient_in_a_whole_group():
    """Say in its experts, when no token came to any of them. The others would wait for it."""
    run_ranks(group_of_one_rank, 2)


class Recomputed(nn.Module):
    """A region that is computed again as a whole, with a unit that runs twice in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.a, self.b, self.c = (nn.Sequential(nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)) for _ in range(3))

    def region(self, x: Tensor) -> Tensor:
        return self.c(self.a(self.b(self.a(x))))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.region, self.first(x), use_reentrant=True)


def twice_in_a_region(rank: int) -> None:
    model, plain = pair_of(Recomputed())
    hocket.fully_shard(model, units=nn.Sequential, options=hocket.ShardOptions(prefetch=0))
    for one in (model, plain):
        one(inputs()).square().sum().backward()
    expect_gradients(model, plain)


class Outside(nn.Module):
    """Units that run outside of a region that is computed again, and inside of one again, alone and with others."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.a, self.b, self.rest0, self.rest1 = (
            nn.Sequential(nn.Linear(WIDTH, 20), nn.Tanh(), nn.Linear(20, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.region, self.b(self.a(x)), use_reentrant=self.reentrant)
        return checkpoint(self.a, self.rest0(x), use_reentrant=self.reentrant)

    def region(self, y: Tensor) -> Tensor:
        return self.rest1(self.rest0(self.b(y)))


def outside_of_a_region(rank: int, reentrant: bool) -> None:
    for options in (hocket.ShardOptions(prefetch=0), hocket.ShardOptions(prefetch=2), hocket.ShardOptions(staging=1)):
        torch.manual_seed(0)
        model, plain = pair_of(Outside(reentrant))
        ctx = hocket.fully_shard(model, units=nn.Sequential, options=options)
        for _ in range(5):
            for one in (model, plain):
                one(inputs()).square().sum().backward()
            expect_gradients(model, plain)
            for one in (model, plain):
                one.zero_grad()
        assert all(not unit.open and not unit.claims for unit in ctx.units)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_unit_runs_outside_of_what_is_recomputed_and_again_in_it(reentrant):
    run_ranks(outside_of_a_region, 2, reentrant)


def test_a_unit_runs_twice_in_what_is_recomputed():
    """With a graph of its own, whose backward needs the weights of both."""
    run_ranks(twice_in_a_region, 2)


class Boom(Exception):
    pass


def boom(*_: object) -> None:
    raise Boom


def goes_on_without_abort(rank: int) -> None:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    model, plain = pair_of(nn.Sequential(*layers))
    ctx = hocket.fully_shard(model, units=nn.Linear)
    hook = layers[1].register_full_backward_hook(boom)
    with pytest.raises(Boom):
        model(inputs()).square().sum().backward()
    hook.remove()
    for param in model.parameters():
        param.grad = None
    with pytest.raises(ValueError, match=r"abort\(\)"):
        model(inputs())
    ctx.abort()
    for one in (model, plain):
        one(inputs()).square().sum().backward()
    expect_gradients(model, plain)


def test_after_a_backward_that_failed_abort_is_asked_for():
    """Without it no rank would wait for reductions any more."""
    run_ranks(goes_on_without_abort, 2)


def norm_of_what_is_left(rank: int) -> None:
    model, plain = pair_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    hocket.fully_shard(model)
    for one in (model, plain):
        one(inputs()).square().sum().backward()
        next(one.parameters()).grad = None
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    torch.testing.assert_close(hocket.clip_grad_norm_(model, 1e9).float(), expected)


def norm_of_what_was_written(rank: int) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    hocket.fully_shard(model, precision=hocket.Precision(accumulate=torch.bfloat16))
    assert hocket.clip_grad_norm_(model, 1e9) == 0, "there are none"
    model(inputs()).square().sum().backward()
    for param in model.parameters():
        assert param.grad is not None
        param.grad.fill_(2)  # of a copy in the main dtype
    assert hocket.clip_grad_norm_(model, 1e9).item() == pytest.approx(2 * (WIDTH * WIDTH + WIDTH) ** 0.5)


def norm_of_what_was_set(rank: int) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    ctx = hocket.fully_shard(model)
    for group in hocket.sharding.unit_of(model).groups:
        make = group.make_grads

        def make_dirty(group: ParamGroup = group, make: Callable[[], None] = make) -> None:
            fresh = group.grads.flat is None
            make()
            if fresh:
                group.main_grad.fill_(float("nan"))  # memory that was not written may hold this

        group.make_grads = make_dirty
    for param in model.parameters():
        param.grad = torch.full_like(param, 2)
    assert hocket.clip_grad_norm_(ctx, 1e9).item() == pytest.approx(2 * (WIDTH * WIDTH + WIDTH) ** 0.5)
    assert all((param.grad == 2).all() for param in model.parameters() if param.grad is not None)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight.t()).abs()


def norm_of_complex_numbers(rank: int) -> None:
    model, plain = pair_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), Complex()))
    hocket.fully_shard(model)
    for one in (model, plain):
        one(inputs()).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.testing.assert_close(hocket.clip_grad_norm_(model, 1.0).float(), expected)
    expect_gradients(model, plain)


STORIES = [norm_of_what_is_left, norm_of_what_was_written, norm_of_what_was_set, norm_of_complex_numbers]


@pytest.mark.parametrize("story", STORIES, ids=lambda f: f.__name__)
def test_clipping_sees_the_gradients_that_readers_see(story):
    run_ranks(story, 2)


def forgotten_unsent(rank: int) -> None:
    model, plain = pair_of(nn.Linear(WIDTH, WIDTH))
    ctx = hocket.fully_shard(model, strategy="optim_grads_params")
    with ctx.no_sync():
        model(inputs(1)).square().sum().backward()
    for param in model.parameters():
        param.grad = None  # without a look at it, which would have it sent
    for one in (model, plain):
        one(inputs()).square().sum().backward()
    expect_gradients(model, plain)


def test_gradients_that_were_never_sent_can_be_forgotten():
    run_ranks(forgotten_unsent, 2)


def sharded_late(rank: int) -> None:
    hocket.fully_shard(nn.Linear(WIDTH, WIDTH))  # optimizers are looked at from now on
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    hocket.fully_shard(model)
    with pytest.raises(ValueError, match="built before"):
        optimizer.step()


def test_an_optimizer_is_looked_at_again_when_its_model_is_sharded():
    run_ranks(sharded_late, 1)


def two_models(rank: int) -> None:
    generator, critic = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    whole = copy.deepcopy(nn.Sequential(generator, critic))
    first, second = (hocket.fully_shard(one, options=hocket.ShardOptions()) for one in (generator, critic))
    assert first.groups.reduce is second.groups.reduce
    assert first.gathering is second.gathering
    assert first.reducing is second.reducing
    assert first.outer is second.outer
    critic(generator(inputs())).square().sum().backward()
    whole(inputs()).square().sum().backward()
    expect_gradients(generator, whole[0])
    expect_gradients(critic, whole[1])


def test_collectives_of_models_that_share_groups_are_in_one_order():
    run_ranks(two_models, 2)


def read_on_one_rank(rank: int) -> None:
    for strategy in ("optim_grads", "optim_grads_params"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        ctx = hocket.fully_shard(model, units=nn.Linear, strategy=strategy)
        gathers = []
        for _ in range(3):
            model(inputs()).square().sum().backward()
            if rank == 0:
                assert all(param.grad is not None for param in model.parameters())
            gathers.append(ctx.stats().gathers)
        steady = 0 if strategy == "optim_grads" else 2
        assert gathers[2] - gathers[1] == steady, (strategy, gathers)


def test_one_rank_may_look_at_gradients_alone():
    """Between microbatches, to log them: it gathers no more weights than others do."""
    run_ranks(read_on_one_rank, 2)


def stepped_too_early(rank: int) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    hocket.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # leaves no trace in version counters
    model(inputs()).sum().backward()
    loss = model(inputs()).sum()
    optimizer.step()
    with pytest.raises(ValueError, match="between a forward and its backward"):
        loss.backward()


def test_a_fused_step_between_forward_and_backward_is_noticed():
    run_ranks(stepped_too_early, 2)


def readers_on_two_streams(rank: int) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    ctx = hocket.fully_shard(model, options=hocket.ShardOptions(driver="manual"))
    unit = hocket.sharding.unit_of(model)
    claims = [unit.acquire() for _ in range(3)]
    released: list[Ticket] = []
    mark = ctx.gathering.mark

    def mark_of_stream(name: str) -> Ticket:
        released.append(mark(name))
        released[-1]._recorded_on = (7, 0, 7)[len(released) - 1]
        return released[-1]

    ctx.gathering.mark = mark_of_stream  # type: ignore[method-assign]
    for claim in claims:
        claim.wait()
        claim.release()
    unit.evict()
    assert [ticket in unit._last_use() for ticket in released] == [False, True, True], "the last reader of each stream"


def test_memory_is_written_again_behind_the_readers_of_all_streams():
    run_ranks(readers_on_two_streams, 2)


def forgotten_while_accumulating(rank: int) -> None:
    model, plain = pair_of(nn.Linear(WIDTH, WIDTH))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    ctx = hocket.fully_shard(model, mesh=mesh, strategy="optim_grads_params")
    with ctx.accumulating():
        model(inputs(5)).sum().backward()
    for param in model.parameters():
        param.grad = None
    assert all(param.grad is None for param in model.parameters())
    for one in (model, plain):
        one(inputs()).square().sum().backward()
    expect_gradients(model, plain)


def test_gradients_may_be_forgotten_before_replicas_exchange_them():
    """The exchange takes place all the same, in the memory of the forgotten gradients."""
    run_ranks(forgotten_while_accumulating, 2)


def read_for_inference(rank: int, main: torch.dtype) -> None:
    model, plain = pair_of(nn.Linear(WIDTH, WIDTH))
    ctx = hocket.fully_shard(model, precision=hocket.Precision(main=main))
    with ctx.no_sync():
        model(inputs(1)).sum().backward()
    with torch.inference_mode():
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_(2)
    model(inputs(2)).sum().backward()
    (2 * plain(inputs(1)).sum() + plain(inputs(2)).sum()).backward()
    expect_gradients(model, plain)


@pytest.mark.parametrize("main", [torch.float32, torch.float64])
def test_gradients_may_be_read_in_inference_mode(main):
    """Memory that is made there, for reductions that were put off and for readers, is written outside of it too."""
    run_ranks(read_for_inference, 2, main)
