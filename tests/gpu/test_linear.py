"""Weight gradients that products write or add, on a GPU: the bits of autograd or better ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hocket.kernels import formulas
from hocket.layers import functional
from hocket.layers.functional import dense_gradient, write_rows
from hocket.runtime.weights import write_product

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("full_fp32")]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float32], ids=str)
def test_what_is_added_is_no_less_exact_than_autograd(wire: torch.dtype) -> None:
    """Into float32 the product of bfloat16 operands is added without having been rounded."""
    gs, xs = ([torch.randn(2048, n, device="cuda").bfloat16() for _ in range(4)] for n in (3072, 1024))
    ours = torch.full((3072, 1024), float("nan"), device="cuda", dtype=wire)
    theirs = torch.zeros(3072, 1024, device="cuda", dtype=torch.bfloat16)
    for i, (g, x) in enumerate(zip(gs, xs, strict=True)):
        write_product(g.t(), x, ours, add=i > 0)
        theirs += g.t() @ x
        assert i > 0 or wire is torch.float32 or torch.equal(ours, theirs)
    truth = torch.stack([g.double().t() @ x.double() for g, x in zip(gs, xs, strict=True)]).sum(0)
    off, their_off = ((found.double() - truth).norm() / truth.norm() for found in (ours, theirs))
    assert off <= their_off
    if wire is torch.float32:
        assert off < 1e-5


@pytest.mark.parametrize("rows", [0, 1, 2048])
def test_products_times_a_factor(rows: int) -> None:
    """What is written does not depend on what was there; what is added is not rounded before."""
    g, x = (torch.randn(rows, width, device="cuda").bfloat16() for width in (3072, 1024))
    before, expected = torch.randn(3072, 1024, device="cuda"), 0.3 * (g.double().t() @ x.double())
    written, added = torch.full_like(before, float("nan")), before.clone()
    write_product(g.t(), x, written, False, 0.3)
    write_product(g.t(), x, added, True, 0.3)
    torch.testing.assert_close(written.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(added.double(), before.double() + expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [64, 8192])
def test_rows_of_a_table_are_autograds(tokens: int) -> None:
    """Few tokens and many: torch has a kernel for either."""
    ids = (torch.randn(2, tokens // 2, device="cuda").abs() * 3000).long().clamp_(max=32000)
    g = torch.randn(*ids.shape, 256, device="cuda", dtype=torch.bfloat16)
    wanted = dense_gradient(ids, g, 32001)
    out = torch.full_like(wanted, float("nan"))
    write_rows(ids, g, out)
    assert torch.equal(out, wanted)
    write_rows(ids, g, out, add=True)
    assert torch.equal(out, 2 * wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_one_input_add_up_its_gradient(dtype: torch.dtype) -> None:
    """No less exact than when autograd adds up what each of them has rounded, and the same bits every time."""
    widths = (2048, 512, 512)
    x = torch.randn(2, 1024, 1024, device="cuda").to(dtype).requires_grad_()
    params = [nn.Parameter(torch.randn(n, 1024, device="cuda").to(dtype)) for n in widths]
    gs = [torch.randn(2, 1024, n, device="cuda").to(dtype) for n in widths]

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(functional.linears(x, params), [x, *params], gs)

    found, again = run(), run()
    with formulas():
        plain = run()
    exact = sum(g.double() @ p.detach().double() for g, p in zip(gs, params, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found[1:], plain[1:], strict=True))
    mine, others = ((grads[0].double() - exact).norm() for grads in (found, plain))
    assert mine <= 1.02 * others
