"""Tensors that hold this rank's elements of a parameter, and compute numbers of the whole.

Note: [A part knows its whole]
Training loops compute norms of gradients, check for infinities, and scale by the result; with one rank's elements,
ranks would diverge. So a shard and its gradient know which elements they hold. Elementwise functions return such parts,
and a whole tensor beside a part is cut to the same elements. Sums, norms, means and extremes of all elements are
combined over ranks. Any other function is computed with the whole, which all ranks gather, and returns a plain tensor.
Errors are views other than of all elements, since writes to them would be lost; in-place functions that are not
elementwise; and elementwise functions of parts with different elements.

Note: [A part has the shape of its whole]
Rules such as "no weight decay for vectors", parameter counts and initializers use `shape`, `ndim`, `size()`, `len()`
and `numel()`, which are the whole's in Python. Torch's kernels see a 1-D tensor of the local elements, as `to_local()`
does. A foreign kernel would combine an address with `numel()` and write out of bounds, so `data_ptr()` is an error. A
view of the whole is the same elements with another shape.

Note: [Random numbers are drawn whole]
Each rank draws the numbers of the whole parameter and keeps its own. So a model from the meta device that is
initialized after sharding, by `reset_parameters()`, `torch.nn.init` or `weight.data.normal_()`, has the values of an
unsharded one with the same seed.

A number of a shard inside of autograd has the whole's value and the local elements' graph, so that a backward through
it is the intended error (Note: [Autograd never sees a shard]).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from hocket.layers.slices import Span

How = Literal["sum", "max"]
ReduceOverRanks = Callable[[Tensor, How], None]
"""The `sum` or `max` of a tensor over the ranks that hold the other elements, in place."""


@dataclass(frozen=True)
class Place:
    """Which elements of a parameter a part holds."""

    name: str
    span: Span
    reduce: ReduceOverRanks

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        return torch.Size(self.span.shape)

    @property
    def here(self) -> int:
        return len(self.span)

    @property
    def numel(self) -> int:
        """Of the whole parameter."""
        return self.shape.numel()


def refusal(name: str, place: Place) -> ValueError:
    return ValueError(
        f"{name} of a part of {place.name}, of which this rank has {place.here} of {place.numel} elements, "
        f"would be something else on every rank: use to_local() for the elements that are here, or whole weights "
        f"inside of ctx.gathered()"
    )


def over_ranks(value: Tensor, how: How, place: Place) -> Tensor:
    if value.is_complex():
        return torch.complex(over_ranks(value.real, how, place), over_ranks(value.imag, how, place))
    total = value.double().reshape(1).clone()
    place.reduce(total, how)
    return total.squeeze(0).to(value.device)


def whole_of(x: Tensor, place: Place) -> Tensor:
    """The whole parameter or gradient. All ranks of the model call this."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        mine = x.detach().as_subclass(Tensor)
        if mine.dtype == torch.bool:  # which not every transport adds up
            return whole_of(mine.to(torch.uint8), place).bool()
        flat = mine.new_zeros(place.numel)
        place.span.put(mine, flat)
        place.reduce(torch.view_as_real(flat) if flat.is_complex() else flat, "sum")
        return flat.view(place.shape)


def _sum(x: Tensor, place: Place) -> Tensor:
    exact = x.is_complex() or not x.is_floating_point()
    total = over_ranks(x.sum(dtype=None if exact else torch.float64), "sum", place)
    return total.to(x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)


def _norm(x: Tensor, place: Place, p: float) -> Tensor:
    if p == torch.inf:
        return _most(x.abs(), place)
    return (over_ranks((x.abs().double() ** p).sum(), "sum", place) ** (1 / p)).to(x.abs().dtype)


def _most(x: Tensor, place: Place) -> Tensor:
    lost = x.isnan().any() if x.is_floating_point() else torch.zeros((), dtype=torch.bool)
    low = torch.full((1,), -torch.inf, dtype=torch.float64, device=x.device)
    largest = torch.cat([x.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).double(), low]).max()
    found = over_ranks(largest, "max", place)
    is_lost = over_ranks(lost.double().to(x.device), "max", place)
    return torch.where(is_lost > 0, torch.nan, found).to(x.dtype) if x.is_floating_point() else found.to(x.dtype)


