"""Which tokens context-parallel ranks get: as many each, as much attention, against pairs counted one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from benchmarks.context_balance import lengths_of
from hocket.model.context import TOLERANCE, Chunks, context_of, imbalance_of, shares, work_of, zigzag
from hocket.model.documents import attend, documents_of
from hocket.program.documents import of_windows


def counted(bounds: tuple[int, ...], chunks: tuple[range, ...], window: int = 0) -> int:
    keys = [token - max(b for b in bounds if b <= token) + 1 for chunk in chunks for token in chunk]
    return sum(min(each, window or each) for each in keys)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_every_token_has_one_rank_and_work_is_what_is_counted(ranks: int, seed: int) -> None:
    length, sequences = 512, 1 + seed % 3
    starts = range(0, sequences * length, length)
    bounds = (*(s + end for s in starts for end in lengths_of(seed + s, length, mean=64)[:-1]), sequences * length)
    found = shares(bounds, length, ranks)
    assert sorted(t for mine in found.chunks for chunk in mine for t in chunk) == list(range(sequences * length))
    assert {sum(map(len, mine)) for mine in found.chunks} == {sequences * length // ranks}
    assert all(chunk.start // length == (chunk.stop - 1) // length for mine in found.chunks for chunk in mine)
    assert list(found.work) == [counted(bounds, mine) for mine in found.chunks]
    assert found.work == work_of(bounds, found.chunks)
    assert found == shares(list(bounds), length, ranks)


@pytest.mark.parametrize("windows", [(64,), (0, 64, 64, 64, 512), (512, 0)])
def test_layers_with_windows_cost_what_they_attend_to(windows: tuple[int, ...]) -> None:
    """Flash attention over windows takes 1.6 times as long for a pair. Counted fully, ranks would be uneven."""
    length, ranks, uneven = 2048, 4, 0.0
    attending = of_windows(windows, 512)
    for seed in range(4):
        bounds = tuple(lengths_of(seed, length, mean=256))
        found, plain = shares(bounds, length, ranks, attending), shares(bounds, length, ranks)
        whole = [0 if window >= 512 else window for window in windows]

        def costs(chunks: tuple[Chunks, ...], bounds: tuple[int, ...] = bounds) -> list[float]:
            return [sum((1.6 if w else 1) * counted(bounds, mine, w) for w in whole) for mine in chunks]  # noqa: B023

        ratios = [mine / cost for mine, cost in zip(found.work, costs(found.chunks), strict=True)]
        assert ratios == pytest.approx([ratios[0]] * ranks, rel=1e-9)
        assert found.work == work_of(bounds, found.chunks, attending)
        assert imbalance_of([found.work]) <= TOLERANCE
        uneven = max(uneven, imbalance_of([work_of(bounds, plain.chunks, attending)]))
    assert uneven > TOLERANCE or 0 in whole


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("length", [32 * 1024, 128 * 1024])
def test_documents_of_a_heavy_tail_are_within_the_tolerance(ranks: int, length: int) -> None:
    """Each of 20 batches, and on average far better than zigzag chunks."""
    gains = []
    for seed in range(20):
        bounds = lengths_of(seed, length)
        found, plain = shares(bounds, length, ranks), work_of(bounds, zigzag(1, length, ranks))
        assert 0 <= found.imbalance <= TOLERANCE
        gains.append(max(plain) / max(found.work))
    assert sum(gains) / len(gains) > {2: 1.2, 4: 1.4, 8: 1.6}[ranks]


@pytest.mark.parametrize("bounds", [(0, 1024), tuple(range(0, 1025, 8)), (0, 1000, 1024), (0, 24, 1024)])
def test_extremes_are_balanced_too(bounds: tuple[int, ...]) -> None:
    assert shares(bounds, 1024, 4).imbalance <= TOLERANCE


def test_one_document_is_cut_as_zigzag_cuts_it() -> None:
    assert {frozenset(mine) for mine in shares((0, 64), 64, 2).chunks} == {
        frozenset({range(16), range(48, 64)}),
        frozenset({range(16, 48)}),
    }


def test_what_cannot_be_balanced_says_so() -> None:
    """Chunks of fewer tokens than `SMALLEST` are not made: one document of 32 tokens, and others of one."""
    found = shares((0, 32, *range(33, 65)), 64, 4)
    assert found.imbalance > TOLERANCE
    assert found.imbalance == max(found.work) * 4 / sum(found.work) - 1


def test_attention_of_such_chunks_is_that_of_whole_sequences() -> None:
    torch.manual_seed(0)
    length, ranks = 256, 2
    bounds = (0, 3, 150, 156, 256, 300, 512)
    ids = torch.zeros(2 * length, dtype=torch.int64)
    for number, (a, b) in enumerate(pairwise(bounds)):
        ids[a:b] = number
    documents, found = documents_of(ids.view(2, length)), shares(bounds, length, ranks)
    q, k, v = (torch.randn(2 * length, heads, 8) for heads in (4, 2, 2))
    whole = attend(q, k, v, documents)
    for rank, mine in enumerate(found.chunks):
        spans = context_of(documents, found.chunks, rank).spans
        for span, chunk in zip(spans, mine, strict=True):
            keys = slice(span.keys.start, span.keys.stop)
            part = attend(q[chunk.start : chunk.stop], k[keys], v[keys], span)
            torch.testing.assert_close(part, whole[chunk.start : chunk.stop])


def test_a_bad_length_is_named() -> None:
    with pytest.raises(ValueError, match="60 tokens cannot be cut into 8 chunks of one length"):
        shares((0, 60), 60, 4)


def test_lengths_have_the_mean_and_tail_that_the_figures_are_for() -> None:
    found = [b - a for seed in range(200) for a, b in pairwise(lengths_of(seed, 128 * 1024))]
    assert 1500 < sum(found) / len(found) < 2500
    assert max(found) > 0.4 * 128 * 1024
