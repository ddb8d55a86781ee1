"""Ways to write the loop around a model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn import functional as F

from tests.fsdp.zoo.program import STEPS, WIDTH, Block, Run, distance, program, stack


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(seed: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = generator(seed)
    return torch.randn(rows, 8, generator=drawn), torch.randn(rows, 4, generator=drawn)


@program("gradient accumulation")
def accumulation(run: Run) -> None:
    model = run.shard(stack(), Block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for microbatch in range(3):
            for seed in run.seeds(10 * step + microbatch):
                x, y = batch(seed)
                run.backward(F.mse_loss(model(x), y) / 3)
        optimizer.step()
        optimizer.zero_grad()
    run.note_weights(model)


@program("torch.nn.utils.clip_grad_norm_")
def clipping(run: Run) -> None:
    model = run.shard(stack(), Block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for seed in run.seeds(step):
            x, y = batch(seed)
            run.backward(F.mse_loss(model(x), y))
        run.note(f"norm {step}", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    run.note_weights(model)


@program("shards on the host (CPUOffloadPolicy)")
def offloaded(run: Run) -> None:
    model = run.shard(stack(), Block, offload_policy=CPUOffloadPolicy(pin_memory=torch.cuda.is_available()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for microbatch in range(2):
            for seed in run.seeds(10 * step + microbatch):
                x, y = batch(seed)
                run.backward(F.mse_loss(model(x), y) / 2)
        run.note(f"norm {step}", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    run.note_weights(model)


@program("EMA of weights")
def ema(run: Run) -> None:
    model = run.shard(stack(), Block)
    averages = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for seed in run.seeds(step):
            x, y = batch(seed)
            run.backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for average, p in zip(averages, model.parameters(), strict=True):
                average.lerp_(p, 0.1)
    with torch.no_grad():
        for p, average in zip(model.parameters(), averages, strict=True):
            p.copy_(average)
    run.note_weights(model)


@program("GAN: two models, two optimizers")
def gan(run: Run) -> None:
    maker = run.shard(nn.Sequential(nn.Linear(8, WIDTH), Block(), nn.Linear(WIDTH, 4)), Block)
    critic = run.shard(nn.Sequential(nn.Linear(4, WIDTH), Block(), nn.Linear(WIDTH, 1)), Block)
    makes, judges = (torch.optim.Adam(model.parameters(), lr=1e-2) for model in (maker, critic))
    for step in range(STEPS):
        for seed in run.seeds(step):
            x, real = batch(seed)
            run.backward(F.softplus(-critic(real)).mean() + F.softplus(critic(maker(x).detach())).mean())
        judges.step()
        judges.zero_grad()
        for seed in run.seeds(step):
            x, _ = batch(seed)
            run.backward(F.softplus(-critic(maker(x))).mean())
        makes.step()
        makes.zero_grad()
        judges.zero_grad()
    run.note_weights(maker, "maker.")
    run.note_weights(critic, "critic.")


@program("eval between steps and microbatches")
def evaluating(run: Run) -> None:
    model = run.shard(stack(), Block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for seed in run.seeds(step):
            x, y = batch(seed)
            run.backward(F.mse_loss(model(x), y))
        model.eval()
        with torch.no_grad():
            run.note(f"validation {step}", F.mse_loss(model(batch(7)[0]), batch(7)[1]))
        model.train()
        for seed in run.seeds(100 + step):
            x, y = batch(seed)
            run.backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            run.note(f"inference {step}", F.mse_loss(model(batch(8)[0]), batch(8)[1]))
    run.note_weights(model)


@program("gradient penalty (create_graph)")
def penalty(run: Run) -> None:
    critic = run.shard(nn.Sequential(nn.Linear(4, WIDTH), Block(), nn.Linear(WIDTH, 1)), Block)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    for step in range(STEPS):
        for seed in run.seeds(step):
            x = torch.randn(4, 4, generator=generator(seed)).requires_grad_()
            (grad,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
            run.backward((grad.norm(dim=-1) - 1).square().mean() + critic(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    run.note_weights(critic)


@program("deepcopy before sharding")
def copied(run: Run) -> None:
    model = stack()
    teacher = run.shard(copy.deepcopy(model).requires_grad_(False), Block)
    model = run.shard(model, Block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for seed in run.seeds(step):
            x, y = batch(seed)
            with torch.no_grad():
                wanted = teacher(x)
            run.backward(F.mse_loss(model(x), y) + F.mse_loss(model(x), wanted))
        optimizer.step()
        optimizer.zero_grad()
    run.note_weights(model)


@program("groups of parameters by ndim")
def by_ndim(run: Run) -> None:
    model = run.shard(stack(), Block)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2
    )
    for step in range(STEPS):
        for seed in run.seeds(step):
            drawn = generator(seed)
            run.backward(distance(model(torch.randn(4, 8, generator=drawn)), drawn))
        optimizer.step()
        optimizer.zero_grad()
    run.note_weights(model)


def between(name: str, change: Callable[[nn.Module, int], object]) -> None:
    """Register the plain loop; `change` sees the gradients of each step, and leaves it out if it returns False."""

    @program(name)
    def train_and_change(run: Run) -> None:
        model = run.shard(stack(), Block)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            for seed in run.seeds(step):
                x, y = batch(seed)
                run.backward(F.mse_loss(model(x), y))
            if change(model, step) is not False:
                optimizer.step()
            optimizer.zero_grad()
        run.note_weights(model)


def clip_by_stack(model: nn.Module, step: int) -> None:
    norm = torch.norm(torch.stack([p.grad.detach().norm(2) for p in grads_of(model)]), 2)
    for p in grads_of(model):
        p.grad.mul_((0.1 / (norm + 1e-6)).clamp(max=1))


def clip_by_numbers(model: nn.Module, step: int) -> None:
    norm = sum(p.grad.data.norm().item() ** 2 for p in grads_of(model)) ** 0.5
    for p in grads_of(model):
        p.grad.data.mul_(min(1.0, 0.1 / norm))


def only_finite(model: nn.Module, step: int) -> bool:
    """One rank has an infinity in the second step, which all leave out."""
    first = next(iter(grads_of(model))).grad
    local = first.to_local() if hasattr(first, "to_local") else first
    if step == 1 and (not dist.is_initialized() or dist.get_rank() == 0 or local is first):
        local.view(-1)[0] = torch.inf
    return all(bool(torch.isfinite(p.grad).all()) for p in grads_of(model))


def within_unit(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.div_(p.abs().max() + 1)


def grads_of(model: nn.Module) -> list[Any]:
    return [p for p in model.parameters() if p.grad is not None]


between("gradients clipped by a norm of norms", clip_by_stack)
between("gradients clipped by norms as numbers", clip_by_numbers)
between("steps left out for infinities", only_finite)
between("weights divided by their largest", within_unit)
