"""The four dtypes of a group of parameters."""

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.fsdp.options import Formats, Precision
from tests.helpers.ranks import run_ranks

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


class Picky(nn.Module):
    """Needs rows in the dtype of its weights; raises another error for no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not len(x):
            raise RuntimeError("no rows")
        return self.layer(x)


def inputs_of_another_format(rank: int) -> None:
    model = nn.Sequential(Picky(), Picky())
    hocket.fully_shard(model, units=Picky, precision=Precision(compute=BF16))
    with pytest.raises(RuntimeError, match="dtype") as caught:
        model(torch.ones(2, 4))
    (note,) = caught.value.__notes__
    assert note.startswith("unit '0' computes in torch.bfloat16 and was given torch.float32: hocket.Precision is of")
    assert note.endswith("inside of torch.autocast('cpu', torch.bfloat16)")
    for rows in (torch.ones(0, 4), torch.ones(2, 5, dtype=BF16)):
        with pytest.raises(RuntimeError) as caught:
            model(rows)
        assert not hasattr(caught.value, "__notes__"), "other errors stay as they are"
    with torch.autocast("cpu", BF16):
        model(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4, dtype=BF16)).sum().backward()


def test_inputs_that_are_not_of_the_dtype_of_a_unit_are_named_in_torchs_error():
    run_ranks(inputs_of_another_format, 1)
