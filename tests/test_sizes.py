"""Sizes with units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.sizes import Size, parse_bytes, parse_size


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("128M params", 128_000_000, "params"),
        ("128Mi params", 2**27, "params"),
        ("1 param", 1, "params"),
        ("0.5K params", 500, "params"),
        (" 40params ", 40, "params"),
        ("256MiB", 2**28, "bytes"),
        ("64 MB", 64_000_000, "bytes"),
        ("1.5 GiB", 3 * 2**29, "bytes"),
        ("12B", 12, "bytes"),
    ],
)
def test_a_number_and_a_unit(text: str, value: int, unit: str) -> None:
    assert parse_size(text) == Size(value, unit)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("134217728", "fix: 134217728 params for parameters, or 134217728B for bytes"),
        ("128M", "a number of what? fix: 128M params for parameters, or 128MB for bytes"),
        ("0.3 params", "not a whole number of params"),
        ("64 mb", "is no size"),
        ("many params", "is no size"),
        ("-1 params", "is no size"),
        ("", "is no size"),
    ],
)
def test_anything_else_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_size(text, "overlap.dp.bucket")
    assert str(caught.value).startswith("overlap.dp.bucket")
    assert words in str(caught.value)


@given(st.integers(0, 2**44), st.sampled_from(["bytes", "params"]))
def test_a_size_reads_what_it_prints(value: int, unit: str) -> None:
    size = Size(value, unit)  # type: ignore[arg-type]
    assert parse_size(str(size)) == size


def test_bytes_and_parameters_of_a_dtype() -> None:
    assert parse_size("128Mi params").nbytes(2) == 2**28
    assert parse_size("256MiB").params(2) == 2**27
    assert parse_bytes("256MiB", "x") == 2**28
