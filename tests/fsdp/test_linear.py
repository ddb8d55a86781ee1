"""The gradients that linear layers write to sinks: the bits of autograd's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hocket.layers.functional import linear_forward
from hocket.runtime.weights import set_sink
from tests.fsdp.sinks import DTYPES, F_OUT, LAYOUTS, OUTPUTS, D, Slot, attach, compare_bits, equal, linears, pair, same


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_of_autograd(layout: str, bias: bool, dtype: torch.dtype) -> None:
    for output in OUTPUTS:
        compare_bits(LAYOUTS[layout](), *linears(bias, dtype), output)
    compare_bits(LAYOUTS[layout](), *linears(bias, dtype), needs=False)


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    order=st.randoms(use_true_random=False),
    step=st.integers(1, 2),
    bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    output=st.sampled_from(sorted(OUTPUTS)),
)
@settings(max_examples=60)
def test_bits_of_autograd_in_any_layout(
    shape: list[int], order: object, step: int, bias: bool, dtype: torch.dtype, output: str
) -> None:
    sizes = [*shape, D * step]
    axes = list(range(len(sizes)))
    order.shuffle(axes)  # type: ignore[attr-defined]
    stored = torch.randn([sizes[axis] for axis in axes])
    x = stored.permute([axes.index(i) for i in range(len(sizes))])[..., ::step]
    compare_bits(x, *linears(bias, dtype), output)


def test_large_product_at_an_odd_address() -> None:
    """Large enough for the blocked kernels."""
    for dtype in DTYPES:
        compare_bits(torch.randn(2, 333, 130), *pair(lambda: nn.Linear(130, 257), dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_called_twice_and_accumulated(dtype: torch.dtype) -> None:
    plain, mine = linears(True, dtype)
    slots = attach(mine)
    for _ in range(2):
        x = torch.randn(2, 3, 5, D, dtype=dtype).unbind()
        for model in (plain, mine):
            for part in x:
                model(part).square().sum().backward()
    same(plain, slots, mine)
    assert all(slot.times == 4 for slot in slots.values())


def test_two_calls_in_one_graph() -> None:
    plain, mine = pair(lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh()))
    slots = attach(mine)
    x = torch.randn(5, D)
    for model in (plain, mine):
        model(model(x)).square().sum().backward()
    same(plain, slots, mine)


@pytest.mark.parametrize(
    ("compute", "wire"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.float32)],
    ids=str,
)
def test_a_buffer_of_another_dtype(compute: torch.dtype, wire: torch.dtype) -> None:
    """On a CPU what is added is autograd's gradient, rounded to the dtype it is computed in."""
    plain, mine = linears(True, compute)
    slots = attach(mine, wire)
    expected = {name: torch.zeros(p.shape, dtype=wire) for name, p in plain.named_parameters()}
    for _ in range(3):
        x = torch.randn(4, 6, D, dtype=compute)
        for model in (plain, mine):
            model(x).square().sum().backward()
        for name, param in plain.named_parameters():
            assert param.grad is not None
            expected[name] += param.grad
            param.grad = None
    for name, slot in slots.items():
        equal(slot.view, expected[name], name)


def test_hooks_of_the_parameter_run_without_a_gradient() -> None:
    """Who counts contributions by hooks sees one more that brings nothing."""
    _, mine = linears()
    slots = attach(mine)
    seen: list[Tensor | None] = []
    mine.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad))
    mine(torch.randn(3, D)).sum().backward()
    assert seen == [None]
    assert slots["weight"].times == 1


def test_only_the_bias_or_the_weight_is_trained() -> None:
    for frozen in ("weight", "bias"):
        plain, mine = linears()
        slots = attach(mine)
        for model in (plain, mine):
            getattr(model, frozen).requires_grad_(False)
            x = torch.ones(3, D, requires_grad=True)
            model(x).square().sum().backward()
        same(plain, slots, mine)


def test_a_frozen_weight_keeps_no_activation() -> None:
    _, mine = linears()
    attach(mine)
    mine.weight.requires_grad_(False)
    kept: list[int] = []
    x = torch.randn(3, D, requires_grad=True)
    with saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()) or tensor, lambda tensor: tensor):
        mine(x)
    assert x.data_ptr() not in kept


def test_a_bias_that_is_in_no_unit() -> None:
    plain, mine = linears()
    slot = Slot(torch.empty(F_OUT, D))
    set_sink(mine.weight, slot)
    x = torch.randn(3, D)
    plain(x).square().sum().backward()
    linear_forward(mine, x).square().sum().backward()
    equal(slot.view, plain.weight.grad)
    equal(mine.bias.grad, plain.bias.grad)
