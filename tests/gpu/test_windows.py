"""On a GPU, windows and sinks by flash attention, biases of experts and SwiGLU with a limit by kernels; whole steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.kernels import formulas
from hocket.layers.functional import add_bias_by_expert
from hocket.model.documents import Documents, attend, whole_sequences
from hocket.model.heads import attend_with_sinks
from hocket.model.layers import swiglu
from hocket.recipes import PLAIN
from tests.gpu.test_documents import CUDA, packed, some_documents
from tests.gpu.test_parity import BASE, run
from tests.helpers.plans import planned

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
CLOSE: dict[str, Any] = dict(rtol=0.03, atol=0.03)


@pytest.mark.parametrize("window", [0, 2, 100])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
@pytest.mark.parametrize("documents", [whole_sequences(2, 512, torch.device("cpu")), some_documents(2, 512)])
def test_flash_attention(documents: Documents, heads: tuple[int, int], sink: bool, window: int) -> None:
    """With gradients of queries, keys, values and sinks."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1024, count, 64) for count in (heads[0], heads[1], heads[1])]
    exact = [torch.randn(shape, generator=generator) for shape in (*shapes, (heads[0],))]
    g = torch.randn(shapes[0], generator=generator)
    found: list[list[Tensor]] = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        q, k, v, sinks = (x.to(device, dtype).requires_grad_() for x in exact)
        seen, used = documents.to(torch.device(device)), [q, k, v, sinks] if sink else [q, k, v]
        out = attend_with_sinks(q, k, v, sinks, seen, window) if sink else attend(q, k, v, seen, window)
        grads = torch.autograd.grad(out, used, g.to(out))
        found.append([x.detach().float().cpu() for x in (out, *grads)])
    for mine, theirs in zip(*found, strict=True):
        scale = theirs.abs().max()
        torch.testing.assert_close(mine / scale, theirs / scale, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_are_their_formulas(dtype: torch.dtype) -> None:
    ends = torch.tensor([0, 300, 300, 900], dtype=torch.int32, device="cuda")
    gate_up = (5 * torch.randn(1000, 5760, device="cuda")).to(dtype)
    bias, g = torch.randn(4, 5760, device="cuda").to(dtype), torch.randn(1000, 2880, device="cuda").to(dtype)

    def made() -> list[Tensor]:
        x, b = gate_up.clone().requires_grad_(), bias.clone().requires_grad_()
        out = swiglu(add_bias_by_expert(x * 1, b, ends), None, 7.0, 1.702)
        return [out.detach()[:900], *(grad[:900] for grad in torch.autograd.grad(out, (x, b), g))]

    with formulas():
        expected = made()
    rtol, atol = (1e-4, 1e-3) if dtype is torch.float32 else (0.03, 1.0)  # a digit of bf16 in a sum of 600 rows
    for mine, theirs in zip(made(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize("recompute", [("attn", "experts", "mlp"), ("dispatch",), ("dispatch", "experts")])
def test_a_merged_and_recomputed_step_keeps_the_bits_of_a_sequential_one(recompute: tuple[str, ...]) -> None:
    torch.use_deterministic_algorithms(True)  # flash attention adds in a fixed order only if it must not warn instead
    model = {"window": 64, "full_layers": (1,), "sinks": True, "router_bias": True, "expert_bias": True}
    alone = changed(BASE, {"mesh.pp": 1, "mesh.dp": 1, "mesh.ep": 1, "plan.chunks": 1, "data.packing": "on"})
    alone = changed(alone, {f"model.{name}": value for name, value in {**model, "swiglu_limit": 7.0}.items()})
    sequential = changed(alone, {"plan.order": "sequential", **PLAIN})
    merged = planned(alone, order="1f1b", recompute=recompute, defer_layers=0)
    found: list[list[Tensor]] = []
    for config in (sequential, merged):
        engine = Engine(config, 0, CUDA)
        generator = torch.Generator().manual_seed(0)
        batches = [[packed(torch.randint(512, (2, 257), generator=generator)) for _ in range(6)] for _ in range(2)]
        found.append(run(engine, batches))
        engine.close()
    assert all(bool(torch.isfinite(value).all()) for value in found[0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
