"""More ways to write the loop: precision, state, compilation, and what reaches into a model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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
from torch.nn import functional as F

from tests.fsdp.zoo.loops import batch, generator
from tests.fsdp.zoo.program import STEPS, WIDTH, Block, Run, fit, loop, program, stack


def train(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(STEPS)) -> None:
    """The plain loop."""
    for step in steps:
        for seed in run.seeds(step):
            x, y = batch(seed)
            run.backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()


@program("GradScaler")
def scaled(run: Run) -> None:
    model = run.shard(stack(), Block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        for seed in run.seeds(step):
            x, y = batch(seed)
            loss = F.mse_loss(model(x), y)
            run.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    run.note("scale", scaler.get_scale())
    run.note_weights(model)


@program("autocast to bf16")
def autocast(run: Run) -> None:
    model = run.shard(stack(), Block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for seed in run.seeds(step):
            x, y = batch(seed)
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(model(x).float(), y)
            run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    run.note_weights(model)


@program("clip_grad_value_ and learning rates by schedule")
def scheduled(run: Run) -> None:
    model = run.shard(stack(), Block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS + 1)
    for step in range(STEPS):
        for seed in run.seeds(step):
            x, y = batch(seed)
            run.backward(F.mse_loss(model(x), y))
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        schedule.step()
        model.zero_grad()
    run.note_weights(model)


@program("two optimizers of one model")
def two_optimizers(run: Run) -> None:
    model = run.shard(stack(), Block)
    matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim >= 2], lr=0.1, momentum=0.9)
    vectors = torch.optim.Adam([p for p in model.parameters() if p.ndim < 2], lr=1e-2)
    for step in range(STEPS):
        for seed in run.seeds(step):
            x, y = batch(seed)
            run.backward(F.mse_loss(model(x), y))
        for optimizer in (matrices, vectors):
            optimizer.step()
            optimizer.zero_grad()
    run.note_weights(model)


def every_optimizer() -> None:
    kinds: dict[str, Callable[..., Any]] = {
        "Adagrad": torch.optim.Adagrad,
        "Adamax": torch.optim.Adamax,
        "NAdam": torch.optim.NAdam,
        "RAdam": torch.optim.RAdam,
        "RMSprop": torch.optim.RMSprop,
        "Adadelta": torch.optim.Adadelta,
        "AdamW, fused": lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True),
        "ASGD": torch.optim.ASGD,
        "Rprop": torch.optim.Rprop,
    }
    for name, kind in kinds.items():

        def trained(run: Run, kind: Callable[..., Any] = kind) -> None:
            model = run.shard(stack(), Block)
            train(run, model, kind(model.parameters(), lr=1e-2))
            run.note_weights(model)

        program(f"torch.optim: {name}")(trained)


every_optimizer()


def folder(run: Run) -> str:
    """A folder of all ranks, in every form."""
    found = [tempfile.mkdtemp() if run.rank == 0 else None]
    if run.form != "plain":
        dist.broadcast_object_list(found)
    return found[0] or tempfile.mkdtemp()


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@program("DCP: save, load into another model, go on")
def saved(run: Run) -> None:
    model = run.shard(stack(), Block)
    optimizer = _adamw(model)
    train(run, model, optimizer)
    if run.form == "plain":
        train(run, model, optimizer, range(STEPS, 2 * STEPS))
        return run.note_weights(model)
    where = folder(run)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=where)
    torch.manual_seed(9)
    other = run.shard(stack(), Block)
    optimizer = _adamw(other)
    weights, state = get_state_dict(other, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=where)
    set_state_dict(other, optimizer, model_state_dict=weights, optim_state_dict=state)
    train(run, other, optimizer, range(STEPS, 2 * STEPS))
    return run.note_weights(other)


@program("whole state dicts by get_model_state_dict")
def whole_state(run: Run) -> None:
    model = run.shard(stack(), Block)
    optimizer = _adamw(model)
    train(run, model, optimizer)
    options = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(model, options=options)
    state: Any = get_optimizer_state_dict(model, optimizer, options=options)
    for name, value in weights.items():
        run.note(f"state {name}", value)
    for name, values in state["state"].items():
        run.note(f"average {name}", values["exp_avg"])
    other = run.shard(stack(), Block)
    optimizer = _adamw(other)
    set_model_state_dict(other, weights, options=options)
    set_optimizer_state_dict(other, optimizer, state, options=options)
    train(run, other, optimizer, range(STEPS, 2 * STEPS))
    run.note_weights(other)


@program("optimizer.state_dict and load_state_dict on the same ranks")
def optimizer_state(run: Run) -> None:
    model = run.shard(stack(), Block)
    optimizer = _adamw(model)
    train(run, model, optimizer)
    state = optimizer.state_dict()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    train(run, model, optimizer)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    train(run, model, optimizer, range(STEPS, 2 * STEPS))
    run.note_weights(model)


def compiled(whole: bool) -> Callable[[Run], None]:
    def trained(run: Run) -> None:
        model: Any = run.shard(stack(), Block)
        if whole:
            model.compile(backend="aot_eager")
        else:
            for block in model:
                block.compile(backend="aot_eager")
        train(run, model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.note_weights(model)

    return trained


program("compiled blocks", heavy=True)(compiled(False))
program("compiled model", heavy=True)(compiled(True))


@program("forward and backward hooks on modules")
def hooked(run: Run) -> None:
    model = run.shard(stack(), Block)
    seen: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, Block):
            module.register_forward_hook(lambda module, args, out: out * 1.5)
            module.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 0.5,))
            module.norm.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.register_forward_hook(lambda module, args, out: seen.append(out.detach().sum()))
    train(run, model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.note("calls", float(len(seen)) if run.form != "plain" else len(seen) / run.world)
    run.note_weights(model)


class Parts(nn.Module):
    """An encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (
            nn.Sequential(nn.Linear(8, WIDTH), Block()),
            nn.Sequential(Block(), nn.Linear(WIDTH, 8)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


@program("submodules called from outside, which are units")
def called(run: Run) -> None:
    model: Any = Parts()
    run.shard(model, [model.encoder, model.decoder])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for seed in run.seeds(step):
            x, _ = batch(seed)
            run.backward(F.mse_loss(model.decoder(model.encoder(x)), x))
        optimizer.step()
        optimizer.zero_grad()
    run.note_weights(model)


class Chooses(nn.Module):
    """Runs one of its branches; one is never run."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.count = 0

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
def meta(run: Run) -> None:
    with torch.device("meta" if run.form != "plain" else "cpu"):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    values: Any = {name: torch.randn(p.shape, generator=generator(3)) * 0.3 for name, p in model.named_parameters()}
    if run.form == "hocket":
        import hocket

        run.shard(model, nn.Linear, options=hocket.ShardOptions(device="cpu"))
    else:
        run.shard(model, nn.Linear)
    if run.form == "fsdp2":
        model.to_empty(device="cpu")
    if run.form == "plain":
        model.load_state_dict(values)
    else:
        set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for seed in run.seeds(step):
            run.backward(fit(4, 8)(model, generator(seed)))
        optimizer.step()
        optimizer.zero_grad()
    run.note_weights(model)


@program("torch.func.vmap of the model")
def mapped(run: Run) -> None:
    model = run.shard(stack(), Block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for seed in run.seeds(step):
            x, y = batch(seed)
            run.backward(F.mse_loss(torch.func.vmap(model)(x), y))
        optimizer.step()
        optimizer.zero_grad()
    run.note_weights(model)


@program("torch.func.jacrev by inputs, inside of a loss", no="derivatives by torch.func")
def jacobian(run: Run) -> None:
    model = run.shard(stack(), Block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for seed in run.seeds(step):
            x, y = batch(seed)
            slopes = torch.func.jacrev(lambda x, model=model: model(x).sum(0))(x)
            run.backward(F.mse_loss(model(x), y) + slopes.square().mean())
        optimizer.step()
        optimizer.zero_grad()
    run.note_weights(model)


@program("a penalty on model.parameters()", no="autograd through sharded parameters")
def penalized(run: Run) -> None:
    model = run.shard(stack(), Block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for seed in run.seeds(step):
            x, y = batch(seed)
            run.backward(F.mse_loss(model(x), y) + 1e-2 * sum(p.square().sum() for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    run.note_weights(model)


@program("values written to parameters between steps")
def written(run: Run) -> None:
    model = run.shard(stack(), Block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        train(run, model, optimizer, range(step, step + 1))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9).clamp_(-0.3, 0.3)
    run.note_weights(model)


@program("torch.func.functional_call with other weights", no="parameters replaced or moved later")
def called_with(run: Run) -> None:
    model = run.shard(stack(), Block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for seed in run.seeds(step):
            x, y = batch(seed)
            half = {name: p * 0.5 for name, p in model.named_parameters()}
            run.backward(F.mse_loss(torch.func.functional_call(model, half, (x,)), y))
        optimizer.step()
        optimizer.zero_grad()
    run.note_weights(model)


@program("parameters frozen after sharding")
def frozen_later(run: Run) -> None:
    model: Any = run.shard(stack(), Block)
    model[1].requires_grad_(False)
    train(run, model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    run.note_weights(model)


@program("torch.optim: Muon", off=2e-2)  # it computes in bf16
def muon(run: Run) -> None:
    model = run.shard(stack(), Block)
    train(run, model, torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2))
    run.note_weights(model)


@program("torch.optim: Adafactor", no="an optimizer of whole matrices")
def adafactor(run: Run) -> None:
    model = run.shard(stack(), Block)
    train(run, model, torch.optim.Adafactor(model.parameters(), lr=1e-2))
    run.note_weights(model)


@program("gradients scaled by hand")
def scaled_gradients(run: Run) -> None:
    model = run.shard(stack(), Block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for seed in run.seeds(step):
            x, y = batch(seed)
            run.backward(F.mse_loss(model(x), y))
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    run.note_weights(model)


@program("hooks on parameters", no="autograd through sharded parameters")
def parameter_hooks(run: Run) -> None:
    model = run.shard(stack(), Block)
    for p in model.parameters():
        p.register_hook(lambda grad: grad * 0.5)
    train(run, model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.note_weights(model)
