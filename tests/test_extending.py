"""The programs of docs/design/architecture.md: a pass of one's own, and a part with a lane of its own that trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.config import Config
from hocket.engine import Engine
from hocket.predict.simulate import simulate
from hocket.program.check import check
from hocket.timeline import text_timeline
from tests.helpers.costs import Table
from tests.helpers.dryrun import dry_run
from tests.helpers.parity import batches_of, config, learn, whole
from tests.helpers.ranks import run_ranks
from tests.reference import Batch, microbatch

PAGE = Path(__file__).resolve().parents[1] / "docs" / "design" / "architecture.md"


def program(number: int) -> str:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[number]


def run(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(text, str(PAGE), "exec"), names)
    return names


def test_the_pass_makes_a_valid_program() -> None:
    names = run(program(0))
    ops = [op for op in names["program"].ranks[0] if op.lane == "compute" and op.verb in ("fwd", "bwd", "wgrad")]
    late = [i for i, op in enumerate(ops) if (op.verb, op.part) == ("wgrad", "experts")]
    assert any(ops[i + 1].part == ops[i].part == "experts" for i in late[:-1])
    assert len(program(0).splitlines()) <= 30


def settings() -> Config:
    plan = {"merge": "on", "defer_wgrad": "on", "prefetch": 1, "chunks": 2}
    return config({"layers": 8}, {"pp": 2, "dp": 2}, plan, 4, "fp32")


def train(rank: int, text: str, steps: list[list[list[Batch]]]) -> dict[str, Any]:
    """One rank of a planned run of the page's model."""
    torch.use_deterministic_algorithms(True)
    c, names = settings(), run(text)
    engine = Engine(c, rank, torch.device("cpu"), source=names["MeanModel"](c))
    engine.init_weights()
    pieces = [p for unit in engine.sharded.units.values() for p in unit.pieces()]
    first = [(p.name, p.shape, p.lo, p.hi, p.main.clone()) for p in pieces]
    out = learn(engine, steps, lambda: [(p.name, p.shape, p.lo, p.hi, p.grad.clone()) for p in pieces])
    program = engine.program
    assert not check(program)
    dry_run(program, rank)
    out |= {"first": first, "lanes": {op.lane for _, _, op in program}, "rows": "", "programs": hash(program.ranks)}
    timeline = simulate(program, Table({("fwd", "mean"): 3, ("fwd", "inner"): 1, ("bwd", "inner"): 2}))
    out["drawn"] = text_timeline(timeline, program)
    engine.close()
    return out


def plain_step(weights: dict[str, Tensor], microbatches: list[list[Batch]], eps: float) -> dict[str, Any]:
    """The same step by autograd, all data-parallel ranks in one process: losses by microbatch, and gradients."""
    w = {name: value.clone().requires_grad_() for name, value in weights.items()}
    losses = []
    for batches in microbatches:
        given = [microbatch(batch) for batch in batches]
        xs = [F.embedding(one.ids, w["embed.weight"]) for one in given]
        for n in range(8):
            own = [F.linear(x, w[f"layers.{n}.inner"]) for x in xs]
            mean = torch.stack([one / len(own) for one in own]).sum(0)
            xs = [x + F.linear(mean, w[f"layers.{n}.outer"]) for x in xs]
        heads = [F.rms_norm(x, x.shape[-1:], w["head.norm"], eps) for x in xs]
        logits = [F.linear(h, w["head.weight"]).flatten(0, 1) for h in heads]
        losses.append([F.cross_entropy(y, one.targets.flatten()) for y, one in zip(logits, given, strict=True)])
    total = torch.stack([torch.stack(row) for row in losses]).mean()
    grads = torch.autograd.grad(total, list(w.values()))
    return {"losses": [[loss.item() for loss in row] for row in losses], "grads": dict(zip(w, grads, strict=True))}


def test_the_part_with_a_lane_of_its_own_trains_as_plain_autograd_does() -> None:
    c, text = settings(), program(1)
    batches = batches_of(c, steps=1)
    ranks = run_ranks(train, 4, text, batches)
    assert all("mean" in r["lanes"] for r in ranks)
    assert "mean " in ranks[0]["drawn"]
    assert len({r["programs"] for r in ranks}) == 1
    weights = whole([piece for r in ranks for piece in r["first"]])
    expected = plain_step(weights, batches[0], c.model.norm_eps)
    last = [r for r in ranks if r["losses"][0]]
    for m, row in enumerate(expected["losses"]):
        assert sorted(r["losses"][0][m] for r in last) == pytest.approx(sorted(row), rel=1e-6)
    grads = whole([piece for r in ranks for piece in r["grads"][0]])
    for name, grad in expected["grads"].items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=1e-6)
    assert len(text.splitlines()) <= 65
