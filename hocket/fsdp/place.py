"""Which elements of a parameter a part has, and numbers of the whole that ranks compute together.

See Note: [A part knows its whole] in `part.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hocket.layers.slices import Span

How = Literal["sum", "max"]
Ask = Callable[[Tensor, How], None]
"""The `sum` or `max` of a tensor over the ranks that keep the other elements, in place."""


@dataclass(frozen=True)
class Place:
    """Which elements of a parameter a part has."""

    name: str
    span: Span
    ask: Ask
    splits: bool = True
    """False if one rank has all elements, by `granularity="tensor"`: it may take them as a plain matrix."""

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        return torch.Size(self.span.shape)

    @property
    def here(self) -> int:
        """How many elements this rank has."""
        return len(self.span)

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return self.shape.numel()


def refusal(name: str, place: Place) -> ValueError:
    return ValueError(
        f"{name} of a part of {place.name}, of which this rank has {place.here} of {place.numel} elements, "
        f"would be something else on every rank: use to_local() for the elements that are here, or whole weights "
        f"inside of ctx.gathered()"
    )


def one_number(x: Tensor, name: str, place: Place) -> float | int | bool | complex:
    """What is the only element of a parameter."""
    if place.numel != 1:
        raise refusal(name, place)
    return over_ranks(plain_sum(x), "sum", place).item()


def plain_sum(x: Tensor) -> Tensor:
    """The sum of the elements that are here, without autograd."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.detach().as_subclass(Tensor).sum()


def over_ranks(value: Tensor, how: How, place: Place) -> Tensor:
    """One number over the ranks."""
    if value.is_complex():
        return torch.complex(over_ranks(value.real, how, place), over_ranks(value.imag, how, place))
    asked = value.double().reshape(1).clone()
    place.ask(asked, how)
    return asked.squeeze(0).to(value.device)


def whole_of(x: Tensor, place: Place) -> Tensor:
    """The whole parameter, or its gradient. All ranks of the model call this."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        mine = x.detach().as_subclass(Tensor)
        flat = mine.new_zeros(place.numel)
        place.span.put(mine, flat)
        place.ask(torch.view_as_real(flat) if flat.is_complex() else flat, "sum")
        return flat.view(place.shape)


def of_whole(func: Any, name: str, args: Any, kwargs: Any, place: Place) -> Any:
    """A number of the whole parameter."""
    part, *rest = args
    how = WHOLE[name]
    options = dict(kwargs)
    given = [options.pop(key, None) for key in ("dim", "axis")]
    if how is _norm:
        p = options.pop("p", options.pop("ord", rest.pop(0) if rest else None))
        if name == "linalg_norm" and p not in (None, "fro") and len(place.shape) != 1:
            raise refusal(name, place)  # of matrices, these are norms of singular values, or of rows and columns
        options["p"] = 2 if p in (None, "fro") else p
    if how in (_variance, _deviation) and rest and isinstance(rest[0], bool):
        options["unbiased"] = rest.pop(0)
    if rest and how is not _dot:
        given.append(rest.pop(0))
    dims = [dim for dim in given if dim not in (None, (), [])]
    along = dims and not (
        name not in ("max", "min")
        and len(place.shape) == 1
        and all(dim in (0, -1, (0,), [0], (-1,), [-1]) for dim in dims)
    )
    if along or rest[1:] or options.pop("keepdim", False) or options.pop("out", None) is not None:
        raise refusal(name, place)
    with torch._C.DisableTorchFunctionSubclass():
        mine = part.as_subclass(Tensor)
        dtype = options.pop("dtype", None)
        mine = mine if dtype is None else mine.to(dtype)
        with torch.no_grad():
            value = how(
                mine.detach(),
                place,
                *(one.as_subclass(Tensor) if isinstance(one, Tensor) else one for one in rest),
                **options,
            )
        if not mine.requires_grad:
            return value
        return mine.sum() * 0 + value.detach()


def _sum(x: Tensor, place: Place) -> Tensor:
    total = over_ranks(
        x.sum(dtype=None if x.is_complex() or not x.is_floating_point() else torch.float64), "sum", place
    )
    return total.to(x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)


def _mean(x: Tensor, place: Place) -> Tensor:
    return _sum(x, place) / place.numel


def _count(x: Tensor, place: Place) -> Tensor:
    return over_ranks(x.count_nonzero(), "sum", place).long()


def _norm(x: Tensor, place: Place, p: Any = 2) -> Tensor:
    sizes = x.abs()
    p = float(p)
    if p == torch.inf:
        return _most(sizes, place)
    if p == -torch.inf:
        return _least(sizes, place)
    if p == 0:
        return _count(x, place).to(sizes.dtype)
    total = over_ranks((sizes.double() ** p).sum(), "sum", place)
    return (total ** (1 / p)).to(sizes.dtype)


def _most(x: Tensor, place: Place) -> Tensor:
    lost = x.isnan().any() if x.is_floating_point() else torch.zeros((), dtype=torch.bool)
    low = torch.full((1,), -torch.inf, dtype=torch.float64, device=x.device)
    largest = torch.cat([x.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).double(), low]).max()
    found = over_ranks(largest, "max", place)
    is_lost = over_ranks(lost.double().to(x.device), "max", place)
    return torch.where(is_lost > 0, torch.nan, found).to(x.dtype) if x.is_floating_point() else found.to(x.dtype)


def _least(x: Tensor, place: Place) -> Tensor:
    if x.is_floating_point():
        return -_most(-x, place)
    return (-_most(-x.double(), place)).to(x.dtype)


def _any(x: Tensor, place: Place) -> Tensor:
    return over_ranks(x.any().double(), "max", place).bool()


def _all(x: Tensor, place: Place) -> Tensor:
    return ~_any(~x.bool(), place)


def _variance(x: Tensor, place: Place, unbiased: bool = True, correction: int | None = None) -> Tensor:
    correction = int(unbiased) if correction is None else correction
    mean = over_ranks(x.double().sum(), "sum", place) / place.numel
    total = over_ranks((x.double() - mean).square().sum(), "sum", place)
    return (total / (place.numel - correction)).to(x.dtype)


def _deviation(x: Tensor, place: Place, unbiased: bool = True, correction: int | None = None) -> Tensor:
    return _variance(x, place, unbiased, correction).sqrt()


def _dot(x: Tensor, place: Place, other: Tensor) -> Tensor:
    return _sum(x * other, place)


WHOLE: dict[str, Callable[..., Tensor]] = {
    "sum": _sum, "mean": _mean, "norm": _norm, "vector_norm": _norm, "linalg_vector_norm": _norm,
    "linalg_norm": _norm, "frobenius_norm": _norm, "max": _most, "amax": _most, "min": _least, "amin": _least,
    "any": _any, "all": _all, "count_nonzero": _count, "var": _variance, "std": _deviation, "dot": _dot, "vdot": _dot,
    "inner": _dot,
}  # fmt: skip
"""Functions by name that give one number of the whole parameter."""
NUMBERS: dict[str, Callable[[Any], Any]] = {
    "item": lambda x: x, "__bool__": bool, "__float__": float, "__int__": int, "__index__": operator.index,
    "__complex__": complex,
}  # fmt: skip
"""What makes a number of Python of a parameter that has one element."""
