"""Managed functions and segments against plain autograd: the same bits, and nothing left alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from hocket.config import ModelConfig
from hocket.layers.dispatch import exchange_counts
from hocket.layers.functional import (
    dense_gradient,
    embedding,
    grouped_linear,
    grouped_wgrad,
    linear,
    scale,
    score,
    shift,
    sums_by_id,
    write_sums,
)
from hocket.layers.norms import rms_norm
from hocket.model.moe import MoELayer
from hocket.model.transformer import Chunk
from hocket.runtime.segment import Segment
from hocket.runtime.weights import Weight, WgradQueue, collecting, manage, weight_of
from tests.helpers.chunks import init_chunk
from tests.helpers.plans import small

DTYPES = [torch.float32, torch.bfloat16]
CONFIG = small(
    vocab=64, layers=3, dense_layers=(1,), experts=8, top_k=3, shared_ffn=24, aux_loss=0.05, qk_norm=True, init_std=0.2
)

CONFIGS = {
    "mixed_shared": CONFIG,
    "moe": replace(CONFIG, dense_layers=(), shared_ffn=0),
    "dense": replace(CONFIG, experts=0, qk_norm=False),
    "biases": replace(CONFIG, qkv_bias=True, o_bias=True, qk_norm_over="whole"),
    "norms after": replace(CONFIG, experts=0, qk_norm_over="whole", norms="after", shared_ffn=0),
    "sigmoid": replace(CONFIG, router="sigmoid", route_scale=2.5, bias_rate=0.1),
    "all_experts": replace(CONFIG, experts=4, top_k=4, normalize_top_k=False),
    "tied": replace(CONFIG, tied=True),
}


# -- one function at a time ----------------------------------------------------------------------------------

OFFSETS = torch.tensor([4, 4, 11, 11], dtype=torch.int32)
NONE_SENT = torch.zeros(4, dtype=torch.int32)
IDS = torch.randint(9, (3, 5), generator=torch.Generator().manual_seed(0))

Case = tuple[tuple[int, ...], tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]
CASES: dict[str, Case] = {
    "linear_2d": ((7, 16), (24, 16), linear),
    "linear_3d": ((2, 5, 16), (24, 16), linear),
    "linear_one_token": ((1, 1, 16), (24, 16), linear),
    "score": ((7, 16), (24, 16), lambda x, p: score(x, p)[1]),
    "scale": ((2, 5, 16), (16,), scale),
    "shift": ((2, 5, 16), (16,), shift),
    "scale_heads": ((2, 5, 3, 8), (8,), scale),
    "rms_norm": ((2, 5, 16), (16,), lambda x, p: rms_norm(x, p, 1e-6)),
    "grouped": ((11, 16), (4, 16, 8), lambda x, p: grouped_linear(x, p, OFFSETS.to(x.device))),
    "grouped_no_rows": ((0, 16), (4, 16, 8), lambda x, p: grouped_linear(x, p, NONE_SENT.to(x.device))),
    "twice": ((7, 16), (16, 16), lambda x, p: linear(linear(x, p), p)),
}


def gradients(fn: Callable[..., Any], x: Tensor, value: Tensor, managed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(output, input gradient, weight gradient) of one function."""
    p = nn.Parameter(value.clone())
    x = x.clone().requires_grad_()
    queue = WgradQueue()
    if managed:
        manage(p, "p").value = value
        with collecting(queue):
            y = fn(x, p)
    else:
        y = fn(x, p)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y))
    assert x.grad is not None
    if not managed:
        assert p.grad is not None
        return y, x.grad, p.grad
    assert p.grad is None
    slot = torch.full_like(value, float("nan"))
    assert queue.drain(lambda weight: slot) == {weight_of(p)}
    return y, x.grad, slot


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_managed_equals_stock(case: str, dtype: torch.dtype) -> None:
    x_shape, p_shape, fn = CASES[case]
    x, value = torch.randn(x_shape).to(dtype), torch.randn(p_shape).to(dtype)
    plain, managed = gradients(fn, x, value, False), gradients(fn, x, value, True)
    for what, a, b in zip(("output", "input gradient", "weight gradient"), plain, managed, strict=True):
        assert torch.equal(a, b), what


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_managed_embedding_equals_stock(dtype: torch.dtype) -> None:
    value = torch.randn(9, 16).to(dtype)
    g = torch.randn(3, 5, 16).to(dtype)
    p = nn.Parameter(value.clone())
    embedding(IDS, p).backward(g)
    q = nn.Parameter(value.clone())
    manage(q, "q").value = value
    segment = Segment()
    assert torch.equal(segment.forward(lambda ids: embedding(ids, q), IDS), value[IDS])
    assert segment.backward(g) == (None,)
    slot = torch.full_like(value, float("nan"))
    segment.queue.drain(lambda _: slot)
    assert p.grad is not None
    assert torch.equal(slot, p.grad)


