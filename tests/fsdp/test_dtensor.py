"""Parameters and gradients of a sharded model as DTensors: what torch's functions and users' programs do with them."""

# pyrefly: ignore-errors
from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import hocket
from tests.fsdp.elements import here, local
from tests.fsdp.twin import naming
from tests.helpers.ranks import run_ranks

WORLD = 2
WHOLE = StateDictOptions(full_state_dict=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 12), Block(), Block(), nn.Linear(12, 2, bias=False))


def both(strategy: str = "optim_grads_params", seed: int = 0) -> tuple[nn.Sequential, nn.Sequential]:
    plain = model_of(seed)
    model = copy.deepcopy(plain)
    hocket.fully_shard(model, units=Block, strategy=strategy)
    return model, plain


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)


def losses(model: nn.Module, plain: nn.Module, rank: int) -> tuple[Tensor, Tensor]:
    """This rank's on its data, and the mean of all ranks' without sharding."""
    x = torch.randn(WORLD, 5, 12, generator=torch.Generator().manual_seed(1))
    return model(x[rank]).square().mean(), plain(x.flatten(0, 1)).square().mean()


def norms(rank: int, strategy: str) -> None:
    for p in (2.0, 1.0, 3.0, float("inf")):
        model, plain = both(strategy)
        for loss in losses(model, plain, rank):
            loss.backward()
        wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type=p)
        total = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()], p)
        found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=p)
        with naming(f"{strategy} {p}"):
            torch.testing.assert_close(whole(found), wanted)
            torch.testing.assert_close(whole(total), wanted)
            for shard, param in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(local(shard.grad), here(shard, param.grad))
    model, plain = both()
    if rank == 0:
        with torch.no_grad():
            plain[0].weight.fill_(float("inf"))
    next(iter(losses(model, plain, rank))).backward()
    for shard in model.parameters():
        shard.grad.fill_(float("nan") if rank else 0.0)
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
def test_the_norm_is_that_of_all_ranks(strategy: str) -> None:
    run_ranks(norms, WORLD, strategy)


def scaled(rank: int) -> None:
    """One rank's infinity has all skip the step and halve the scale."""
    model, plain = both()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, foreach=True) for one in (model, plain)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2) for _ in optimizers]
    for step in range(5):
        for optimizer, scaler, loss in zip(optimizers, scalers, losses(model, plain, rank), strict=True):
            scaler.scale(loss).backward()
            if step == 2:
                first = optimizer.param_groups[0]["params"][0]
                if optimizer is optimizers[1] or rank == 0:
                    local(first.grad)[0] = float("inf")
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert scalers[0].get_scale() == 2.0**5
    for shard, param in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(local(shard), here(shard, param))


def test_the_scale_of_a_loss_is_that_of_all_ranks() -> None:
    run_ranks(scaled, WORLD)


def same_state(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted), (found, wanted)
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            same_state(found[key], value)
    elif isinstance(wanted, Tensor):
        torch.testing.assert_close(found, wanted)
    else:
        assert found == wanted


