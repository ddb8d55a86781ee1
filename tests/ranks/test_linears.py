"""Several linear layers of one input, whose gradient their products add up on a GPU: that way, on a CPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.layers import functional
from hocket.layers.functional import linears
from hocket.runtime.weights import WgradQueue, collecting, manage, weight_of

WIDTHS = (12, 4, 4)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "usable", lambda *tensors: True)


def made(dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[nn.Parameter], list[Tensor]]:
    """Input, weights, and gradients of the outputs."""
    x = torch.randn(2, 5, 8, dtype=dtype).requires_grad_()
    return (
        x,
        [nn.Parameter(torch.randn(n, 8, dtype=dtype)) for n in WIDTHS],
        [torch.randn(2, 5, n).to(x) for n in WIDTHS],
    )


def formula(x: Tensor, params: list[nn.Parameter], gs: list[Tensor]) -> list[Tensor]:
    outs = [x @ p.t() for p in params]
    return [*outs, *torch.autograd.grad(outs, [x, *params], gs)]


class Ops(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def test_ordinary_weights() -> None:
    x, params, gs = made()
    outs = linears(x, params)
    with Ops() as ops:
        found = [*outs, *torch.autograd.grad(outs, [x, *params], gs)]
    for a, b in zip(found, formula(x, params, gs), strict=True):
        torch.testing.assert_close(a, b)
    assert ops.counts["aten::addmm_"] == 2
    assert not ops.counts["aten::add"] + ops.counts["aten::add_"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_managed_weights_have_the_same_bits(dtype: torch.dtype) -> None:
    x, params, gs = made(dtype)
    outs = linears(x, params)
    ordinary = [*outs, *torch.autograd.grad(outs, [x, *params], gs)]
    queue, values = WgradQueue(), [p.detach().clone() for p in params]
    for p, value in zip(params, values, strict=True):
        manage(p, "p").value = value
    with collecting(queue):
        outs = linears(x, params)
    managed = [*outs, *torch.autograd.grad(outs, [x], gs)]
    slots = {weight_of(p): torch.full_like(p, float("nan")) for p in params}
    assert len(queue) == len(params)
    queue.drain(lambda weight: slots[weight])
    for a, b in zip(ordinary, [*managed, *slots.values()], strict=True):
        assert torch.equal(a, b)


def test_only_what_is_asked_for() -> None:
    x, params, gs = made()
    params[1].requires_grad_(False)
    outs = linears(x.detach(), params)
    torch.autograd.backward([outs[0], outs[2]], [gs[0], gs[2]])
    assert params[1].grad is None
    assert params[0].grad is not None
    torch.testing.assert_close(params[0].grad, formula(x, [params[0]], gs[:1])[2])


def test_what_autograd_refuses() -> None:
    x, params, gs = made()
    outs = linears(x, params)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(outs, x, gs, create_graph=True)
    outs = linears(x, params)
    with torch.no_grad():
        params[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified in place"):
        torch.autograd.grad(outs, x, gs)


def test_one_weight_has_nothing_to_add_up() -> None:
    x, params, _ = made()
    assert "_Linears" not in str(linears(x, params[:1])[0].grad_fn)
