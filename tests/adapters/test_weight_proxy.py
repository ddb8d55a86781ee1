"""Parameters that stand in for weights: whatever a module computes with them, gradients are those of autograd.

Between forward and backward the weights move to another slot, and the old one is filled with nan.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.fsdp.planned.unit import Slots
from hocket.layers.weight_proxy import WeightProxy, grouped_linear
from hocket.runtime.segment import Segment
from hocket.runtime.weights import Weight, manage

Params = dict[str, Tensor]
ENDS = torch.tensor([2, 2, 7, 12], dtype=torch.int32)

CASES: dict[str, tuple[dict[str, tuple[int, ...]], Callable[[Tensor, Params], Tensor]]] = {
    "linear": ({"w": (6, 8)}, lambda x, p: F.linear(x, p["w"])),
    "linear_bias": ({"w": (6, 8), "b": (6,)}, lambda x, p: F.linear(x, p["w"], p["b"])),
    "scale": ({"w": (8,)}, lambda x, p: p["w"] * x),
    "scale_right": ({"w": (8,)}, lambda x, p: (x * p["w"]) * p["w"]),
    "one_plus_scale": ({"w": (8,)}, lambda x, p: x * (1.0 + p["w"].float())),
    "rms_norm": ({"w": (8,)}, lambda x, p: F.rms_norm(x, (8,), p["w"], 1e-6)),
    "layer_norm": ({"w": (8,), "b": (8,)}, lambda x, p: F.layer_norm(x, (8,), p["w"], p["b"])),
    "matmul": ({"w": (8, 6)}, lambda x, p: (x @ p["w"]).sin()),
    "transposed": ({"w": (6, 8)}, lambda x, p: x.matmul(p["w"].t())),
    "view": ({"w": (8,)}, lambda x, p: x * p["w"].view(1, 8).expand(12, 8)),
    "same_type": ({"w": (6, 8)}, lambda x, p: F.linear(x.float(), p["w"].type(torch.float32)).exp()),
    "sigmoid": ({"w": (8,)}, lambda x, p: x * p["w"].sigmoid()),
    "indexed": ({"w": (3, 6, 8)}, lambda x, p: F.linear(x, p["w"][1]) + F.linear(x, p["w"][2])),
    "cat": ({"w": (4,)}, lambda x, p: torch.cat([x, p["w"].reshape(1, -1).expand(12, -1)], -1).softmax(-1)),
    "conv": ({"w": (12, 1, 3)}, lambda x, p: F.conv1d(x.unsqueeze(0), p["w"], padding=2, groups=12)[0]),
    "asked": ({"w": (6, 8)}, lambda x, p: F.linear(x.to(p["w"].device, p["w"].dtype), p["w"]) * len(p["w"])),
    "keywords": (
        {"w": (8,), "b": (8,)},
        lambda x, p: torch.addcmul(x, x, p["w"], value=2.0) + torch.add(x, other=p["b"]),
    ),
}


def slots(weights: list[Weight], values: Params) -> Tensor:
    """Put the values into a new slot, as a gather does."""
    flat = torch.full((sum(value.numel() for value in values.values()) + 3,), torch.nan)
    at = 3
    for weight in weights:
        value = values[weight.name]
        weight.value = flat[at : at + value.numel()].view(value.shape)
        weight.value.copy_(value)
        at += value.numel()
    return flat


def managed(shapes: dict[str, tuple[int, ...]]) -> tuple[Params, dict[str, WeightProxy], list[Weight]]:
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    stand_ins = {name: WeightProxy.of(*value.shape) for name, value in values.items()}
    return values, stand_ins, [manage(stand_in, name) for name, stand_in in stand_ins.items()]


def moved_backward(
    x: Tensor, fn: Callable[[Tensor, Params], Tensor], values: Params, params: Params, weights: list[Weight]
) -> tuple[Tensor, Tensor | None, Params]:
    segment, old = Segment(), slots(weights, values)
    y = segment.forward(lambda x: fn(x, params), x)
    new = slots(weights, values)
    old.fill_(torch.nan)
    (gx,) = segment.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
    found = {weight.name: torch.full(weight.shape, torch.nan) for weight in weights}
    segment.queue.drain(lambda weight: found[weight.name])
    assert not new[3:].isnan().any()
    return y, gx, found


def compared(
    shapes: dict[str, tuple[int, ...]], fn: Callable[[Tensor, Params], Tensor], x: Tensor, exact: bool
) -> None:
    values, stand_ins, weights = managed(shapes)
    y, gx, found = moved_backward(x, fn, values, dict(stand_ins), weights)
    leaves = {name: nn.Parameter(value) for name, value in values.items()}
    x = x.clone().requires_grad_(x.is_floating_point())
    expected = fn(x, dict(leaves))
    wanted = [x, *leaves.values()] if x.requires_grad else [*leaves.values()]
    grads = torch.autograd.grad(expected, wanted, torch.linspace(-1, 1, expected.numel()).view(expected.shape))
    close = torch.equal if exact else lambda a, b: torch.allclose(a, b, 1e-5, 1e-6)
    assert close(y, expected.detach())
    if x.requires_grad:
        assert gx is not None
        assert close(gx, grads[0])
    for name, grad in zip(leaves, grads[-len(leaves) :], strict=True):
        assert close(found[name], grad), name


@pytest.mark.parametrize("case", CASES)
def test_gradients_with_weights_that_move(case: str) -> None:
    shapes, fn = CASES[case]
    compared(shapes, fn, torch.randn(12, 8), exact=True)


@pytest.mark.parametrize("padding", [None, 3, -1])
def test_embedding(padding: int | None) -> None:
    ids = torch.randint(0, 9, (2, 5))
    ids[0, :2] = 3
    compared({"w": (9, 4)}, lambda ids, p: F.embedding(ids, p["w"], padding), ids, exact=True)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_grouped(transposed: bool, bias: bool) -> None:
    """One expert has no rows."""
    shapes: dict[str, tuple[int, ...]] = {
        "w": (4, 8, 16) if transposed else (4, 16, 8),
        **({"b": (4, 16)} if bias else {}),
    }
    compared(
        shapes, lambda x, p: grouped_linear(x, p["w"], ENDS, p.get("b"), transposed), torch.randn(12, 8), exact=False
    )


def test_without_gradients_values_are_used_as_they_are() -> None:
    values, stand_ins, weights = managed({"w": (6, 8)})
    slots(weights, values)
    x = torch.randn(3, 8)
    with torch.no_grad():
        assert torch.equal(F.linear(x, stand_ins["w"]), F.linear(x, values["w"]))
        assert torch.equal(stand_ins["w"].t() @ values["w"], values["w"].t() @ values["w"])


def test_nothing_else_is_intercepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of activations alone costs what it costs."""
    values, stand_ins, weights = managed({"w": (6, 8)})
    known, calls = WeightProxy.__torch_function__.__func__, []

    def counted(cls: type, func: object, *args: object) -> object:
        calls.append(func)
        return known(cls, func, *args)

    monkeypatch.setattr(WeightProxy, "__torch_function__", classmethod(counted))
    moved_backward(
        torch.randn(3, 8), lambda x, p: F.silu(F.linear(x, p["w"])).square(), values, dict(stand_ins), weights
    )
    assert calls == [F.linear]


def test_a_gather_meanwhile_is_no_change_of_other_weights() -> None:
    """torch refuses a hook during which a saved tensor changed, by a count that all views of a tensor share."""
    used, other = Slots("dense weight", 2, 8, torch.float32, torch.device("cpu")).buffers

    def meanwhile(saved: torch.Tensor) -> torch.Tensor:
        other.zero_()  # as a thread of gloo does at any time
        return saved

    x = torch.randn(3, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(meanwhile, lambda saved: saved):
        F.layer_norm(x, (8,), used.view(8)).sum().backward()
    assert x.grad is not None
