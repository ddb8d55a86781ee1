"""The kernels between matrix products on a GPU: against float64, the same bits every time, and what they need."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.kernels import formulas
from hocket.layers.functional import score
from hocket.layers.linears import cross_entropy
from hocket.layers.norms import add_rms_norm, norm_rotate, rms_norm, rotate
from hocket.model.layers import swiglu
from hocket.model.rotary import rotary_table

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
"""A bf16 result has been rounded once."""


@pytest.fixture(autouse=True, scope="module")
def _context_of_backward() -> None:
    """The first matrix product in autograd's own thread warns that the thread has no CUDA context, and makes one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.ones(2, 2, device="cuda", requires_grad=True)
        (x @ x).sum().backward()


def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def results(fn: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Output and gradients of the inputs."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    out = fn(*(leaf * 1 for leaf in leaves))  # not leaves: a loss overwrites its logits
    g = torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    g = g.bfloat16().to(out.dtype)  # the same numbers in all dtypes
    return [out.detach(), *torch.autograd.grad(out, leaves, g)]


def compare(fn: Callable[..., Tensor], inputs: Sequence[Tensor], rtol: float, atol: float) -> None:
    """The kernel is as near to the formula in float64 as its dtype allows, and has the same bits in a second run."""
    found, again = results(fn, *inputs), results(fn, *inputs)
    with formulas():
        expected = results(fn, *(t.double() for t in inputs))
    for i, (a, b, c) in enumerate(zip(found, expected, again, strict=True)):
        assert torch.equal(a, c), f"{i}: other bits"
        torch.testing.assert_close(a.double(), b.double(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 4096, 2048), (1, 300, 32, 128), (3, 77, 1000), (2, 5, 16384), (0, 64), (7, 3)])
def test_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = new(*shape, dtype=dtype)
    x += x.sign()
    with_sums = 1 if dtype is torch.float32 else 4  # weight gradients: sums of thousands, rounded at their end
    compare(lambda x, p: rms_norm(x, p, 1e-6), [x, new(shape[-1], dtype=dtype)], with_sums * TOLERANCE[dtype], 3e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("added", [False, True])
def test_residual_stream(added: bool, dtype: torch.dtype) -> None:
    x, p = 4 * new(2, 300, 2048, dtype=dtype), new(2048, dtype=dtype)

    def stream(x: Tensor, p: Tensor, *more: Tensor) -> Tensor:
        return torch.cat(add_rms_norm(x, more[0] if more else None, p, 1e-6), -1)

    more = [new(2, 300, 2048, dtype=dtype)] if added else []
    # The sum is rounded before it is normed, which in float64 it is not.
    compare(stream, [x, p, *more], 4 * TOLERANCE[dtype], 3e-3 if dtype is torch.float32 else 0.5)


@pytest.mark.parametrize(("experts", "width"), [(128, 2048), (256, 7168), (512, 2048), (64, 1000), (5, 72), (4, 64)])
@pytest.mark.parametrize("tokens", [1, 300, 8192])
def test_router(tokens: int, experts: int, width: int) -> None:
    """As exact as in fp32: bf16 gradients differ from the exact ones by one rounding, and the same bits every time."""
    x, w = new(tokens, width, dtype=torch.bfloat16), (4 + new(experts, width)).bfloat16()
    g_x, g = new(tokens, width, dtype=torch.bfloat16), new(tokens, experts)
    g -= g.mean(1, keepdim=True)  # a softmax's: terms of the input gradient nearly cancel out

    def run() -> list[Tensor]:
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        outs = score(*leaves)
        return [outs[1].detach(), *torch.autograd.grad(outs, leaves, [g_x, g])]

    with torch.no_grad():
        x64, w64, g64 = x.double(), w.double(), g.double()
        exact = [x64 @ w64.t(), g64 @ w64 + g_x.double(), g64.t() @ x64]
        terms = [x64.abs() @ w64.abs().t(), g64.abs() @ w64.abs() + g_x.double().abs(), g64.abs().t() @ x64.abs()]
    for found, again, e, t, lost in zip(run(), run(), exact, terms, (2**-18, 2**-16, 2**-18), strict=True):
        assert torch.equal(found, again)
        rounding = 2**-8 if found.dtype is torch.bfloat16 else 0.0
        assert ((found.double() - e).abs() <= rounding * e.abs() + lost * t).all()


@pytest.mark.parametrize(("tokens", "experts", "lost"), [(1, 128, 2**-21), (3, 5, 2**-20), (8192, 128, 2**-18)])
def test_weight_gradient_of_a_router_in_fp32(tokens: int, experts: int, lost: float) -> None:
    """Nothing of the gradient is left out where microbatches are added up; of few tokens it could be seen."""
    from hocket.kernels.products import weight_gradient

    g, x = new(tokens, experts), new(tokens, 2048, dtype=torch.bfloat16)
    out = new(experts, 2048)
    exact = out.double() + 0.5 * g.double().t() @ x.double()
    terms = out.double().abs() + 0.5 * g.double().abs().t() @ x.double().abs()
    weight_gradient(g, x, out, add=True, scale=0.5)
    assert ((out.double() - exact).abs() <= lost * terms).all()


def test_router_in_a_graph() -> None:
    """Recorded and replayed with other numbers, it has the bits of a plain run."""
    x, w = new(300, 2048, dtype=torch.bfloat16), new(128, 2048, dtype=torch.bfloat16)
    g_x, g = new(300, 2048, dtype=torch.bfloat16), new(300, 128)

    def run() -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, w)]  # of the stream that runs
        outs = score(*leaves)
        return [outs[1], *torch.autograd.grad(outs, leaves, [g_x, g])]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = run()
    for t in (x, w, g_x, g):
        t.copy_(torch.randn_like(t))
    graph.replay()
    for a, b in zip(recorded, run(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 1024, 32, 128), (1, 77, 4, 128), (3, 5, 7, 96), (2, 9, 130, 128), (0, 4, 2, 8)])
