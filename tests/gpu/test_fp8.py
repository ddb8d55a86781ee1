"""Products in fp8 on a GPU: against their formulas and against fp32, and the same bits in every run."""

from __future__ import annotations

import pytest
import torch

from benchmarks.fp8_checks import Found, checks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs products in fp8"
    ),
]


@pytest.mark.usefixtures("full_fp32")
def test_casts_and_products() -> None:
    """All checks of the benchmark, on smaller matrices, with new memory full of nan."""
    found = Found(torch.device("cuda"), 1)
    checks(found, 4)
    assert not found.failed
    assert len(found.results["check"]) == 18