def _least(x: Tensor, place: Place) -> Tensor:
    return (-_most(-(x if x.is_floating_point() else x.double()), place)).to(x.dtype)


def _any(x: Tensor, place: Place) -> Tensor:
    return over_ranks(x.any().double(), "max", place).bool()


NUMBERS: dict[str, Callable[[Tensor, Place], Tensor]] = {
    "sum": _sum, "mean": lambda x, place: _sum(x, place) / place.numel, "max": _most, "amax": _most, "min": _least,
    "amin": _least, "any": _any, "all": lambda x, place: ~_any(~x.bool(), place),
    "count_nonzero": lambda x, place: over_ranks(x.count_nonzero(), "sum", place).long(),
}  # fmt: skip
"""Numbers of all elements that ranks combine, by the name of the function."""
NORMS = ("norm", "vector_norm", "linalg_vector_norm", "linalg_norm", "frobenius_norm")


def _number(name: str, args: Any, kwargs: Any, place: Place) -> Callable[[Tensor], Tensor] | None:
    """How to compute a function of all elements from each rank's; None if the whole is needed."""
    rest = list(args[1:])
    options = {key: value for key, value in kwargs.items() if value is not None and value is not False}
    dtype = options.pop("dtype", None)
    of: Callable[[Tensor, Place], Tensor] | None = NUMBERS.get(name)
    if name in NORMS:
        p = options.pop("p", options.pop("ord", rest.pop(0) if rest else None))
        if name == "linalg_norm" and p not in (None, "fro") and len(place.shape) != 1:
            return None  # for matrices these are spectral or row and column norms
        order = 2.0 if p in (None, "fro") else float(p)
        of = functools.partial(_norm, p=order) if order > 0 else None
    if of is None or rest or options:
        return None
    return lambda x: of(x if dtype is None else x.to(dtype), place)


def _refuse_views(name: str, found: Sequence[Tensor], wholes: Sequence[Tensor], place: Place) -> None:
    """Refuse a result that shares memory with a gathered tensor: writes to it would be lost."""
    memory = {whole.untyped_storage().data_ptr() for whole in wholes if whole.numel()}
    if any(one.untyped_storage().data_ptr() in memory for one in found if one.layout is torch.strided):
        raise refusal(name, place)


def _of_whole(func: Any, name: str, args: Any, kwargs: Any, place: Place) -> Any:
    """Any function of the whole, on all ranks. See Note: [A part knows its whole]."""
    if name in _LEAVING or kwargs.get("out") is not None or (name.endswith("_") and not name.endswith("__")):
        raise refusal(name, place)
    wholes, graph = list[Tensor](), list[Tensor]()

    def whole(one: Any) -> Any:
        if isinstance(one, list | tuple):
            return [whole(each) for each in one]
        if (at := getattr(one, "place", None)) is None:
            keeps_all = isinstance(one, Tensor) and isinstance(one, WholeSize)
            return one.as_subclass(Tensor).view(one.shape) if keeps_all else one
        wholes.append(whole_of(one, at))
        if one.requires_grad and torch.is_grad_enabled():
            graph.append(one.as_subclass(Tensor).sum() * 0)
        return wholes[-1]

    with torch._C.DisableTorchFunctionSubclass():
        args, kwargs = [whole(one) for one in args], {key: whole(one) for key, one in kwargs.items()}
        found = func(*args, **kwargs)
        tensors = [one for one in (found if isinstance(found, tuple | list) else [found]) if isinstance(one, Tensor)]
        _refuse_views(name, tensors, wholes, place)
        if not graph:
            return found

        def linked(one: Any) -> Any:
            keeps = isinstance(one, Tensor) and (one.is_floating_point() or one.is_complex())
            return one + sum(graph) if keeps else one

        return type(found)([linked(one) for one in found]) if isinstance(found, tuple | list) else linked(found)


