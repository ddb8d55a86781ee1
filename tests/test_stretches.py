"""Attention of the last tokens of a document in two parts, against attention to all of it at once."""

from __future__ import annotations

import pytest
import torch

from hocket.model.context import context_of, zigzag
from hocket.model.documents import attend, documents_of, whole_sequences
from hocket.model.heads import InParts, attend_stretch, merged

KEYS, HEADS, KV, WIDTH = 40, 4, 2, 8


@pytest.mark.parametrize("queries", [1, 7, KEYS])
def test_two_parts_find_what_the_whole_does(queries: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, h, WIDTH, dtype=torch.float64) for n, h in ((queries, HEADS), (KEYS, KV), (KEYS, KV)))
    given = [x.requires_grad_() for x in (q, k, v)]
    chunk = range(KEYS - queries, KEYS)
    (span,) = context_of(whole_sequences(1, KEYS, torch.device("cpu")), [(range(KEYS - queries),), (chunk,)], 1).spans
    wanted, grad = attend(q, k, v, span), torch.randn(queries, HEADS, WIDTH, dtype=torch.float64)
    found = InParts.apply(q, k, v)
    torch.testing.assert_close(found, wanted)
    both = (torch.autograd.grad(x, given, grad) for x in (found, wanted))
    for mine, theirs in zip(*both, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_what_is_found_in_few_keys_counts_little() -> None:
    """Weights of the two are the exponentials of their lse, whatever those are."""
    one, other = torch.randn(2, 3, HEADS, WIDTH)
    lse, more = torch.randn(2, 3, HEADS) * 40
    out, total = merged(one, lse, other, more)
    share = (lse.double() - more.double()).sigmoid().unsqueeze(-1)
    torch.testing.assert_close(out.double(), one * share + other * (1 - share), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total.double(), torch.logaddexp(lse.double(), more.double()), rtol=1e-5, atol=1e-5)


def test_chunks_of_documents_go_another_way() -> None:
    """On a CPU all do; that several documents of a chunk are kept apart is what `attend` is for."""
    documents = documents_of(torch.tensor([[0] * 11 + [1] * 20 + [2] * 9]))
    q, k, v = (torch.randn(KEYS, h, WIDTH) for h in (HEADS, KV, KV))
    wanted, chunks = attend(q, k, v, documents), zigzag(1, KEYS, 2)
    for rank in range(2):
        for span, chunk in zip(context_of(documents, chunks, rank).spans, chunks[rank], strict=True):
            keys = slice(span.keys.start, span.keys.stop)
            found = attend_stretch(q[chunk.start : chunk.stop], k[keys], v[keys], span, whole=False)
            torch.testing.assert_close(found, wanted[chunk.start : chunk.stop])
