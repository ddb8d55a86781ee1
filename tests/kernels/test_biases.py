"""The kernels of experts' biases against their formulas."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.kernels.sums import add_by_expert, row_sums
from hocket.layers import functional as biases
from hocket.layers.functional import add_bias_by_expert, sum_by_expert
from tests.kernels.test_grouped import ends_of

COUNTS = st.lists(st.sampled_from([0, 1, 7, 15, 16, 17, 40]), min_size=1, max_size=5)


@given(counts=COUNTS, beyond=st.integers(0, 20), width=st.sampled_from([1, 8, 72, 600]), dtype=st.booleans())
@settings(max_examples=8, deadline=None)
def test_each_row_gets_the_bias_of_its_expert(counts: list[int], beyond: int, width: int, dtype: bool) -> None:
    """Rows behind the last expert's are not touched."""
    kind, rows = torch.bfloat16 if dtype else torch.float32, sum(counts)
    x, bias = torch.randn(rows + beyond, width).to(kind), torch.randn(len(counts), width).to(kind)
    found = add_by_expert(x.clone(), bias, ends_of(counts))
    assert torch.equal(found[:rows], x[:rows] + bias.repeat_interleave(torch.tensor(counts), 0))
    assert torch.equal(found[rows:], x[rows:])
    plain = add_bias_by_expert(x, bias, ends_of(counts))
    assert torch.equal(plain[:rows], found[:rows])


@given(
    counts=COUNTS,
    beyond=st.integers(0, 20),
    width=st.sampled_from([1, 8, 72, 200]),
    into=st.sampled_from([(torch.bfloat16, False), (torch.float32, False), (torch.float32, True)]),
    scale=st.sampled_from([1.0, 0.25]),
)
@settings(max_examples=8, deadline=None)
def test_gradients_are_sums_over_rows(counts, beyond, width, into, scale) -> None:
    dtype, add = into
    rows = sum(counts)
    g = torch.randn(rows + beyond, width).bfloat16()
    g[rows:] = float("nan")
    before = torch.randn(len(counts), width).to(dtype)
    ends = torch.tensor(counts).cumsum(0).tolist()
    sums = torch.stack([g[end - n : end].double().sum(0) for end, n in zip(ends, counts, strict=True)])
    expected = scale * sums + (before.double() if add else 0)
    for fn in (row_sums, sum_by_expert):
        out = before.clone()
        fn(g, ends_of(counts), out, add, scale)
        loose = 2**-8 if dtype is torch.bfloat16 or fn is sum_by_expert else 1e-5
        torch.testing.assert_close(out.double(), expected, rtol=loose, atol=30 * loose)


def test_functions_choose_the_kernels(monkeypatch) -> None:
    """The bias is added in place, and its gradient is the sum."""
    x, bias, ends = torch.randn(20, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True), ends_of([4, 0, 16])
    wanted = add_bias_by_expert(x, bias, ends)
    wanted.square().sum().backward()
    expected = [x.grad, bias.grad]
    x.grad = bias.grad = None
    monkeypatch.setattr(biases, "usable", lambda *tensors: True)
    given = x * 1
    found = add_bias_by_expert(given, bias, ends)
    assert found.data_ptr() == given.data_ptr()
    assert torch.equal(found, wanted)
    found.square().sum().backward()
    for mine, theirs in zip([x.grad, bias.grad], expected, strict=True):
        assert mine is not None
        torch.testing.assert_close(mine, theirs)
