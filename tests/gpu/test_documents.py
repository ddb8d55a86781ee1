"""On a GPU, attention inside of documents is flash attention over them; planned steps keep their bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.config import Config
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.kernels import IGNORED
from hocket.model.documents import PADDING, Documents, Microbatch, attend, documents_of
from hocket.model.latent_attention import attention
from hocket.predict.part_sizes import attending
from hocket.program.documents import dealt, lengths_of
from hocket.recipes import PLAIN
from tests.gpu.test_parity import BASE, run
from tests.helpers.plans import planned

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
CUDA = torch.device("cuda", 0)


def some_documents(sequences: int, length: int) -> Documents:
    """Documents of one token, of a few and of many, and padding at the end of the first sequence."""
    ids = torch.stack([torch.arange(length).add(row * 37).div(97, rounding_mode="floor") for row in range(sequences)])
    ids[:, 5], ids[0, -length // 5 :] = 1000, PADDING
    return documents_of(ids)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
def test_flash_attention_over_documents(heads: tuple[int, int]) -> None:
    documents, generator = some_documents(2, 512), torch.Generator().manual_seed(0)
    shapes = [(1024, count, 64) for count in (heads[0], heads[1], heads[1])]
    exact = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    given = [x.detach().to(CUDA, torch.bfloat16).requires_grad_() for x in exact]
    g = torch.randn(shapes[0], generator=generator)
    expected = attend(exact[0], exact[1], exact[2], documents)
    got = attend(given[0], given[1], given[2], documents.to(CUDA))
    expected.backward(g)
    got.backward(g.to(got))
    close: dict[str, Any] = dict(rtol=0.03, atol=0.03)
    torch.testing.assert_close(got.detach().float().cpu(), expected.detach(), **close)
    for mine, theirs in zip(given, exact, strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.float().cpu(), theirs.grad, **close)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("widths", [(192, 128), (64, 96)], ids=str)
def test_attention_with_values_of_another_width(widths: tuple[int, int], packed: bool) -> None:
    """Narrow ones are filled up with zeros; the scale is that of what was there before."""
    generator, scale = torch.Generator().manual_seed(0), 1.8 * widths[0] ** -0.5
    shape = (1, 512) if packed else (2, 256)
    documents = some_documents(2, 256) if packed else None
    exact = [
        torch.randn(*shape, 4, width, generator=generator).requires_grad_() for width in (*widths[:1] * 2, widths[1])
    ]
    given = [x.detach().to(CUDA, torch.bfloat16).requires_grad_() for x in exact]
    g = torch.randn(*shape, 4, widths[1], generator=generator)
    expected = attention(exact[0], exact[1], exact[2], scale, documents)
    got = attention(given[0], given[1], given[2], scale, None if documents is None else documents.to(CUDA))
    expected.backward(g)
    got.backward(g.to(got))
    close: dict[str, Any] = dict(rtol=0.05, atol=0.05)
    torch.testing.assert_close(got.detach().float().cpu(), expected.detach(), **close)
    for mine, theirs in zip(given, exact, strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.float().cpu(), theirs.grad, **close)


def test_a_merged_and_recomputed_step_keeps_the_bits_of_a_sequential_one() -> None:
    torch.use_deterministic_algorithms(True)  # flash attention adds in a fixed order only if it must not warn instead
    one_rank = {"mesh.pp": 1, "mesh.dp": 1, "mesh.ep": 1, "plan.chunks": 1}
    alone = changed(BASE, {**one_rank, "data.packing": "on"})
    sequential = changed(alone, {"plan.order": "sequential", **PLAIN})
    merged = planned(alone, order="1f1b", recompute=("attn", "experts", "mlp"), defer_layers=0)
    found: list[list[Tensor]] = []
    for config in (sequential, merged):
        engine = Engine(config, 0, CUDA)
        generator, batches = torch.Generator().manual_seed(0), []
        for _ in range(2):
            ids = [torch.randint(512, (2, 257), generator=generator) for _ in range(6)]
            batches.append([packed(i) for i in ids])
        found.append(run(engine, batches))
        engine.close()
    assert all(bool(torch.isfinite(value).all()) for value in found[0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def dealt_out(step: int, config: Config, generator: torch.Generator) -> list[Microbatch]:
    """Microbatches of a step, of sequences that are dealt out by their documents: more of them in each step."""
    count = 2 * config.train.microbatches
    ids = torch.randint(512, (count, 257), generator=generator)
    numbers = (torch.rand(count, 256, generator=generator) < 0.003 * (1 + step)).cumsum(1)
    lengths = [row.unique_consecutive(return_counts=True)[1].tolist() for row in numbers]
    works = [attending(config.model, 256).work(lengths_of(each)) for each in lengths]
    return [
        Microbatch(ids[mine, :-1].to(CUDA), ids[mine, 1:].to(CUDA), documents=documents_of(numbers[mine]).to(CUDA))
        for (mine,) in dealt(works, 1, 2)
    ]


def test_a_replayed_step_learns_from_sequences_that_were_dealt_out() -> None:
    """Every step has other documents in another order, and in time more than the recorded one has room for."""
    torch.use_deterministic_algorithms(True)
    one_rank = {"mesh.pp": 1, "mesh.dp": 1, "mesh.ep": 1, "plan.chunks": 1, "plan.order": "sequential"}
    packed = changed(BASE, {**one_rank, **PLAIN, "data.packing": "on"})
    found: list[list[float]] = []
    for graphs in ("off", "on"):
        config = planned(packed, graphs=graphs)
        engine, generator, numbers = Engine(config, 0, CUDA), torch.Generator().manual_seed(0), list[float]()
        engine.init_weights()
        ways = []
        for step in range(10):
            result = engine.train_step(dealt_out(step, config, generator), 1e-3)
            numbers += [float(result.loss), float(result.grad_norm)]
            ways.append(result.way)
        engine.close()
        found.append(numbers)
        assert ("replayed" in ways) == (graphs == "on")
    assert found[0] == found[1]


def packed(ids: Tensor) -> Microbatch:
    documents, targets = some_documents(2, 256), ids[:, 1:].clone()
    targets[documents.ids_BS == PADDING] = IGNORED
    targets[:, ::7] = IGNORED
    return Microbatch(ids[:, :-1].to(CUDA), targets.to(CUDA), documents=documents.to(CUDA))
