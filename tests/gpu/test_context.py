"""Ranks that share sequences, on GPUs: attention of chunks by flash attention, and a step against that of one rank."""

from __future__ import annotations

import random
from typing import Any, Literal

import pytest
import torch

from hocket.config import Config, DataConfig, MeshConfig, OverlapConfig, PrecisionConfig, TrainConfig
from hocket.config.overlap import ContextOverlap
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.model.context import context_of, zigzag
from hocket.model.documents import Microbatch, attend, documents_of, whole_sequences
from hocket.model.heads import attend_stretch, attend_with_sinks, cudnn_supports
from hocket.runtime.lanes import CudaLanes
from tests.helpers.plans import planned, small
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("sinks", [False, True])
def test_chunks_attend_as_whole_sequences_do(window: int, sinks: bool) -> None:
    """Flash attention aligns queries that are fewer than their keys with the last of these."""
    batch, length, ranks = 2, 1024, 2
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(5, (batch, length), generator=generator).sort(1).values
    documents = documents_of(numbers)
    qkv = [torch.randn(batch * length, heads, 64, generator=generator) for heads in (8, 2, 2)]
    q, k, v = (x.to(CUDA, torch.bfloat16) for x in qkv)
    sink = torch.randn(8, generator=generator).to(CUDA, torch.bfloat16)

    def attended(q: Any, k: Any, v: Any, seen: Any) -> Any:
        return attend_with_sinks(q, k, v, sink, seen, window) if sinks else attend(q, k, v, seen, window)

    wanted, chunks = attended(q, k, v, documents.to(CUDA)), zigzag(batch, length, ranks)
    for rank in range(ranks):
        context = context_of(documents.to(CUDA), chunks, rank)
        for span, chunk in zip(context.spans, chunks[rank], strict=True):
            keys = slice(span.keys.start, span.keys.stop)
            found = attended(q[chunk.start : chunk.stop], k[keys], v[keys], span)
            torch.testing.assert_close(found, wanted[chunk.start : chunk.stop], rtol=2e-2, atol=2e-2)


Method = Literal["gather", "heads"]


def settings(cp: int, method: Method, recompute: tuple[str, ...], graphs: str = "off") -> Config:
    model = small(vocab=256, hidden=128, heads=4, kv_heads=2, head_dim=64, layers=2, experts=0, ffn=256)
    whole = Config(
        model=model,
        mesh=MeshConfig(cp=cp),
        precision=PrecisionConfig(compute="bf16"),
        data=DataConfig(sequence_length=256),
        overlap=OverlapConfig(cp=ContextOverlap(method=method)),
        train=TrainConfig(microbatches=2, sequences=2, transport="nccl", device="cuda"),
    )
    return planned(whole, merge="off", recompute=recompute if cp > 1 else (), graphs=graphs)