@pytest.mark.parametrize("part", [1, 2])
def test_rotary(shape: tuple[int, ...], part: int, dtype: torch.dtype) -> None:
    """The bits of the formula, also for a gradient that lies in memory as attention left it, and if half rotates."""
    table = rotary_table(shape[1], shape[3] // part, 1e6, torch.device("cuda"))
    x = new(*shape, dtype=dtype)
    g = new(shape[0], shape[2], shape[1], shape[3], dtype=dtype).transpose(1, 2)
    y = rotate(x.requires_grad_(), table)
    (dx,) = torch.autograd.grad(y, x, g)
    with formulas():
        exact = x.detach().float().requires_grad_()
        expected = rotate(exact, table)
        (expected_dx,) = torch.autograd.grad(expected, exact, g.float())
    assert torch.equal(y, expected.to(dtype))
    assert torch.equal(dx, expected_dx.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 1024, 32, 128), (1, 777, 4, 128), (3, 5, 7, 96), (0, 4, 2, 8)])
@pytest.mark.parametrize("part", [1, 2])
def test_norm_and_rotary(shape: tuple[int, ...], part: int, dtype: torch.dtype) -> None:
    table = rotary_table(shape[1], shape[3] // part, 1e6, torch.device("cuda"))
    x = new(*shape, dtype=dtype)
    x += x.sign()

    def heads(x: Tensor, p: Tensor) -> Tensor:
        return norm_rotate(x, p, 1e-6, table.to(torch.float64 if x.dtype is torch.float64 else torch.float32))

    # Both halves of a pair may be large where their sum is not, and a weight gradient is a sum of thousands.
    compare(heads, [x, new(shape[-1], dtype=dtype)], 4 * TOLERANCE[dtype], 3e-3 if dtype is torch.float32 else 0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(8192, 1536), (1, 333, 11264), (5, 2 * 1001), (0, 64), (70000, 2)])
def test_swiglu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    compare(swiglu, [4 * new(*shape, dtype=dtype)], TOLERANCE[dtype], 1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "vocab"), [(512, 151936), (300, 50257), (64, 100), (1, 1)])
def test_loss(tokens: int, vocab: int, dtype: torch.dtype) -> None:
    targets = torch.randint(vocab, (tokens,), device="cuda")
    targets[1::7] = -100
    logits = 3 * new(tokens, vocab, dtype=dtype)
    compare(lambda logits: cross_entropy(logits, targets), [logits], 1e-4 + TOLERANCE[dtype], 1e-6)


def test_loss_beyond_32_bits() -> None:
    """More than 2**31 logits."""
    tokens, vocab = 16384, 151936
    targets = torch.randint(vocab, (tokens,), device="cuda")
    logits = torch.zeros(tokens, vocab, device="cuda", dtype=torch.bfloat16).requires_grad_()
    loss = cross_entropy(logits * 1, targets)
    assert float(loss.detach()) == pytest.approx(torch.tensor(float(vocab)).log().item(), rel=1e-5)
    (g,) = torch.autograd.grad(loss, logits)
    last = g[-1].float()
    assert int(last.argmin()) == int(targets[-1])
    assert float(last.min()) == pytest.approx(-1 / tokens, rel=0.01)


def test_loss_needs_no_second_copy_of_the_logits() -> None:
    tokens, vocab = 2048, 151936
    x = new(tokens, 64, dtype=torch.bfloat16).requires_grad_()
    w = new(vocab, 64, dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(vocab, (tokens,), device="cuda")

    def peak() -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(cross_entropy(F.linear(x, w), targets), [x, w])
        return torch.cuda.max_memory_allocated() - before

    peak()
    logits, weight = 2 * tokens * vocab, 2 * w.numel()
    assert peak() < 1.05 * logits + 2 * weight
    with formulas():
        assert peak() > 4 * logits


def test_no_host_waits() -> None:
    x, p = new(64, 128).requires_grad_(), new(128).requires_grad_()
    table, targets = rotary_table(64, 64, 1e4, torch.device("cuda")), torch.randint(64, (64,), device="cuda")

    def run() -> None:
        y = rotate(rms_norm(x, p, 1e-6).view(1, 64, 2, 64), table)
        cross_entropy(swiglu(y.flatten(2)[0]), targets).backward()

    run()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    run()
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(128, device="cuda"))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return swiglu(norm_rotate(x, self.p, 1e-6, table).flatten(2))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which the compiler looks at
@pytest.mark.parametrize("within", ["compile", "autocast", "vmap"])
def test_formulas_where_kernels_would_not_do(within: str) -> None:
    body, x, table = Body(), new(2, 16, 4, 128), rotary_table(16, 128, 1e4, torch.device("cuda"))
    expected = results(lambda x: body(x, table), x)
    fn: Callable[..., Any] = body
    if within == "compile":
        fn = torch.compile(body, fullgraph=True, backend="aot_eager")
    elif within == "vmap":
        fn = torch.vmap(lambda x, table: body(x.unsqueeze(0), table).squeeze(0), in_dims=(0, None))
    with torch.autocast("cuda", torch.bfloat16, enabled=within == "autocast"):
        found = results(lambda x: fn(x, table), x)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
