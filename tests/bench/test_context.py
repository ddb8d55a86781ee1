"""Contenders whose ranks share sequences: all learn what hocket does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention

from benchmarks.bench import gate
from benchmarks.bench.contender import load, why_not
from benchmarks.bench.ours import Planned
from benchmarks.bench.workload import Workload
from hocket.config.schema import changed
from tests.bench.setup import CPU, built, curves, workload
from tests.helpers.ranks import run_ranks

of_torch: Any = _attention
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACK = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@contextmanager
def attention_of_cpus() -> Iterator[None]:
    """torch's `context_parallel` knows attention on GPUs alone: what it does there, with the operator of CPUs."""

    def forward(call: Any, args: Any, kwargs: Any) -> Any:
        q, group = args[0], args[0].device_mesh.get_group()
        local = [x.to_local() for x in args[:3]]
        repeats = local[0].shape[1] // local[1].shape[1]
        local = [local[0], *(x.repeat_interleave(repeats, 1) for x in local[1:])]
        causal = dict(is_causal=args[4] if len(args) > 4 else kwargs["is_causal"], dropout_p=0.0)
        out, lse = of_torch._templated_ring_attention(group, 2, FLASH, *local, **causal)[:2]
        return tuple(DTensor.from_local(x, q.device_mesh, q.placements) for x in (out, lse))

    def backward(call: Any, args: Any, kwargs: Any) -> Any:
        grad, q, k, v, out, lse, dropout, causal = (x.to_local() if isinstance(x, DTensor) else x for x in args[:8])
        groups, mesh = k.shape[1], args[1].device_mesh
        wide = [x.repeat_interleave(q.shape[1] // groups, 1) for x in (k, v)]
        back = dict(dropout_p=dropout, grad_out=grad, grad_out_name="grad_out")
        given = dict(query=q, key=wide[0], value=wide[1], out=out, logsumexp=lse, is_causal=causal)
        gq, *narrow = of_torch._templated_ring_attention_backward(mesh.get_group(), 2, BACK, **back, **given)[:3]
        found = [gq, *(g.unflatten(1, (groups, -1)).sum(2) for g in narrow)]
        return tuple(DTensor.from_local(g, mesh, args[1].placements) for g in found)

    with patch.dict(of_torch.custom_ops, {FLASH.default: forward, BACK.default: backward}):
        yield


def lent(rank: int, names: list[str], work: Workload, steps: int) -> dict[str, list[float]]:
    with attention_of_cpus():
        return curves(rank, names, work, steps)


@pytest.mark.full
@pytest.mark.parametrize("moe", [False, True])
def test_all_learn_what_hocket_does(moe: bool) -> None:
    work = workload(1, 2 if moe else 1, cp=2, moe=moe, kv_heads=2)
    work = work.having(lambda config: changed(config, {"model.aux_loss": 0.0}))
    found = run_ranks(lent, 2, ["hocket", "torch_cp_gather", "torch_cp_ring", "ulysses"], work, 4)
    verdict = gate.judge(found[0], work)
    assert found[1] == found[0]
    assert verdict.worst < 0.4 * verdict.tolerance
    assert verdict.fall > 0.02
    assert set(verdict.curves) == {"hocket", "torch_cp_gather", "torch_cp_ring", "ulysses"}


def test_chunks_by_documents_learn_what_zigzag_ones_do() -> None:
    work = workload(1, cp=2).having(lambda config: changed(config, {"data.packing": "on"}))
    found = run_ranks(uneven, 2, work)
    curves_of, told = zip(*found, strict=True)
    verdict = gate.judge(curves_of[0], work)
    assert verdict.worst < 0.4 * verdict.tolerance
    assert told[0] == told[1]
    assert told[0]["hocket"] is not None
    assert told[0]["hocket_zigzag"] is None
    assert "knows no documents" in why_not("ulysses", work.config)


def uneven(rank: int, work: Workload) -> tuple[dict[str, list[float]], dict[str, float | None]]:
    """Curves, and how uneven the last step was."""
    found, told = {}, {}
    for name in ("hocket", "hocket_zigzag"):
        contender = built(name, rank, work)
        assert isinstance(contender, Planned)
        found[name] = gate.curve(contender, work, rank, CPU, 6)
        assert contender.engine.shared is not None
        told[name] = contender.engine.shared.imbalance
        contender.close()
    return found, told


def test_who_cannot_share_sequences_says_so() -> None:
    shared, whole = workload(1, cp=2, kv_heads=2).config, workload(2).config
    assert "mesh.cp = 2; fix: mesh.cp = 1, or leave it out" in why_not("fsdp2_tuned", shared)
    assert "mesh.cp = 1; fix: mesh.cp = 2 or more" in why_not("ulysses", whole)
    assert "needs GPUs" in why_not("torch_cp_ring", shared)
    assert why_not("ulysses", shared) == why_not("hocket_null", shared) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.window": 4}, "plain causal attention alone"),
        ({"model.kv_heads": 1}, "model.kv_heads = 1 do not divide by mesh.cp = 2"),
    ],
)
def test_what_would_compute_something_else_is_refused(changes: dict[str, Any], words: str) -> None:
    work = workload(1, cp=2, kv_heads=2).having(lambda config: changed(config, changes))
    with pytest.raises(ValueError, match=f"against = ulysses .*{words}"):
        load("ulysses")(work, 0, CPU)
