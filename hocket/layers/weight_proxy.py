"""Parameters that replace managed weights inside modules written without hocket.

A module of another library reads `self.weight` and calls torch functions on it. A `WeightProxy` in its place has a
shape and no value. Torch passes every function that takes it to `WeightProxy.__torch_function__`; functions of
activations alone have no overhead. There, three things can happen:

- A product, a table lookup or a scale becomes hocket's function of the same name (`layers/functional.py`), which saves
  no weight and defers its weight gradient to the segment's queue.
- A query of the parameter itself (its shape, its dtype) is answered.
- Any other function gets the weight's current value. See Note: [Weights in unknown functions].

Note: [Weights in unknown functions]
An unknown function may save the weight for its backward, when the slot holds another layer's weights. So hooks around
the call replace every saved view of the weight by its offset in the weight, and backward looks the weight up again. The
gradient that autograd computes for the value goes to the segment's queue. A result that shares memory with the weight,
such as a reshape, would pass the slot to functions outside the hooks, so it is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hocket.layers import functional
from hocket.runtime.weights import Weight, WgradQueue, current_queue, weight_of


class WeightProxy(nn.Parameter):
    """A parameter on the meta device; its `Weight` has the value. See the module's docstring."""

    @classmethod
    def of(cls, *shape: int) -> WeightProxy:
        """A proxy of this shape. Its dtype is that of the value."""
        return torch.Tensor._make_subclass(cls, torch.empty(shape, device="meta"), True)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        replaced = _REPLACED.get(func)
        if replaced is not None:
            return replaced(func, *args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ABOUT or func.__name__ in ("__get__", "__set__", "__delete__"):
                return func(*args, **kwargs)
            return _with_value(func, args, kwargs)


def grouped_linear(
    x_RD: Tensor, p: Tensor, ends_E: Tensor, bias_EF: Tensor | None = None, transposed: bool = False
) -> Tensor:
    """One product per expert on rows in the order of experts, [R, F], of weights [E, F, D], or `transposed` [E, D, F].

    `ends` has the end of each expert's rows, int32. Parameters may be ordinary ones.
    """
    y_RF = functional.grouped_linear(x_RD, p, ends_E, turned=not transposed)
    if bias_EF is None:
        return y_RF
    if weight_of(bias_EF) is None:
        return y_RF + bias_EF.index_select(0, functional.owners(len(y_RF), ends_E))
    return functional.add_bias_by_expert(y_RF, bias_EF, ends_E)


def _with_value(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function with the values of the proxies among its arguments."""
    queue = current_queue() if torch.is_grad_enabled() else None
    used: list[Weight] = []

    def value(x: Any) -> Any:
        if isinstance(x, WeightProxy):
            weight = weight_of(x)
            if weight is None or weight.value is None:
                return x
            used.append(weight)
            return weight.tensor() if queue is None else _Value.apply(queue.anchored(), weight, queue)
        if isinstance(x, list | tuple):
            return type(x)(map(value, x))
        return x

    args, kwargs = value(args), {name: value(x) for name, x in kwargs.items()}
    if queue is None:
        return func(*args, **kwargs)
    with saved_tensors_hooks(partial(_packed, used), _unpacked):
        result = func(*args, **kwargs)
        return _apart(result, {weight.tensor().untyped_storage()._cdata for weight in used})


def _packed(used: list[Weight], saved: Tensor) -> Any:
    """What backward needs to find a saved tensor: the tensor, or its place in a weight."""
    for weight in used:
        value = weight.tensor()
        first = saved.storage_offset() - value.storage_offset()
        same = saved.untyped_storage()._cdata == value.untyped_storage()._cdata and saved.dtype == value.dtype
        if same and 0 <= first < max(value.numel(), 1):
            return weight, saved.size(), saved.stride(), first
    return saved.detach()  # an output saved as it is would keep its own graph alive


def _unpacked(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    weight, size, stride, first = packed
    value = weight.tensor()
    return value.as_strided(size, stride, value.storage_offset() + first)


def _apart(result: Any, storages: set[int]) -> Any:
    """Copies tensors that share memory with a weight."""
    if isinstance(result, Tensor):
        return result.clone() if result.untyped_storage()._cdata in storages else result
    if isinstance(result, list | tuple) and type(result) in (list, tuple):
        return type(result)(_apart(x, storages) for x in result)
    return result


def _linear(func: Any, x: Tensor, p: Tensor, bias: Tensor | None = None) -> Tensor:
    weight = weight_of(p)
    if weight is None or weight.value is None or isinstance(x, WeightProxy):
        return _other(func, x, p, bias)
    if x.dtype != weight.value.dtype or (bias is not None and weight_of(bias) is None):
        return _other(func, x, p, bias)
    return functional.linear(x, p, bias)


def _embedding(func: Any, ids: Tensor, p: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    weight = weight_of(p)
    plain = not any(x for x in (*args, *kwargs.values()) if x != 2.0)  # norm_type, which is unused without max_norm
    if weight is None or weight.value is None or not plain:
        return _other(func, ids, p, padding_idx, *args, **kwargs)
    return functional.embedding(ids, p, -1 if padding_idx is None else padding_idx % len(weight.tensor()))


def _scale(func: Any, a: Tensor, b: Any) -> Tensor:
    p, x = (a, b) if isinstance(a, WeightProxy) else (b, a)
    weight = weight_of(p)
    if not isinstance(x, Tensor) or isinstance(x, WeightProxy) or weight is None or weight.value is None:
        return _other(func, a, b)
    fits = x.dim() > 1 and weight.shape == x.shape[-1:] and x.dtype == weight.value.dtype  # no query of `p` itself
    return functional.scale(x, p) if fits and x.requires_grad else _other(func, a, b)


def _dtype(func: Any, p: Tensor, *_: Any) -> Any:
    weight = weight_of(p)
    if weight is not None and weight.value is not None:
        p = weight.value
    with torch._C.DisableTorchFunctionSubclass():
        return func(p)


def _other(func: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return _with_value(func, args, kwargs)


_ABOUT = {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride, torch.Tensor.is_floating_point,
    torch.Tensor.__len__, torch.Tensor.ndimension, torch.Tensor.nelement, torch.Tensor.__repr__,
    torch.Tensor.__format__, torch.Tensor.is_contiguous, torch.Tensor.is_complex, torch.Tensor.element_size,
    torch.Tensor.requires_grad_, torch.Tensor.data_ptr,
}  # fmt: skip
"""Queries of the parameter, not of its value."""

_REPLACED: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.Tensor.mul: _scale,
    torch.Tensor.__mul__: _scale,
    torch.Tensor.__rmul__: _scale,
    torch.mul: _scale,
    torch.Tensor.dtype.__get__: _dtype,  # pyrefly: ignore
    torch.Tensor.device.__get__: _dtype,  # pyrefly: ignore
}


class _Value(torch.autograd.Function):
    """The weight's value, whose gradient goes to the queue."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, weight: Weight, queue: WgradQueue) -> Tensor:
        ctx.weight, ctx.queue = weight, queue
        return weight.tensor().detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        ctx.queue.push(ctx.weight, partial(_copy, g))
        return None, None, None


def _copy(g: Tensor, out: Tensor) -> None:
    out.copy_(g)
