"""What all tests share: seeds, the skipping of GPU tests, the profile of the property tests."""

from __future__ import annotations

import os
import random

import hypothesis
import numpy as np
import pytest
import torch

# Random examples are the same in every run of CI; elsewhere each run looks at new ones.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--parity-cases", type=int, default=2000, help="cases of the full parity matrix, drawn at random; 0 takes all"
    )
    parser.addoption("--renew-golden", action="store_true", help="write what is shown now to tests/golden")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


# Where there is no GPU, kernels are interpreted. Triton wants to know before it is first imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Several threads split a product differently on different machines, and then its bits differ. Ranks have one each.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
