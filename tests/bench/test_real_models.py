"""Models of transformers train alike in all forms of `benchmarks.real_models`."""

from __future__ import annotations

import pytest
import torch

from benchmarks.real_models import FORMS, Row, both, line, measure
from tests.helpers.ranks import run_ranks

MODELS = ("llama", "t5")


def measured(rank: int) -> list[list[Row]]:
    device = torch.device("cpu")
    return [[measure(name, form, device, True, 32, 1, False) for form in FORMS[:2]] for name in MODELS]


def test_forms_have_one_loss() -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    for found in run_ranks(measured, 2):
        for name, (theirs, ours) in zip(MODELS, found, strict=True):
            assert ours.loss == pytest.approx(theirs.loss, rel=0.01), name
            assert min(ours.milliseconds, theirs.milliseconds) > 0
            assert f"{theirs.milliseconds / ours.milliseconds:.3f} x" in line(name, FORMS[1], ours, theirs)


def test_rounds_are_one_row() -> None:
    first, second, third = (Row(ms, gb, 1.0, (ms,)) for ms, gb in ((30.0, 2.0), (10.0, 3.0), (20.0, 1.0)))
    assert both(both(first, second), third) == Row(20.0, 3.0, 1.0, (30.0, 10.0, 20.0))
