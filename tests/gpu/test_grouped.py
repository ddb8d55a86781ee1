"""The kernel of experts' weight gradients, at the sizes it is for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hocket.layers.functional import grouped_wgrad

pytestmark = pytest.mark.gpu
MATRICES = [(2048, 1536), (768, 2048), (200, 72)]
COUNTS = [[1024] * 8, [0, 3, 2000, 64, 0, 65, 1, 0], [0, 0, 0, 0], [1000, 1001]]


def operands(counts: list[int], width: int, inner: int) -> tuple[Tensor, Tensor, Tensor]:
    """(x, g, ends): with rows behind the experts' that mean nothing."""
    rows = sum(counts)
    x, g = (torch.randn(rows + 40, n, device="cuda").bfloat16() for n in (width, inner))
    x[rows:] = g[rows:] = float("nan")
    return x, g, torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)


def exact(x: Tensor, g: Tensor, counts: list[int]) -> Tensor:
    """fp64 [E, D, F]."""
    parts = zip(x[: sum(counts)].split(counts), g[: sum(counts)].split(counts), strict=True)
    return torch.stack([a.double().t() @ b.double() for a, b in parts])


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("width", "inner"), MATRICES)
def test_written_and_added(width: int, inner: int, counts: list[int]) -> None:
    x, g, ends = operands(counts, width, inner)
    expected = exact(x, g, counts)
    slot = torch.full(expected.shape, float("nan"), device="cuda", dtype=torch.bfloat16)
    grouped_wgrad(x, g, ends, slot)
    torch.testing.assert_close(slot.double(), expected, rtol=2**-8, atol=1e-2)
    before = torch.randn(expected.shape, device="cuda")
    total, written = before.clone(), torch.full_like(before, float("nan"))
    grouped_wgrad(x, g, ends, written, False, 0.25)
    grouped_wgrad(x, g, ends, total, True, 0.25)
    torch.testing.assert_close(written.double(), 0.25 * expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(total, before + written)


def test_the_same_bits_every_time() -> None:
    x, g, ends = operands([700, 0, 1300, 48], 2048, 1536)
    found = []
    for _ in range(5):
        total = torch.ones(4, 2048, 1536, device="cuda")
        for _ in range(3):
            grouped_wgrad(x, g, ends, total, True, 0.25)
        found.append(total)
    assert all(torch.equal(total, found[0]) for total in found)


def test_what_is_written_has_the_bits_of_torch() -> None:
    """Both add up an expert's rows in their order: so a plan gets the gradients of plain autograd."""
    counts = [1024, 700, 0, 1300, 48]
    x, g, ends = operands(counts, 2048, 1536)
    slot = torch.empty(5, 2048, 1536, device="cuda", dtype=torch.bfloat16)
    grouped_wgrad(x, g, ends, slot)
    assert torch.equal(slot, torch._grouped_mm(x.t(), g, offs=ends))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device() -> None:
    x, g, ends = operands([100, 28], 256, 128)
    total = torch.zeros(2, 256, 128, device="cuda")
    try:
        torch.cuda.set_sync_debug_mode("error")
        grouped_wgrad(x, g, ends, total, True, 0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
