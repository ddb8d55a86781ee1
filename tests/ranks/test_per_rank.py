"""One copy per destination rank: what arrives where, gradients against float64, and extremes of routing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.bench.plain import Exchange, SyncMoELayer
from hocket.config import ModelConfig
from hocket.layers.dispatch import (
    Splits,
    counts_to_send,
    exchange_counts,
    from_experts,
    send_rows,
    splits_of,
    to_experts,
    unpermute,
)
from hocket.layers.routing import Routing, route
from hocket.model.parts import ExpertPlace
from hocket.predict.part_sizes import label_bytes, ranks_per_token
from hocket.program.mesh import Mesh
from hocket.runtime.comm import make_groups
from tests.helpers.plans import small
from tests.helpers.ranks import run_ranks
from tests.reference import moe_layer

WIDTH = 8
CONFIG = ModelConfig(hidden=WIDTH, experts=12, top_k=3)
CHOICES = {
    "any": lambda e, t: torch.randn(t, e),
    "one expert": lambda e, t: torch.zeros(t, e).index_fill(1, torch.tensor([e // 2]), 9.0),
    "one rank": lambda e, t: torch.arange(e, 0.0, -1.0).expand(t, e).clone(),
    "last rank": lambda e, t: torch.arange(0.0, e).expand(t, e).clone(),
}
"""Logits of so many tokens, by what most of them choose."""


def exchanged(sent: list[Tensor], splits: list[Splits]) -> list[Tensor]:
    """What every rank receives of what all send."""
    parts = [rows[: sum(at.table.send)].split(at.table.send) for rows, at in zip(sent, splits, strict=True)]
    return [torch.cat([part[rank] for part in parts]) for rank in range(len(sent))]


def experts(rows: Tensor, splits: Splits, factors: Tensor) -> Tensor:
    """Each expert multiplies by a number of its own."""
    sizes = splits.offsets_L.long().diff(prepend=torch.zeros(1, dtype=torch.int64))
    return rows * factors.repeat_interleave(sizes).unsqueeze(1).to(rows.dtype)


def layer(
    inputs: list[list[Tensor]], config: ModelConfig, per_rank: bool, weighted: bool = False
) -> tuple[list[Tensor], list[Routing]]:
    """Outputs of all ranks, whose inputs are (tokens, logits, residual), with the exchange played by hand."""
    ranks = len(inputs)
    factors = torch.arange(1.0, config.experts + 1).view(ranks, -1)
    rows, probs, routings = [], [], []
    for x, logits, _ in inputs:
        weights, routing = route(logits, config)
        routing = routing.by_rank(ranks) if per_rank else routing
        sent, _, kept = send_rows(x, weights, routing)
        rows.append(sent)
        probs.append(kept)
        routings.append(routing)
    every = torch.stack([counts_to_send(routing, ranks) for routing in routings])
    splits = [splits_of(every, rank, routing) for rank, routing in enumerate(routings)]
    returned = []
    for rank, received in enumerate(exchanged(rows, splits)):
        grouped, weights, opened = to_experts(received, splits[rank], weighted=weighted)
        assert len(grouped) == int(splits[rank].offsets_L[-1])
        made = experts(grouped, splits[rank], factors[rank])
        made = made if weights is None else (made * weights.unsqueeze(1)).to(made.dtype)
        returned.append(from_experts(made, opened, splits[rank]))
    back = [replace(at, table=at.table.back) for at in splits]
    returned = exchanged(returned, back)
    return [unpermute(returned[r], probs[r], inputs[r][2], None, routings[r]) for r in range(ranks)], routings


def exact(inputs: list[list[Tensor]], config: ModelConfig, routings: list[Routing]) -> list[Tensor]:
    """The same in float64 without any rows."""
    outputs = []
    for (x, logits, residual), routing in zip(inputs, routings, strict=True):
        expert_of_row = torch.arange(config.experts).repeat_interleave(routing.counts_E)
        chosen = expert_of_row[routing.inverse_TK.long()]
        weights = logits.softmax(-1).gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        outputs.append(residual + x * (weights * (chosen + 1)).sum(-1, keepdim=True))
    return outputs


def assert_right(tokens: list[int], config: ModelConfig, choices: str, dtype: torch.dtype) -> None:
    inputs = [
        [torch.randn(t, WIDTH).to(dtype), CHOICES[choices](config.experts, t), torch.randn(t, WIDTH).to(dtype)]
        for t in tokens
    ]
    found: list[list[Tensor]] = []
    routings: list[Routing] = []
    grads = [torch.randn(t, WIDTH).to(dtype) for t in tokens]
    for way in ("exact", "per rank", "per rank, weighted by experts", "per expert"):
        leaves = [
            [t.detach().to(torch.float64 if way == "exact" else t.dtype).requires_grad_() for t in rank]
            for rank in inputs
        ]
        if way == "exact":
            _, routings = layer(inputs, config, False)
            outputs = exact(leaves, config, routings)
        else:
            outputs, _ = layer(leaves, config, way != "per expert", weighted="weighted" in way)
        torch.autograd.backward(outputs, [g.to(out.dtype) for g, out in zip(grads, outputs, strict=True)])
        found.append(
            [*outputs, *(t.grad if t.grad is not None else torch.zeros_like(t) for rank in leaves for t in rank)]
        )
    rtol, atol = (1e-4, 1e-4) if dtype is torch.float32 else (6e-2, 0.4)
    for right, *others in zip(*found, strict=True):
        for other in others:
            torch.testing.assert_close(other.double(), right, rtol=rtol, atol=atol)


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.sampled_from([2, 3, 4]),
    data=st.data(),
    top_k=st.integers(1, 12),
    choices=st.sampled_from(list(CHOICES)),
    seed=st.integers(0, 1000),
)
def test_rows_come_where_they_belong(ranks: int, data: st.DataObject, top_k: int, choices: str, seed: int) -> None:
    """Also with another number of tokens on every rank, none on some."""
    torch.manual_seed(seed)
    tokens = data.draw(st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks))
    assert_right(tokens, replace(CONFIG, top_k=top_k), choices, torch.float32)


@pytest.mark.parametrize("choices", CHOICES)
def test_in_bf16(choices: str) -> None:
    torch.manual_seed(0)
    assert_right([7, 1, 5, 0], replace(CONFIG, top_k=4), choices, torch.bfloat16)


def test_a_token_is_sent_once_to_every_rank_that_has_its_experts() -> None:
    _, routing = route(torch.tensor([[9.0, 8, 0, 0, 7, 0], [0, 0, 9, 8, 7, 0]]), replace(CONFIG, experts=6, top_k=3))
    pairs = routing.by_rank(3).pairs
    assert pairs is not None
    assert pairs.counts_PM.tolist() == [
        [1, 1, 1],
        [1, 1, 1],
        [2, 0, 2],
    ]  # token 0 to ranks 0 and 2, token 1 to ranks 1 and 2
    assert pairs.row_TK.tolist() == [[0, 0, 2], [1, 1, 3]]
    assert pairs.first_TK.tolist() == [[0, -1, 2], [1, -1, 3]]
    assert pairs.seat_TK.tolist() == [[0, 1, 0], [0, 1, 1]]


def test_as_many_rows_as_formulas_expect() -> None:
    torch.manual_seed(0)
    config = replace(CONFIG, experts=128, top_k=8)
    for ranks in (2, 4, 8):
        pairs = route(torch.randn(4000, 128), config)[1].by_rank(ranks).pairs
        assert pairs is not None
        assert int(pairs.counts_PM[:, -1].sum()) / 4000 == pytest.approx(ranks_per_token(config, ranks), rel=0.01)
    assert ranks_per_token(config, 128) == pytest.approx(8)
    assert ranks_per_token(replace(config, top_k=128), 4) == 4


def test_sums_of_a_rank_are_rounded_once() -> None:
    """A rank's outputs are summed in fp32: 1 + 2^-9 seven times is lost if added up in bf16."""
    config = replace(CONFIG, experts=16, top_k=8)
    _, routing = route(torch.arange(16.0).expand(1, 16), config)
    routing = routing.by_rank(2)
    rows, *_ = send_rows(torch.ones(1, WIDTH, dtype=torch.bfloat16), torch.full((1, 8), 1.0), routing)
    nothing = torch.zeros(2, 9, dtype=torch.int64)
    splits = splits_of(torch.stack([counts_to_send(routing, 2), nothing]), 1, routing)
    grouped, _, opened = to_experts(rows[:1], splits)
    factors = torch.full((8,), 2.0**-9)
    factors[0] = 1.0
    assert from_experts(experts(grouped, splits, factors), opened, splits)[0, 0].item() == 1.0 + 2.0**-6


