"""Toy steps, whose ops are shorter than a host takes to issue one: what is simulated of them leaves the host out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from hocket.plan.hardware import H200, HARDWARE


@pytest.fixture(scope="package", autouse=True)
def quick_hosts() -> Iterator[None]:
    """GPUs that nobody waits for and that nothing slows down: tests of friction give their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(HARDWARE, "h200", replace(H200, issue=0.0, counts=0.0, beside_kernels=0.0, beside_copies=0.0))  # type: ignore[arg-type]
        yield
