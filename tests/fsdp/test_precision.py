"""The four dtypes of a group of parameters."""

import pytest
import torch

from hocket.fsdp.options import Formats, Precision

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def test_what_is_not_said_follows_the_module():
    assert Precision().of(BF16) == Formats(main=FP32, compute=BF16, wire=BF16, accumulate=FP32)
    assert Precision(compute=FP16).of(FP32) == Formats(FP32, FP16, FP16, FP32)
    assert Precision(BF16, FP32, FP16, BF16).of(FP32) == Formats(BF16, FP32, FP16, BF16)
    assert Precision(None, BF16, FP32, None).of(BF16) == Formats(BF16, BF16, FP32, FP32)
    assert Precision(None, accumulate=None).of(BF16) == Formats(BF16, BF16, BF16, BF16)


def test_numbers_that_are_no_floats_stay_as_they_are():
    assert Precision(compute=BF16).of(torch.int64) == Formats(torch.int64, torch.int64, torch.int64, torch.int64)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("main", torch.int64),
        ("wire", "bf16"),
        ("accumulate", 32),
        ("main", torch.bool),
        ("compute", torch.float8_e4m3fn),
    ],
)
def test_formats_that_are_none_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"Precision\({field}=.*\) is no dtype to train in: use torch.float32"):
        Precision(**{field: value})
