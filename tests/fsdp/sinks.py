"""Linear layers with sinks, and plain ones beside them to compare every bit with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from hocket.fsdp.layout import FlatLayout
from hocket.layers.functional import linear_forward
from hocket.runtime.weights import put, set_sink

DTYPES = [torch.float32, torch.bfloat16]
D, F_OUT = 24, 40


class Slot:
    """A sink over a piece of a buffer: first written, then added to."""

    def __init__(self, view: Tensor) -> None:
        self.view, self.times = view.fill_(math.nan), 0

    def __call__(self) -> tuple[Tensor, bool]:
        self.times += 1
        return self.view, self.times > 1

    def take(self, param: nn.Parameter) -> None:
        """What the hook of a sharded unit does with a gradient that autograd made."""
        if param.grad is not None:
            grad, param.grad = param.grad.detach(), None
            put(grad, *self())

    @property
    def gradient(self) -> Tensor | None:
        return self.view if self.times else None


Sunk = type("Sunk", (nn.Linear,), {"forward": linear_forward})
"""A linear layer as in a sharded unit."""


def attach(model: nn.Module, dtype: torch.dtype | None = None, align: int = 1) -> dict[str, Slot]:
    """Give parameters slots in one buffer, by default at odd addresses, and linear layers their new forward."""
    params = dict(model.named_parameters())
    layout = FlatLayout.build([("before", (1,)), *((name, tuple(p.shape)) for name, p in params.items())], 1, align)
    first = next(iter(params.values()))
    flat, slots = torch.empty(layout.total, dtype=dtype or first.dtype, device=first.device), {}
    for name, param in params.items():
        entry = layout.by_name[name]
        slots[name] = Slot(flat[entry.offset : entry.end].view(param.shape))
        set_sink(param, slots[name])
        param.register_post_accumulate_grad_hook(slots[name].take)
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Sunk
    return slots


M = TypeVar("M", bound=nn.Module)


def pair(build: Callable[[], M], dtype: torch.dtype = torch.float32) -> tuple[M, M]:
    """The same model twice."""
    first, second = build().to(dtype), build().to(dtype)
    second.load_state_dict(first.state_dict())
    return first, second


def linears(bias: bool = True, dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, nn.Linear]:
    return pair(lambda: nn.Linear(D, F_OUT, bias=bias), dtype)


def equal(a: Tensor | None, b: Tensor | None, what: str = "") -> None:
    """Both None, or the same bits in the same layout."""
    assert (a is None) == (b is None), what
    if a is not None and b is not None:
        assert torch.equal(a, b), f"{what}: {(a - b).abs().max()}"
        assert a.stride() == b.stride(), what


def same(plain: nn.Module, slots: dict[str, Slot], model: nn.Module) -> None:
    """The gradients of the plain model are in the slots, to the last bit, and nowhere else."""
    assert all(param.grad is None for param in model.parameters())
    for name, param in plain.named_parameters():
        equal(slots[name].gradient, param.grad, name)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: torch.randn(9, D),
    "one row": lambda: torch.randn(1, D),
    "no rows": lambda: torch.randn(0, D),
    "columns": lambda: torch.randn(D, 9).t(),
    "every other row": lambda: torch.randn(18, D)[::2],
    "part of rows": lambda: torch.randn(9, 2 * D)[:, 3 : 3 + D],
    "the same row": lambda: torch.randn(1, D).expand(9, D),
    "batch": lambda: torch.randn(3, 7, D),
    "empty batch": lambda: torch.randn(3, 0, D),
    "batch second": lambda: torch.randn(7, 3, D).transpose(0, 1),
    "batch of parts": lambda: torch.randn(3, 7, 2 * D)[..., :D],
    "columns of a batch": lambda: torch.randn(3, D, 7).transpose(1, 2),
    "image": lambda: torch.randn(2, 3, 5, D),
    "channels first": lambda: torch.randn(2, D, 3, 5).permute(0, 2, 3, 1),
}

OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda y: torch.randn_like(y),
    "expanded": lambda y: y.new_ones(()).expand(y.shape),
    "transposed": lambda y: torch.randn_like(y.mT.contiguous()).mT,
}


def compare_bits(
    x: Tensor, plain: nn.Linear, mine: nn.Linear, output: str = "dense", needs: bool = True, align: int = 1
) -> None:
    """One forward and backward each; `align` is the elements to whose multiples slots are aligned."""
    slots = attach(mine, align=align)
    x = x.to(plain.weight)
    a, b = x.detach().requires_grad_(needs), x.detach().requires_grad_(needs)
    ya, yb = plain(a), mine(b)
    equal(ya, yb, "output")
    g = OUTPUTS[output](ya.detach())
    ya.backward(g)
    yb.backward(g)
    equal(a.grad, b.grad, "input gradient")
    same(plain, slots, mine)
    assert all(slot.times == 1 for slot in slots.values())