def _drawing(name: str) -> Callable[..., Any]:
    """A random in-place method. See Note: [Random numbers are drawn whole]."""
    draw = getattr(torch.Tensor, name)

    def fill(self: Any, *args: Any, **kwargs: Any) -> Any:
        local = self.to_local()
        whole = torch.empty(self.shape, dtype=local.dtype, device=local.device)
        local.copy_(self.span.of(draw(whole, *args, **kwargs)))
        return self

    return fill


class WholeSize:
    """Sizes of the whole parameter, by its `shape`. See Note: [A part has the shape of its whole]."""

    shape: torch.Size

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    nelement = numel

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]


for _name in ("normal_", "uniform_", "bernoulli_", "exponential_", "random_", "cauchy_", "log_normal_", "geometric_"):
    setattr(WholeSize, _name, _drawing(_name))


def no_address(name: str, here: int, numel: int) -> ValueError:
    """The error of `data_ptr()`."""
    return ValueError(
        f"data_ptr() of {name}, of which this rank has {here} of {numel} elements: a kernel that goes by shape or "
        f"numel() would write beyond them; use to_local(), or an optimizer of torch's"
    )


class Part(WholeSize, Tensor):  # pyrefly: ignore[inconsistent-inheritance]
    """Elements of a sharded parameter, or elementwise results. See Note: [A part knows its whole]."""

    place: Place
    is_sparse = False  # optimizers read it often

    @staticmethod
    def of(local: Tensor, place: Place) -> Part:
        """A part that shares memory and graph with `local`."""
        part = local.as_subclass(Part)
        part.place = place
        return part

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.place.shape

    @property
    def span(self) -> Span:
        return self.place.span

    def to_local(self) -> Tensor:
        """The local elements, 1-D, as a plain tensor."""
        return plain(self)

    def full_tensor(self) -> Tensor:
        """The whole, as a plain tensor. All ranks of the model call this."""
        return whole_of(self, self.place)

    def data_ptr(self) -> int:
        """Raises ValueError."""
        raise no_address(self.place.name, self.place.here, self.place.numel)

    def __repr__(self) -> str:  # pyrefly: ignore[bad-override]  (Tensor's takes an argument of its own)
        at = self.place
        return f"Part({at.name}: elements {at.span.lo} to {at.span.hi} of {tuple(at.shape)}, {plain(self)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        copy = memo[id(self)] = Part.of(plain(self).clone(), self.place)
        return copy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See Note: [A part knows its whole]."""
        return call(func, args, kwargs or {})


def plain(x: Tensor) -> Tensor:
    """A part's elements as a plain tensor; other tensors as they are."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor) if isinstance(x, Part) else x


def call(func: Any, args: Any, kwargs: Any) -> Any:
    name = getattr(func, "__name__", "")
    if name in ("equal", "allclose"):
        args = [*args, *(kwargs[key] for key in ("input", "other") if key in kwargs)]
        kwargs = {key: value for key, value in kwargs.items() if key not in ("input", "other")}
    if name in ("__getitem__", "__setitem__"):
        _refuse_some(name, *args)
    if name in ("__setitem__", "copy_"):
        args = alongside(name, args)
    if name in _QUIET or name.startswith(("_fused_", "_amp_")):
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
        if name != "__get__" or not isinstance(found, Tensor):
            return found
        name = getattr(func.__self__, "__name__", name)  # of the attribute
        if name in ("_base", "grad", "_grad"):
            return found
    if name.startswith("_foreach_"):
        return _of_each(func, name, args, kwargs)
    place = next((at for one in _tensors(args, kwargs) if (at := getattr(one, "place", None)) is not None), None)
    if place is None:  # a copy, or a parameter that this rank holds whole
        with torch._C.DisableTorchFunctionSubclass():
            if name in ("equal", "allclose") and len(args) > 1 and args[0].shape == args[1].shape:
                args = [*(one.as_subclass(Tensor).view(one.shape) for one in args[:2]), *args[2:]]
            return func(*args, **kwargs)
    return _call(func, name, args, kwargs, place)


