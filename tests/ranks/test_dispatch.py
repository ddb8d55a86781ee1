"""Routing, and the movement of rows: invariants, gradients against float64, experts without rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.config import ModelConfig
from hocket.layers.dispatch import Splits, exchange_counts, group_rows, permute, ungroup_rows, unpermute
from hocket.layers.routing import Routing, balance_bias, inverse_of, route
from hocket.runtime.blocks import HostBlocks, rows_of
from hocket.runtime.transports import RowTable

CONFIG = ModelConfig(hidden=8, experts=8, top_k=3)

SIZES = st.tuples(st.integers(1, 9), st.integers(1, 8)).flatmap(
    lambda s: st.tuples(st.just(s[0]), st.just(s[1]), st.integers(1, s[1]))
)
"""(tokens, experts, top_k)."""


def random_route(
    tokens: int, config: ModelConfig = CONFIG, spread: float = 1.0, seed: int = 0
) -> tuple[Tensor, Routing]:
    """A routing of random logits. A large `spread` among experts leaves some without rows."""
    generator = torch.Generator().manual_seed(seed)
    preference = torch.randn(config.experts, generator=generator) * spread
    return route(torch.randn(tokens, config.experts, generator=generator) + preference, config)


def assignment(routing: Routing) -> list[list[int]]:
    """The experts of every token, read back from order and counts."""
    expert_of_row = torch.arange(routing.counts_E.numel()).repeat_interleave(routing.counts_E)
    return expert_of_row[routing.inverse_R].view(routing.tokens, routing.top_k).tolist()


# -- routing -------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(SIZES, st.sampled_from(["softmax", "sigmoid"]), st.integers(0, 1000))
def test_routing_invariants(sizes: tuple[int, int, int], router: str, seed: int) -> None:
    tokens, experts, top_k = sizes
    config = replace(CONFIG, experts=experts, top_k=top_k, router=router, route_scale=2.0)  # pyrefly: ignore
    probs, routing = random_route(tokens, config, spread=3.0, seed=seed)
    rows = tokens * top_k
    assert probs.shape == (tokens, top_k)
    torch.testing.assert_close(probs.sum(-1), torch.full((tokens,), 2.0))
    assert routing.counts_E.shape == (experts,)
    assert int(routing.counts_E.sum()) == rows
    order_R = inverse_of(routing.inverse_R)
    assert torch.equal(order_R[routing.inverse_R], torch.arange(rows))
    chosen = assignment(routing)
    assert all(len(set(experts_of_token)) == top_k for experts_of_token in chosen)
    # Rows of one expert are in the order of their tokens.
    for block in (order_R // top_k).split(routing.counts_E.tolist()):
        assert (block.diff() > 0).all()


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_the_best_experts_are_chosen_and_weighted(router: str) -> None:
    logits = torch.randn(5, 8)
    config = replace(CONFIG, router=router, normalize_top_k=False)  # pyrefly: ignore
    probs, routing = route(logits, config)
    scores = logits.softmax(-1) if router == "softmax" else logits.sigmoid()
    best = scores.topk(3)
    assert torch.equal(probs, best.values)
    assert assignment(routing) == best.indices.tolist()


def test_bias_changes_the_choice_but_not_the_weights() -> None:
    logits = torch.randn(6, 8)
    bias = torch.zeros(8)
    bias[5] = 10.0
    config = replace(CONFIG, top_k=1, normalize_top_k=False)
    probs, routing = route(logits, config, bias)
    assert assignment(routing) == [[5]] * 6
    assert routing.counts_E.tolist() == [0, 0, 0, 0, 0, 6, 0, 0]
    assert torch.equal(probs[:, 0], logits.softmax(-1)[:, 5])


def test_even_routing_gives_every_expert_as_many_rows_whatever_the_scores() -> None:
    config = ModelConfig(experts=8, top_k=2, routing="even", aux_loss=0.1)
    logits = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    probs, routing = route(logits, config)
    assert routing.counts_E.tolist() == [4] * 8
    assert routing.chosen_TK is not None
    assert (routing.chosen_TK[:, 0] % 4 == routing.chosen_TK[:, 1] % 4).all(), "two experts of a token are far apart"
    chosen = logits.softmax(-1).gather(1, routing.chosen_TK)
    torch.testing.assert_close(probs, chosen / chosen.sum(-1, keepdim=True))
    probs[:, 0].sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum() > 0
    padded = route(logits, config, real_T=torch.arange(16) < 12)[1]
    assert padded.load_E.sum() == 24
    uneven = route(logits[:5], config)[1]
    assert int(uneven.counts_E.max() - uneven.counts_E.min()) <= 1


def test_all_experts_chosen() -> None:
    probs, routing = random_route(4, replace(CONFIG, top_k=8))
    assert routing.counts_E.tolist() == [4] * 8
    assert all(sorted(experts) == list(range(8)) for experts in assignment(routing))
    torch.testing.assert_close(probs.sum(-1), torch.ones(4))


def test_balance_bias_moves_towards_the_mean() -> None:
    bias = balance_bias(torch.zeros(4), torch.tensor([9, 1, 5, 5]), rate=0.5)
    assert bias.tolist() == [-0.5, 0.5, 0.0, 0.0]
    assert balance_bias(bias, torch.tensor([5, 5, 5, 5]), rate=0.5).tolist() == [-0.5, 0.5, 0.0, 0.0]
    even = torch.full((100,), 1_000_003)
    assert not balance_bias(torch.zeros(100), even, rate=0.5).any(), "their sum is no fp32 number"


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("aux", [0.0, 0.3])
def test_route_gradient_against_float64(router: str, aux: float) -> None:
    """Weights and load-balancing loss written out in one expression, in float64."""
    config = replace(CONFIG, router=router, aux_loss=aux, route_scale=1.5)  # pyrefly: ignore
    logits = torch.randn(6, 8, requires_grad=True)
    g = torch.randn(6, 3)
    probs, routing = route(logits, config, aux_scale=0.25)
    probs.backward(g)

    exact = logits.detach().double().requires_grad_()
    scores = exact.softmax(-1) if router == "softmax" else exact.sigmoid()
    chosen = torch.tensor(assignment(routing))
    weights = scores[torch.arange(6)[:, None], chosen]
    weights = 1.5 * weights / weights.sum(-1, keepdim=True)
    share = torch.bincount(chosen.flatten(), minlength=8).double() / 18
    balance = 8 * (share * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()
    ((weights * g.double()).sum() + aux * 0.25 * balance).backward()
    assert logits.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(probs.double(), weights)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
    if aux:
        assert routing.aux is not None
        assert not routing.aux.requires_grad
        torch.testing.assert_close(routing.aux.double(), balance.detach())
    else:
        assert routing.aux is None


def test_balance_loss_is_one_when_even() -> None:
    config = replace(CONFIG, top_k=8, aux_loss=1.0)
    _, routing = route(torch.zeros(4, 8), config)
    assert routing.aux is not None
    torch.testing.assert_close(routing.aux, torch.tensor(1.0))


# -- permute and unpermute -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "top_k", "spread"), [(7, 3, 1.0), (1, 3, 1.0), (5, 8, 1.0), (7, 2, 20.0)])
@pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared"])
def test_permute_and_unpermute_against_float64(
    tokens: int, top_k: int, spread: float, shared: bool, dtype: torch.dtype
) -> None:
    """Through both, with rows changed in between, so that every gradient matters."""
    config = replace(CONFIG, top_k=top_k)
    probs, routing = random_route(tokens, config, spread)
    assert spread < 10 or (routing.counts_E == 0).any()
    x, residual, extra = (torch.randn(tokens, 8).to(dtype) for _ in range(3))
    factor = torch.randn(tokens * top_k, 8).to(dtype)
    g = torch.randn(tokens, 8).to(dtype)
    inputs = [t.clone().requires_grad_() for t in (x, probs, residual, extra)]
    rows = permute(inputs[0], routing) * factor
    out = unpermute(rows, inputs[1], inputs[2], inputs[3] if shared else None, routing)
    out.backward(g)

    exact = [t.detach().double().requires_grad_() for t in inputs]
    rows = exact[0][inverse_of(routing.inverse_R) // top_k] * factor.double()
    weighted = rows[routing.inverse_R].view(tokens, top_k, 8) * exact[1][..., None]
    expected = exact[2] + weighted.sum(1) + (exact[3] if shared else 0)
    expected.backward(g.double())
    rtol, atol = (1e-5, 1e-5) if dtype is torch.float32 else (4e-2, 6e-2)
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)
    assert out.dtype is dtype
    for a, b in zip(inputs, exact, strict=True):
        if b.grad is None:
            assert a.grad is None
            continue
        assert a.grad is not None
        assert a.grad.dtype is a.dtype
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=rtol, atol=atol)


def test_permute_sums_in_fp32() -> None:
    """1 + 2^-9 eight times is lost if added up in bf16."""
    _, routing = random_route(1, replace(CONFIG, top_k=8))
    x = torch.zeros(1, 8, dtype=torch.bfloat16, requires_grad=True)
    g = torch.full((8, 8), 2.0**-9, dtype=torch.bfloat16)
    g[routing.inverse_R[0]] = 1.0
    permute(x, routing).backward(g)
    assert x.grad is not None
    assert x.grad[0, 0].item() == 1.0 + 2.0**-6  # 1 + 7 * 2^-9, rounded once


# -- exchange ------------------------------------------------------------------------------------------------


@dataclass
class FakeGroup:
    """Counts of all ranks, known beforehand."""

    rank: int
    sent: list[Tensor]

    @property
    def size(self) -> int:
        return len(self.sent)

    def all_counts(self, counts: Tensor) -> Tensor:
        assert torch.equal(counts, self.sent[self.rank])
        return torch.stack(self.sent)


@settings(max_examples=40)
@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 6), st.integers(0, 1000))
def test_every_row_reaches_its_expert_and_comes_back(ranks: int, local: int, tokens: int, seed: int) -> None:
    """Rows carry (source rank, token, expert); the exchange is played by hand."""
    config = replace(CONFIG, experts=ranks * local, top_k=min(2, ranks * local))
    routings = [random_route(tokens + r, config, spread=3.0, seed=seed + r)[1] for r in range(ranks)]
    sent_counts = [routing.counts_E.view(ranks, local) for routing in routings]
    splits = [exchange_counts(routing, FakeGroup(r, sent_counts)) for r, routing in enumerate(routings)]
    expert = torch.arange(ranks * local)
    rows = [
        torch.stack([torch.full_like(e, r), inverse_of(routing.inverse_R) // routing.top_k, e], 1)
        for r, routing in enumerate(routings)
        for e in [expert.repeat_interleave(routing.counts_E)]
    ]
    parts = [rows[r].split(splits[r].table.send) for r in range(ranks)]
    for r in range(ranks):
        assert splits[r].table.receive == [splits[s].table.send[r] for s in range(ranks)]
        assert splits[r].table.back.send == splits[r].table.receive
        assert splits[r].table.back.receive == splits[r].table.send
        received = torch.cat([parts[s][r] for s in range(ranks)])
        grouped = group_rows(received, splits[r])
        assert splits[r].offsets_L.dtype is torch.int32
        assert int(splits[r].offsets_L[-1]) == received.shape[0]
        first = 0
        for e, end in enumerate(splits[r].offsets_L.tolist()):
            block = grouped[first:end]
            assert (block[:, 2] == r * local + e).all()
            assert block[:, :2].tolist() == sorted(block[:, :2].tolist())
            first = end
        assert torch.equal(ungroup_rows(grouped, splits[r]), received)


def test_rows_that_are_placed_arrive_in_grouped_order() -> None:
    """Where rows lie that are sent one by one, and sorted when they have come."""
    routings = [random_route(6 + r, replace(CONFIG, experts=6), spread=3.0, seed=r)[1] for r in range(3)]
    sent_counts = [routing.counts_E.view(3, 2) for routing in routings]
    rows = [100.0 * r + torch.arange(float(routing.room)).view(-1, 1) for r, routing in enumerate(routings)]
    for r, routing in enumerate(routings):
        known = exchange_counts(routing, FakeGroup(r, sent_counts))
        placed = exchange_counts(routing, FakeGroup(r, sent_counts), placed=True)
        assert (placed.table.send, placed.table.receive) == (known.table.send, known.table.receive)
        assert (placed.table.back.send, placed.table.back.receive) == (known.table.receive, known.table.send)
        assert torch.equal(placed.offsets_L, known.offsets_L)
        assert placed.offsets_L.dtype is torch.int32
        received = [rows[s].split(sent_counts[s].sum(1).tolist())[r] for s in range(3)]
        wanted = group_rows(torch.cat(received), known)
        assert isinstance(placed.table, HostBlocks)
        places, landed = rows_of(placed.table.arriving), torch.full_like(wanted, -1.0)
        landed[places] = torch.cat(received)
        assert torch.equal(landed, wanted)
        assert group_rows(landed, placed) is landed
        assert ungroup_rows(landed, placed) is landed


def test_grouping_is_differentiable_by_gathers() -> None:
    splits = Splits(RowTable([[3, 4], [4, 0]], 0), torch.tensor([[1, 2], [4, 0]]))
    rows = torch.randn(7, 4, requires_grad=True)
    grouped = group_rows(rows, splits)
    assert torch.equal(grouped, rows[torch.tensor([0, 3, 4, 5, 6, 1, 2])])
    g = torch.randn(7, 4)
    grouped.backward(g)
    assert rows.grad is not None
    assert torch.equal(rows.grad, g[torch.tensor([0, 5, 6, 1, 2, 3, 4])])
    again = rows.detach().requires_grad_()
    ungroup_rows(group_rows(again, splits), splits).backward(g)
    assert again.grad is not None
    assert torch.equal(again.grad, g)


def test_without_a_group_nothing_moves() -> None:
    _, routing = random_route(5)
    splits = exchange_counts(routing, None)
    rows = torch.randn(15, 4)
    assert splits.table.send == splits.table.receive == [15]
    assert group_rows(rows, splits) is rows
    assert ungroup_rows(rows, splits) is rows
    assert splits.offsets_L.tolist() == routing.counts_E.cumsum(0).tolist()


def test_a_rank_that_receives_nothing() -> None:
    splits = Splits(RowTable([[0, 2], [0, 0]], 0), torch.zeros(2, 3, dtype=torch.int64))
    rows = torch.empty(0, 4, requires_grad=True)
    assert ungroup_rows(group_rows(rows, splits), splits).shape == (0, 4)
    assert splits.offsets_L.tolist() == [0, 0, 0]