def trained(rank: int, seed: int = 0, **kwargs: Any) -> tuple[nn.Sequential, nn.Sequential, Any, Any]:
    model, plain = both(seed=seed, **kwargs)
    ours, theirs = adamw(model), adamw(plain)
    for _ in range(2):
        for optimizer, loss in zip((ours, theirs), losses(model, plain, rank), strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, plain, ours, theirs


def states(rank: int, folder: str) -> None:
    """Whole states are a plain model's, both ways; parts go through DCP."""
    model, plain, ours, theirs = trained(rank)
    same_state(dict(get_model_state_dict(model, options=WHOLE)), dict(get_model_state_dict(plain)))
    found: Any = get_optimizer_state_dict(model, ours, options=WHOLE)
    wanted: Any = get_optimizer_state_dict(plain, theirs)
    same_state(found["state"], wanted["state"])
    assert found["param_groups"][0]["params"] == wanted["param_groups"][0]["params"]
    once = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert (not once) if rank else once.keys() == plain.state_dict().keys()

    other, _ = both(seed=7)
    fresh = adamw(other)
    set_model_state_dict(other, plain.state_dict(), options=WHOLE)
    set_optimizer_state_dict(other, fresh, wanted, options=WHOLE)
    same_state(dict(get_model_state_dict(other, options=WHOLE)), dict(plain.state_dict()))
    same_state(get_optimizer_state_dict(other, fresh, options=WHOLE)["state"], wanted["state"])

    first, _ = both(seed=8)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(first, {} if rank else plain.state_dict(), options=options)
    same_state(dict(get_model_state_dict(first, options=WHOLE)), dict(plain.state_dict()))
    begun = adamw(first)
    set_optimizer_state_dict(first, begun, {} if rank else wanted, options=options)
    same_state(get_optimizer_state_dict(first, begun, options=WHOLE)["state"], wanted["state"])

    weights, state = get_state_dict(model, ours, options=StateDictOptions(cpu_offload=True))
    torch.distributed.checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    last, _ = both(seed=9)
    new = adamw(last)
    weights, state = get_state_dict(last, new)
    loaded = {"model": weights, "optimizer": state}
    torch.distributed.checkpoint.load(loaded, checkpoint_id=folder)
    set_state_dict(last, new, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    same_state(dict(get_model_state_dict(last, options=WHOLE)), dict(plain.state_dict()))
    same_state(get_optimizer_state_dict(last, new, options=WHOLE)["state"], wanted["state"])
    dist.barrier()


def test_states_of_torchs_own_functions(tmp_path: Path) -> None:
    run_ranks(states, WORLD, str(tmp_path / "checkpoint"))


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda x: x.norm(),
    "norm of order 1": lambda x: torch.norm(x.detach(), 1),
    "norm of order inf": lambda x: x.norm(p=float("inf")),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, 3.0),
    "linalg.norm": lambda x: torch.linalg.norm(x),
    "data.norm": lambda x: x.data.norm(2),
    "squares": lambda x: (x**2).sum(),
    "sum in fp64": lambda x: x.sum(dtype=torch.float64),
    "mean": lambda x: x.abs().mean(),
    "max": lambda x: x.max(),
    "min": lambda x: torch.min(x),
    "amax": lambda x: x.amax(),
    "any": lambda x: (x > 0.4).any(),
    "all": lambda x: torch.isfinite(x).all(),
    "count": lambda x: (x > 0).count_nonzero(),
    "std": lambda x: x.std(),
    "var": lambda x: x.var(unbiased=False),
    "all elements": lambda x: x[...].sum() + x[:].sum(),
    "masked": lambda x: x.masked_fill(x > 0.1, 3.0).sum(),
    "dot": lambda x: torch.sum(x * x.clone()),
    "nan": lambda x: torch.where(x > 0, torch.nan, x).max(),
    "foreach": lambda x: torch._foreach_norm([x])[0],
    "isclose": lambda x: torch.isclose(x, x.clone().mul_(2)).all(),
    "clone": lambda x: x.clone().mul_(2).norm(),
    "deepcopy": lambda x: copy.deepcopy(x).norm(),
    "mean by hand": lambda x: (x**2).sum() / x.numel(),
    "by rows": lambda x: x.sum() / len(x) + x.sum() / x.shape[0] + x.sum() / x.size(-1) + x.sum() * x.ndim,
    "view": lambda x: x.view(-1).mul(2).norm(),
    "other views": lambda x: x.reshape(x.shape).flatten().unsqueeze(0).sum() + x.view_as(x).reshape(1, -1).sum(),
}  # fmt: skip
"""What programs compute by hand from all elements."""


