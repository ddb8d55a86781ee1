"""On a GPU, gated delta nets by flash-linear-attention's kernels and by torch's operations; whole steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.kernels import formulas
from hocket.layers.norms import add_rms_norm, norm_rotate, rms_norm
from hocket.model import delta_net
from hocket.model.documents import Documents
from hocket.recipes import PLAIN
from tests.gpu.test_documents import CUDA, packed, some_documents
from tests.gpu.test_parity import BASE, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
CLOSE: dict[str, Any] = dict(rtol=0.03, atol=0.03)
KERNELS = pytest.mark.skipif(
    not torch.cuda.is_available() or not delta_net.has_kernels(),
    reason="needs fla-core, and a triton where it is right",
)


@KERNELS
@pytest.mark.parametrize("documents", [None, some_documents(2, 512)], ids=["sequences", "documents"])
def test_kernels_are_the_rule_in_chunks(documents: Documents | None) -> None:
    """With all gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 512, 2, 128), (2, 512, 2, 128), (2, 512, 4, 128), (2, 512, 4), (2, 512, 4)]
    q, k, v, g, b = (torch.randn(shape, generator=generator) for shape in shapes)
    exact = [q, k, v, -g.abs(), b.sigmoid()]
    up, found = torch.randn(shapes[2], generator=generator), list[list[Tensor]]()
    starts = None if documents is None else documents.position_T.view(2, 512) == 0
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        x = [t.to(device, torch.float32 if i == 3 else dtype).requires_grad_() for i, t in enumerate(exact)]
        if device == "cpu":
            out = delta_net.chunked_rule(x[0], x[1], x[2], x[3], x[4], starts)[0]
        else:
            there = None if documents is None else documents.to(CUDA)
            out = delta_net._by_kernels(x[0], x[1], x[2], x[3], x[4], there)
        grads = torch.autograd.grad(out, x, up.to(out))
        found.append([t.detach().float().cpu() for t in (out, *grads)])
    for theirs, mine in zip(*found, strict=True):
        scale = theirs.abs().max()
        torch.testing.assert_close(mine / scale, theirs / scale, **CLOSE)


def test_norms_with_one_added_to_their_weights() -> None:
    """Kernels against formulas, with gradients."""
    x = torch.randn(2, 64, 4, 64, device=CUDA, dtype=torch.bfloat16)
    p = (0.1 * torch.randn(64, device=CUDA)).bfloat16()
    table = torch.randn(2, 64, 1, 16, device=CUDA)

    def made() -> list[Tensor]:
        given = [x.clone().requires_grad_(), p.clone().requires_grad_()]
        total, normed = add_rms_norm(given[0], None, given[1], 1e-6, True)
        out = rms_norm(total, given[1], 1e-6, True) + normed + norm_rotate(given[0], given[1], 1e-6, table, True)
        return [out.detach(), *torch.autograd.grad(out, given, torch.ones_like(out))]

    with formulas():
        expected = made()
    for mine, theirs in zip(made(), expected, strict=True):
        scale = theirs.abs().max()
        torch.testing.assert_close(mine / scale, theirs / scale, **CLOSE)


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=KERNELS)])
def test_a_merged_and_recomputed_step_is_close_to_a_sequential_one(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and gradients, with documents; kernels may add in any order."""
    monkeypatch.setattr(delta_net, "has_kernels", lambda: kernels)
    model = {"delta_heads": 4, "delta_key_heads": 2, "delta_key_dim": 64, "delta_value_dim": 64, "full_layers": (1,)}
    model |= {"attn_gate": True, "norm_plus_one": True}
    one_rank = {"mesh.pp": 1, "mesh.dp": 1, "mesh.ep": 1, "plan.chunks": 1, "data.packing": "on"}
    alone = changed(BASE, {**one_rank, **{f"model.{name}": value for name, value in model.items()}})
    found: list[list[Tensor]] = []
    for config in (
        changed(alone, {"plan.order": "sequential", **PLAIN}),
        changed(alone, {"plan.recompute": ("attn",)}),
    ):
        engine = Engine(config, 0, CUDA)
        generator = torch.Generator().manual_seed(0)
        found.append(run(engine, [[packed(torch.randint(512, (2, 257), generator=generator)) for _ in range(6)]]))
        engine.close()
    for mine, theirs in zip(*found, strict=True):
        assert bool(torch.isfinite(mine).all())
        torch.testing.assert_close(mine.float(), theirs.float(), **CLOSE)
