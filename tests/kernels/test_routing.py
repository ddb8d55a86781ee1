"""The kernels that choose experts and place rows, against the formulas in `hocket/layers/routing.py`."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.config import ModelConfig
from hocket.kernels.routing import choose, regroup, weigh
from hocket.layers.dispatch import Splits
from hocket.layers.routing import route
from hocket.layers.tensor import Arriving
from hocket.runtime.transports import RowTable

CONFIGS = st.builds(
    lambda sizes, **others: ModelConfig(
        experts=sizes[0], top_k=sizes[1], route_groups=sizes[2], route_top_groups=sizes[3], **others
    ),
    sizes=st.sampled_from(
        [
            *((1, 1, 1, 1), (2, 1, 1, 1), (5, 2, 1, 1), (8, 8, 1, 1), (64, 3, 1, 1), (100, 4, 1, 1)),
            *((8, 2, 4, 1), (64, 6, 8, 3), (60, 7, 5, 2), (100, 4, 10, 9)),
        ]
    ),
    route_group_score=st.sampled_from(["best", "best_two"]),
    router=st.sampled_from(["softmax", "sigmoid"]),
    normalize_top_k=st.booleans(),
    route_scale=st.sampled_from([1.0, 2.5]),
    aux_loss=st.sampled_from([0.0, 0.3]),
)


@given(
    config=CONFIGS,
    tokens=st.integers(1, 9) | st.sampled_from([64, 65, 130]),
    bias=st.sampled_from([None, 0.1, 9.0]),
    spread=st.sampled_from([0.0, 1.0, 50.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=6)
def test_route(config: ModelConfig, tokens: int, bias: float | None, spread: float, seed: int) -> None:
    """The same experts and rows; weights, loss and gradients but for rounding."""
    experts, aux = config.experts, config.aux_loss
    torch.manual_seed(seed)
    logits = torch.randn(tokens, experts) + torch.randn(experts) * spread
    if spread == 50.0:  # otherwise scores of 0 and 1 tie, and ties may fall either way
        logits = (torch.arange(experts) * 0.1).expand(tokens, experts) + logits * 1e-3
    bias_E = None if bias is None else torch.randn(experts) * bias
    given, exact = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    probs, inverse, counts, chosen, scores, total = choose(given, bias_E, config, aux * 0.5, Arriving)
    expected, routing = route(exact, config, bias_E, aux_scale=0.5)
    assert torch.equal(inverse, routing.inverse_R)
    assert torch.equal(counts, routing.counts_E)
    torch.testing.assert_close(probs, expected)
    if routing.aux is not None:
        torch.testing.assert_close(replace(routing, total_E=total, scores_E=scores).aux, routing.aux)
    g = torch.randn_like(probs)
    probs.backward(g)
    expected.backward(g)
    torch.testing.assert_close(given.grad, exact.grad, rtol=1e-4, atol=1e-5)
    again = logits.clone().requires_grad_()
    probs_again = weigh(again, chosen, total, config, aux * 0.5)
    probs_again.backward(g)
    assert torch.equal(probs_again, probs), "weights of known choices"
    assert torch.equal(again.grad, given.grad), "gradient of the logits for known choices"  # pyrefly: ignore


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_the_balance_loss_of_two_ranks_is_that_of_all_tokens(router: str) -> None:
    """Kernels of a rank that has half of the tokens, told the rows of both, against the formula of the whole."""
    config = ModelConfig(experts=8, top_k=2, router=router, aux_loss=0.3)  # pyrefly: ignore
    logits = torch.randn(30, 8) + torch.arange(8) * 0.3
    whole = logits.clone().requires_grad_()
    probs, routing = route(whole, config)
    g = torch.randn_like(probs)
    probs.backward(g)
    halves = [half.clone().requires_grad_() for half in logits.chunk(2)]
    parts = []
    for half, g_half in zip(halves, g.chunk(2), strict=True):
        found, *_, chosen, scores, total = choose(half, None, config, 0.3, lambda _: Arriving(routing.counts_E), 2)
        found.backward(g_half)
        again = half.detach().clone().requires_grad_()
        weigh(again, chosen, total, config, 0.3, 2).backward(g_half)
        assert torch.equal(again.grad, half.grad)  # pyrefly: ignore
        part = replace(routing, total_E=total, scores_E=scores).aux
        assert part is not None
        parts.append(part)
    torch.testing.assert_close(torch.cat([half.grad for half in halves]), whole.grad, rtol=1e-4, atol=1e-5)  # pyrefly: ignore
    torch.testing.assert_close(parts[0] + parts[1], routing.aux)


def test_ties_and_no_numbers_leave_a_row_for_every_choice() -> None:
    """A run whose numbers have gone wrong must end with a loss that says so, not outside of a buffer."""
    for config in (
        ModelConfig(experts=6, top_k=3),
        ModelConfig(experts=6, top_k=3, route_groups=2, route_top_groups=1),
        ModelConfig(experts=6, top_k=3, route_groups=3, route_top_groups=2, route_group_score="best"),
    ):
        logits = torch.zeros(7, 6)
        logits[3], logits[4, 2], logits[5] = float("nan"), float("inf"), float("-inf")
        for bias in (None, torch.full((6,), float("-inf"))):
            _, inverse, counts, *_ = choose(logits, bias, config, 0.0, Arriving)
            assert sorted(inverse.tolist()) == list(range(21))
            assert int(counts.sum()) == 21
            assert (counts <= 7).all()


@pytest.mark.parametrize(("experts", "groups", "top_groups"), [(256, 8, 4), (160, 8, 3), (60, 5, 2)])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_groups_are_those_of_transformers(family: str, experts: int, groups: int, top_groups: int) -> None:
    """The formulas and the kernels choose the same experts as its routers, and give them the same weights."""
    pytest.importorskip("transformers", minversion="5.0", exc_type=ImportError, reason="needs transformers 5")
    known = importlib.import_module(f"transformers.models.{family}")
    short = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}[family]
    modelling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    sizes = dict(
        hidden_size=32, n_routed_experts=experts, num_experts_per_tok=6, n_group=groups, topk_group=top_groups,
        routed_scaling_factor=1.5,
    )  # fmt: skip
    first = family == "deepseek_v2"
    theirs = getattr(modelling, f"{short}TopkRouter")(
        getattr(known, f"{short}Config")(**sizes, **(dict(topk_method="group_limited_greedy") if first else {}))
    )
    torch.nn.init.normal_(theirs.weight)
    bias = None if first else theirs.e_score_correction_bias.normal_(std=0.3)
    ours = ModelConfig(
        experts=experts, top_k=6, route_groups=groups, route_top_groups=top_groups, route_scale=1.5,
        route_group_score="best" if first else "best_two", router="softmax" if first else "sigmoid",
        normalize_top_k=not first,
    )  # fmt: skip
    logits, weights, ids = theirs(torch.randn(12, 32))
    probs, routing = route(logits.detach(), ours, bias)
    by_kernel, *_, chosen, _, _ = choose(logits.detach(), bias, ours, 0.0, Arriving)
    assert routing.chosen_TK is not None
    expected = torch.zeros(12, experts).scatter(1, ids, weights)
    for mine, found in ((routing.chosen_TK, probs), (chosen, by_kernel)):
        assert torch.equal(mine.long().sort(dim=-1).values, ids.sort(dim=-1).values)
        torch.testing.assert_close(torch.zeros(12, experts).scatter(1, mine.long(), found), expected)


@given(
    counts=st.integers(1, 5).flatmap(
        lambda ranks: st.integers(1, 6).flatmap(
            lambda local: st.lists(
                st.lists(st.integers(0, 5) | st.just(1100), min_size=local, max_size=local),
                min_size=ranks,
                max_size=ranks,
            )
        )
    )
)
@settings(max_examples=5)
def test_regroup(counts: list[list[int]]) -> None:
    recv = [sum(of_rank) for of_rank in counts]
    splits = Splits(RowTable([[rows] + [0] * (len(recv) - 1) for rows in recv], 0), torch.tensor(counts))
    ends, order, inverse = regroup(splits.counts_PL, sum(recv))
    assert torch.equal(ends, splits.offsets_L)
    if len(recv) > 1:
        assert torch.equal(order, splits.order_R)
        assert torch.equal(inverse, splits.inverse_R)


@pytest.mark.parametrize("experts", [96, 256])
def test_real_numbers_of_experts(experts: int) -> None:
    config = ModelConfig(experts=experts, top_k=8)
    logits = torch.randn(20, experts)
    probs, inverse, counts, *_ = choose(logits, None, config, 0.0, Arriving)
    expected, routing = route(logits, replace(config))
    torch.testing.assert_close(probs, expected)
    assert torch.equal(inverse, routing.inverse_R)
    assert torch.equal(counts, routing.counts_E)
