"""Values and type annotations: whether a value fits, a type's name in words, and conversion from JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_MOST = 2**27
"""Largest integer that `read` accepts: a larger one would be a table that fits into no memory."""


def is_a(value: object, hint: Any) -> bool:
    """Whether a value has the annotated type. An int is also a float; a bool is not a number."""
    if get_origin(hint) is Literal:
        return any(value == option and type(value) is type(option) for option in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return any(is_a(value, kind) for kind in get_args(hint))
    if get_origin(hint) is tuple:
        args = get_args(hint)
        if not isinstance(value, tuple) or (args[-1] is not Ellipsis and len(value) != len(args)):
            return False
        return all(is_a(item, args[0]) for item in value)
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, int | float if hint is float else hint)


def describe(hint: Any) -> str:
    """A type in words."""
    if get_origin(hint) is Literal:
        names = get_args(hint)
        return str(names[0]) if len(names) == 1 else "one of " + ", ".join(map(str, names))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(describe, get_args(hint)))
    if get_origin(hint) is tuple:
        args = get_args(hint)
        if get_origin(args[0]) is Literal:
            return "a list of names out of " + ", ".join(map(str, get_args(args[0])))
        if get_origin(args[0]) in (Union, UnionType):
            return f"a list, each {describe(args[0])}"
        several = {int: "whole numbers", float: "numbers", str: "texts"}.get(args[0], "objects")
        return f"a list of {several}" if args[-1] is Ellipsis else f"{len(args)} {several}"
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "text", NoneType: "nothing"}
    return words.get(hint, "an object")


def read(hint: Any, value: Any, name: str) -> Any:
    """Convert a JSON value to an annotated type: lists become tuples, objects mappings, dataclasses or named tuples.

    Raises ValueError for anything else: another type, an unknown or missing field, a number too large. `name` is the
    value's place, for messages.
    """
    args = get_args(hint)
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        if args[-1] is not Ellipsis and len(value) != len(args):
            raise ValueError(f"{name} = {value!r}: not {describe(hint)}")
        return tuple(read(args[0], each, f"{name}.{n}") for n, each in enumerate(value))
    if get_origin(hint) is Mapping and isinstance(value, Mapping):
        return {read(args[0], key, name): read(args[1], each, f"{name}.{key}") for key, each in value.items()}
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or hasattr(hint, "_fields")):
        return _object(hint, value, name)
    if get_origin(hint) is Mapping or not is_a(value, hint):
        raise ValueError(f"{name} = {value!r}: not {describe(hint)}")
    if hint is not float and isinstance(value, int) and abs(value) > _MOST:
        raise ValueError(f"{name} = {value}: more than {_MOST}")
    return value


def _object(kind: Any, value: Any, name: str) -> Any:
    """A dataclass or named tuple. Fields excluded from comparison are not part of its JSON."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} = {value!r}: not an object")
    hints, place = _hints(kind), f"{name}." if name else ""
    if unknown := [key for key in value if key not in hints]:
        raise ValueError(f"{place}{unknown[0]}: no such field; there are {', '.join(hints)}")
    given = {key: read(hints[key], each, f"{place}{key}") for key, each in value.items()}
    try:
        return kind(**given)
    except TypeError as error:  # a field without default is missing
        raise ValueError(f"{name or 'it'}: {error}") from None


@cache
def _hints(kind: Any) -> dict[str, Any]:
    left_out = {f.name for f in dataclasses.fields(kind) if not f.compare} if dataclasses.is_dataclass(kind) else set()
    return {name: hint for name, hint in get_type_hints(kind).items() if name not in left_out}
