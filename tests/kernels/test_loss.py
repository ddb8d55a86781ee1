"""The kernels of cross-entropy against torch's, also in float64, and what they do to the logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.config import ModelConfig
from hocket.kernels.loss import BLOCK, IGNORED, cross_entropy
from hocket.layers import linears, vocabulary
from hocket.model import transformer
from tests.helpers.chunks import init_chunk

DTYPES = [torch.float32, torch.bfloat16]


def both(fn, logits: Tensor, targets: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """(loss, gradient of the logits times `factor`)."""
    leaf = logits.clone().requires_grad_()
    loss = fn(leaf * 1, targets)  # not a leaf: the loss overwrites its logits
    loss.backward(torch.tensor(factor, dtype=loss.dtype))
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@given(
    tokens=st.integers(1, 7),
    width=st.integers(1, 40) | st.sampled_from([1000, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]),
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([0.1, 3.0, 100.0]),
    ignored=st.booleans(),
    factor=st.sampled_from([1.0, 0.125, -3.0]),
)
@settings(max_examples=13)
def test_against_float64(tokens, width, dtype, size, ignored, factor) -> None:
    logits, targets = (size * torch.randn(tokens, width)).to(dtype), torch.randint(width, (tokens,))
    if ignored and tokens > 1:
        targets[::2] = IGNORED
    loss, g = both(cross_entropy, logits, targets, factor)
    expected, expected_g = both(F.cross_entropy, logits.double(), targets, factor)
    assert loss.dtype is torch.float32
    assert g.dtype == dtype
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5 * size)
    torch.testing.assert_close(g.double(), expected_g, rtol=1e-4 if dtype is torch.float32 else 2**-7, atol=1e-6)


def test_minus_infinity_has_no_chance() -> None:
    """A whole block of it, too, and first of all."""
    logits = torch.randn(2, 2 * BLOCK)
    logits[:, :BLOCK] = float("-inf")
    targets = torch.tensor([BLOCK, 2 * BLOCK - 1])
    for a, b in zip(
        both(cross_entropy, logits, targets, 1.0), both(F.cross_entropy, logits, targets, 1.0), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("target", [-1, 5, -101, 1 << 40])
def test_a_target_outside_of_the_vocabulary_shows(target: int) -> None:
    assert cross_entropy(torch.randn(3, 5), torch.tensor([1, target, 2])).isnan()


@pytest.mark.parametrize("targets", [[], [IGNORED, IGNORED]])
def test_no_targets_at_all(targets: list[int]) -> None:
    """Where torch says that 0 / 0 is no number, a microbatch of which nothing counts has no loss and no gradient."""
    chosen = torch.tensor(targets, dtype=torch.long)
    loss, gradient = both(cross_entropy, torch.randn(len(targets), 5), chosen, 1.0)
    assert loss == 0
    assert not gradient.any()


def test_the_gradient_lies_where_the_logits_were_and_is_made_once() -> None:
    leaf = torch.randn(3, 7, requires_grad=True)
    logits = leaf * 1
    loss = cross_entropy(logits, torch.tensor([1, 2, 3]))
    loss.backward(retain_graph=True)
    assert leaf.grad is not None
    assert torch.equal(logits, leaf.grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_chooses_it(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(vocab=50, hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=24, tied=tied)
    chunk = init_chunk(transformer.Chunk(config, range(1)), seed=1)
    ids, targets = torch.randint(50, (2, 2, 6))

    def step() -> tuple[Tensor, list[Tensor]]:
        chunk.zero_grad()
        loss = chunk.loss(chunk(ids), targets)
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in chunk.parameters() if p.grad is not None]

    loss, grads = step()
    monkeypatch.setattr(linears, "usable", lambda *tensors: True)
    fused, fused_grads = step()
    torch.testing.assert_close(fused, loss, rtol=1e-6, atol=1e-6)
    for a, b in zip(fused_grads, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_pieces_of_tokens_have_the_loss_and_gradients_of_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    h, weight = torch.randn(10, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    targets = torch.randint(50, (10,))
    targets[3] = IGNORED

    def step() -> tuple[Tensor, ...]:
        loss = vocabulary.loss_in_pieces(h, weight, targets, 3)
        return loss.detach(), *torch.autograd.grad(loss * 2, (h, weight))

    formula = step()
    monkeypatch.setattr(vocabulary, "usable", lambda *tensors: True)
    for fused, wanted in zip(step(), formula, strict=True):
        torch.testing.assert_close(fused, wanted, rtol=1e-5, atol=1e-6)


def test_second_derivatives_are_refused() -> None:
    leaf = torch.randn(3, 7, requires_grad=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(cross_entropy(leaf * 1, torch.tensor([1, 2, 3])), leaf, create_graph=True)
