"""What all tests share: seeds, the skipping of GPU tests, the profile of the property tests."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch

from tests.helpers.command import end_all

# Random examples are the same in every run of CI; elsewhere each run looks at new ones.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_make_parametrize_id(val: object) -> str | None:
    """Bytes by their number: what gzip writes has the time in it, and every worker must find the same tests."""
    return f"{len(val)} bytes" if isinstance(val, bytes) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity-cases", type=int, default=2000, help="cases of the whole parity matrix, drawn at random")
    parser.addoption("--renew-golden", action="store_true", help="write what is shown now to tests/golden")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """The objects of thousands of tests live to the end, so the garbage collector need not look through them."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more worker than cores: many tests wait for processes that they have started."""
    return min(len(os.sched_getaffinity(0)) + 1, 8)


# Little of what is imported and collected is garbage. See pytest_collection_finish.
gc.disable()

# Where there is no GPU, kernels are interpreted. Triton wants to know before it is first imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Thousands of ranks and commands import the same files, which are compiled once: also where that is not the custom.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What is shown must not depend on the size of a terminal, which readline tells the processes that pytest starts.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

# Several threads split a product differently on different machines, and then its bits differ. Ranks have one each.
torch.set_num_threads(1)
# oneDNN compiles a kernel for each new shape of a bf16 product, which takes longer than all of a small model's step.
torch.backends.mkldnn.set_flags(False)


@pytest.fixture(autouse=True)
def _end_commands() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    # torch.manual_seed asks for the caller's stack once for each kind of accelerator, thousands of times.
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)