def _call(func: Any, name: str, args: Any, kwargs: Any, place: Place) -> Any:
    if (number := _number(name, args, kwargs, place)) is not None:
        with torch._C.DisableTorchFunctionSubclass():
            mine = args[0].as_subclass(Tensor)
            with torch.no_grad():
                value = number(mine.detach())
            return mine.sum() * 0 + value if mine.requires_grad and torch.is_grad_enabled() else value
    if name in ("equal", "allclose"):
        with torch._C.DisableTorchFunctionSubclass():
            differs = not func(*map(plain, alongside(name, args)), **kwargs)
            return not over_ranks(plain(args[0]).new_tensor(differs, dtype=torch.float64), "max", place).item()
    if name in _VIEWS:
        return _view(func, name, args, kwargs, place)
    pairs = name not in NUMBERS or (len(args) > 1 and isinstance(args[1], Tensor))  # such as torch.max of two
    by_element = _by_element(name) and pairs
    initializes = getattr(func, "__module__", "") == "torch.nn.init"
    if not (by_element or initializes or name in _PLAIN):
        return _of_whole(func, name, args, kwargs, place)
    if by_element:
        args = alongside(name, args)
    with torch._C.DisableTorchFunctionSubclass():
        if name in _PLAIN:
            return func(*(plain(one) if isinstance(one, Part) else one for one in args), **kwargs)
        found = func(*args, **kwargs)
        if isinstance(found, tuple):
            return _of_whole(func, name, args, kwargs, place)
        if not isinstance(found, Tensor) or any(found is one for one in (*args, *kwargs.values())):
            return found
        if found.shape == (place.here,) and by_element:
            return Part.of(found, place)
    raise refusal(name, place)


def _view(func: Any, name: str, args: Any, kwargs: Any, place: Place) -> Tensor:
    """The same elements, with the shape of a view of the whole."""
    part, *rest = args
    with torch._C.DisableTorchFunctionSubclass():
        mine = part.as_subclass(Tensor)
        like = torch.empty(place.shape, dtype=mine.dtype, device="meta")
        rest = [torch.empty(one.shape, device="meta") if isinstance(one, Tensor) else one for one in rest]
        whole = func(like, *rest, **kwargs)
        same = place.span.part is None or whole.shape == place.shape  # other shapes reorder it
        if whole.numel() != place.numel or whole.dtype != mine.dtype or not same:
            raise refusal(name, place)
        return Part.of(mine.view_as(mine), replace(place, span=replace(place.span, shape=tuple(whole.shape))))


