"""Tables whose gradient is written to a sink: autograd's bits, for the formula of GPUs too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.fsdp.members import forward_of
from hocket.layers.functional import dense_gradient, embedding, embedding_forward, sums_by_id, write_sums
from hocket.runtime.weights import set_sink
from tests.fsdp.sinks import DTYPES, D, Slot

V = 50
IDS = {
    "some often": lambda: torch.randint(V // 5, (3, 13)),
    "all the same": lambda: torch.full((4, 5), V - 1),
    "each once": lambda: torch.randperm(V)[:20].view(4, 5),
    "one": lambda: torch.tensor([[7]]),
    "32 bits": lambda: torch.randint(V, (2, 9), dtype=torch.int32),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids", IDS)
def test_sums_are_those_of_the_whole_table(ids: str, dtype: torch.dtype) -> None:
    ids_T = IDS[ids]()
    g_TD = torch.randn(*ids_T.shape, D, dtype=dtype)
    wanted = dense_gradient(ids_T, g_TD, V)
    flat = ids_T.reshape(-1).long()
    assert torch.equal(sums_by_id(flat, g_TD.reshape(-1, D)), wanted[flat])
    for into in (dtype, torch.float32):
        out = torch.full((V, D), float("nan"), dtype=into)
        write_sums(ids_T, g_TD, out, add=False)
        assert torch.equal(out, wanted.to(into))
        before = out.normal_().clone()
        write_sums(ids_T, g_TD, out, add=True)
        assert torch.equal(out, before.add_(wanted))
        if into is torch.float32:
            write_sums(ids_T, g_TD, out, True, 0.3)
            assert torch.equal(out, before.add_(wanted.float() * 0.3))


def table(**options: Any) -> tuple[nn.Parameter, Slot]:
    param = nn.Parameter(torch.randn(V, D, **options))
    slot = Slot(torch.empty(V, D, **options))
    set_sink(param, slot)
    param.register_post_accumulate_grad_hook(slot.take)
    return param, slot


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_is_in_the_sink(dtype: torch.dtype) -> None:
    param, slot = table(dtype=dtype)
    plain = nn.Parameter(param.detach().clone())
    for number in (1, 2):
        ids, g = torch.randint(V, (2, 9)), torch.randn(2, 9, D, dtype=dtype)
        out = embedding(ids, param)
        assert torch.equal(out, F.embedding(ids, plain))
        out.backward(g)
        F.embedding(ids, plain).backward(g)
        assert param.grad is None
        assert slot.times == number
        assert plain.grad is not None
        assert torch.equal(slot.view, plain.grad)


def test_what_is_left_to_autograd() -> None:
    param, slot = table()
    ids = torch.randint(V, (2, 9))
    (grad,) = torch.autograd.grad(embedding(ids, param).square().sum(), [param])
    assert slot.times == 0
    assert torch.equal(grad, dense_gradient(ids, 2 * param.detach()[ids], V))
    (grad,) = torch.autograd.grad(embedding(ids, param).square().sum(), [param], create_graph=True)
    grad.sum().backward()
    assert slot.times == 1
    with torch.no_grad():
        assert torch.equal(embedding(ids, param), param[ids])


@pytest.mark.parametrize("options", [{"padding_idx": 3}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}], ids=str)
def test_options_of_modules_are_obeyed(options: dict[str, Any]) -> None:
    assert forward_of(nn.Embedding) is embedding_forward
    ids = torch.randint(5, (2, 9))
    grads = list[Tensor]()
    for forward in (nn.Embedding.forward, embedding_forward):
        torch.manual_seed(0)
        module = nn.Embedding(V, D, **options)
        slot = Slot(torch.empty(V, D))
        set_sink(module.weight, slot)
        module.weight.register_post_accumulate_grad_hook(slot.take)
        forward(module, ids).square().sum().backward()
        grads.append(slot.view)
    assert torch.equal(*grads)
