"""Muon on shards, on one to four gloo ranks, against `torch.optim.Muon` on whole matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hocket
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.fsdp.planned.muon import orthogonal
from hocket.fsdp.planned.optimizer import AdamWOptions, MuonOptions, PlannedAdamW, matrices_of
from hocket.model.source import parameter_shapes
from hocket.program.mesh import Mesh
from hocket.step import PlannedStep
from tests.helpers.parity import batches_of, config, learn, whole
from tests.helpers.ranks import run_ranks
from tests.helpers.units import add_grads, build, tensors

LR, MOMENTUM, DECAY = 1e-2, 0.95, 0.1


def takes(name: str, shape: Any) -> bool:
    return name.startswith("layers.") and len(shape) == (3 if ".experts." in name else 2)


def decays(name: str, shape: Any) -> bool:
    return len(shape) > 1 and not name.endswith("wq")


def options(scale: Any) -> AdamWOptions:
    muon = MuonOptions(takes, decays, DECAY, MOMENTUM, scale)
    return AdamWOptions(lr=LR, clip=0.0, decays=decays, muon=muon)


def grads_of(step: int, rank: int, mesh: Mesh) -> Mapping[str, Tensor]:
    """What a rank contributes; for experts, the rows of all expert-parallel ranks have met in it."""
    first = rank - rank % mesh.ep
    of_all = [tensors(10 * step + first + other) for other in range(mesh.ep)]
    mine = tensors(10 * step + rank)
    return {n: torch.stack([o[n] for o in of_all]).sum(0) if ".experts." in n else x for n, x in mine.items()}


def summed(step: int, mesh: Mesh) -> dict[str, Tensor]:
    """The mean of what ranks contribute, added up in their order."""
    total = {name: torch.zeros_like(value) for name, value in tensors(0).items()}
    for rank in range(mesh.dp):
        for name, grad in grads_of(step, rank, mesh).items():
            if ".experts." not in name or rank % mesh.ep == 0:
                total[name] += grad
    return {name: grad * (1 / mesh.dp) for name, grad in total.items()}


def reference(first: Mapping[str, Tensor], steps: list[dict[str, Tensor]], scale: str) -> dict[str, Tensor]:
    """torch's Muon and AdamW on whole matrices, each expert's one of its own, by the gradients of each step."""
    params = {name: value.clone() for name, value in first.items()}
    matrices = {
        name: [m.clone().contiguous().requires_grad_() for m in matrices_of(name, value)]
        for name, value in params.items()
        if takes(name, value.shape)
    }
    groups = [
        {"params": parts, "weight_decay": DECAY * decays(name, params[name].shape)} for name, parts in matrices.items()
    ]
    muon = torch.optim.Muon(groups, lr=LR, momentum=MOMENTUM, adjust_lr_fn=scale)
    rest = {name: param.requires_grad_() for name, param in params.items() if name not in matrices}
    adamw = torch.optim.AdamW(
        [{"params": [p], "weight_decay": DECAY * decays(name, p.shape)} for name, p in rest.items()],
        lr=LR, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    for grads in steps:
        for name, grad in grads.items():
            if name in matrices:
                for matrix, part in zip(matrices[name], matrices_of(name, grad), strict=True):
                    matrix.grad = part.contiguous()
            else:
                rest[name].grad = grad
        muon.step()
        adamw.step()
    with torch.no_grad():
        for name, parts in matrices.items():
            for view, part in zip(matrices_of(name, params[name]), parts, strict=True):
                view.copy_(part)
    return {name: param.detach() for name, param in params.items()}


def assert_same_way(first: Mapping[str, Tensor], found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same bits, but for those of elements at the end of a shard, which are not vectorised, and what follows."""
    for name, value in found.items():
        if takes(name, value.shape):
            mine, theirs = value - first[name], expected[name] - first[name]
            assert (mine - theirs).norm() < 0.002 * theirs.norm(), name
        else:
            assert torch.equal(value, expected[name]), name