def alongside(name: str, args: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments of an elementwise function, with whole tensors cut to the part's elements.

    Raises ValueError if the tensor changed in place is whole, or for parts with different elements.
    """
    places = [at for one in args if (at := getattr(one, "place", None)) is not None]
    if not places:
        return tuple(args)
    place, *others = places
    _refuse_others(name, place, *others)
    here = (place.here,)

    def is_whole(one: Any) -> bool:
        is_plain = isinstance(one, Tensor) and getattr(one, "place", None) is None
        return is_plain and one.shape == place.shape != here

    if name == "__setitem__" and isinstance(args[1], slice) and args[1] != slice(None) and is_whole(args[0]):
        return tuple(args)  # the caller has chosen elements of the whole
    changes = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i")
    if changes and is_whole(args[0]):
        raise refusal(name, place)
    return tuple(place.span.of(one) if is_whole(one) else one for one in args)


_NO_OPERATORS = frozenset(
    f"__{name}__"
    for name in (
        *("matmul", "rmatmul", "bool", "float", "int", "index", "complex", "array", "dlpack", "iter", "contains"),
        *("reversed", "len"),
    )
)
"""Special methods that do not compute element by element."""


@functools.cache
def _by_element(name: str) -> bool:
    """Whether a function is elementwise."""
    if name in _KEEPING or name.removesuffix("_") in _KEEPING:
        return True
    if name.startswith("__"):
        return name not in _NO_OPERATORS
    for named in (name.removesuffix("_"), f"{name.removesuffix('_')}_"):
        packet = getattr(torch.ops.aten, named, None)
        if packet is not None and any(
            torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
        ):
            return True
    return False


def _refuse_some(name: str, x: Tensor, index: Any, *_: Any) -> None:
    """Refuse indexing, which would select other elements on every rank, except boolean masks."""
    place = getattr(x, "place", None)
    if place is None or index is Ellipsis or (isinstance(index, slice) and index == slice(None)):
        return
    if name == "__setitem__" and isinstance(index, Tensor) and index.dtype == torch.bool:
        return
    raise refusal(name, place)


def _of_each(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name in ("_foreach_norm", "_foreach_max"):
        return [getattr(one, name.removeprefix("_foreach_"))(*args[1:], **kwargs) for one in args[0]]
    lists = [one for one in (*args, *kwargs.values()) if isinstance(one, list | tuple)]
    places = [[p for one in of if (p := getattr(one, "place", None)) is not None] for of in zip(*lists, strict=False)]
    for several in places:
        if len(several) > 1:
            _refuse_others(name, *several)
    with torch._C.DisableTorchFunctionSubclass():
        found = func(*args, **kwargs)
    if name.endswith("_") or not any(places):
        return found
    for one, of in zip(found, places, strict=True):
        if of and one.shape != (of[0].here,):
            raise refusal(name, of[0])
    return [Part.of(one, of[0]) if of else one for one, of in zip(found, places, strict=True)]


def _refuse_others(name: str, place: Place, *others: Place) -> None:
    for other in others:
        if other.span != place.span:
            raise ValueError(
                f"{name} of parts of {place.name} and {other.name}, of which this rank has other elements: shard both "
                f"models alike, or compute with whole weights inside of ctx.gathered()"
            )


def _tensors(args: Any, kwargs: Any) -> Iterator[Tensor]:
    for one in (*args, *kwargs.values()):
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from (inside for inside in one if isinstance(inside, Tensor))


_VIEWS = frozenset({"view", "reshape", "flatten", "ravel", "view_as", "reshape_as", "squeeze", "unsqueeze"})
"""Functions that reshape and keep the order of elements."""
_LEAVING = frozenset({"numpy", "tolist", "__array__", "__iter__", "__dlpack__"})
"""Functions by which elements leave torch, often on one rank alone."""
_KEEPING = frozenset({
    "absolute", "negative", "arccos", "arcsin", "arctan", "arccosh", "arcsinh", "arctanh", "arctan2", "divide",
    "multiply", "subtract", "floor_divide", "fix", "greater", "greater_equal", "less", "less_equal", "not_equal",
    "isclose", "isreal", "isposinf", "isneginf", "dropout", "detach", "to", "cuda", "cpu", "float", "double", "half",
    "bfloat16", "type", "int", "long", "bool", "short", "char", "byte", "type_as", "cfloat", "cdouble", "contiguous",
    "alias", "real", "imag", "conj", "conj_physical", "resolve_conj", "resolve_neg", "pin_memory", "data",
    "share_memory", "to_dense", "requires_grad", "retain_grad", "copy", "zero", "fill", "normal", "uniform",
    "bernoulli", "exponential", "random", "cauchy", "log_normal", "geometric", "apply", "map",
})  # fmt: skip
"""Elementwise functions, and those that keep elements in place, that torch does not tag as pointwise."""
_PLAIN = frozenset({
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_empty",
    "new_ones", "new_full", "new_tensor", "new_empty_strided", "view_as_real", "view_as_complex", "__reduce_ex__",
    "__repr__", "__str__", "__format__", "is_same_size", "storage", "untyped_storage",
})  # fmt: skip
"""Functions that return local elements on purpose."""
_QUIET = frozenset({
    "__get__", "__set__", "__delete__", "__setitem__", "__len__", "__hash__", "copy_", "size", "dim", "numel",
    "nelement", "stride", "element_size", "is_complex", "is_floating_point", "is_contiguous", "is_inference",
    "get_device", "data_ptr", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "as_subclass",
    "_make_subclass", "_is_view", "_has_compatible_shallow_copy_type",
})  # fmt: skip
"""Functions that read no element, or only write them."""
