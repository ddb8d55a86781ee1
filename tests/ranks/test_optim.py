"""AdamW on shards, on one to four gloo ranks, against plain AdamW on whole parameters: the same bits."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from hocket.fsdp.planned.model import PlannedModel
from hocket.fsdp.planned.optimizer import AdamWOptions, PlannedAdamW
from hocket.program.mesh import Mesh
from hocket.program.ops import Layout, Program
from hocket.runtime.comm import make_groups
from tests.helpers.ranks import run_ranks
from tests.helpers.units import CPU, SLOTS, add_grads, build, build_module, tensors

OPTIONS = AdamWOptions(lr=1e-2, clip=0.7)


def rank_grads(seed, name, ep):
    """The gradient that one rank contributes; for experts, the rows of `ep` ranks have met in it."""
    return torch.stack([tensors(seed + e)[name] for e in range(ep)]).sum(0)


def but_some(name, shape):
    return len(shape) > 1 and not name.endswith(("wo", "embed.weight")) and "experts" not in name


def reference_steps(mesh, steps, averages=torch.float32, decays=OPTIONS.decays):
    """Plain AdamW on whole tensors. The gradient of rank r in step i is `tensors(10 * i + r)`.

    Averages are rounded to `averages` behind every step.
    """
    params = {name: value.clone().requires_grad_() for name, value in tensors(5).items()}
    decay = [p for name, p in params.items() if decays(name, p.shape)]
    rest = [p for name, p in params.items() if not decays(name, p.shape)]
    adamw = torch.optim.AdamW(
        [{"params": decay, "weight_decay": OPTIONS.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=OPTIONS.lr, betas=OPTIONS.betas, eps=OPTIONS.eps,
    )  # fmt: skip
    norms = []
    for i in range(steps):
        for name, param in params.items():
            grad = torch.zeros(param.shape)
            for first in range(0, mesh.dp, ep := mesh.ep if ".experts." in name else 1):
                grad += rank_grads(10 * i + first, name, ep)
            param.grad = grad * (1 / mesh.dp)
        norm = torch.stack([p.grad.double().square().sum() for p in params.values() if p.grad is not None]).sum().sqrt()
        norms.append(norm.item())
        for param in params.values():
            assert param.grad is not None
            param.grad *= (OPTIONS.clip / (norm + 1e-6)).clamp(max=1.0).float()
        adamw.param_groups[0]["lr"] = adamw.param_groups[1]["lr"] = OPTIONS.lr * (i + 1)
        adamw.step()
        for state in adamw.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to(averages).float()
    return {name: p.detach() for name, p in params.items()}, norms


def _train(rank, mesh, steps, averages=torch.float32, later=False, decays=OPTIONS.decays):
    model, groups = build(rank, mesh)
    model.load(tensors(5))
    optimizer = PlannedAdamW(model, groups.control, replace(OPTIONS, averages=averages, decays=decays))
    norms = []
    for i in range(steps):
        grads = tensors(10 * i + rank)
        for name in (n for n in grads if ".experts." in n):
            grads[name] = rank_grads(10 * i + rank - rank % mesh.ep, name, mesh.ep)
        add_grads(model, grads)
        norms.append(optimizer.judge(OPTIONS.lr * (i + 1)).item())
        optimizer.apply(later)
        optimizer.catch_up()
    assert optimizer.steps == steps
    assert {s.exp_avg.dtype for s in optimizer.state.values()} == {averages}
    assert not any(unit.group.grads.nbytes for unit in model.units.values())
    pieces = [(s.piece.name, s.piece.lo, s.piece.hi, s.piece.main.clone()) for s in optimizer.state.values()]
    dense = model.unit("dense", 0, 1)
    if not dense.whole:
        dense.gather(1).wait()
    return pieces, norms, {weight.name: weight.tensor().clone() for weight in dense.weights}


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2), Mesh(dp=4), Mesh(dp=4, ep=2), Mesh(dp=4, ep=4)], ids=str)
def test_adamw_on_shards_equals_adamw_on_whole_parameters(mesh):
    steps = 3
    expected, norms = reference_steps(mesh, steps)
    for pieces, found_norms, gathered in run_ranks(_train, mesh.world, mesh, steps):
        assert found_norms == pytest.approx(norms, rel=1e-12)
        assert norms[0] > OPTIONS.clip
        for name, lo, hi, value in pieces:
            assert torch.equal(value, expected[name].flatten()[lo:hi]), name
        for name, value in gathered.items():
            assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("later", [False, True])
def test_weights_that_are_left_out_do_not_decay(later):
    mesh = Mesh(dp=4, ep=2)
    expected, _ = reference_steps(mesh, 3, decays=but_some)
    for pieces, *_ in run_ranks(_train, mesh.world, mesh, 3, torch.float32, later, but_some):
        for name, lo, hi, value in pieces:
            assert torch.equal(value, expected[name].flatten()[lo:hi]), name
    everything, _ = reference_steps(mesh, 3)
    differ = {name for name, value in expected.items() if not torch.equal(value, everything[name])}
    assert differ == {name for name, value in expected.items() if value.ndim > 1 and not but_some(name, value.shape)}
    assert len(differ) > 2


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=4, ep=2)], ids=str)
def test_averages_in_bf16_are_rounded_behind_every_update(mesh, later):
    expected, _ = reference_steps(mesh, 3, torch.bfloat16)
    exact, _ = reference_steps(mesh, 3)
    for pieces, *_ in run_ranks(_train, mesh.world, mesh, 3, torch.bfloat16, later):
        for name, lo, hi, value in pieces:
            assert torch.equal(value, expected[name].flatten()[lo:hi]), name
    assert not any(torch.equal(value, exact[name]) for name, value in expected.items() if value.numel() > 8)


def _resume(rank, mesh, averages):
    model, groups = build(rank, mesh)
    model.load(tensors(5))
    options = replace(OPTIONS, averages=averages)
    first = PlannedAdamW(model, groups.control, options)
    add_grads(model, tensors(rank))
    first.judge()
    first.apply()
    weights = {name: state.piece.main.clone() for name, state in first.state.items()}
    moments = {name: (state.exp_avg.clone(), state.exp_avg_sq.clone()) for name, state in first.state.items()}
    add_grads(model, tensors(10 + rank))
    first.judge()
    first.apply()
    expected = {name: state.piece.main.clone() for name, state in first.state.items()}
    second = PlannedAdamW(model, groups.control, options)
    for name, state in second.state.items():
        state.piece.main.copy_(weights[name])
        state.exp_avg.copy_(moments[name][0])
        state.exp_avg_sq.copy_(moments[name][1])
    second.steps = 1
    add_grads(model, tensors(10 + rank))
    second.judge()
    second.apply()
    assert all(torch.equal(state.piece.main, expected[name]) for name, state in second.state.items())
    return len(expected)


@pytest.mark.parametrize("averages", [torch.float32, torch.bfloat16], ids=str)
def test_state_can_be_taken_and_put_back(averages):
    run_ranks(_resume, 2, Mesh(dp=2), averages)


def _tiny(rank, world):
    """Fewer elements than ranks: some ranks keep nothing at all."""
    groups = make_groups(Mesh(dp=world), rank, CPU, "gloo")
    chunk = nn.ModuleDict({"head": nn.ParameterDict({"norm": nn.Parameter(torch.empty(3, device="meta"))})})
    program = Program(Layout(("dense",)), 1, (), weight_slots=SLOTS, grad_slots=SLOTS)
    model = PlannedModel([chunk], Mesh(dp=world), groups, program, torch.float32, CPU)
    model.load({"head.norm": torch.ones(3)})
    optimizer = PlannedAdamW(model, groups.control, AdamWOptions(lr=0.1, clip=0.0))
    unit = model.unit("head", 0)
    (view,) = unit.grad_views(0).values()
    view.fill_(1.0)
    unit.zero_missing(0, unit.weights)
    unit.reduce(0).wait()
    norm = optimizer.judge()
    optimizer.apply()
    assert norm.item() == pytest.approx(3**0.5)
    unit.gather(0).wait()
    assert torch.allclose(unit.weights[0].tensor(), torch.full((3,), 0.9))
    return len(optimizer.state)


def test_ranks_that_keep_nothing_take_part():
    assert run_ranks(_tiny, 4, 4) == [1, 1, 1, 0]


def test_without_communication_a_step_stays_finite():
    """The null transport needs no process group; slots hold numbers like weights, not what memory held before."""
    mesh = Mesh(pp=1, dp=4, ep=2)
    groups = make_groups(mesh, 3, CPU, "null")
    program = Program(Layout(("dense", "moe"), ep=2), 1, (), weight_slots=SLOTS, grad_slots=SLOTS)
    model = PlannedModel([build_module(2)], mesh, groups, program, torch.bfloat16, CPU)
    model.load(tensors(1, scale=0.02))
    unit = model.unit("dense", 0, 0)
    assert unit.gather(0).done
    assert all(weight.tensor().float().abs().max() < 1 for weight in unit.weights)
    assert all(weight.tensor().any() for weight in unit.weights)
    unit.release()
    optimizer = PlannedAdamW(model, groups.control, OPTIONS)
    add_grads(model, tensors(2))
    assert optimizer.judge().isfinite()
    optimizer.apply()
    model.assert_clean()
