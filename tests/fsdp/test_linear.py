"""Linear layers that write their weight gradients to sinks: the bits of autograd, and never a gradient too many."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.checkpoint import checkpoint

from hocket.fsdp.linear import FORWARDS, forward_of, linear_forward, set_sink, sink_of

DTYPES = [torch.float32, torch.bfloat16]
D, F_OUT = 24, 40


class Slot:
    """A sink over a piece of a buffer: first written, then added to."""

    def __init__(self, view: Tensor) -> None:
        self.view, self.times = view.fill_(math.nan), 0

    def target(self) -> tuple[Tensor, bool]:
        return self.view, self.times > 0

    def done(self) -> None:
        self.times += 1

    def take(self, param: nn.Parameter) -> None:
        """What the hook of a sharded unit does with a gradient that autograd made."""
        if param.grad is not None:
            view, add = self.target()
            view.add_(param.grad) if add else view.copy_(param.grad)
            self.done()
            param.grad = None

    @property
    def gradient(self) -> Tensor | None:
        return self.view if self.times else None


class Sunk(nn.Linear):
    """A linear layer as in a sharded unit."""

    def forward(self, x: Tensor) -> Tensor:
        return linear_forward(self, x)


def attach(model: nn.Module, dtype: torch.dtype | None = None, device: str = "cpu") -> dict[str, Slot]:
    """Give every parameter a slot in one buffer, at odd addresses, and every linear layer its new forward."""
    params = dict(model.named_parameters())
    wire = dtype or next(iter(params.values())).dtype
    flat = torch.empty(1 + sum(p.numel() for p in params.values()), dtype=wire, device=device)
    offset, slots = 1, {}
    for name, param in params.items():
        slots[name] = Slot(flat[offset : offset + param.numel()].view(param.shape))
        offset += param.numel()
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
    "expanded": lambda y: torch.ones((), dtype=y.dtype).expand(y.shape),
    "transposed": lambda y: torch.randn_like(y.mT.contiguous()).mT,
}


def compare_bits(x: Tensor, plain: nn.Linear, mine: nn.Linear, output: str = "dense", needs: bool = True) -> None:
    slots = attach(mine)
    x = x.to(plain.weight.dtype)
    a, b = x.detach().requires_grad_(needs), x.detach().requires_grad_(needs)
    assert a.stride() == x.stride()
    ya, yb = plain(a), mine(b)
    equal(ya, yb, "output")
    g = OUTPUTS[output](ya.detach())
    ya.backward(g)
    yb.backward(g)
    equal(a.grad, b.grad, "input gradient")
    same(plain, slots, mine)
    assert all(slot.times == 1 for slot in slots.values())


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


def test_a_bias_that_is_in_no_unit() -> None:
    plain, mine = linears()
    slot = Slot(torch.empty(F_OUT, D))
    set_sink(mine.weight, slot)
    x = torch.randn(3, D)
    plain(x).square().sum().backward()
    linear_forward(mine, x).square().sum().backward()
    equal(slot.view, plain.weight.grad)
    equal(mine.bias.grad, plain.bias.grad)


# What backward is asked for.


def test_a_backward_for_the_input_alone_contributes_nothing() -> None:
    plain, mine = linears()
    slots = attach(mine)
    x = torch.randn(3, D, requires_grad=True)
    (dx,) = torch.autograd.grad(mine(x).square().sum(), x)
    mine(x).square().sum().backward(inputs=[x])
    equal(dx, x.grad)
    assert all(slot.times == 0 for slot in slots.values())
    for model in (plain, mine):
        model(x).square().sum().backward(inputs=[model.weight])
    same(plain, slots, mine)


def test_autograd_grad_of_a_weight_returns_it() -> None:
    plain, mine = linears()
    slots = attach(mine)
    x = torch.randn(3, D, requires_grad=True)
    expected = torch.autograd.grad(plain(x).square().sum(), [x, *plain.parameters()])
    found = torch.autograd.grad(mine(x).square().sum(), [x, *mine.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert all(slot.times == 0 for slot in slots.values())


def test_gradient_penalty() -> None:
    """Backward through a backward: the first one only makes a graph."""
    plain, mine = pair(lambda: nn.Sequential(nn.Linear(D, F_OUT), nn.Tanh(), nn.Linear(F_OUT, 1)))
    slots = attach(mine)
    x = torch.randn(5, D, requires_grad=True)
    for model in (plain, mine):
        (dx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        assert dx.requires_grad
        (dx.norm() + model(x).sum()).backward()
    for name, param in plain.named_parameters():
        assert param.grad is not None
        torch.testing.assert_close(slots[name].view, param.grad, rtol=1e-6, atol=1e-6)


def test_second_derivatives() -> None:
    _, mine = linears()
    mine.double()
    attach(mine)
    x = torch.randn(2, 3, D, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor, *_: Tensor) -> Tensor:
        return linear_forward(mine, x).tanh()

    assert torch.autograd.gradgradcheck(function, (x, *mine.parameters()))


def test_backward_twice_through_one_graph() -> None:
    plain, mine = linears()
    slots = attach(mine)
    x = torch.randn(3, D)
    for model in (plain, mine):
        y = model(x).square().sum()
        y.backward(retain_graph=True)
        y.backward()
    same(plain, slots, mine)


def test_a_weight_modified_before_backward_is_an_error() -> None:
    _, mine = linears()
    slots = attach(mine)
    y = mine(torch.randn(3, D)).sum()
    with torch.no_grad():
        mine.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified in place"):
        y.backward()
    assert slots["weight"].times == 0


def test_backward_in_another_thread() -> None:
    plain, mine = linears()
    slots = attach(mine)
    x = torch.randn(3, D)
    losses = [model(x).square().sum() for model in (plain, mine)]
    for loss in losses:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    same(plain, slots, mine)


# Recompute, hooks on saved tensors, ties.


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
def test_checkpoint(reentrant: bool) -> None:
    plain, mine = pair(lambda: nn.Sequential(nn.Linear(D, D), nn.ReLU(inplace=True), nn.Linear(D, D, bias=False)))
    slots = attach(mine)
    x = torch.randn(2, 3, D, requires_grad=True)
    for model in (plain, mine):
        checkpoint(model, checkpoint(model, x, use_reentrant=reentrant), use_reentrant=reentrant).sum().backward()
    same(plain, slots, mine)


def test_saved_tensor_hooks_see_activations_alone() -> None:
    _, mine = linears()
    slots = attach(mine)
    x = torch.randn(3, D)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor * 2

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = mine(x)
    y.sum().backward()
    assert [id(tensor) for tensor in packed] == [id(x)]
    assert torch.equal(slots["weight"].view, torch.ones(3, F_OUT).t() @ (2 * x))


class Tied(nn.Module):
    """An embedding whose weight is the head's and an inner layer's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = (
            nn.Embedding(D, D),
            nn.Linear(D, D, bias=False),
            nn.Linear(D, D, bias=False),
        )
        self.inner.weight = self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(ids)).tanh())


