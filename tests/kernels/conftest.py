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

E4M3 = torch.float8_e4m3fn


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
    mend_interpreter(monkeypatch)
    with np.errstate(all="ignore"):
        yield


def mend_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts off what does not fit into a bfloat16 or an e4m3, where hardware rounds; numpy warns of nan.

    It multiplies matrices of bfloat16 as if their bits were integers. And its loops end at numbers in arrays of one
    element, which numpy no longer takes for numbers.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    def cast(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return plain(self, source, target)
        rounded = torch.from_numpy(source.data).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(rounded, tl.bfloat16)

    def cast_fp8(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        kinds = source.dtype.scalar, target.scalar
        if kinds == (tl.float8e4nv, tl.float32):
            wide = torch.from_numpy(np.ascontiguousarray(source.data)).view(E4M3).float()
            return interpreter.TensorHandle(wide.numpy(), tl.float32)
        assert kinds == (tl.float32, tl.float8e4nv), kinds
        fitting = torch.from_numpy(np.ascontiguousarray(source.data)).clamp(-448, 448)  # as hardware; nan stays nan
        return interpreter.TensorHandle(fitting.to(E4M3).view(torch.uint8).numpy(), tl.float8e4nv)

    def patch(tensor: Any, scope: Any) -> None:
        patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        a, b = (cast_to_fp32(self, x) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return multiply(self, a, b, *others)

    def cast_to_fp32(self: Any, x: Any) -> Any:
        values = torch.from_numpy(x.data.view(np.int16)).view(torch.bfloat16).float().numpy()
        return interpreter.TensorHandle(values, tl.float32)

    multiply = interpreter.InterpreterBuilder.create_dot
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    patched = interpreter._patch_lang_tensor
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
    plain = interpreter.InterpreterBuilder.cast_impl
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fp_to_fp", cast_fp8)
