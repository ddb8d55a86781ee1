"""What traces of toy steps are compared with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hocket.predict.hardware import HARDWARE
from tests.measured.simulated import QUICK


@pytest.fixture(scope="package", autouse=True)
def quick_hosts() -> Iterator[None]:
    """Tests of overheads give their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(HARDWARE, "h200", QUICK)  # type: ignore[arg-type]
        yield
