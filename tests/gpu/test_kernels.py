"""The kernels that choose experts and move rows, against their formulas on the same GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hocket.config import ModelConfig
from hocket.fsdp.buffers import squares_of
from hocket.kernels import formulas
from hocket.kernels.adamw import adamw
from hocket.layers.dispatch import (
    Splits,
    counts_to_send,
    from_experts,
    group_rows,
    permute,
    send_rows,
    splits_of,
    to_experts,
    ungroup_rows,
    unpermute,
)
from hocket.layers.routing import Routing, route
from hocket.model.moe import MoELayer
from hocket.model.parts import ONLY
from hocket.runtime.transports import RowTable

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16]
CONFIG = ModelConfig(experts=128, top_k=8, aux_loss=0.01)
SIZES = [(1, 8, 2048), (300, 8, 2048), (33, 3, 100), (1000, 1, 4096), (5, 6, 7), (64, 8, 5120)]
"""(tokens, top_k, width)."""


def routed(tokens: int, top_k: int, spread: float = 1.0) -> tuple[Tensor, Routing]:
    """Weights and routing of random logits; with a large spread most experts get nothing."""
    logits = torch.randn(tokens, CONFIG.experts) + torch.randn(CONFIG.experts) * spread
    return route(logits.cuda(), replace(CONFIG, top_k=top_k))


def both_ways(run: Callable[..., Tensor], *inputs: Tensor) -> list[list[Tensor]]:
    """Output and gradients by formulas, by kernels, and by kernels again."""
    found = []
    for by_formula in (True, False, False):
        leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]

        def once(leaves: list[Tensor] = leaves) -> Tensor:
            out = run(*leaves)
            g = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
            out.backward(g.to(out.device, out.dtype))
            return out.detach()

        if by_formula:
            with formulas():
                out = once()
        else:
            out = once()
        grads = [x.grad for x in leaves if x.grad is not None]
        found.append([out, *grads])
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "top_k", "width"), SIZES)
def test_permute(tokens: int, top_k: int, width: int, dtype: torch.dtype) -> None:
    _, routing = routed(tokens, top_k)
    formula, *kernels = both_ways(lambda x: permute(x, routing), torch.randn(tokens, width).to("cuda", dtype))
    for kernel in kernels:
        assert all(torch.equal(a, b) for a, b in zip(formula, kernel, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize(("tokens", "top_k", "width"), SIZES)
def test_unpermute(tokens: int, top_k: int, width: int, has_shared: bool, dtype: torch.dtype) -> None:
    """The same bits, but for the gradients of weights, which are sums over columns; those are always the same."""
    probs, routing = routed(tokens, top_k)
    rows, residual, shared = (torch.randn(n, width).to("cuda", dtype) for n in (tokens * top_k, tokens, tokens))

    def run(rows: Tensor, probs: Tensor, residual: Tensor, shared: Tensor) -> Tensor:
        return unpermute(rows, probs, residual, shared if has_shared else None, routing)

    formula, first, again = both_ways(run, rows, probs, residual, shared)
    for i, (a, b, c) in enumerate(zip(formula, first, again, strict=True)):
        assert torch.equal(b, c)
        if i == 2:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
        else:
            assert torch.equal(a, b), i


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 128, 8), (4096, 128, 8), (1000, 32, 4), (777, 256, 8)])
def test_route(tokens: int, experts: int, top_k: int, router: str) -> None:
    config = replace(CONFIG, experts=experts, top_k=top_k, router=router)  # pyrefly: ignore
    # No two of a token's scores are so close that rounding decides.
    near = torch.stack([torch.randperm(experts) for _ in range(tokens)]) * (8.0 / experts)
    logits = (near + torch.rand(experts) * 1e-3).cuda()
    with formulas():
        _, expected = route(logits, config)
    _, routing = route(logits, config)
    assert torch.equal(expected.inverse_R, routing.inverse_R)
    assert torch.equal(expected.counts_E, routing.counts_E)
    assert expected.aux is not None
    assert routing.aux is not None
    torch.testing.assert_close(expected.aux, routing.aux)
    formula, *kernels = both_ways(lambda logits: route(logits, config)[0], logits)
    for kernel in kernels:
        torch.testing.assert_close(formula, kernel, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(*kernels, strict=True))


def test_all_tokens_choose_the_same_experts() -> None:
    logits = torch.arange(128.0).expand(2000, 128).contiguous().cuda()
    _, routing = route(logits, CONFIG)
    assert routing.counts_E.tolist() == [0] * 120 + [2000] * 8
    assert torch.equal(routing.inverse_R.sort().values.cpu(), torch.arange(16000, dtype=torch.int32))


def test_numbers_gone_wrong_stay_inside() -> None:
    _, routing = route(torch.full((999, 128), float("nan"), device="cuda"), CONFIG)
    assert torch.equal(routing.inverse_R.sort().values.cpu(), torch.arange(999 * 8, dtype=torch.int32))


@pytest.mark.parametrize(
    "counts", [[[3, 0], [0, 5], [7, 1]], [[0] * 4, [0] * 4], [[5000, 1, 0], [0, 0, 9000]]], ids=str
)
def test_grouping(counts: list[list[int]]) -> None:
    table = RowTable([[sum(of_rank)] + [0] * (len(counts) - 1) for of_rank in counts], 0)
    by_formula, by_kernel = (Splits(table, torch.tensor(counts, device="cuda")) for _ in range(2))
    with formulas():
        expected = [by_formula.offsets_L, by_formula.order_R, by_formula.inverse_R]
    found = [by_kernel.offsets_L, by_kernel.order_R, by_kernel.inverse_R]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    rows = torch.randn(sum(table.receive), 16, device="cuda")
    assert torch.equal(ungroup_rows(group_rows(rows, by_kernel), by_kernel), rows)


def test_a_layer_with_kernels_is_the_one_with_formulas() -> None:
    """In fp32, where rounding moves no token to another expert."""
    config = ModelConfig(
        hidden=256, heads=4, kv_heads=2, head_dim=64, experts=16, top_k=4, expert_ffn=128, shared_ffn=128, qk_norm=True,
        aux_loss=0.01,
    )  # fmt: skip
    layer = MoELayer(config, ONLY, 1.0).to_empty(device="cuda")
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.randn(param.shape) * 0.05 if param.dim() > 1 else torch.ones(param.shape))
    names = [name for name, _ in layer.named_parameters()]

    def run(x: Tensor, *params: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, params, strict=True)), (x,))

    with warnings.catch_warnings():
        # The first matrix product in autograd's own thread warns that the thread has no CUDA context, and makes one.
        warnings.simplefilter("ignore")
        x = torch.ones(2, 2, device="cuda", requires_grad=True)
        (x @ x).sum().backward()
    formula, kernel, again = both_ways(run, torch.randn(2, 100, 256).cuda(), *layer.parameters())
    for name, a, b, c in zip(["output", "input", *names], formula, kernel, again, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(b, c, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("tokens", [1, 777, 4096])
def test_one_copy_per_rank(tokens: int, ranks: int, dtype: torch.dtype) -> None:
    """Rows of all ranks are this rank's own: the same bits both ways, but for gradients of weights."""
    probs, routing = routed(tokens, 8)
    x, residual = (torch.randn(tokens, 256).to("cuda", dtype) for _ in range(2))

    def run(x: Tensor, probs: Tensor, residual: Tensor) -> Tensor:
        mine = routing.by_rank(ranks)
        rows, *_ = send_rows(x, probs, mine)
        splits = splits_of(counts_to_send(mine, ranks).expand(ranks, -1, -1).transpose(0, 1), 0, mine)
        grouped, _, opened = to_experts(rows[: sum(splits.table.receive)], splits)
        return unpermute(from_experts(grouped * 2, opened, splits), None, residual, None, mine)

    formula, first, again = both_ways(run, x, probs, residual)
    for i, (a, b, c) in enumerate(zip(formula, first, again, strict=True)):
        assert torch.equal(b, c)
        if i == 2:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
        else:
            assert torch.equal(a, b), i


