"""Which modules of transformers get hocket's kernels, and that they compute the same with them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip(
    "transformers",
    minversion="5.0",
    reason="needs transformers 5, which make setup installs where there is a network",
    exc_type=ImportError,
)

from hocket.adapters.fused import fuse, gate_of
from hocket.model.layers import swiglu
from tests.adapters.families import EXPERTS, model

NORMS = {"llama": 2, "qwen2": 2, "qwen3": 4, "olmo2": 4, "granite": 2, "gemma2": 0, "qwen3_moe": 4, "deepseek_v3": 4}
"""Norms of the last layer that one kernel computes; Gemma's add one to their weights."""


@pytest.mark.parametrize("family", NORMS)
def test_norms_are_known_by_what_they_compute(family: str) -> None:
    made = model(family)
    decoder: Any = made.model.layers[-1]
    fused = copy.deepcopy(decoder)
    assert fuse(fused) == NORMS[family]
    for (name, module), (_, same) in zip(decoder.named_modules(), fused.named_modules(), strict=True):
        if name.endswith("norm"):
            x = torch.randn(5, module.weight.numel(), requires_grad=True)
            grads = [torch.autograd.grad(m(x).pow(3).sum(), [x, m.weight]) for m in (module, same)]
            for one, other in zip(*grads, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", EXPERTS)
def test_gates_are_known_by_what_they_compute(family: str) -> None:
    made = model(family)
    block = next(m for m in made.modules() if hasattr(m, "_apply_gate"))
    assert (gate_of(block) is swiglu) == (family != "gpt_oss")