LOOKED_UP = {
    "some often": lambda: torch.randint(10, (3, 13)),
    "all the same": lambda: torch.full((4, 5), 49),
    "each once": lambda: torch.randperm(50)[:20].view(4, 5),
    "one": lambda: torch.tensor([[7]]),
    "32 bits": lambda: torch.randint(50, (2, 9), dtype=torch.int32),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids", LOOKED_UP)
def test_sums_of_rows_are_those_of_the_whole_table(ids: str, dtype: torch.dtype) -> None:
    """The formula of GPUs has autograd's bits."""
    ids_T = LOOKED_UP[ids]()
    g_TD = torch.randn(*ids_T.shape, 24, dtype=dtype)
    wanted = dense_gradient(ids_T, g_TD, 50)
    flat = ids_T.reshape(-1).long()
    assert torch.equal(sums_by_id(flat, g_TD.reshape(-1, 24)), wanted[flat])
    for into in (dtype, torch.float32):
        out = torch.full((50, 24), float("nan"), dtype=into)
        write_sums(ids_T, g_TD, out, add=False)
        assert torch.equal(out, wanted.to(into))
        before = out.normal_().clone()
        write_sums(ids_T, g_TD, out, add=True)
        assert torch.equal(out, before.add_(wanted))
        if into is torch.float32:
            write_sums(ids_T, g_TD, out, True, 0.3)
            assert torch.equal(out, before.add_(wanted.float() * 0.3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_without_rows_get_zeros(dtype: torch.dtype) -> None:
    """Memory that held NaN before is reused for the gradient: experts without rows must still get zeros."""
    value = torch.randn(4, 16, 8).to(dtype)
    for _ in range(3):
        poison = [torch.full((4, 16, 8), float("nan"), dtype=dtype) for _ in range(8)]
        del poison
        _, _, grad = gradients(CASES["grouped"][2], torch.randn(11, 16).to(dtype), value, True)
        assert grad.isfinite().all()
        assert not grad[1].any()
        assert not grad[3].any()
        assert grad[0].any()


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_without_rows_get_zeros_from_a_kernel_that_forgets_them(dtype: torch.dtype, add: bool) -> None:
    """As torch's does on Blackwell."""
    product, ends = torch._grouped_mm, torch.tensor([0, 5, 5, 11], dtype=torch.int32)
    x, g = torch.randn(11, 16).to(dtype), torch.randn(11, 8).to(dtype)

    def forgets(*operands: Tensor, offs: Tensor) -> Tensor:
        out = product(*operands, offs=offs)
        out[0] = out[2] = float("nan")
        return out

    found, wanted = torch.full((2, 4, 16, 8), 2.0 if add else float("nan"), dtype=dtype)
    with patch.object(torch, "_grouped_mm", forgets):
        grouped_wgrad(x, g, ends, found, add)
    grouped_wgrad(x, g, ends, wanted, add)
    assert torch.equal(found, wanted)
    assert (found[[0, 2]] == (2.0 if add else 0.0)).all()


def test_weight_is_looked_up_again_in_backward() -> None:
    """Between forward and backward the weight moves to another slot, and its old slot gets other contents."""
    x, value = torch.randn(7, 16), torch.randn(24, 16)
    expected = gradients(linear, x, value, False)
    p = nn.Parameter(value.clone())
    weight = manage(p, "p")
    first, second = value.clone(), value.clone()
    weight.value = first
    segment = Segment()
    y = segment.forward(lambda x: linear(x, p), x)
    first.fill_(float("nan"))
    weight.value = second
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    (dx,) = segment.backward(g)
    assert dx is not None
    assert torch.equal(dx, expected[1])
    weight.value = None
    slot = torch.empty(24, 16)
    segment.queue.drain(lambda _: slot)
    assert torch.equal(slot, expected[2])


def test_reading_a_weight_that_is_nowhere_fails() -> None:
    p = nn.Parameter(torch.randn(4, 4))
    manage(p, "layers.0.attn.wq")
    with pytest.raises(AssertionError, match=r"layers.0.attn.wq is read while it is not gathered"):
        linear(torch.randn(2, 4), p)


def test_an_input_without_gradient_would_lose_the_weight_gradient() -> None:
    p = nn.Parameter(torch.randn(4, 4))
    manage(p, "p").value = torch.randn(4, 4)
    with collecting(WgradQueue()), pytest.raises(AssertionError, match="input requires no gradient"):
        linear(torch.randn(2, 4), p)


def test_drain_adds_to_what_another_queue_wrote() -> None:
    a, b = WgradQueue(), WgradQueue()
    weight = Weight("w", torch.Size([2]))
    other = Weight("other", torch.Size([2]))
    slots = {weight: torch.full((2,), float("nan")), other: torch.full((2,), float("nan"))}
    for queue, number in ((a, 1.0), (a, 2.0), (b, 4.0)):
        queue.push(weight, partial(Tensor.fill_, value=number))
    b.push(other, partial(Tensor.fill_, value=8.0))
    assert len(a) == 2
    written = a.drain(slots.__getitem__)
    assert written == {weight}
    assert b.drain(slots.__getitem__, written) == {weight, other}
    assert slots[weight].tolist() == [7, 7]
    assert slots[other].tolist() == [8, 8]
    assert len(a) == len(b) == 0


@pytest.mark.parametrize("case", ["linear_2d", "scale", "grouped", "grouped_no_rows"])
def test_drain_adds_up_in_another_dtype(case: str) -> None:
    """On a CPU, contributions of bf16 are rounded, multiplied in fp32 and added, as a reduction over one rank does."""
    x_shape, p_shape, fn = CASES[case]
    p, total, expected = nn.Parameter(torch.empty(p_shape)), torch.full(p_shape, float("nan")), torch.zeros(p_shape)
    weight, written = manage(p, "p"), set[Weight]()
    weight.value = torch.randn(p_shape).bfloat16()
    for _ in range(3):
        x, alone = torch.randn(x_shape).bfloat16(), torch.empty_like(weight.value)
        for again in (False, True):
            queue = WgradQueue()
            with collecting(queue):
                y = fn(x.clone().requires_grad_(), p)
            y.backward(torch.ones_like(y))
            if again:
                queue.drain(lambda _: total, written, torch.bfloat16, 0.3)
            else:
                queue.drain(lambda _, alone=alone: alone)
        expected += alone.float() * 0.3
    assert torch.equal(total, expected)


# -- segments -------------------------------------------------------------------------------------------------


def test_segment_inputs_and_outputs_of_all_kinds() -> None:
    def fn(a: Tensor, ids: Tensor, none: None, word: str, b: Tensor) -> tuple[Any, ...]:
        return a * b, ids + 1, none, word, a, (b * 2).detach()

    segment = Segment()
    a, b, ids = torch.randn(3), torch.randn(3), torch.arange(3)
    product, next_ids, none, word, same, constant = segment.forward(fn, a, ids, None, "x", b)
    assert torch.equal(product, a * b)
    assert torch.equal(next_ids, ids + 1)
    assert (none, word) == (None, "x")
    assert torch.equal(same, a)
    assert not any(y.requires_grad for y in (product, next_ids, same, constant))
    g = torch.randn(3)
    da, dids, dnone, dword, db = segment.backward(g, None, None, None, torch.ones(3), None)
    assert da is not None
    assert db is not None
    assert torch.equal(da, g * b + 1)
    assert torch.equal(db, g * a)
    assert (dids, dnone, dword) == (None, None, None)
    with pytest.raises(AssertionError, match="backward once"):
        segment.backward(g, None, None, None, None, None)


def test_segment_input_that_nobody_used_has_no_gradient() -> None:
    segment = Segment()
    a, b = torch.randn(3), torch.randn(3)
    y = segment.forward(lambda a, b: a.sin(), a, b)
    da, db = segment.backward(torch.ones_like(y))
    assert da is not None
    assert db is None


def test_segment_runs_under_no_grad() -> None:
    segment = Segment()
    with torch.no_grad():
        y = segment.forward(torch.sin, torch.zeros(3))
        (dx,) = segment.backward(torch.ones_like(y))
    assert dx is not None
    assert dx.tolist() == [1, 1, 1]


def test_segment_keeps_neither_output_nor_unsaved_input() -> None:
    """Addition saves nothing: both operands and the sum can go while the segment waits for backward."""
    for fn, freed in ((torch.add, [True, True, True]), (torch.mul, [False, False, True])):
        segment = Segment()
        a, b = torch.randn(3), torch.randn(3)
        y = segment.forward(fn, a, b)
        storages = [StorageWeakRef(t.untyped_storage()) for t in (a, b, y)]
        del a, b, y
        assert [ref.expired() for ref in storages] == freed, fn
        assert [g is not None for g in segment.backward(torch.ones(3))] == [True, True]
        assert all(ref.expired() for ref in storages)


# -- a whole model through segments ---------------------------------------------------------------------------


class BySegments:
    """Runs a managed model part by part, each an segment; weight gradients drained at once or at the end."""

    def __init__(self, chunk: Chunk, defer: bool) -> None:
        self.chunk = chunk
        self.defer = defer
        self.weights: dict[Weight, str] = {}
        for name, param in chunk.named_parameters():
            weight = manage(param, name)
            weight.value, param.data = param.data, torch.empty(0, dtype=param.dtype)
            self.weights[weight] = name
        self.grads = {w: torch.full_like(w.tensor(), float("nan")) for w in self.weights}
        self.written: set[Weight] = set()
        self.waiting: list[Segment] = []

    def _run(self, fn: Callable[..., Any], *inputs: Any) -> tuple[Segment, Any]:
        segment = Segment()
        return segment, segment.forward(fn, *inputs)

    def _back(self, segment: Segment, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        result = segment.backward(*grads)
        self.waiting.append(segment)
        if not self.defer:
            self.drain()
        return result

    def drain(self) -> None:
        for segment in self.waiting:
            segment.queue.drain(self.grads.__getitem__, self.written)
        self.waiting = []

    def step(self, ids: Tensor, targets: Tensor) -> Tensor:
        """One forward and backward; returns the loss."""
        embed, x = self._run(self.chunk.embed, ids)  # pyrefly: ignore
        stack: list[Any] = []
        for layer in map(self.chunk.layer, range(self.chunk.config.layers)):
            if isinstance(layer, MoELayer):
                attn, (rows, residual, shared, weights, probs, routing) = self._run(layer.forward_attn, x)
                experts, rows = self._run(layer.forward_experts, rows, weights, exchange_counts(routing, None))
                last, x = self._run(layer.forward_unpermute, rows, residual, shared, probs, routing)
                stack.append((attn, experts, last))
            else:
                attn, x = self._run(layer.forward_attn, x)
                mlp, x = self._run(layer.forward_mlp, x)
                stack.append((attn, mlp))
        head, loss = self._run(self.chunk.loss, x, targets)
        del x
        g, _ = self._back(head, torch.tensor(0.5, device=loss.device))
        for segments in reversed(stack):
            if len(segments) == 3:
                attn, experts, last = segments
                rows, residual, shared, probs, _ = self._back(last, g)
                rows, weights, _ = self._back(experts, rows)
                (g,) = self._back(attn, rows, residual, shared, weights, probs, None)
            else:
                attn, mlp = segments
                (g,) = self._back(mlp, g)
                (g,) = self._back(attn, g)
        self._back(embed, g)
        self.drain()
        return loss


def model(config: ModelConfig, dtype: torch.dtype) -> Chunk:
    return init_chunk(Chunk(config, range(config.layers), aux_scale=0.5), seed=5, dtype=dtype)


def batch(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    return torch.randint(64, shape), torch.randint(64, shape)


@pytest.mark.parametrize("defer", [False, True], ids=["wgrad_now", "wgrad_deferred"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_segments_equal_plain_autograd(name: str, dtype: torch.dtype, defer: bool) -> None:
    config = CONFIGS[name]
    for shape in ((2, 12), (1, 1)):
        ids, targets = batch(shape)
        plain = model(config, dtype)
        loss = plain.loss(plain(ids), targets)
        loss.backward(torch.tensor(0.5))
        segments = BySegments(model(config, dtype), defer)
        assert torch.equal(loss, segments.step(ids, targets))
        grads = {name: segments.grads[weight] for weight, name in segments.weights.items()}
        assert grads.keys() == dict(plain.named_parameters()).keys()
        for param_name, param in plain.named_parameters():
            assert param.grad is not None
            assert torch.equal(param.grad, grads[param_name]), param_name


def custom_nodes(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """The nodes above `outputs` that are made by this package; torch's own cannot be referred to weakly."""
    waiting = [y.grad_fn for y in outputs if y.grad_fn is not None]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions if following is not None)
    yield from (node for node in seen if isinstance(node, torch.autograd.function.BackwardCFunction))


def test_nothing_of_the_graph_is_left_after_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even while weight gradients wait, and without the garbage collector's help."""
    nodes: list[weakref.ref[Any]] = []
    activations: list[StorageWeakRef] = []
    forward = Segment.forward

    def watched(self: Segment, fn: Callable[..., Any], *inputs: Any) -> Any:
        def inner(*args: Any) -> Any:
            result = fn(*args)
            outputs = result if isinstance(result, tuple) else (result,)
            tensors = [t for t in (*args, *outputs) if isinstance(t, Tensor) and t.requires_grad]
            nodes.extend(weakref.ref(node) for node in custom_nodes(tensors))
            activations.extend(StorageWeakRef(t.untyped_storage()) for t in tensors)
            return result

        return forward(self, inner, *inputs)

    alive: list[list[bool]] = []

    class Watched(BySegments):
        def step(self, ids: Tensor, targets: Tensor) -> Tensor:
            loss = super().step(ids, targets)
            alive.append([ref() is not None for ref in nodes])
            return loss

        def drain(self) -> None:
            alive.append([ref() is not None for ref in nodes])
            super().drain()

    monkeypatch.setattr(Segment, "forward", watched)
    segments = Watched(model(CONFIG, torch.float32), defer=True)
    gc.disable()
    try:
        loss = segments.step(*batch((2, 12)))
        assert loss.isfinite()
        del loss
        left = [ref for ref in activations if not ref.expired()]
    finally:
        gc.enable()
    assert len(nodes) > 50
    assert not any(map(any, alive)), [sum(a) for a in alive]
    assert not left
