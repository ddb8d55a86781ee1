"""Attention in stages, of all ranks in one process, against attention of whole documents."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hocket.model.chunks import shares, zigzag
from hocket.model.context import Context, context_of
from hocket.model.documents import Documents, attend, documents_of, whole_sequences
from hocket.model.partial_attention import Meeting, _how
from hocket.model.ring import Final, Stage, more, own, stage_of, whole
from hocket.model.sinks import attend_with_sinks
from hocket.program.part_sizes import stage_shifts
from hocket.program.transformer import STAGES
from hocket.runtime.destinations import Ordinary

BATCH, LENGTH, HEADS, WIDTH = 2, 96, 4, 8
CPU = torch.device("cpu")


def packed(seed: int) -> Documents:
    """Two sequences of documents of very different lengths."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.rand(BATCH, LENGTH, generator=generator) < 0.06
    return documents_of(cuts.cumsum(1))


def contexts(documents: Documents, ranks: int, even: bool) -> list[Context]:
    chunks = shares(documents.bounds, LENGTH, ranks).chunks if even else zigzag(BATCH, LENGTH, ranks)
    return [context_of(documents, chunks, rank) for rank in range(ranks)]


def taken(x_UX: Tensor, chunks: tuple[range, ...]) -> Tensor:
    return torch.cat([x_UX[chunk.start : chunk.stop] for chunk in chunks])


def exchanged(stages: list[Stage], blocks: list[Tensor]) -> list[Tensor]:
    """What each rank gets, sent by slices of each rank's tokens."""
    sent = []
    for each, block in zip(stages, blocks, strict=True):
        rows = torch.cat([block[:0], *(block[r.start : r.stop] for r in each.sent)])
        sent.append(rows.split(list(each.rows[len(sent)])))
    return [torch.cat([of_rank[taker] for of_rank in sent]) for taker in range(len(blocks))]


