"""Ways to write the loop around a model: accumulation, clipping, state, precision, and what reaches into a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn import functional as F

import hocket
from tests.fsdp.zoo.program import STEPS, WIDTH, Block, Run, fit, loop, program, stack

AGAIN = range(STEPS, 2 * STEPS)
WHOLE = StateDictOptions(full_state_dict=True)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(4, 8, generator=drawn), torch.randn(4, 4, generator=drawn)


def plain(model: Any, seed: int) -> Tensor:
    x, y = batch(seed)
    return F.mse_loss(model(x), y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, foreach=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def train(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Any, int], Tensor] = plain,
    steps: Iterable[int] = range(STEPS),
    microbatches: int = 1,
    change: Callable[[int], object] = lambda step: None,
    after: Callable[[int], object] = lambda step: None,
    none: bool = True,
) -> None:
    """The loop over steps. `change` sees gradients, and leaves a step out if it returns False; `after` sees weights."""
    optimizer = optimizer or sgd(model)
    for step in steps:
        for microbatch in range(microbatches):
            for seed in run.seeds(10 * step + microbatch):
                run.backward(loss(model, seed) / microbatches)
        if change(step) is not False:
            optimizer.step()
        optimizer.zero_grad(set_to_none=none)
        after(step)
    run.note_weights(model)


@program("gradient accumulation")
def _(run: Run) -> None:
    model = run.shard(stack(), Block)
    train(run, model, adamw(model), microbatches=3)


@program("torch.nn.utils.clip_grad_norm_")
def _(run: Run) -> None:
    model = run.shard(stack(), Block)

    def clip(step: int) -> None:
        run.note(f"norm {step}", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))

    train(run, model, adamw(model), change=clip)


@program("shards on the host (CPUOffloadPolicy)")
def _(run: Run) -> None:
    model = run.shard(stack(), Block, offload_policy=CPUOffloadPolicy(pin_memory=torch.cuda.is_available()))

    def clip(step: int) -> None:
        run.note(f"norm {step}", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))

    train(run, model, adamw(model), microbatches=2, change=clip)


@program("EMA of weights")
def _(run: Run) -> None:
    model = run.shard(stack(), Block)
    averages = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def average(step: int) -> None:
        for kept, p in zip(averages, model.parameters(), strict=True):
            kept.lerp_(p, 0.1)

    train(run, model, after=average)
    with torch.no_grad():
        for p, kept in zip(model.parameters(), averages, strict=True):
            p.copy_(kept)
    run.note_weights(model)


@program("GAN: two models, two optimizers")
def _(run: Run) -> None:
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
def _(run: Run) -> None:
    model = run.shard(stack(), Block)

    def between(step: int) -> None:
        model.eval()
        with torch.no_grad():
            run.note(f"validation {step}", plain(model, 7))
        model.train()
        for seed in run.seeds(100 + step):
            run.backward(plain(model, seed))

    def infer(step: int) -> None:
        with torch.inference_mode():
            run.note(f"inference {step}", plain(model, 8))

    train(run, model, change=between, after=infer)


@program("deepcopy before sharding")
def _(run: Run) -> None:
    model = stack()
    teacher = run.shard(copy.deepcopy(model).requires_grad_(False), Block)

    def loss(model: nn.Module, seed: int) -> Tensor:
        x, y = batch(seed)
        with torch.no_grad():
            wanted = teacher(x)
        return F.mse_loss(model(x), y) + F.mse_loss(model(x), wanted)

    train(run, run.shard(model, Block), loss=loss)


def by_ndim(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices, and the rest."""
    return [p for p in model.parameters() if p.ndim >= 2], [p for p in model.parameters() if p.ndim < 2]


@program("groups of parameters by ndim")
def _(run: Run) -> None:
    model = run.shard(stack(), Block)
    groups = [{"params": found, "weight_decay": decay} for found, decay in zip(by_ndim(model), (0.5, 0.0), strict=True)]
    train(run, model, torch.optim.AdamW(groups, lr=1e-2))


