"""Functions of torch that look at all gradients or all state, on a sharded model: as on a plain one."""

# pyrefly: ignore-errors
from __future__ import annotations

import copy
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

import hocket
from hocket.fsdp.part import plain as plain_part
from tests.fsdp.twin import Case, Pair, naming
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
    return nn.Sequential(nn.Linear(12, 12), Block(), Block(), nn.Linear(12, 1, bias=False))


def both(strategy: str = "optim_grads_params", seed: int = 0) -> tuple[nn.Sequential, nn.Sequential]:
    plain = model_of(seed)
    model = copy.deepcopy(plain)
    hocket.fully_shard(model, units=Block, strategy=strategy)
    return model, plain


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


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
            torch.testing.assert_close(found, wanted)
            torch.testing.assert_close(total, wanted)
            for shard, param in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(plain_part(shard.grad), param.grad.flatten()[shard.lo : shard.hi])
    model, plain = both()
    if rank == 0:
        with torch.no_grad():
            plain[0].weight.fill_(float("inf"))
    next(iter(losses(model, plain, rank))).backward()
    for shard in model.parameters():
        shard.grad.fill_(float("nan") if rank else 0.0)
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="norm_type=0 of sharded gradients"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=0)


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
def test_the_norm_is_that_of_all_ranks(strategy: str) -> None:
    run_ranks(norms, WORLD, strategy)


def scaled(rank: int) -> None:
    """One rank's infinity has all skip the step and halve the scale."""
    model, plain = both()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2) for _ in optimizers]
    for step in range(5):
        for optimizer, scaler, loss in zip(optimizers, scalers, losses(model, plain, rank), strict=True):
            scaler.scale(loss).backward()
            if step == 2:
                first = optimizer.param_groups[0]["params"][0]
                if optimizer is optimizers[1] or rank == 0:
                    plain_part(first.grad).view(-1)[0] = float("inf")
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert scalers[0].get_scale() == 2.0**5
    for shard, param in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(shard.to_local(), param.detach().flatten()[shard.lo : shard.hi])


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
    for flat in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, flatten_optimizer_state_dict=flat)
        sent: Any = get_optimizer_state_dict(plain, theirs, options=StateDictOptions(flatten_optimizer_state_dict=flat))
        begun = adamw(first)
        set_optimizer_state_dict(first, begun, None if rank else sent, options=options)
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
    with pytest.raises(ValueError, match=r"give the module that hocket\.fully_shard was given"):
        get_model_state_dict(nn.Sequential(last))
    dist.barrier()


def test_states_of_torchs_own_functions(tmp_path: Path) -> None:
    run_ranks(states, WORLD, str(tmp_path / "checkpoint"))


def experts_alone(rank: int, strategies: list[str], experts: int) -> None:
    """Experts that one rank keeps whole, and no other has: all count, and the infinity of one counts for all."""
    for strategy in strategies:
        pair = Pair(Case("moe", strategy, experts=experts), rank, dist.get_world_size())
        for p in (2.0, float("inf")):
            pair.microbatch()
            grads = [param.grad for param in pair.module.parameters() if param.grad is not None]
            found = torch.nn.utils.get_total_norm(grads, p)
            twin = {id(g): g.total for g in pair.twin.gradients.values() if g.total is not None}
            wanted = torch.nn.utils.get_total_norm(list(twin.values()), p)
            with naming(f"{strategy}, {experts}, {p}"):
                torch.testing.assert_close(found, wanted)
                torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(pair.module.parameters(), 0.1, p), wanted)
            pair.optimizer.zero_grad()
            pair.forget()
        if strategy != "no_shard":
            continue
        pair.microbatch()
        mine = next(p for name, p in pair.module.named_parameters() if ".experts." in name and p.grad is not None)
        if rank == 0:
            plain_part(mine.grad).fill_(float("inf"))
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer := torch.optim.SGD([mine], lr=1.0))
        scaler.update()
        assert scaler.get_scale() == 0.5, strategy
        assert not optimizer.state


@pytest.mark.parametrize(("world", "experts"), [(2, 2), (4, 2), (4, 4)])
def test_norms_with_experts_that_one_rank_has(world: int, experts: int) -> None:
    run_ranks(experts_alone, world, ["no_shard", "optim", "optim_grads_params"], experts)
