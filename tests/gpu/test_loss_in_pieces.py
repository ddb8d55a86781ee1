"""On a GPU, logits in pieces have the loss and gradients of whole ones, and take less memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.layers.linears import cross_entropy
from hocket.layers.vocabulary import loss_in_pieces
from hocket.model.documents import Microbatch
from hocket.recipes import PLAIN
from tests.gpu.test_parity import BASE, run
from tests.helpers.plans import planned

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
CUDA = torch.device("cuda", 0)


def test_pieces_have_the_gradients_of_whole_logits_in_less_memory() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, width, words = 8192, 256, 32000
    sizes = (tokens, width), (words, width)
    given = [(0.1 * torch.randn(size, generator=generator)).to(CUDA, torch.bfloat16).requires_grad_() for size in sizes]
    targets, found, peaks = torch.randint(words, (tokens,), generator=generator).to(CUDA), list[list[Tensor]](), []
    for pieces in (1, 8):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        h, weight = given
        whole = pieces == 1
        loss = cross_entropy(h @ weight.T, targets) if whole else loss_in_pieces(h, weight, targets, pieces)
        found.append([loss.detach(), *torch.autograd.grad(loss, given)])
        peaks.append(torch.cuda.max_memory_allocated() - before)
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(found[1][1:], found[0][1:], strict=True):
        assert (mine.float() - theirs.float()).norm() < 1e-2 * theirs.float().norm()
    assert peaks[1] < 0.5 * peaks[0]


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_a_merged_step_in_pieces_keeps_the_bits_of_a_sequential_one(graphs: str) -> None:
    one_rank = {"mesh.pp": 1, "mesh.dp": 1, "mesh.ep": 1, "plan.chunks": 1}
    alone = planned(changed(BASE, one_rank), loss_pieces=3)
    sequential = changed(alone, {"plan.order": "sequential", **PLAIN})
    merged = planned(alone, order="1f1b", recompute=("attn", "experts", "mlp"), defer_layers=0, graphs=graphs)
    found: list[list[Tensor]] = []
    for config in (sequential, merged):
        engine = Engine(config, 0, CUDA)
        generator, batches = torch.Generator().manual_seed(0), []
        for _ in range(5):
            ids = [torch.randint(512, (2, 257), generator=generator).to(CUDA) for _ in range(6)]
            batches.append([Microbatch(i[:, :-1].contiguous(), i[:, 1:].contiguous()) for i in ids])
        found.append(run(engine, batches))
        engine.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
