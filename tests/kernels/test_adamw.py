"""The kernel of AdamW, against torch's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.fsdp.planned.optimizer import _adamw as formula
from hocket.kernels.adamw import BLOCK, adamw

BETAS, EPS = (0.9, 0.95), 1e-8


def told(step: int, lr: float, factor: float = 1.0, decay: float = 0.1, skipped: bool = False) -> Tensor:
    corrections = [1 - beta**step for beta in BETAS]
    numbers = [factor, lr / corrections[0], corrections[1] ** 0.5, skipped, 1 - lr * decay]
    return torch.tensor(numbers, dtype=torch.float64)


def spread_out(numel: int, power: float) -> Tensor:
    return torch.randn(numel) * 10 ** (power * torch.randn(numel))


@given(
    numel=st.integers(1, 40) | st.integers(BLOCK - 1, BLOCK + 1) | st.integers(2 * BLOCK, 3 * BLOCK),
    lr=st.floats(1e-6, 0.1),
    decay=st.sampled_from([0.0, 0.1]),
    factor=st.sampled_from([1.0, 0.03]),
)
@settings(max_examples=13)
def test_is_torchs_adamw(numel: int, lr: float, decay: float, factor: float) -> None:
    """In fp64: the kernel errs by no more than torch's own operations in fp32."""
    mine = spread_out(numel, 0.5)
    theirs = mine.clone()
    exact = mine.double().requires_grad_()
    torchs = torch.optim.AdamW([exact], lr=lr, betas=BETAS, eps=EPS, weight_decay=decay)
    kept, others = ((torch.zeros(numel), torch.zeros(numel)) for _ in range(2))
    weight = torch.zeros(numel).bfloat16()
    for step in range(1, 4):
        grad = spread_out(numel, 1.0)
        exact.grad = grad.double() * factor
        torchs.step()
        adamw(mine, grad.clone(), kept, weight, told(step, lr, factor, decay), True, (*BETAS, EPS))
        formula(theirs, grad.clone(), others, told(step, lr, factor, decay), True, (*BETAS, EPS))
    assert torch.equal(weight, mine.bfloat16())
    wanted = exact.detach()
    largest = (theirs - wanted).abs().max().item() + 1e-6 * wanted.abs().max().item()
    assert (mine - wanted).abs().max().item() <= 2 * largest
    for average, name in zip(kept, ("exp_avg", "exp_avg_sq"), strict=True):
        least = 1e-6 * average.abs().max().item()  # what is left of gradients that nearly cancel is less exact
        torch.testing.assert_close(average.double(), torchs.state[exact][name], rtol=1e-5, atol=least)


def test_averages_in_bf16_are_rounded_behind_the_update() -> None:
    numel, lr = BLOCK + 5, 0.01
    wide, narrow = (torch.linspace(-2, 2, numel) for _ in range(2))
    exact = torch.zeros(numel), torch.zeros(numel)
    rounded = torch.zeros(numel).bfloat16(), torch.zeros(numel).bfloat16()
    for step in range(1, 4):
        grad = spread_out(numel, 1.0)
        adamw(wide, grad, exact, None, told(step, lr), False, (*BETAS, EPS))
        adamw(narrow, grad, rounded, None, told(step, lr), False, (*BETAS, EPS))
        assert all(torch.equal(a.bfloat16(), b) for a, b in zip(exact, rounded, strict=True))
        assert torch.equal(wide, narrow)
        exact = rounded[0].float(), rounded[1].float()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_step_that_is_skipped_changes_nothing(value: float) -> None:
    tensors = [torch.randn(BLOCK + 3) for _ in range(4)]
    before = [tensor.clone() for tensor in tensors]
    grad = torch.full((BLOCK + 3,), value)
    main, weight, *averages = tensors
    adamw(main, grad, (averages[0], averages[1]), weight, told(1, 0.1, value, skipped=True), True, (*BETAS, EPS))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_a_part_leaves_its_neighbours_alone() -> None:
    memory = [torch.randn(3 * BLOCK) for _ in range(4)]
    before = [tensor.clone() for tensor in memory]
    at = slice(BLOCK - 3, 2 * BLOCK + 1)
    main, grad, average, squares = (tensor[at] for tensor in memory)
    adamw(main, grad, (average, squares.abs_()), None, told(1, 0.1), True, (*BETAS, EPS))
    for tensor, old in zip(memory, before, strict=True):
        assert torch.equal(tensor[: at.start], old[: at.start])
        assert torch.equal(tensor[at.stop :], old[at.stop :])
    assert not torch.equal(memory[0][at], before[0][at])
