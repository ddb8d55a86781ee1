"""Sizes with units."""

from __future__ import annotations

import pytest

from hocket.sizes import parse_bytes


@pytest.mark.parametrize(
    ("text", "value"),
    [("256MiB", 2**28), ("64 MB", 64_000_000), ("1.5 GiB", 3 * 2**29), (" 12B ", 12)],
)
def test_a_number_and_a_unit(text: str, value: int) -> None:
    assert parse_bytes(text, "x") == value


@pytest.mark.parametrize(
    ("text", "words"),
    [("134217728", "has no unit"), ("64 mb", "is no size"), ("-1B", "is no size"), ("", "is no size")],
)
def test_anything_else_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"^memory={text!r} {words}"):
        parse_bytes(text, "memory")
