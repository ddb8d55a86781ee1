"""What tests on GPUs share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def full_fp32() -> Iterator[None]:
    """Products in fp32 that are not rounded to TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    with warnings.catch_warnings():
        # The first matrix product in autograd's own thread warns that the thread has no CUDA context, and makes one.
        warnings.simplefilter("ignore")
        x = torch.ones(2, 2, device="cuda", requires_grad=True)
        (x @ x).sum().backward()
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
