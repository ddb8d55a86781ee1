"""The kernels that number pairs and write and read labels, against the formulas in `hocket/layers/rows.py`."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.config import ModelConfig
from hocket.kernels import rows as kernels
from hocket.kernels.rows import BLOCK
from hocket.layers.routing import route
from hocket.layers.rows import pack, pair, read_labels
from hocket.predict.part_sizes import label_bytes

CONFIG = ModelConfig(experts=12)
CASES = {
    "tokens": st.integers(1, 9) | st.sampled_from([BLOCK, BLOCK + 1]),
    "ranks": st.sampled_from([1, 2, 3, 4, 6, 12]),
    "top_k": st.integers(1, 8),
    "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
    "spread": st.sampled_from([0.0, 1.0, 50.0]),
    "seed": st.integers(0, 1000),
}


@given(**CASES)
@settings(max_examples=4, deadline=None)
def test_numbers_and_labels(tokens, ranks, top_k, dtype, spread, seed) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(tokens, CONFIG.experts) + torch.randn(CONFIG.experts) * spread
    probs, routing = route(logits, replace(CONFIG, top_k=top_k))
    expected = pair(routing.inverse_TK, routing.counts_E, ranks)
    row, _, seat, counts = found = kernels.number(routing.inverse_TK, routing.counts_E, ranks)
    wanted = (expected.row_TK, expected.first_TK, expected.seat_TK, expected.counts_PM)
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(found, wanted, strict=True))

    rows = pack(torch.randn(tokens, 16).to(dtype), probs, expected)[: int(counts[:, -1].sum())]
    columns = label_bytes(top_k) // 4
    written = rows.clone().view(torch.int32)
    written[:, -columns:][:, : 2 * top_k] = 7
    kernels.write_labels(written, columns, probs, row, seat)
    used = written.shape[1] - columns + 2 * top_k
    assert torch.equal(written[:, :used], rows.view(torch.int32)[:, :used])

    # As if every part came from another rank, so that seats of each count from the end of those before it.
    grouped = torch.randperm(tokens * top_k, dtype=torch.int32)
    place, weights = read_labels(rows, top_k, counts, grouped)
    place_k, weights_k = kernels.read_labels(rows.view(torch.int32), columns, top_k, counts, grouped)
    assert torch.equal(place, place_k)
    assert torch.equal(weights, weights_k)
    assert torch.equal(kernels.label_grads(rows.view(torch.int32), columns, row), probs)
    assert torch.equal(place[place >= 0].sort().values, torch.arange(tokens * top_k, dtype=torch.int32))
