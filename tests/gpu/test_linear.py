"""Weight gradients that linear layers write to sinks, on a GPU: the bits of autograd or better ones, and no copy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hocket.fsdp.layout import ALIGN
from hocket.kernels import formulas
from hocket.layers import functional
from hocket.layers.functional import dense_gradient, write_rows
from hocket.runtime.weights import write_product
from tests.fsdp.sinks import DTYPES, LAYOUTS, OUTPUTS, attach, compare_bits, linears, pair

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("full_fp32")]


def large(dtype: torch.dtype = torch.bfloat16, bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    return pair(lambda: nn.Linear(1024, 3072, bias, device="cuda"), dtype)


def exact(xs: list[Tensor], gs: list[Tensor]) -> Tensor:
    """The weight gradient of all (input, output gradient) pairs in float64."""
    return torch.stack([g.double().t() @ x.double() for x, g in zip(xs, gs, strict=True)]).sum(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_bits_of_autograd(bias: bool, dtype: torch.dtype) -> None:
    for layout in LAYOUTS:
        for output in OUTPUTS:
            plain, mine = linears(bias, dtype)
            compare_bits(LAYOUTS[layout](), plain.cuda(), mine.cuda(), output, align=ALIGN)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_autograd_with_large_products(dtype: torch.dtype) -> None:
    compare_bits(torch.randn(2, 2048, 1024), *large(dtype), align=ALIGN)
    compare_bits(torch.randn(4096, 1024), *large(dtype, bias=False), align=ALIGN)


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float32], ids=str)
def test_what_is_added_is_no_less_exact_than_autograd(wire: torch.dtype) -> None:
    """Into float32 the product of bfloat16 operands is added without having been rounded."""
    plain, mine = large(bias=False)
    slots = attach(mine, wire, align=ALIGN)
    xs = [torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    gs = [torch.randn(2048, 3072, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    for x, g in zip(xs, gs, strict=True):
        plain(x).backward(g)
        mine(x).backward(g)
    truth = exact(xs, gs)
    assert plain.weight.grad is not None
    theirs, ours = (
        (found.double() - truth).norm() / truth.norm() for found in (plain.weight.grad, slots["weight"].view)
    )
    assert slots["weight"].times == 4
    assert ours <= theirs
    if wire is torch.float32:
        assert ours < 1e-5


def test_no_rows_leave_zeros_or_what_was_there() -> None:
    for wire in (torch.bfloat16, torch.float32):
        _, mine = large()
        slots = attach(mine, wire, align=ALIGN)
        empty = torch.empty(0, 1024, device="cuda", dtype=torch.bfloat16)
        mine(empty).sum().backward()
        assert not any(slot.view.any() for slot in slots.values())
        mine(empty.new_ones(3, 1024)).sum().backward()
        mine(empty).sum().backward()
        assert all(slot.view.eq(3).all() for slot in slots.values())


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


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float32], ids=str)
def test_no_gradient_tensor_is_made(wire: torch.dtype) -> None:
    """Autograd's way takes the memory of a whole weight; here backward takes less than a tenth of one."""
    taken = {}
    for name, module in zip(("autograd", "written"), pair(lambda: nn.Linear(8192, 8192, False, "cuda")), strict=True):
        module.bfloat16()
        slots = attach(module, wire, align=ALIGN) if name == "written" else {}
        x = torch.randn(16, 8192, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        peaks = []
        for times in (0, 1, 0, 1):  # the first two allocate workspaces
            module.weight.grad = None
            for slot in slots.values():
                slot.times = times
            y = module(x).sum()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            y.backward()
            peaks.append(torch.cuda.max_memory_allocated() - before)
        taken[name] = max(peaks[2:])
    weight = 2 * 8192 * 8192
    assert taken["autograd"] >= weight
    assert taken["written"] < weight / 10


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
