"""Windows and sinks against attention written out, with torch's own derivatives, in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hocket.model.documents import PADDING, Documents, attend, documents_of, whole_sequences
from hocket.model.heads import attend_with_sinks
from hocket.model.transformer import Chunk
from tests.helpers.chunks import init_chunk
from tests.helpers.plans import small

CPU = torch.device("cpu")
PACKED = documents_of(torch.tensor([[0, 0, 0, 0, 0, 0, 1, 2, 2], [3, 3, 4, 4, 4, 4, 4, PADDING, PADDING]]))


def written_out(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, documents: Documents, window: int) -> Tensor:
    """Token by token: softmax over the keys that it sees, and its head's sink."""
    out, ends, groups = torch.empty_like(q), documents.ends.tolist(), q.shape[1] // k.shape[1]
    for first, end in pairwise(ends):
        for t in range(first, end):
            seen = slice(max(first, t + 1 - window) if window else first, t + 1)
            for head in range(q.shape[1]):
                scores = k[seen, head // groups] @ q[t, head] / q.shape[-1] ** 0.5
                more = scores if sinks is None else torch.cat([scores, sinks[head : head + 1]])
                out[t, head] = more.softmax(0)[: len(scores)] @ v[seen, head // groups]
    return out


@pytest.mark.parametrize("window", [0, 1, 3, 9])
@pytest.mark.parametrize("documents", [whole_sequences(2, 9, CPU), PACKED], ids=["whole", "packed"])
def test_attention_with_windows_and_sinks(documents: Documents, window: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(18, heads, 6, dtype=torch.float64).requires_grad_() for heads in (6, 2, 2))
    sinks, g = torch.randn(6, dtype=torch.float64).requires_grad_(), torch.randn(18, 6, 6, dtype=torch.float64)
    given = [q, k, v, sinks]
    for last in (None, sinks):
        used = given if last is not None else given[:3]
        expected = written_out(q, k, v, last, documents, window)
        wanted = torch.autograd.grad(expected, used, g)
        if last is None:
            found = attend(q, k, v, documents, window)
        else:
            found = attend_with_sinks(q, k, v, last, documents, window)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        for mine, theirs in zip(torch.autograd.grad(found, used, g), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_a_token_depends_on_its_window_alone() -> None:
    """Of one layer; of two layers on twice as many tokens, less one."""
    for layers, reach in ((1, 3), (2, 5)):
        model = small(layers=layers, dense_layers=tuple(range(layers)), window=3, sinks=True)
        chunk = init_chunk(Chunk(model, range(layers)), 0)
        ids = torch.arange(12).unsqueeze(0)
        for changed in (11 - reach, 12 - reach):
            other = ids.clone()
            other[0, changed] = 20
            differs = not torch.equal(chunk(ids)[0, -1], chunk(other)[0, -1])
            assert differs == (changed == 12 - reach)


def test_layers_without_a_window_see_all() -> None:
    model = small(layers=3, dense_layers=(0, 1, 2), window=2, full_layers=(1,))
    assert model.windows() == (2, 0, 2)
    chunk, ids = init_chunk(Chunk(model, range(3)), 0), torch.arange(12).unsqueeze(0)
    other = ids.clone()
    other[0, 0] = 20
    assert not torch.equal(chunk(ids)[0, -1], chunk(other)[0, -1])