@program("two optimizers of one model")
def _(run: Run) -> None:
    model = run.shard(stack(), Block)
    matrices, vectors = by_ndim(model)
    other = torch.optim.Adam(vectors, lr=1e-2)

    def update(step: int) -> None:
        other.step()
        other.zero_grad()

    train(run, model, torch.optim.SGD(matrices, lr=0.1, momentum=0.9), change=update)


def between(name: str, change: Callable[[nn.Module, int], object], after: bool = False) -> None:
    """Register the plain loop; `change` sees the gradients of each step, or the weights `after` it."""

    @program(name)
    def train_and_change(run: Run) -> None:
        model = run.shard(stack(), Block)
        changes = partial(change, model)
        if after:
            train(run, model, after=changes)
        else:
            train(run, model, change=changes)


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


@torch.no_grad()
def within_unit(model: nn.Module, step: int) -> None:
    for p in model.parameters():
        p.div_(p.abs().max() + 1)


@torch.no_grad()
def write(model: nn.Module, step: int) -> None:
    for p in model.parameters():
        p.mul_(0.9).clamp_(-0.3, 0.3)


def grads_of(model: nn.Module) -> list[Any]:
    return [p for p in model.parameters() if p.grad is not None]


between("gradients clipped by a norm of norms", clip_by_stack)
between("gradients clipped by norms as numbers", clip_by_numbers)
between("steps left out for infinities", only_finite)
between("weights divided by their largest", within_unit)
between("values written to parameters between steps", write, after=True)


@program("gradients scaled by hand")
def _(run: Run) -> None:
    model = run.shard(stack(), Block)

    def scale(step: int) -> None:
        for p in grads_of(model):
            p.grad.mul_(0.5)

    train(run, model, change=scale, none=False)


@program("GradScaler")
def _(run: Run) -> None:
    model = run.shard(stack(), Block)
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step_scaled(step: int) -> bool:
        scaler.step(optimizer)
        scaler.update()
        return False

    train(run, model, optimizer, lambda model, seed: scaler.scale(plain(model, seed)), change=step_scaled)
    run.note("scale", scaler.get_scale())


@program("autocast to bf16")
def _(run: Run) -> None:
    def loss(model: nn.Module, seed: int) -> Tensor:
        x, y = batch(seed)
        with torch.autocast("cpu", torch.bfloat16):
            return F.mse_loss(model(x).float(), y)

    train(run, run.shard(stack(), Block), loss=loss)


@program("clip_grad_value_ and learning rates by schedule")
def _(run: Run) -> None:
    model = run.shard(stack(), Block)
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS + 1)

    def clip(step: int) -> None:
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)

    def proceed(step: int) -> None:
        schedule.step()
        model.zero_grad()

    train(run, model, optimizer, change=clip, after=proceed)


def optimizer_of(name: str, kind: Callable[..., Any], **how: Any) -> None:
    """Register the plain loop with an optimizer."""

    @program(f"torch.optim: {name}", **how)
    def trained(run: Run) -> None:
        model = run.shard(stack(), Block)
        train(run, model, kind(model))


for _kind in ("Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta", "ASGD", "Rprop"):
    optimizer_of(_kind, lambda model, kind=_kind: getattr(torch.optim, kind)(model.parameters(), lr=1e-2))
optimizer_of("AdamW, fused", lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
optimizer_of("Muon", lambda model: torch.optim.Muon(by_ndim(model)[0], lr=1e-2), off=2e-2)  # it computes in bf16
optimizer_of("Adafactor", lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2))


@program("optimizer.state_dict and load_state_dict on the same ranks")
def _(run: Run) -> None:
    model = run.shard(stack(), Block)
    optimizer = adamw(model)
    train(run, model, optimizer)
    state = optimizer.state_dict()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    train(run, model, optimizer)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    train(run, model, optimizer, steps=AGAIN)