def train(rank: int, mesh: Mesh, steps: int, scale: str, bad: int = -1) -> list[Any]:
    model, groups = build(rank, mesh)
    model.load(tensors(5))
    optimizer = PlannedAdamW(model, groups.control, options(scale))
    for step in range(steps):
        grads = dict(grads_of(step - (0 <= bad < step), rank, mesh))
        if step == bad:
            grads["layers.0.attn.wq"] = torch.full_like(grads["layers.0.attn.wq"], torch.inf)
        add_grads(model, grads)
        optimizer.judge(LR)
        optimizer.apply()
    assert not any(unit.group.grads.nbytes for unit in model.units.values())
    assert set(optimizer.momenta).isdisjoint(optimizer.state)
    pieces = [*(state.piece for state in optimizer.state.values()), *(piece for piece, _ in optimizer.momenta.values())]
    return [(p.name, p.shape, p.lo, p.hi, p.main.clone()) for p in pieces]


MESHES = [Mesh(), Mesh(dp=2), Mesh(dp=4), Mesh(dp=4, ep=2), Mesh(dp=4, ep=4)]


@pytest.mark.parametrize(
    ("mesh", "scale"), [*((mesh, "match_rms_adamw") for mesh in MESHES), (MESHES[-2], "original")], ids=str
)
def test_muon_on_shards_is_muon_on_whole_matrices(mesh: Mesh, scale: str) -> None:
    steps = 3
    expected = reference(tensors(5), [summed(step, mesh) for step in range(steps)], scale)
    found = whole([piece for rank in run_ranks(train, mesh.world, mesh, steps, scale) for piece in rank])
    assert found.keys() == expected.keys()
    assert_same_way(tensors(5), found, expected)


def test_a_skipped_step_moves_nothing() -> None:
    mesh = Mesh(dp=2)
    plain, skipping = (
        whole([piece for rank in run_ranks(train, 2, mesh, steps, "original", bad) for piece in rank])
        for steps, bad in ((2, -1), (3, 1))
    )
    assert all(torch.equal(plain[name], value) for name, value in skipping.items())


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8)])
def test_matrices_together_are_each_of_torchs(shape: tuple[int, int]) -> None:
    from torch.optim._muon import _zeropower_via_newtonschulz

    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    for found, matrix in zip(orthogonal(matrices), matrices, strict=True):
        theirs = _zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
        assert (found - theirs).norm() < 0.01 * theirs.norm()
        values = torch.linalg.svdvals(found.float())
        assert values.min() > 0.3
        assert values.max() < 1.6


def test_what_is_one_matrix() -> None:
    shapes = {name: torch.empty(shape) for name, shape in parameter_shapes(MODEL.model).items()}
    count = {
        name: {tuple(matrix.shape) for matrix in matrices_of(name, value)}
        for name, value in shapes.items()
        if MODEL.optimizer.by_muon(name, value.shape)
    }
    assert count["layers.0.mlp.w_gate_up"] == {(48, 32)}
    assert count["layers.1.experts.w_gate_up"] == {(16, 32)}
    assert len(matrices_of("layers.1.experts.w_gate_up", shapes["layers.1.experts.w_gate_up"])) == 2 * 4
    assert count["layers.1.experts.w_down"] == {(32, 16)}
    assert count["layers.1.attn.wk"] == {(16, 32)}
    assert not {"embed.weight", "head.weight", "layers.0.attn_norm", "head.norm"} & count.keys()
    assert {"layers.1.router.weight", "layers.1.shared.w_down", "layers.1.attn.wo"} <= count.keys()
    kept = changed(MODEL, {"optimizer.adamw": ("*.router.*",)})
    assert not kept.optimizer.by_muon("layers.1.router.weight", (4, 32))
    weight = torch.randn(4, 6, 10)
    gate, up = matrices_of("layers.1.experts.w_gate_up", weight)[2:4]
    assert torch.equal(gate, weight[1, :, :5].T)
    assert torch.equal(up, weight[1, :, 5:].T)