@pytest.mark.parametrize("averages", [torch.float32, torch.bfloat16], ids=str)
def test_adamw(averages: torch.dtype) -> None:
    """Within rounding of torch's own in fp64; and nothing where the step is skipped."""
    numel, lr, betas, eps = (1 << 20) + 5, 0.01, (0.9, 0.95), 1e-8
    main = torch.randn(numel, device="cuda")
    exact = main.double().requires_grad_()
    torchs = torch.optim.AdamW([exact], lr=lr, betas=betas, eps=eps, weight_decay=0.1)
    kept = [torch.zeros(numel, device="cuda", dtype=averages) for _ in betas]
    weight = torch.zeros(numel, device="cuda", dtype=torch.bfloat16)
    for step in range(1, 4):
        grad = torch.randn(numel, device="cuda")
        exact.grad = 0.5 * grad.double()
        torchs.step()
        corrections = [1 - beta**step for beta in betas]
        numbers = [0.5, lr / corrections[0], corrections[1] ** 0.5, 0.0, 1 - lr * 0.1]
        told = torch.tensor(numbers, dtype=torch.float64, device="cuda")
        adamw(main, grad, (kept[0], kept[1]), weight, told, True, (*betas, eps))
    assert torch.equal(weight, main.bfloat16())
    torch.testing.assert_close(
        main.double(), exact.detach(), rtol=1e-6, atol=1e-6 if averages is torch.float32 else 2e-3
    )
    told[3], before = 1.0, main.clone()
    adamw(main, grad, (kept[0], kept[1]), weight, told, True, (*betas, eps))
    assert torch.equal(main, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_squares_of_gradients(dtype: torch.dtype) -> None:
    """Like torch's but for the order of additions, always the same bits, and without a copy in fp64."""
    grads = [torch.randn(numel, device="cuda").to(dtype) for numel in (1, 0, 12345, 1 << 26)]
    expected = torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float64).square() for grad in grads])
    squares_of(grads)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    first, again = squares_of(grads), squares_of(grads)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
    torch.testing.assert_close(first, expected, rtol=1e-13, atol=0.0)
    assert torch.equal(first, again)
