"""The products of experts that gate their rows, at the sizes they are for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hocket.config import ModelConfig
from hocket.kernels.experts import down_backward, up
from hocket.kernels.usable import formulas
from hocket.model.layers import swiglu
from hocket.model.moe import Experts
from hocket.runtime.functional import grouped_mm

pytestmark = pytest.mark.gpu
SIZES = [(2048, 768), (1024, 384), (200, 72), (4096, 1536)]
COUNTS = [[1024] * 8, [0, 3, 2000, 64, 0, 65, 1, 0], [0, 0, 0, 0], [1000, 1001]]


def new(*shape: int, std: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * std).bfloat16()


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)


@pytest.mark.parametrize("gathered", [False, True], ids=["rows", "gathered"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("width", "ffn"), SIZES)
def test_against_single_products(width: int, ffn: int, counts: list[int], gathered: bool) -> None:
    """Rows behind the experts' mean nothing. Twice, to the same bits."""
    rows, ends = sum(counts), ends_of(counts)
    x, g, gate_up = new(rows + 40, width), new(rows + 40, width), new(rows + 40, 2 * ffn)
    x[rows:] = g[rows:] = gate_up[rows:] = float("nan")
    w, down = new(len(counts), width, 2 * ffn, std=width**-0.5), new(len(counts), ffn, width)
    weights = torch.rand(rows + 40, device="cuda")
    source = torch.randint(max(rows, 1), (rows + 40,), device="cuda", dtype=torch.int32) if gathered else None
    taken_x, taken_g = (t[:rows] if source is None else t[source[:rows].long()] for t in (x, g))
    found = [(*up(x, source, w, ends, weights, rows + 40), *down_backward(g, source, down, ends, weights, gate_up))]
    found.append((*up(x, source, w, ends, weights, rows + 40), *down_backward(g, source, down, ends, weights, gate_up)))
    assert all(torch.equal(a[:rows], b[:rows]) for a, b in zip(*found, strict=True) if a is not None and b is not None)
    wide, inner, g_gate_up, g_weights = (t[:rows] for t in found[0] if t is not None)
    torch.testing.assert_close(wide, grouped_mm(taken_x, w, ends), rtol=2**-7, atol=2e-2)
    torch.testing.assert_close(inner, swiglu(wide, weights=weights[:rows]), rtol=2**-7, atol=1e-3)
    leaves = [t[:rows].float().requires_grad_() for t in (gate_up, weights)]
    g_inner = torch.cat([a.float() @ b.float().t() for a, b in zip(taken_g.split(counts), down, strict=True)])
    with formulas():
        swiglu(leaves[0], weights=leaves[1]).backward(g_inner)
    for a, leaf in zip((g_gate_up, g_weights), leaves, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(
            a.float(), leaf.grad, rtol=2**-6, atol=0.02 * float(leaf.grad.abs().amax() if rows else 1)
        )


def test_experts_with_and_without() -> None:
    config, counts = ModelConfig(hidden=1024, experts=8, top_k=1, expert_ffn=384), [700, 0, 300, 48, 1, 200, 0, 64]
    made = Experts(config, 8).to_empty(device="cuda").bfloat16()
    with torch.no_grad():
        for param in made.parameters():
            param.normal_(std=0.02)
    x, g, found = new(sum(counts), 1024), new(sum(counts), 1024), []
    for by_formula in (True, False, False):
        leaf, weights = x.clone().requires_grad_(), torch.linspace(0.1, 2.0, len(x), device="cuda").requires_grad_()
        if by_formula:
            with formulas():
                y = made(leaf, ends_of(counts), None, weights)
                grads = torch.autograd.grad(y, [leaf, weights, *made.parameters()], g)
        else:
            y = made(leaf, ends_of(counts), None, weights)
            assert "_Experts" in type(y.grad_fn).__name__
            grads = torch.autograd.grad(y, [leaf, weights, *made.parameters()], g)
        found.append([y.detach(), *grads])
    assert all(torch.equal(a, b) for a, b in zip(found[1], found[2], strict=True))
    for a, b in zip(found[0], found[1], strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2**-5, atol=0.02 * float(a.abs().max()))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device() -> None:
    x, ends, w, down = new(128, 256), ends_of([100, 28]), new(2, 256, 128), new(2, 64, 256)
    try:
        torch.cuda.set_sync_debug_mode("error")
        gate_up, _ = up(x, None, w, ends, None, 128)
        down_backward(x, None, down, ends, None, gate_up)
    finally:
        torch.cuda.set_sync_debug_mode("default")
