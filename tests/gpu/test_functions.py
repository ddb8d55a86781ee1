"""Managed functions, segments and the movement of rows on a GPU: the same bits as stock autograd there."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hocket.layers.functional import grouped_linear
from hocket.model.transformer import Chunk
from hocket.runtime.segment import Segment
from tests.helpers.chunks import init_chunk
from tests.ranks.test_segments import CASES, CONFIGS, DTYPES, BySegments, gradients

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("full_fp32")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_managed_equals_stock(case: str, dtype: torch.dtype) -> None:
    x_shape, p_shape, fn = CASES[case]
    x, value = torch.randn(x_shape).to("cuda", dtype), torch.randn(p_shape).to("cuda", dtype)
    plain, managed = gradients(fn, x, value, False), gradients(fn, x, value, True)
    for what, a, b in zip(("output", "input gradient", "weight gradient"), plain, managed, strict=True):
        assert torch.equal(a, b), f"{what}: {(a - b).abs().max()}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(0, 5, 0, 9), (7, 0, 0, 0), (0, 0, 0, 300), (0, 0, 0, 0), (64, 0, 128, 1)])
def test_grouped_products_against_float64(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Memory that held NaN is reused for the results; experts without rows must get zeros all the same."""
    offsets = torch.tensor(sizes).cumsum(0).to("cuda", torch.int32)
    x = torch.randn(sum(sizes), 64).to("cuda", dtype)
    value = torch.randn(4, 64, 32).to("cuda", dtype)
    for _ in range(3):
        poison = [torch.full((4, 64, 32), float("nan"), dtype=dtype, device="cuda") for _ in range(8)]
        del poison
        y, dx, dw = gradients(lambda x, p: grouped_linear(x, p, offsets), x, value, True)
        exact = x.double().requires_grad_()
        weights = value.double().requires_grad_()
        parts = zip(exact.split(list(sizes)), weights, strict=True)
        expected = torch.cat([rows @ w for rows, w in parts])
        g = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y).double()
        expected.backward(g)
        for a, b in ((y, expected), (dx, exact.grad), (dw, weights.grad)):
            assert b is not None
            tolerance = 1e-4 if dtype is torch.float32 else 1e-2
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * 20)
        assert not dw[torch.tensor(sizes, device="cuda") == 0].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_segments_equal_plain_autograd(name: str, dtype: torch.dtype) -> None:
    """With the attention kernel whose backward always adds in one order."""
    config = CONFIGS[name]
    ids, targets = torch.randint(64, (2, 2, 12), device="cuda")

    def model() -> Chunk:
        return init_chunk(Chunk(config, range(config.layers), aux_scale=0.5), seed=5, dtype=dtype, device="cuda")

    with sdpa_kernel(SDPBackend.MATH):
        plain = model()
        loss = plain.loss(plain(ids), targets)
        loss.backward(torch.tensor(0.5, device="cuda"))
        segments = BySegments(model(), defer=True)
        assert torch.equal(loss, segments.step(ids, targets))
    grads = {name: segments.grads[weight] for weight, name in segments.weights.items()}
    for param_name, param in plain.named_parameters():
        assert param.grad is not None
        assert torch.equal(param.grad, grads[param_name]), param_name


def test_backward_does_not_wait_for_the_device() -> None:
    """An segment's forward and backward are issued while the device is still busy with something before them."""
    x, w = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")

    def run() -> None:
        segment = Segment()
        segment.backward(segment.forward(lambda x: torch.sin(x @ w), x))

    run()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    run()
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
