"""Linear layers with sinks beside all else that autograd does: recompute, ties, transforms, and parts of a graph."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hocket.fsdp.members import FORWARDS, forward_of
from hocket.layers.functional import embedding_forward, linear_forward
from hocket.runtime.weights import sink_of
from tests.fsdp.sinks import F_OUT, LAYOUTS, D, attach, equal, linears, pair, same


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


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
def test_backward_that_makes_a_graph() -> None:
    plain, mine = linears()
    slots = attach(mine)
    xs = [torch.linspace(-1, 1, 3 * D).view(3, D).requires_grad_() for _ in range(2)]
    for model, x in zip((plain, mine), xs, strict=True):
        model(x).tanh().sum().backward(create_graph=True)
        assert x.grad is not None
        assert x.grad.requires_grad
    equal(xs[0].grad, xs[1].grad)
    same(plain, slots, mine)
    assert not slots["weight"].view.requires_grad
    for model in (plain, mine):  # break the circles of gradients and graphs
        model.zero_grad()


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


@pytest.mark.parametrize("kept", [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.tanh.default])
def test_checkpoint_that_keeps_some_operations(kept: OpOverload) -> None:
    plain, mine = pair(lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D, bias=False), nn.Tanh()))
    slots = attach(mine)
    x = torch.randn(2, 3, D, requires_grad=True)
    for model in (plain, mine):
        contexts = partial(create_selective_checkpoint_contexts, [kept])
        checkpoint(model, x, use_reentrant=False, context_fn=contexts).sum().backward()
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
    """All three write to the sink, one after the other."""
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_gradients_it_is_the_plain_function(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, mine = linears()
    attach(mine)
    monkeypatch.setattr("hocket.layers.functional._Linear", None)
    x = LAYOUTS[layout]().requires_grad_()
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
        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input, self.weight) * 2

    assert {nn.Linear: linear_forward, nn.Embedding: embedding_forward} == FORWARDS
    assert forward_of(nn.Linear) is forward_of(NonDynamicallyQuantizableLinear) is linear_forward
    assert [forward_of(cls) for cls in (Own, nn.Bilinear, nn.Module, nn.Identity)] == [None] * 4
    assert sink_of(torch.ones(1)) is None
