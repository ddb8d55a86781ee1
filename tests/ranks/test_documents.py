"""Documents that share sequences, and masks: attention, loss, routing and whole steps respect both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.config import ModelConfig, RopeConfig
from hocket.config.schema import changed
from hocket.kernels import IGNORED
from hocket.layers.linears import cross_entropy
from hocket.layers.routing import route
from hocket.model.documents import PADDING, attend, documents_of
from hocket.model.transformer import Chunk
from tests.helpers.chunks import init_chunk
from tests.helpers.parity import assert_parity, config
from tests.helpers.plans import small

MOE = small(layers=2, dense_layers=(0,))
LENGTHS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=7), min_size=1, max_size=3)
"""Lengths of the documents of some sequences; what is missing to the longest sequence is padding."""


def numbered(lengths: list[list[int]]) -> Tensor:
    """Documents of tokens of sequences as long as the longest, the rest padding."""
    width = max(map(sum, lengths))
    ids = torch.full((len(lengths), width), PADDING)
    for row, sizes in zip(ids, lengths, strict=True):
        for n, end in enumerate(torch.tensor(sizes).cumsum(0).tolist()):
            row[end - sizes[n] : end] = n
    return ids


@given(LENGTHS)
@settings(max_examples=30, deadline=None)
def test_attention_is_that_of_each_document_alone(lengths: list[list[int]]) -> None:
    ids = numbered(lengths)
    documents, tokens = documents_of(ids), ids.numel()
    q, k, v = (torch.randn(tokens, heads, 8) for heads in (4, 2, 2))
    together = attend(q, k, v, documents)
    assert together.shape == (tokens, 4, 8)
    for lo, hi in zip(documents.ends[:-1].tolist(), documents.ends[1:].tolist(), strict=True):
        one_q, one_k, one_v = (x[lo:hi].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        alone = F.scaled_dot_product_attention(one_q, one_k, one_v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(together[lo:hi], alone[0].transpose(0, 1))
        assert documents.position_T[lo:hi].tolist() == list(range(hi - lo))
    assert documents.longest == int(documents.ends.diff().max())
    assert (documents.real_T is None) == bool((ids != PADDING).all())


@given(LENGTHS)
@settings(max_examples=10, deadline=None)
def test_a_packed_model_computes_what_it_does_of_each_document_alone(lengths: list[list[int]]) -> None:
    torch.manual_seed(0)
    chunk, ids = init_chunk(Chunk(MOE, range(2)), 0), numbered(lengths)
    documents, tokens = documents_of(ids), torch.randint(31, ids.shape)
    packed = chunk(tokens, documents).flatten(0, 1)
    for lo, hi in zip(documents.ends[:-1].tolist(), documents.ends[1:].tolist(), strict=True):
        torch.testing.assert_close(packed[lo:hi], chunk(tokens.flatten()[lo:hi].unsqueeze(0))[0], rtol=1e-4, atol=1e-5)


def test_a_loss_without_targets_is_zero_and_has_no_gradient() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    loss = cross_entropy(logits, torch.full((3,), IGNORED))
    loss.backward()
    assert loss == 0
    assert logits.grad is not None
    assert not logits.grad.any()


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.sampled_from(["softmax", "sigmoid"]))
@settings(max_examples=30, deadline=None)
def test_the_balance_loss_and_loads_are_those_without_padding(real: list[bool], router: Any) -> None:
    """Padding is routed, and counts for nothing."""
    c = ModelConfig(experts=5, top_k=2, router=router, aux_loss=0.5)
    real_T, logits = torch.tensor(real), torch.randn(len(real), 5)
    padded, bare = logits.clone().requires_grad_(), logits[real_T].clone().requires_grad_()
    probs, routing = route(padded, c, real_T=real_T)
    expected, wanted = route(bare, c)
    assert routing.counts_E.sum() == 2 * len(real)
    assert torch.equal(routing.load_E, wanted.counts_E)
    assert routing.aux is not None
    assert wanted.aux is not None
    torch.testing.assert_close(routing.aux, wanted.aux)
    torch.testing.assert_close(probs[real_T], expected)
    (probs * real_T.unsqueeze(1)).sum().backward()
    expected.sum().backward()
    assert padded.grad is not None
    torch.testing.assert_close(padded.grad[real_T], bare.grad)
    assert not padded.grad[~real_T].any()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_planned_step_equals_the_plain_one(dtype: str) -> None:
    """Here with slowed positions, which the pairs of `test_parity` have without documents."""
    model = dict(
        layers=3, dense_layers=(1,), shared_ffn=16, qk_norm=True, qkv_bias=True, o_bias=True, aux_loss=0.05,
        bias_rate=0.01, rope=RopeConfig(kind="llama3", factor=2.0, original_positions=8, width=6, without=(2,)),
    )  # fmt: skip
    c = config(model, dict(dp=2, ep=2), dict(merge="on", recompute=("attn", "experts", "mlp")), 4, dtype)
    assert_parity(changed(c, {"data.packing": "on"}))
