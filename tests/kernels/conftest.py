"""Kernels on a CPU, where Triton's interpreter runs them (tests/conftest.py asks for it).

Tests here import kernels like any module, and are skipped where that would fail or prove nothing.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch


def missing() -> str | None:
    """Why kernels cannot be interpreted here, if they cannot."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton compiles for the GPU that is here; tests/gpu is about its kernels"
    return None


class Skipped(pytest.Module):
    """A file of tests that is not even imported."""

    def collect(self) -> Any:
        pytest.skip(missing() or "", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return Skipped.from_parent(parent, path=module_path) if missing() else None


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter cuts off what does not fit into a bfloat16, where hardware rounds; and numpy warns of nan."""
    import triton.language as tl
    from triton.runtime import interpreter

    def cast(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return plain(self, source, target)
        rounded = torch.from_numpy(source.data).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(rounded, tl.bfloat16)

    plain = interpreter.InterpreterBuilder.cast_impl
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast)
    with np.errstate(all="ignore"):
        yield