LAYERS = dict(layers=3, dense_layers=(0,), shared_ffn=16, aux_loss=0.01)
MODEL = changed(config(LAYERS, {}, {}, 2, "fp32"), {"optimizer.name": "muon"})


def run(rank: int, c: Any) -> dict[str, Any]:
    engine = Engine(c, rank, torch.device("cpu"))
    engine.init_weights()
    units = engine.sharded.units.values()

    def pieces(of: str) -> list[Any]:
        return [(p.name, p.shape, p.lo, p.hi, getattr(p, of).clone()) for unit in units for p in unit.pieces()]

    found = {"first": pieces("main"), **learn(engine, batches_of(c, 1) * 6, lambda: pieces("grad"))}
    engine.catch_up()
    found["last"] = pieces("main")
    engine.close()
    return found


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [
        (dict(dp=2, ep=2), dict(merge="on", update="next_step")),
        (dict(pp=2, dp=2), dict(strategy="optim", update="next_step")),
        (dict(dp=4, ep=2, shard=2), {}),
        (dict(dp=2), dict(strategy="no_shard")),
    ],
    ids=str,
)
def test_a_plan_trains_with_muon(mesh: dict[str, int], plan: dict[str, Any]) -> None:
    """By its gradients torch's optimizers make the same weights of the whole model."""
    said = {
        "optimizer.name": "muon", "optimizer.no_decay": ("*wq",), "train.clip": 0.0,
    }  # fmt: skip
    c = changed(config(LAYERS, mesh, plan, 2, "fp32"), said)
    ranks = run_ranks(run, c.mesh.world, c)
    first, last = (whole([piece for rank in ranks for piece in rank[of]]) for of in ("first", "last"))
    grads = [whole([piece for rank in ranks for piece in rank["grads"][step]]) for step in range(6)]
    assert_same_way(first, last, reference(first, grads, "match_rms_adamw"))
    losses = next(rank["losses"] for rank in ranks if rank["losses"][0])
    assert sum(losses[-1]) < sum(losses[0]) - 0.3, losses


def test_what_muon_excludes_is_refused_by_name() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    made = LlamaForCausalLM(LlamaConfig(**sizes))
    with pytest.raises(ValueError, match=r"optimizer.name = muon .*: which weights of a model of others are several"):
        hocket.plan_model(made, {"optimizer.name": "muon"})
    alone = {"mesh.dp": 1, "mesh.pp": 1, "mesh.ep": 1, "plan.chunks": 1, "plan.order": "auto"}
    with pytest.raises(ValueError, match=r"optimizer.adamw = .*no weight is named like 'rooter'"):
        hocket.plan("tiny", {**alone, "optimizer.name": "muon", "optimizer.adamw": ("rooter",)}).start()
    assert replace(MODEL).optimizer.name == "muon"


def test_a_planned_step_goes_on_with_its_momenta(tmp_path: Path) -> None:
    said = {"mesh.dp": 1, "mesh.pp": 1, "mesh.ep": 1, "plan.chunks": 1, "train.device": "cpu", "train.microbatches": 2}
    said |= {
        "model.layers": 2,
        "model.dense_layers": (0,),
        "data.sequence_length": 16,
        "precision.compute": "fp32",
        "optimizer.name": "muon",
    }
    plan = hocket.plan("tiny", said)
    shape = 2 * plan.settings.train.sequences, 16
    batches = [torch.randint(256, shape, generator=torch.Generator().manual_seed(n)) for n in range(4)]

    def trained(step: PlannedStep, some: list[Tensor]) -> dict[str, Tensor]:
        for ids in some:
            step((ids, ids.roll(-1, 1)), 1e-2)
        return step.state_dict()

    step, other = plan.start(), plan.start()
    trained(step, batches[:2])
    step.save(tmp_path / "saved")
    expected = trained(step, batches[2:])
    trained(other, batches[3:])
    other.load(tmp_path / "saved")
    found = trained(other, batches[2:])
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    other.load(tmp_path / "saved", optimizer=False)
    assert not any(momentum.any() for _, momentum in other.engine.optimizer.momenta.values())