class Lamb(torch.optim.Optimizer):
    """Scales each parameter's update by norms of the whole parameter (You et al. 2020)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                update = param.grad / (param.grad.abs().mean() + 1e-3)
                param.sub_(group["lr"] * param.norm() / (update.norm() + 1e-6) * update)


MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "AdamW, one by one": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "LAMB": lambda params: Lamb(params, lr=0.01),
}


def optimized(rank: int, names: list[str]) -> None:
    for name, strategy in itertools.product(names, ("optim_grads_params", "no_shard")):
        model, plain = both(strategy)
        ours, theirs = MAKE[name](model.parameters()), MAKE[name](plain.parameters())
        for _ in range(2):
            for optimizer, loss in zip((ours, theirs), losses(model, plain, rank), strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        with naming(f"{name}, {strategy}"):
            for shard, param in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(local(shard), here(shard, param))
            for one, other in zip(ours.state.values(), theirs.state.values(), strict=True):
                for key, value in other.items():
                    if isinstance(value, Tensor):
                        torch.testing.assert_close(whole(one[key]), value)


def test_optimizers_learn_as_without_sharding() -> None:
    run_ranks(optimized, WORLD, list(MAKE))


def numbers(rank: int, replicas: int) -> None:
    mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("replicate", "shard")) if replicas > 1 else None
    plain = model_of(0)
    model = copy.deepcopy(plain)
    hocket.fully_shard(model, units=Block, mesh=mesh)
    x = torch.randn(4, 12)
    for one in (plain, model):
        one(x).square().sum().backward()
    pairs = [*zip(plain.named_parameters(), model.parameters(), strict=True)]
    for (name, param), shard in pairs[:2] if mesh else pairs[-3:]:  # a matrix, a vector; two rows
        assert isinstance(shard, DTensor)
        for key, of in NUMBERS.items():
            with torch.no_grad(), naming(f"{name}: {key}"):
                for ours, wanted in ((shard, param), (shard.data, param.data), (shard.grad, param.grad)):
                    torch.testing.assert_close(whole(of(ours)), of(wanted), equal_nan=True)
        assert torch.equal(shard.full_tensor(), param)
        assert torch.equal(shard.grad.full_tensor(), param.grad)


@pytest.mark.parametrize("replicas", [1, 2])
def test_numbers_are_those_of_the_whole(replicas: int) -> None:
    run_ranks(numbers, 2 * replicas, replicas)


WRITES: dict[str, Callable[[Any], object]] = {
    "in place": lambda p: p.mul_(2),
    "data": lambda p: p.data.mul_(2),
    "detached": lambda p: p.detach().mul_(2),
    "a view": lambda p: p.view(-1).mul_(2) if p.shape[0] % WORLD == 0 else p.mul_(2),
    "a view of a view": lambda p: p.data.unsqueeze(0).squeeze(0).mul_(2),
    "local": lambda p: p.to_local().mul_(2),
    "foreach": lambda p: torch._foreach_mul_([p], 2.0),
    "foreach of data": lambda p: torch._foreach_mul_([p.data], 2.0),
    "copied": lambda p: p.copy_(p.detach() * 2),
    "out": lambda p: torch.mul(p.detach(), 2, out=p.data),
    "assigned": lambda p: setattr(p, "data", p.detach() * 2),
    "a whole assigned": lambda p: setattr(p, "data", p.full_tensor() * 2),
    "augmented": lambda p: p.__imul__(2),
}
READS: dict[str, Callable[[Any], object]] = {
    "norm": lambda p: p.norm(), "clone": lambda p: p.clone(), "local": lambda p: p.to_local().sum(),
    "average": lambda p: torch.zeros_like(p).lerp_(p, 0.5), "sum": lambda p: p.data.sum(),
    "foreach": lambda p: torch._foreach_add_([torch.zeros_like(p)], [p]),
}  # fmt: skip


def noticed(rank: int) -> None:
    """The next forward computes with what was written, however; what only reads lets nothing be gathered again."""
    model, plain = both()
    ctx = hocket.sharding.context_of(model)
    x = torch.randn(3, 12)
    for name, write in WRITES.items():
        with torch.no_grad():
            for shard, param in zip(model.parameters(), plain.parameters(), strict=True):
                write(shard)
                param.mul_(2)
            assert all(group.stale() for group in ctx.param_groups), name
            torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4, msg=name)
            for shard in (*model.parameters(), *plain.parameters()):
                shard.mul_(0.5)
            model(x)
            for reads, read in READS.items():
                read(next(model.parameters()))
                assert not any(group.stale() for group in ctx.param_groups), reads
    with torch.no_grad():
        next(model.parameters()).grad = torch.ones(12, 12)  # a whole one
    assert torch.equal(next(model.parameters()).grad.full_tensor(), torch.ones(12, 12))
    with pytest.raises(ValueError, match=r"a gradient of shape \(11, 12\) does not fit 0\.weight, which is \(12, 12\)"):
        next(model.parameters()).grad = torch.ones(11, 12)


def test_every_write_is_noticed() -> None:
    run_ranks(noticed, WORLD)


def changed_gradients(rank: int) -> None:
    """Gradients are read in the dtype of the weights, another one than they are added up in; changes are kept."""
    plain = model_of(0)
    model = copy.deepcopy(plain)
    hocket.fully_shard(model, units=Block, precision=hocket.Precision(main=torch.float64))
    for change in (lambda g: g.mul_(0.5), lambda g: g.view_as(g).mul_(0.5), lambda g: torch._foreach_mul_([g], 0.5)):
        for _ in range(2):
            for loss in losses(model, plain, rank):
                loss.backward()
        with torch.no_grad():
            for one in (*model.parameters(), *plain.parameters()):
                change(one.grad)
        for loss in losses(model, plain, rank):
            loss.backward()
        for shard, param in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(local(shard.grad).float(), here(shard, param.grad))
        model.zero_grad()
        plain.zero_grad()


def test_changed_gradients_are_added_to() -> None:
    run_ranks(changed_gradients, WORLD)


def initialized(rank: int) -> None:
    """A model from the meta device has the values of a plain one with the same seed."""
    with torch.device("meta"):
        model = model_of(0)
    hocket.fully_shard(model, units=Block, options=hocket.ShardOptions(device="cpu"))
    model.to_empty(device="cpu")
    plain = model_of(0)
    for one in (model, plain):
        torch.manual_seed(3)
        for param in one.parameters():
            if param.ndim > 1:
                nn.init.trunc_normal_(param, std=0.2)
                nn.init.kaiming_uniform_(param)
            else:
                param.data.normal_()
                nn.init.uniform_(param)
    for shard, param in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(local(shard), here(shard, param))


def test_random_numbers_are_those_of_a_plain_model() -> None:
    run_ranks(initialized, WORLD)


def leaving(rank: int) -> None:
    """Copies are ordinary DTensors; a loss of shards, hooks on them and kernels that go by addresses are refused."""
    model, _ = both()
    model(torch.ones(2, 12)).sum().backward()
    weight = next(model.parameters())
    twin = copy.deepcopy(weight)
    assert type(twin) is DTensor
    assert isinstance(twin, nn.Parameter)
    buffer = io.BytesIO()
    torch.save({"grad": weight.grad, "state": model.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=False)
    assert torch.equal(saved["grad"].to_local(), weight.grad.to_local())
    assert type(saved["state"]["0.weight"]) is DTensor
    assert weight.grad is weight.grad
    for loss in (weight.square().sum(), weight.norm(), weight.view(-1).sum()):
        with pytest.raises(ValueError, match="a gradient reached the shard"):
            (whole(loss) if isinstance(loss, DTensor) else loss).backward()
    with pytest.raises(ValueError, match=r"register_hook on 0\.weight"):
        weight.register_hook(print)
    with pytest.raises(ValueError, match="use to_local"):
        weight.data_ptr()


def test_what_leaves_the_program() -> None:
    run_ranks(leaving, WORLD)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.layer = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale.exp()


def scalars(rank: int, world: int) -> None:
    """Every rank keeps a single number, and it counts once."""
    plain = Scaled()
    model = copy.deepcopy(plain)
    hocket.fully_shard(model)
    ours, theirs = adamw(model), adamw(plain)
    for step in range(3):
        x = torch.randn(world, 4, 12, generator=torch.Generator().manual_seed(step))
        model(x[rank]).square().mean().backward()
        plain(x.flatten(0, 1)).square().mean().backward()
        wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        found = hocket.clip_grad_norm_(model, 0.5)
        torch.testing.assert_close(found.float(), wanted)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(next(model.parameters()).full_tensor(), plain.scale.detach())


def test_a_single_number_is_on_all_ranks() -> None:
    run_ranks(scalars, WORLD, WORLD)
