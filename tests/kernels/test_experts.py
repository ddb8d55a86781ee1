"""The products of experts that gate their rows, against formulas in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.config import ModelConfig
from hocket.kernels.experts import down_backward, up
from hocket.kernels.grouped import Tile, weight_gradients
from hocket.model import moe
from hocket.model.moe import ONLY, Experts, MoELayer
from hocket.parallel import rows
from hocket.parallel.dispatch import exchange_counts
from hocket.runtime import experts, functional

COUNTS = st.lists(st.sampled_from([0, 1, 7, 15, 16, 17, 33]), min_size=1, max_size=5)
TILES = [Tile(16, wide, 16, warps=4, stages=2) for wide in (16, 32, 64, 128)]


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def products(x_RD: Tensor, w_EDF: Tensor, counts: list[int]) -> Tensor:
    """fp64 [R, F]."""
    parts = zip(x_RD.double().split(counts), w_EDF.double(), strict=True)
    return torch.cat([rows @ w for rows, w in parts])


def gated(gate_up: Tensor, weights: Tensor | None) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up * (1 if weights is None else weights[:, None])


@given(
    counts=COUNTS,
    beyond=st.integers(0, 20),
    width=st.sampled_from([8, 16, 40]),
    ffn=st.sampled_from([8, 16, 48, 136]),
    tile=st.sampled_from(TILES),
    weighted=st.booleans(),
    gathered=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_up_against_float64(counts, beyond, width, ffn, tile, weighted, gathered) -> None:
    """For all numbers of rows of experts and all edges of tiles. Rows behind the last expert's are left alone."""
    rows = sum(counts)
    x, w = bf16(rows + beyond, width), bf16(len(counts), width, 2 * ffn)
    weights = torch.randn(rows + beyond) if weighted else None
    x[rows:] = float("nan")
    source = torch.randint(max(rows, 1), (rows,), dtype=torch.int32) if gathered else None
    gate_up, inner = up(x, source, w, ends_of(counts), weights, rows + beyond, tile)
    taken = x[:rows] if source is None else x[source.long()]
    expected = products(taken, w, counts)
    torch.testing.assert_close(gate_up[:rows].double(), expected, rtol=2**-8, atol=1e-4)
    wanted = gated(gate_up[:rows].double(), None if weights is None else weights[:rows])
    torch.testing.assert_close(inner[:rows].double(), wanted, rtol=2**-7, atol=1e-4)