def test_labels_keep_rows_aligned() -> None:
    assert [label_bytes(top_k) for top_k in (1, 2, 6, 8, 9)] == [64, 64, 64, 64, 128]


def test_no_group_has_no_pairs() -> None:
    _, routing = route(torch.randn(3, 12), CONFIG)
    with pytest.raises(AssertionError, match="experts on other ranks"):
        exchange_counts(routing.by_rank(2), None)


# -- over real ranks -----------------------------------------------------------------------------------------

LAYER = small(experts=8, top_k=3, shared_ffn=16, aux_loss=0.1)
TOKENS = [5, 0, 3, 8]


def new_layer(rank: int, per_rank: bool) -> SyncMoELayer:
    made = SyncMoELayer(LAYER, ExpertPlace(4, rank, per_rank), 0.5).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for name, param in made.named_parameters():
        param.data = torch.randn(param.shape, generator=generator) * 0.3 + (1.0 if "norm" in name else 0.0)
        if ".experts." in f".{name}":
            param.data += rank / 10
    return made


def hidden(rank: int) -> Tensor:
    return torch.randn(1, TOKENS[rank], LAYER.hidden, generator=torch.Generator().manual_seed(rank))


def run_layer(rank: int, per_rank: bool) -> list[Any]:
    groups = make_groups(Mesh(dp=4, ep=4), rank, torch.device("cpu"), "gloo")
    own = new_layer(rank, per_rank)
    own.exchange = Exchange(groups.a2a.transport.group, 4, rank)  # type: ignore[attr-defined]
    x = hidden(rank).requires_grad_()
    out = own(x)
    out.backward(torch.ones_like(out))
    groups.destroy()
    return [out.detach(), x.grad, *(param.grad for param in own.parameters())]


@pytest.mark.parametrize("per_rank", [False, True])
def test_ranks_with_different_numbers_of_tokens(per_rank: bool) -> None:
    """No rank waits for ever, and all results are those of one process."""
    found = run_ranks(run_layer, 4, per_rank)
    layers, xs = [new_layer(rank, per_rank) for rank in range(4)], [hidden(rank).requires_grad_() for rank in range(4)]
    outputs, _ = moe_layer(layers, xs)  # pyrefly: ignore
    torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
    for rank, own in enumerate(layers):
        wanted = [outputs[rank], xs[rank].grad, *(param.grad for param in own.parameters())]
        for got, right in zip(found[rank], wanted, strict=True):
            assert right is not None
            assert torch.equal(got, right)