def norms(rank: int, c: Config, steps: int = 3, delayed: bool = False) -> list[tuple[float, float]]:
    """Losses of all ranks, and norms, of some steps; all lanes may be `delayed` at random."""
    torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True, warn_only=True)
    engine = Engine(c, rank, torch.device("cuda", rank))
    if delayed:
        assert isinstance(engine.lanes, CudaLanes)
        chooser = random.Random(rank)
        engine.lanes.delays = [0 if chooser.random() < 0.7 else chooser.randrange(1_000_000) for _ in range(997)]
    engine.init_weights()
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        ids = torch.randint(256, (2, 2, 257), generator=generator).to(engine.device)
        batch = [Microbatch(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in ids]
        result = engine.train_step(batch, 1e-3)
        found.append((engine.agree(result.loss)[0], float(result.grad_norm)))
    assert engine.replays == (c.plan.graphs == "on")
    engine.forget_graph()  # which keeps gradients where it writes them
    engine.assert_clean()
    engine.close()
    return found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("method", "recompute"),
    [("gather", ()), ("gather", ("kv",)), ("gather", ("attn", "kv")), ("heads", ("attn",))],
)
def test_two_ranks_learn_what_one_does(method: Method, recompute: tuple[str, ...]) -> None:
    one, two = (run_ranks(norms, cp, settings(cp, method, recompute), backend="nccl")[0] for cp in (1, 2))
    for (loss, norm), (other, others) in zip(one, two, strict=True):
        assert other == pytest.approx(loss, rel=2e-3)
        assert others == pytest.approx(norm, rel=2e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("transport", ["nccl", "copy_engine"])
@pytest.mark.parametrize("method", ["gather", "heads"])
def test_replayed_steps_learn_what_issued_ones_do(method: Method, transport: str) -> None:
    """Keys and heads that a graph moves: one of seven steps is recorded, and later ones have other text."""
    asked = (changed(settings(2, method, (), graphs), {"train.transport": transport}) for graphs in ("off", "on"))
    plain, replayed = (run_ranks(norms, 2, c, 7, backend="nccl")[0] for c in asked)
    assert replayed[:3] == plain[:3]
    for found, wanted in zip(replayed[3:], plain[3:], strict=True):
        assert found == pytest.approx(wanted, rel=2e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("method", ["gather", "heads"])
def test_copy_engines_move_what_nccl_does(method: Method) -> None:
    """Under random delays the bits of copies without, and NCCL's numbers: it rounds sums that copies keep in fp32."""
    plain = settings(2, method, ())
    copies = changed(plain, {"train.transport": "copy_engine"})
    asked = (plain, False), (copies, False), (copies, True)
    by_nccl, by_copies, delayed = (run_ranks(norms, 2, c, 5, late, backend="nccl")[0] for c, late in asked)
    assert delayed == by_copies
    for found, wanted in zip(by_copies, by_nccl, strict=True):
        assert found == pytest.approx(wanted, rel=2e-3)


@pytest.mark.parametrize(("queries", "keys"), [(512, 512), (256, 1024), (1000, 1002)])
@pytest.mark.parametrize("width", [64, 128])
def test_chunks_of_one_document_attend_in_parts(queries: int, keys: int, width: int) -> None:
    """cuDNN's two parts, put together, and their gradients, against fp32."""
    generator = torch.Generator().manual_seed(0)
    shapes = (queries, 8, width), (keys, 2, width), (keys, 2, width), (queries, 8, width)
    *given, grad = (torch.randn(*shape, generator=generator).to(CUDA, torch.bfloat16) for shape in shapes)
    assert cudnn_supports(given[0], given[1], given[2])
    chunks = [(range(keys - queries),), (range(keys - queries, keys),)]
    (span,) = context_of(whole_sequences(1, keys, CUDA), chunks, 1).spans
    found, wanted = [x.clone().requires_grad_() for x in given], [x.float().requires_grad_() for x in given]
    (q, k, v), (exact_q, exact_k, exact_v) = found, wanted
    out, exact = attend_stretch(q, k, v, span, whole=True), attend(exact_q, exact_k, exact_v, span)
    assert (out.float() - exact).norm() < 1e-2 * exact.norm()
    out.backward(grad)
    exact.backward(grad.float())
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert (mine.grad.float() - theirs.grad).norm() < 1e-2 * theirs.grad.norm()


def test_numbers_of_a_step_come_before_its_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host issues the next step while the GPU updates weights."""
    engine = Engine(settings(1, "gather", ()), 0, CUDA)
    engine.init_weights()
    ids = torch.randint(256, (2, 2, 257), generator=torch.Generator().manual_seed(1)).to(CUDA)
    batch = [Microbatch(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in ids]
    for _ in range(2):
        engine.agree(engine.train_step(batch, 1e-3).loss)
    apply = engine.optimizer.apply

    def late(later: bool = False) -> None:
        torch.cuda._sleep(1_000_000_000)
        apply(later)

    monkeypatch.setattr(engine.optimizer, "apply", late)
    result = engine.train_step(batch, 1e-3)
    told = engine.agree(result.loss)
    assert not torch.cuda.current_stream().query()
    assert (told.loss, told.grad_norm) == (float(result.loss), float(result.grad_norm))
    assert told.loss == engine.agree(result.loss.clone()).loss
    engine.close()