def in_stages(
    q: Tensor, kv: Tensor, told: list[Context], window: int, sinks: Tensor | None
) -> tuple[Tensor, list[Stage]]:
    """Attention of all ranks, one stage after the other, in the order of sequences."""
    ranks = len(told)
    queries, blocks = ([taken(x, told[0].chunks[rank]) for rank in range(ranks)] for x in (q, kv))
    finals = [Final() for _ in told]
    found = [own(queries[n], blocks[n], told[n], window, finals[n]) for n in range(ranks)]
    count, every = min(STAGES, ranks - 1), list[Stage]()
    for number in range(1, count + 1):
        stages = [stage_of(context, window, count, number) for context in told]
        every += stages
        came = exchanged(stages, blocks)
        for rank in range(ranks):
            found[rank] = more(queries[rank], came[rank], *found[rank], stages[rank], window, finals[rank])
    where = None if sinks is None else Ordinary(sinks)
    out = torch.empty_like(q)
    places = [torch.cat([torch.arange(c.start, c.stop, device=q.device) for c in chunks]) for chunks in told[0].chunks]
    for rank, both in enumerate(found):
        out = out.index_copy(0, places[rank], whole(*both, where, q.dtype, finals[rank]))
    return out, every


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("window", [0, 7, 40])
@pytest.mark.parametrize(("ranks", "even"), [(2, True), (4, False), (8, True), (6, False)])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_stages_find_what_attention_finds(seed: int | None, ranks: int, even: bool, window: int, sunk: bool) -> None:
    documents = whole_sequences(BATCH, LENGTH, CPU) if seed is None else packed(seed)
    generator = torch.Generator().manual_seed(3)
    q, kv = (
        torch.randn(BATCH * LENGTH, *sizes, generator=generator, dtype=torch.float64).requires_grad_()
        for sizes in ((HEADS, WIDTH), (2 * 2 * WIDTH,))
    )
    sinks = torch.randn(HEADS, generator=generator, dtype=torch.float64).requires_grad_() if sunk else None
    k, v = kv.view(-1, 2, 2, WIDTH).unbind(1)
    plain = attend(q, k, v, documents, window)
    if sinks is not None:
        plain = attend_with_sinks(q, k, v, sinks, documents, window)
    out, every = in_stages(q, kv, contexts(documents, ranks, even and seed is not None), window, sinks)
    torch.testing.assert_close(out, plain, rtol=1e-10, atol=1e-10)
    given = [q, kv, *([] if sinks is None else [sinks])]
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    both = (torch.autograd.grad(x, given, grad, retain_graph=True) for x in (out, plain))
    for mine, theirs in zip(*both, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    assert all(stage.rows == every[n // ranks * ranks].rows for n, stage in enumerate(every))


def test_nobody_sends_what_no_query_sees() -> None:
    """With a window of less than a chunk a rank gets the last tokens before each of its chunks, and no more."""
    documents = documents_of(torch.zeros(1, 64, dtype=torch.long))
    for ranks, window in ((2, 0), (4, 0), (4, 3), (8, 3)):
        chunks = zigzag(1, 64, ranks)
        told = [context_of(documents, chunks, rank) for rank in range(ranks)]
        count = min(STAGES, ranks - 1)
        got = [
            sum(line[rank] for n in range(1, count + 1) for line in stage_of(told[rank], window, count, n).rows)
            for rank in range(ranks)
        ]
        size = 64 // (2 * ranks)
        if window:
            begins = [
                sum(c.start > 0 and (c.start - 1) not in other for c in mine for other in [tokens(mine)])
                for mine in chunks
            ]
            assert got == [(window - 1) * count for count in begins]
        else:
            assert got == [size * (2 * (ranks - 1) - rank) for rank in range(ranks)]
    alone = documents_of(torch.arange(64).unsqueeze(0) // 8)
    told = [context_of(alone, zigzag(1, 64, 4), rank) for rank in range(4)]
    assert all(not any(map(any, stage_of(each, 0, 3, n).rows)) for each in told for n in (1, 2, 3))


def tokens(chunks: tuple[range, ...]) -> set[int]:
    return {token for chunk in chunks for token in chunk}


def test_whole_sequences_take_one_call_a_stage_and_as_much_work_each() -> None:
    documents = documents_of(torch.zeros(1, 64, dtype=torch.long))
    told = [context_of(documents, zigzag(1, 64, 4), rank) for rank in range(4)]
    for context in told:
        met = [stage_of(context, 0, 3, number).meetings for number in (1, 2, 3)]
        assert [len(each) for each in met] == [1, 1, 1]
        assert [len(each.queries) * len(each.keys) for (each,) in met] == [2 * 8 * 8] * 3


def test_every_other_rank_is_in_one_stage() -> None:
    for ranks in range(2, 20):
        shifts = stage_shifts(ranks, min(STAGES, ranks - 1))
        assert [shift for each in shifts for shift in each] == list(range(1, ranks))
        assert all(0 <= len(behind) - len(ahead) <= 1 for ahead, behind in pairwise(shifts))


def test_windows_as_flash_attention_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its window to the right, left open beside one to the left, ends as many tokens on as there are keys."""

    def within(self: Meeting, window: int) -> Tensor | None:
        queries, keys, left = len(self.queries), len(self.keys), _how(self, window)[1]["window_size_left"]
        if not 0 <= left < keys:
            return None
        own = torch.arange(queries).unsqueeze(1) + keys - queries
        other = torch.arange(keys)
        return ((other >= own - left) & (other <= own + keys)).view(1, 1, queries, keys)

    monkeypatch.setattr(Meeting, "within", within)
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, WIDTH), (2 * 2 * WIDTH,))
    q, kv = (torch.randn(BATCH * LENGTH, *size, generator=generator) for size in sizes)
    k, v = kv.view(-1, 2, 2, WIDTH).unbind(1)
    for seed in range(6):
        documents = packed(seed)
        for window in (3, 7, 11, 40):
            out, _ = in_stages(q, kv, contexts(documents, 4, False), window, None)
            torch.testing.assert_close(out, attend(q, k, v, documents, window), rtol=1e-5, atol=1e-5)