def test_tied_weights() -> None:
    """Two layers write to the sink; what the embedding adds comes by autograd, once."""
    plain, mine = pair(Tied)
    slots = attach(mine)
    ids = torch.randint(D, (2, 9))
    for model in (plain, mine):
        model(ids).square().sum().backward()
    assert {name: slot.times for name, slot in slots.items()} == {"embed.weight": 3}
    same(plain, slots, mine)


# What comes after, and what stays out.


@pytest.mark.parametrize("layout", ["rows", "batch", "batch second", "image"])
def test_the_output_can_be_changed_in_place(layout: str) -> None:
    plain, mine = linears()
    slots = attach(mine)
    x = LAYOUTS[layout]()
    for model in (plain, mine):
        y = model(x)
        y[0].mul_(2)
        y.relu_()
        y.square().sum().backward()
    same(plain, slots, mine)


def _autocast(model: nn.Linear, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)


def _hooked(model: nn.Linear, x: Tensor) -> Tensor:
    model.weight.register_hook(lambda g: 2 * g)
    return model(x)


def _compiled(model: nn.Linear, x: Tensor) -> Tensor:
    return torch.compile(lambda x: linear_forward(model, x), backend="eager", fullgraph=True)(x)


def _vector(model: nn.Linear, x: Tensor) -> Tensor:
    return model(x[0])


def _parameter_of_a_subclass(model: nn.Linear, x: Tensor) -> Tensor:
    class Labelled(Tensor):
        pass

    return model(x.as_subclass(Labelled)).as_subclass(Tensor)


@pytest.mark.parametrize("run", [_autocast, _hooked, _compiled, _vector, _parameter_of_a_subclass])
def test_left_to_autograd(run: Callable[[nn.Linear, Tensor], Tensor]) -> None:
    plain, mine = linears()
    slots = attach(mine)
    calls: list[str] = []
    for slot in slots.values():
        slot.target = lambda slot=slot: calls.append("target") or (slot.view, slot.times > 0)  # type: ignore[method-assign]
        slot.take = lambda param: None  # type: ignore[method-assign]
    mine.weight._post_accumulate_grad_hooks.clear()
    mine.bias._post_accumulate_grad_hooks.clear()
    x = torch.randn(3, D)
    for model in (plain, mine):
        run(model, x).float().square().sum().backward()
    for param, other in zip(plain.parameters(), mine.parameters(), strict=True):
        assert param.grad is not None
        equal(param.grad, other.grad)
    assert not calls


def test_without_gradients_it_is_the_plain_function() -> None:
    plain, mine = linears()
    attach(mine)
    x = torch.randn(2, 3, D, requires_grad=True)
    with torch.no_grad():
        equal(plain(x), mine(x))
        assert not mine(x).requires_grad
    with torch.inference_mode():
        equal(plain(x), mine(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # of torch itself, at the first forward derivative
def test_function_transforms_and_forward_derivatives() -> None:
    plain, mine = linears()
    attach(mine)
    x = torch.randn(3, D)
    expected, found = (torch.func.grad(lambda x, m=model: m(x).square().sum())(x) for model in (plain, mine))
    assert torch.equal(expected, found)
    assert torch.equal(torch.func.vmap(plain)(x[None]), torch.func.vmap(mine)(x[None]))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        a, b = forward_ad.unpack_dual(plain(dual)), forward_ad.unpack_dual(mine(dual))
    assert a.tangent is not None
    equal(a.tangent, b.tangent)


def test_which_classes_are_replaced() -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight) * 2

    assert list(FORWARDS.items()) == [(nn.Linear, linear_forward)]
    assert forward_of(nn.Linear) is forward_of(NonDynamicallyQuantizableLinear) is linear_forward
    assert [forward_of(cls) for cls in (Own, nn.Bilinear, nn.Module, nn.Identity)] == [None] * 4
    assert sink_of(torch.ones(1)) is None
