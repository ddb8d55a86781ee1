"""A planned run on real ranks against the plain sequential one: losses, gradients, weights, bit for bit.

Ranks import the modules of their functions: so this one has no tests, and does nothing when it is imported.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hocket.config import Config, DataConfig, MeshConfig, PrecisionConfig, TrainConfig
from hocket.engine import Engine
from hocket.engine import engine as engine_module
from hocket.layers.linears import linears_of
from hocket.program.stages import layout_of
from hocket.runtime.weights import DTYPES
from tests.helpers.plans import planned, small
from tests.helpers.ranks import run_ranks
from tests.helpers.stats import stats_of
from tests.reference import Batch, Reference, Result, awkward_batches, microbatch, random_batches

STEPS = 2
LR = 1e-2

Piece = tuple[str, tuple[int, ...], int, int, Tensor]
"""Name, whole shape, first and end element, values."""


def config(model: dict[str, Any], mesh: dict[str, int], plan: dict[str, Any], microbatches: int, dtype: Any) -> Config:
    """A small model, with settings of the model, of the mesh, and of plan and overlap under short names."""
    whole = Config(
        model=small(**model),
        mesh=MeshConfig(**mesh),
        precision=PrecisionConfig(compute=dtype),
        data=DataConfig(sequence_length=8),
        train=TrainConfig(
            microbatches=microbatches, sequences=2, transport="gloo",
            betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip=0.5,
        ),
    )  # fmt: skip
    return planned(whole, **plan)


def one_checks(rank: int) -> None:
    """In this process alone: the first rank checks the program, which is that of all ranks."""
    if rank:
        engine_module.assert_valid = lambda program, forward_only=False: None


def train(rank: int, config: Config, steps: list[list[list[Batch]]]) -> dict[str, Any]:
    """One rank of a planned run. New memory holds nan, so reads of memory that was not written show up."""
    torch.use_deterministic_algorithms(True)
    one_checks(rank)
    Engine.lane_seed = config.train.microbatches  # in this process alone
    engine = Engine(config, rank, torch.device("cpu"))
    engine.init_weights()
    units = engine.sharded.units.values()
    out = learn(
        engine, steps, lambda: [(p.name, p.shape, p.lo, p.hi, p.grad.clone()) for u in units for p in u.pieces()]
    )
    out["coordinates"] = engine.where
    engine.catch_up()
    out["weights"] = [(p.name, p.shape, p.lo, p.hi, p.main.clone()) for u in units for p in u.pieces()]
    out["biases"] = {f"layers.{n}.router.bias": layer.router.bias for n, layer in engine.balance.layers.items()}
    out["stats"] = dataclasses.asdict(stats_of(engine.sharded))
    engine.close()
    return out


def learn(engine: Engine, steps: list[list[list[Batch]]], grads: Callable[[], object]) -> dict[str, Any]:
    """Train, and keep losses, norms, and what `grads` says before every update."""
    out: dict[str, Any] = {"losses": [], "grads": [], "norms": []}
    finish = engine.optimizer.apply

    def apply(**how: Any) -> None:
        out["grads"].append(grads())
        finish(**how)

    engine.optimizer.apply = apply  # type: ignore[method-assign]
    for microbatches in steps:
        result = engine.train_step([microbatch(batches[engine.where.dp]) for batches in microbatches], LR)
        out["losses"].append([loss.item() for loss in engine.executor.actions.losses])
        out["norms"].append(float(result.grad_norm))
        engine.assert_clean()
    out["agreed"] = engine.agree(result.loss)[0]
    return out


def whole(pieces: list[Piece]) -> dict[str, Tensor]:
    """Whole tensors from the pieces of all ranks; every element is kept by one of them, or alike by all who have it."""
    out: dict[str, Tensor] = {}
    held: dict[tuple[str, int, int], Tensor] = {}
    for name, shape, lo, hi, values in pieces:
        assert torch.equal(held.setdefault((name, lo, hi), values), values), name
        out.setdefault(name, torch.full((math.prod(shape),), math.nan))[lo:hi] = values
    seen: dict[str, int] = {}
    for name, lo, hi in held:
        seen[name] = seen.get(name, 0) + hi - lo
    assert all(seen[name] == tensor.numel() for name, tensor in out.items())
    shapes = {name: shape for name, shape, *_ in pieces}
    return {name: tensor.view(shapes[name]) for name, tensor in out.items()}


def dims_of(param: Tensor) -> int:
    """Dimensions of a parameter, of stacked ones those of one expert's."""
    return param.dim() - getattr(param, "stacked", False)


LINEAR = 1.0
"""An epsilon of AdamW beside which gradients are small, so that its updates are linear in them. With a small one it
divides gradients by themselves, and rounding, which is the CPU's, grows as they do."""


def adamw(params: list[Tensor], eps: float = 1e-8) -> torch.optim.Optimizer:
    """The optimizer that the settings of `config` ask for: no weight decay for vectors."""
    groups = [
        {"params": [p for p in params if dims_of(p) >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if dims_of(p) < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=eps, foreach=True)


def assert_parity(c: Config, batches: list[list[list[Batch]]] | None = None) -> None:
    batches = batches or batches_of(c)
    dtype, strategy = DTYPES[c.precision.dtype], c.overlap.dp.strategy
    assert strategy != "auto"
    per_rank = c.overlap.ep.copies == "per_rank" and c.mesh.ep > 1  # with one rank every expert has its own row
    wire = DTYPES.get(c.precision.wire)
    clip = c.train.clip or math.inf
    how = clip, adamw, strategy, per_rank, wire, c.mesh.shard, linears_of(c)
    plain = Reference(c.model, c.mesh.dp, c.mesh.ep, dtype, 0, *how, bool(layout_of(c).apart))
    reference = plain.run(batches)
    ranks = run_ranks(train, c.mesh.pp * c.mesh.dp, c, batches)
    compare(reference, ranks)


def batches_of(c: Config, steps: int = STEPS) -> list[list[list[Batch]]]:
    """What to train on: text, or all that there is where documents share sequences."""
    if c.data.packing == "on":
        return awkward_batches(c.model, steps, c.train.microbatches, c.mesh.dp)
    return random_batches(c.model, steps, c.train.microbatches, c.mesh.dp, (2, 8))


def compare(reference: Result, ranks: list[dict[str, Any]]) -> None:
    last = [r for r in ranks if r["losses"][0]]
    for step, expected in enumerate(reference.losses):
        got = [[r["losses"][step][m] for r in last] for m in range(len(expected))]
        assert sorted(map(tuple, got)) == sorted(map(tuple, expected)), f"losses of step {step}"
        grads = whole([piece for r in ranks for piece in r["grads"][step]])
        for name, grad in reference.grads[step].items():
            assert torch.equal(grads[name], grad), f"gradient of {name}, step {step}: {worst(grads[name], grad)}"
        assert all(abs(r["norms"][step] - reference.norms[step]) < 1e-12 for r in ranks)
    weights = whole([piece for r in ranks for piece in r["weights"]])
    assert weights.keys() == reference.weights.keys()
    for name, weight in reference.weights.items():
        assert torch.equal(weights[name], weight), f"{name} after {STEPS} steps: {worst(weights[name], weight)}"
    for r in ranks:
        for name, bias in r["biases"].items():
            if bias is not None:
                assert torch.equal(bias, reference.biases[name])


def worst(a: Tensor, b: Tensor) -> str:
    return f"largest difference {(a - b).abs().max().item():.3g} of {b.abs().max().item():.3g}"