def compiled(whole: bool) -> Callable[[Run], None]:
    def trained(run: Run) -> None:
        model: Any = run.shard(stack(), Block)
        for part in [model] if whole else model:
            part.compile(backend="aot_eager")
        train(run, model)

    return trained


program("compiled blocks", heavy=True)(compiled(False))
program("compiled model", heavy=True)(compiled(True))


@program("forward and backward hooks on modules")
def _(run: Run) -> None:
    model = run.shard(stack(), Block)
    seen: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, Block):
            module.register_forward_hook(lambda module, args, out: out * 1.5)
            module.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 0.5,))
            module.norm.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.register_forward_hook(lambda module, args, out: seen.append(out.detach().sum()))
    train(run, model)
    run.note("calls", float(len(seen)) if run.form != "plain" else len(seen) / run.world)


@program("submodules called from outside, which are units")
def _(run: Run) -> None:
    model: Any = nn.ModuleDict(
        {
            "encoder": nn.Sequential(nn.Linear(8, WIDTH), Block()),
            "decoder": nn.Sequential(Block(), nn.Linear(WIDTH, 4)),
        }
    )
    run.shard(model, list(model.values()))
    train(run, model, loss=lambda model, seed: plain(lambda x: model["decoder"](model["encoder"](x)), seed))


class Chooses(nn.Module):
    """Runs one of its branches; one is never run."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branches[0 if x.sum() > 1e9 else 1](x)


loop("conditional branches, unused parameters", lambda: nn.Sequential(Chooses(), Chooses()), fit(4, 8), nn.Linear)


class Weighted(nn.Module):
    """Uses another module's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Linear(8, WIDTH), Block()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.block(self.embed(x)), self.embed.weight.T)


loop("a weight read by another module", Weighted, fit(4, 8), (nn.Linear, Block))


@program("meta device, then to_empty or reset_parameters")
def _(run: Run) -> None:
    with torch.device("meta" if run.form != "plain" else "cpu"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    drawn = torch.Generator().manual_seed(3)
    values: Any = {name: torch.randn(p.shape, generator=drawn) * 0.3 for name, p in model.named_parameters()}
    run.shard(model, nn.Linear, **({"options": hocket.ShardOptions(device="cpu")} if run.form == "hocket" else {}))
    if run.form == "fsdp2":
        model.to_empty(device="cpu")
    if run.form == "plain":
        model.load_state_dict(values)
    else:
        set_model_state_dict(model, values, options=WHOLE)
    train(run, model)


def loss_of(name: str, loss: Callable[[Any, int], Tensor], no: str = "") -> None:
    """Register the plain loop with another loss."""
    program(name, no=no)(lambda run: train(run, run.shard(stack(), Block), loss=loss))


def jacobian(model: nn.Module, seed: int) -> Tensor:
    return plain(model, seed) + torch.func.jacrev(lambda x: model(x).sum(0))(batch(seed)[0]).square().mean()


def penalized(model: nn.Module, seed: int) -> Tensor:
    return plain(model, seed) + 1e-2 * sum(p.square().sum() for p in model.parameters())


def called_with(model: nn.Module, seed: int) -> Tensor:
    half = {name: p * 0.5 for name, p in model.named_parameters()}
    return plain(lambda x: torch.func.functional_call(model, half, (x,)), seed)


loss_of("torch.func.vmap of the model", lambda model, seed: plain(torch.func.vmap(model), seed))
loss_of("torch.func.jacrev by inputs, inside of a loss", jacobian, no="derivatives by torch.func")
loss_of("a penalty on model.parameters()", penalized, no="autograd through sharded parameters")
loss_of("torch.func.functional_call with other weights", called_with, no="parameters replaced or moved later")


@program("parameters frozen after sharding")
def _(run: Run) -> None:
    model: Any = run.shard(stack(), Block)
    model[1].requires_grad_(False)
    train(run, model)


@program("hooks on parameters", no="autograd through sharded parameters")
def _(run: Run) -> None:
    model = run.shard(stack(), Block)
    for p in model.parameters():
        p.register_hook(lambda grad: grad * 0.5)
    train(run, model)
