"""The kernel of rotary positions against the formula, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.kernels import rotary
from hocket.model import layers

DTYPES = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")


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
)
@settings(max_examples=40)
def test_same_bits_as_the_formula(sizes, half: int, dtype: torch.dtype, order: list[int]) -> None:
    """Also for inputs and gradients whose leading dimensions lie in memory in any order."""
    table = layers.rotary_table(sizes[1], 2 * half, 1e4, CPU)

    def made() -> Tensor:
        tensor = torch.randn(*(sizes[i] for i in order), 2 * half).to(dtype)
        return tensor.permute(*(order.index(i) for i in range(3)), 3)

    x, g = made(), made()
    y, dx = both(rotary.rotary, x, table, g)
    assert torch.equal(y, layers.rotate(x, table))
    # Autograd rounds both parts of a gradient before it adds them, unless they are fp32.
    _, expected = both(layers.rotate, x.float(), table, g.float())
    assert dx.dtype == dtype
    assert torch.equal(dx, expected.to(dtype))


def test_many_heads_and_gaps() -> None:
    """A position of more elements than a tile has, out of a wider tensor, and a last dimension with gaps."""
    table = layers.rotary_table(3, 128, 1e6, CPU)
    wide = torch.randn(2, 3, 100, 128)
    for x in wide[:, :, 1:71], wide[..., ::2]:
        t = table[..., : x.shape[-1] // 2].contiguous()
        assert torch.equal(rotary.rotary(x, t), layers.rotate(x, t))


def test_layers_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    table = layers.rotary_table(4, 8, 1e4, CPU)
    x = torch.randn(1, 4, 2, 8, requires_grad=True)
    assert "_Rotary" not in type(layers.rotate(x, table).grad_fn).__name__
    monkeypatch.setattr(layers, "usable", lambda *tensors: True)
    assert "_Rotary" in type(layers.rotate(x, table).grad_fn).__name__


def test_a_table_of_another_length_is_refused() -> None:
    with pytest.raises(AssertionError, match="table"):
        rotary.rotary(torch.randn(1, 4, 2, 8), layers.rotary_table(5, 8, 1e4, CPU))


def test_second_derivatives() -> None:
    """The gradient of a rotation is a rotation, so there is nothing to refuse."""
    table = layers.rotary_table(4, 8, 1e4, CPU)
    x = torch.randn(1, 4, 2, 8, requires_grad=True)
    g, found = torch.randn(1, 4, 2, 8), []
    for fn in (rotary.rotary, layers.rotate):
        (dx,) = torch.autograd.grad((fn(x, table) ** 3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad((dx * g).sum(), x)[0])
    torch.testing.assert_close(*found)