@given(
    counts=COUNTS,
    beyond=st.integers(0, 20),
    width=st.sampled_from([8, 16, 40]),
    ffn=st.sampled_from([8, 16, 48, 136]),
    tile=st.sampled_from(TILES),
    weighted=st.booleans(),
    gathered=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_down_backward_against_float64(counts, beyond, width, ffn, tile, weighted, gathered) -> None:
    rows = sum(counts)
    g, w, gate_up = bf16(rows + beyond, width), bf16(len(counts), ffn, width), bf16(rows + beyond, 2 * ffn)
    weights = torch.randn(rows + beyond) if weighted else None
    g[rows:] = gate_up[rows:] = float("nan")
    source = torch.randint(max(rows, 1), (rows,), dtype=torch.int32) if gathered else None
    found, g_weights = down_backward(g, source, w, ends_of(counts), weights, gate_up, tile)
    taken = g[:rows] if source is None else g[source.long()]
    g_inner = products(taken, w.transpose(1, 2), counts)
    leaves = [gate_up[:rows].double().requires_grad_()]
    leaves += [] if weights is None else [weights[:rows].double().requires_grad_()]
    gated(leaves[0], leaves[1] if weighted else None).backward(g_inner)
    wanted = [leaf.grad for leaf in leaves]
    assert wanted[0] is not None
    torch.testing.assert_close(found[:rows].double(), wanted[0], rtol=2**-7, atol=1e-3)
    assert (g_weights is not None) == weighted
    if g_weights is not None:
        torch.testing.assert_close(g_weights[:rows].double(), wanted[1], rtol=1e-4, atol=1e-3)


def test_bits_do_not_depend_on_other_experts_rows() -> None:
    """Nor on where they lie, or in which tile of rows."""
    x, w, weights = bf16(50, 40), bf16(3, 40, 48), torch.randn(50)
    whole = up(x, None, w, ends_of([7, 30, 13]), weights, 50, TILES[0])
    alone = up(x[7:37], None, w[1:2], ends_of([30]), weights[7:37], 30, TILES[0])
    assert all(torch.equal(a[7:37], b) for a, b in zip(whole, alone, strict=True))


@pytest.mark.parametrize("first", [True, False])
def test_weight_gradients_of_gathered_rows(first: bool) -> None:
    counts = [20, 0, 33]
    x, g, source = bf16(30, 24), bf16(53, 16), torch.randint(30, (53,), dtype=torch.int32)
    ends, out, wanted = ends_of(counts), torch.empty(3, 24, 16), torch.empty(3, 24, 16)
    tile = Tile(16, 16, 16, warps=4, stages=2)
    if first:
        weight_gradients((x, source), g, ends, out, tile=tile)
        weight_gradients(x[source.long()], g, ends, wanted, tile=tile)
    else:
        out, wanted = (t.transpose(1, 2).contiguous() for t in (out, wanted))
        weight_gradients(g, (x, source), ends, out, tile=tile)
        weight_gradients(g, x[source.long()], ends, wanted, tile=tile)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("weighted", [True, False])
def test_experts_choose_them(monkeypatch: pytest.MonkeyPatch, weighted: bool) -> None:
    """And get what single functions give, but for one rounding less in backward."""
    config = ModelConfig(hidden=64, experts=3, top_k=1, expert_ffn=32)
    made, counts = Experts(config, 3).to_empty(device="cpu").bfloat16(), [5, 0, 28]
    with torch.no_grad():
        for param in made.parameters():
            param.normal_(std=0.2)
    x, g, found = bf16(33, 64), bf16(33, 64), []
    for fused in (False, True):
        for module in (experts, functional):
            monkeypatch.setattr(module, "usable", lambda *tensors, fused=fused: fused)
        leaf, weights = x.clone().requires_grad_(), torch.linspace(0.1, 2.0, 33).requires_grad_()
        y = made(leaf, ends_of(counts), None, weights if weighted else None)
        assert ("_Experts" in type(y.grad_fn).__name__) == fused
        wanted = [leaf, *made.parameters(), *([weights] if weighted else [])]
        found.append([y.detach(), *torch.autograd.grad(y, wanted, g)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=0.05, atol=0.02 * float(a.abs().max()))


@pytest.mark.parametrize("why", ["limit", "fp32"])
def test_experts_leave_others_alone(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr(experts, "usable", lambda *tensors: True)
    config = ModelConfig(hidden=64, experts=3, top_k=1, expert_ffn=32, swiglu_limit=7.0 if why == "limit" else 0.0)
    dtype = torch.float32 if why == "fp32" else torch.bfloat16
    made = Experts(config, 3).to_empty(device="cpu").to(dtype)
    y = made(torch.zeros(4, 64, dtype=dtype).requires_grad_(), ends_of([4, 0, 0]))
    assert "_Experts" not in type(y.grad_fn).__name__
    assert moe.gates_itself(torch.zeros(1).bfloat16())


def test_experts_of_tokens_are_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bits, though nobody makes rows."""
    config = ModelConfig(hidden=64, experts=4, top_k=2, expert_ffn=32, heads=2, kv_heads=1, head_dim=32)
    made = MoELayer(config, ONLY, 0.5).to_empty(device="cpu").bfloat16()
    with torch.no_grad():
        for param in made.parameters():
            param.normal_(std=0.2) if param.dim() > 1 else param.fill_(1.0)
    for module in (experts, functional, rows):
        monkeypatch.setattr(module, "usable", lambda *tensors: True)
    found, x, g = [], bf16(1, 21, 64), bf16(1, 21, 64)
    for whole in (False, True):
        leaf = x.clone().requires_grad_()
        if whole:
            y = made(leaf)
            assert "_Tokens" in type(y.grad_fn).__name__
        else:
            sent, residual, shared, weights, probs, routing = made.forward_attn(leaf)
            sent = made.forward_experts(sent, weights, exchange_counts(routing, None))
            y = made.forward_unpermute(sent, residual, shared, probs, routing)
        found.append([y.detach(), *torch.autograd.grad(y, [leaf, *made.parameters()], g)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
