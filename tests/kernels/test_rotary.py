"""The kernel of rotary positions against the formula, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.kernels import norm as rotary
from hocket.kernels.norm import Rotary
from hocket.layers import norms
from hocket.model.rotary import rotary_table
from tests.helpers.ranks import run_ranks
from tests.kernels.conftest import mend_interpreter
from tests.ranks.test_segments import gradients

DTYPES = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")
SHARES = st.sampled_from([1.0, 1.0, 0.5, 0.3])
"""Of a head, how much rotates."""


def turned(x: Tensor, table: Tensor) -> Tensor:
    return Rotary.apply(x, table, False)


def both(fn, x: Tensor, table: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """(output, input gradient)."""
    x = x.detach().requires_grad_()
    y = fn(x, table)
    y.backward(g)
    assert x.grad is not None
    return y.detach(), x.grad


@given(
    sizes=st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 5)),
    half=st.integers(1, 9) | st.sampled_from([32, 48, 64]),
    dtype=st.sampled_from(DTYPES),
    order=st.permutations([0, 1, 2]),
    share=SHARES,
)
@settings(max_examples=13)
def test_same_bits_as_the_formula(sizes, half: int, dtype: torch.dtype, order: list[int], share: float) -> None:
    """Also for inputs and gradients whose leading dimensions lie in memory in any order, and if a part rotates."""
    table = rotary_table(sizes[1], 2 * max(int(half * share), 1), 1e4, CPU)

    def made() -> Tensor:
        tensor = torch.randn(*(sizes[i] for i in order), 2 * half).to(dtype)
        return tensor.permute(*(order.index(i) for i in range(3)), 3)

    x, g = made(), made()
    y, dx = both(turned, x, table, g)
    assert torch.equal(y, norms.rotate(x, table))
    # Autograd rounds both parts of a gradient before it adds them, unless they are fp32.
    _, expected = both(norms.rotate, x.float(), table, g.float())
    assert dx.dtype == dtype
    assert torch.equal(dx, expected.to(dtype))


def test_many_heads_and_gaps() -> None:
    """A position of more elements than a tile has, out of a wider tensor, and a last dimension with gaps."""
    table = rotary_table(3, 128, 1e6, CPU)
    wide = torch.randn(2, 3, 100, 128)
    for x in wide[:, :, 1:71], wide[..., ::2]:
        t = table[..., : x.shape[-1] // 2].contiguous()
        assert torch.equal(turned(x, t), norms.rotate(x, t))


def test_layers_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    table = rotary_table(4, 8, 1e4, CPU)
    x = torch.randn(1, 4, 2, 8, requires_grad=True)
    assert "Rotary" not in type(norms.rotate(x, table).grad_fn).__name__
    monkeypatch.setattr(norms, "usable", lambda *tensors: True)
    assert "Rotary" in type(norms.rotate(x, table).grad_fn).__name__


def test_a_table_of_another_length_is_refused() -> None:
    for table in rotary_table(5, 8, 1e4, CPU), rotary_table(4, 10, 1e4, CPU):
        with pytest.raises(AssertionError, match="table"):
            turned(torch.randn(1, 4, 2, 8), table)


def test_second_derivatives() -> None:
    """The gradient of a rotation is a rotation, so there is nothing to refuse."""
    table = rotary_table(4, 8, 1e4, CPU)
    x = torch.randn(1, 4, 2, 8, requires_grad=True)
    g, found = torch.randn(1, 4, 2, 8), []
    for fn in (turned, norms.rotate):
        (dx,) = torch.autograd.grad((fn(x, table) ** 3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad((dx * g).sum(), x)[0])
    torch.testing.assert_close(*found)


@given(
    sizes=st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 5)),
    half=st.integers(1, 9) | st.sampled_from([32, 48]),
    programs=st.integers(1, 3),
    share=SHARES,
)
@settings(max_examples=6)
def test_with_norm_against_float64(sizes, half: int, programs: int, share: float) -> None:
    """For a gradient as attention leaves it, and for programs that take several tiles."""
    table, eps = rotary_table(sizes[1], 2 * max(int(half * share), 1), 1e4, CPU), 1e-5
    x, p = torch.randn(*sizes, 2 * half), torch.randn(2 * half)
    x += x.sign()
    g = torch.randn(sizes[0], sizes[2], sizes[1], 2 * half).transpose(1, 2)
    exact_x, exact_p = x.double().requires_grad_(), p.double().requires_grad_()
    exact = norms.norm_rotate(exact_x, exact_p, eps, table.double())
    exact.backward(g.double())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotary, "PROGRAMS", programs)
        patch.setattr(rotary, "HEADS_TILE", 64)
        y = rotary.rope(x, table, p, eps)
        dx, parts = rotary.norm_rope_backward(g, x, table, p, eps)
    for a, b in (y, exact), (dx, exact_x.grad), (parts.sum(0), exact_p.grad):
        assert b is not None
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 3, 16), (0, 5, 3, 16)])
def test_with_norm_managed_equals_ordinary(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = rotary_table(5, 16, 1e4, CPU)

    def heads(x: Tensor, p: Tensor) -> Tensor:
        return norms.norm_rotate(x, p, 1e-5, table)

    x, value = torch.randn(shape).to(dtype), torch.randn(16).to(dtype)
    formula = gradients(heads, x, value, False)
    monkeypatch.setattr(norms, "usable", lambda *tensors: True)
    ordinary, managed = gradients(heads, x, value, False), gradients(heads, x, value, True)
    assert "_NormRotate" in str(ordinary[0].grad_fn)
    tolerance = 1e-5 if dtype is torch.float32 else 2**-5
    for a, b, c in zip(ordinary, managed, formula, strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=tolerance, atol=tolerance)


def far_apart(rank: int) -> None:
    """Only what is written of this memory exists."""
    table, gap = rotary_table(2, 4, 1e4, CPU), 2**30
    x = torch.empty(2 * gap + 8, dtype=torch.bfloat16).as_strided((1, 2, 3, 4), (8, 4, gap, 1))
    x.copy_(torch.randn(x.shape))
    near, weight = x.contiguous(), torch.ones(4)
    assert torch.equal(rotary.rope(x, table), rotary.rope(near, table))
    with pytest.MonkeyPatch.context() as patch:  # this is a process of its own
        mend_interpreter(patch)
        found, wanted = (rotary.norm_rope_backward(g, near, table, weight, 1e-5) for g in (x, near))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_heads_may_be_far_apart() -> None:
    """As those of long sequences are in what attention gives back."""
    run_ranks(far_apart, 1)
