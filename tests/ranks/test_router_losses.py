"""The router's losses: against formulas of transformers and of papers, and over ranks against the sequential step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

from hocket.config import ModelConfig
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.kernels import IGNORED
from hocket.layers.routing import Routing, attach_losses, route, shares_of
from hocket.model.documents import PADDING, documents_of
from tests.helpers import parity
from tests.helpers.parity import assert_parity, batches_of, config
from tests.helpers.ranks import run_ranks
from tests.reference import Batch, microbatch

B, S = 3, 7
ROUTERS = ["softmax", "sigmoid"]


def of(router: str, **changes: Any) -> ModelConfig:
    return ModelConfig(experts=6, top_k=2, router=router, **changes)  # pyrefly: ignore


def logits_of(tokens: int = B * S) -> Tensor:
    return (3 * torch.randn(tokens, 6, generator=torch.Generator().manual_seed(0))).requires_grad_()


def gradient(c: ModelConfig, logits: Tensor, load: Tensor | None = None, real: Tensor | None = None) -> Tensor:
    """Of the losses alone: what attaching them adds."""
    probs, routing = route(logits, replace(c, aux_loss=0.0), real_T=real)
    count = B * S if real is None else int(real.sum())
    attached = attach_losses(probs, logits, routing, c, load, (real, B, (0.5 / count, 0.5 / B)))
    assert torch.equal(attached, probs)
    return torch.autograd.grad(attached, logits, torch.zeros_like(probs))[0]


def chosen(c: ModelConfig, logits: Tensor) -> Tensor:
    """One where a token goes to an expert, [T, E]."""
    return torch.zeros_like(logits).scatter(1, logits.detach().topk(c.top_k).indices, 1.0)


def double(c: ModelConfig, logits: Tensor) -> Tensor:
    """A token's shares."""
    return shares_of(logits.double(), c)


def test_the_z_loss_is_that_of_transformers() -> None:
    logits = logits_of()
    theirs: Any = router_z_loss_func(logits.view(B, S, 6)) * 0.5 * 0.01
    expected = torch.autograd.grad(theirs, logits)[0]
    torch.testing.assert_close(gradient(of("softmax", z_loss=0.01), logits), expected)


@pytest.mark.parametrize("router", ROUTERS)
def test_the_loss_by_sequence_is_deepseeks(router: str) -> None:
    """DeepSeek-V3, eq. 17 to 20, and the mean over sequences."""
    c, logits = of(router, aux_loss=0.3, aux_loss_over="sequence"), logits_of()
    total: Any = 0.0
    for rows, shares in zip(chosen(c, logits).view(B, S, 6), double(c, logits).view(B, S, 6), strict=True):
        f = 6 / (c.top_k * S) * rows.sum(0)
        total = total + (f * shares.mean(0)).sum() / B
    expected = torch.autograd.grad(0.5 * 0.3 * total, logits)[0]
    torch.testing.assert_close(gradient(c, logits), expected)


@pytest.mark.parametrize("router", ROUTERS)
def test_the_loss_over_a_batch_takes_its_shares_from_elsewhere(router: str) -> None:
    c, logits = of(router, aux_loss=0.3, aux_loss_over="batch"), logits_of()
    load = torch.rand(6).softmax(0)
    loss = 0.5 * 0.3 * 6 * (load * double(c, logits).mean(0)).sum()
    torch.testing.assert_close(gradient(c, logits, load), torch.autograd.grad(loss, logits)[0])
    even = gradient(c, logits, torch.full((6,), 1 / 6))
    torch.testing.assert_close(even, torch.zeros_like(even), atol=1e-7, rtol=0)


@pytest.mark.parametrize("router", ROUTERS)
def test_one_sequence_or_the_batch_of_one_microbatch_is_the_loss_over_the_microbatch(router: str) -> None:
    logits = logits_of(B * S)
    plain = of(router, aux_loss=0.3)
    probs, routing = route(logits, plain, aux_scale=0.5)
    expected = torch.autograd.grad(probs, logits, torch.zeros_like(probs))[0]
    load = routing.load_E / routing.load_E.sum()
    torch.testing.assert_close(gradient(replace(plain, aux_loss_over="batch"), logits, load), expected)
    by_sequence = replace(plain, aux_loss_over="sequence")
    probs, routing = route(logits, by_sequence, aux_scale=0.5)
    attached = attach_losses(probs, logits, routing, by_sequence, None, (None, 1, (0.5 / (B * S), 0.5)))
    torch.testing.assert_close(torch.autograd.grad(attached, logits, torch.zeros_like(probs))[0], expected)


@pytest.mark.parametrize("over", ["sequence", "batch"])
@pytest.mark.parametrize("router", ROUTERS)
def test_padding_counts_for_nothing(router: str, over: str) -> None:
    c = of(router, aux_loss=0.3, aux_loss_over=over, z_loss=0.1)
    real = torch.ones(B, S, dtype=torch.bool)
    real[:, 5:] = False
    logits, load = logits_of(), torch.rand(6).softmax(0)
    bare = logits.detach().view(B, S, 6)[:, :5].reshape(-1, 6).requires_grad_()
    probs, routing = route(bare, replace(c, aux_loss=0.0))
    attached = attach_losses(probs, bare, routing, c, load, (None, B, (0.5 / (B * 5), 0.5 / B)))
    expected = torch.autograd.grad(attached, bare, torch.zeros_like(probs))[0]
    found = gradient(c, logits, load, real.flatten()).view(B, S, 6)
    torch.testing.assert_close(found[:, :5].reshape(-1, 6), expected)
    assert not found[:, 5:].any()


LOSSES = {
    "z": dict(z_loss=0.05),
    "sequence": dict(z_loss=0.01, aux_loss=0.2, aux_loss_over="sequence", router="sigmoid"),
}


@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
def test_a_merged_step_on_ranks_has_the_bits_of_the_sequential_one(losses: dict[str, Any]) -> None:
    model = dict(layers=4, dense_layers=(0,), shared_ffn=16, bias_rate=0.01, **losses)
    assert_parity(config(model, dict(dp=2, ep=2), dict(merge="on", recompute=("attn:1",)), 3, "fp32"))


BATCH = dict(layers=3, dense_layers=(1,), aux_loss=0.5, aux_loss_over="batch", bias_rate=0.01)


def train(rank: int, c: Any, steps: list[list[list[Batch]]]) -> dict[str, Any]:
    """Steps, and the share that each layer's router goes by in each of them, and its rows in it by this rank."""
    engine = Engine(c, rank, torch.device("cpu"))
    engine.init_weights()
    shares, rows, norms = [], [], []
    count = engine.executor.actions._count_rows
    mine: dict[int, list[Routing]] = {}

    def counting(layer: int, made: Any) -> None:
        if "routing" in made and engine.executor.actions.training:
            mine.setdefault(layer, []).append(made["routing"])
        count(layer, made)

    engine.executor.actions._count_rows = counting  # type: ignore[method-assign]
    for batches in steps:
        shares.append({layer: share.clone() for layer, share in engine.balance.shares().items()})
        mine.clear()
        result = engine.train_step([microbatch(of_ranks[engine.where.dp]) for of_ranks in batches], 1e-2)
        rows.append({layer: sum(r.load_E for r in several) for layer, several in mine.items()})
        norms.append(float(result.grad_norm))
    engine.close()
    return dict(shares=shares, rows=rows, norms=norms)


@pytest.mark.parametrize("mesh", [dict(dp=2, ep=2), dict(dp=2, pp=2)], ids=str)
def test_shares_are_those_of_the_whole_step_before(mesh: dict[str, int]) -> None:
    c = config(BATCH, mesh, {}, 2, "fp32")
    found = run_ranks(train, c.mesh.world, c, batches_of(c, 3))
    for rank in found:
        for layer, share in rank["shares"][0].items():
            assert torch.equal(share, torch.full((4,), 0.25)), layer
        for step in (1, 2):
            for layer, share in rank["shares"][step].items():
                rows = torch.stack([other["rows"][step - 1].get(int(layer), torch.zeros(4)) for other in found]).sum(0)
                assert rows.sum() == c.mesh.dp * 2 * 2 * 8 * 2  # microbatches, sequences, tokens, experts of each
                assert torch.equal(share, (rows / rows.sum()).float()), layer
    assert {layer for rank in found for layer in rank["shares"][1]} == {"0", "2"}


def test_the_loss_over_a_batch_does_not_depend_on_how_ranks_share_it() -> None:
    """Two ranks with a microbatch each are one rank with two."""
    c = config(BATCH, dict(dp=2), {}, 1, "fp32")
    shared = batches_of(c, 3)
    alone = [[[batch] for batch in ranks] for (ranks,) in shared]
    two = run_ranks(train, 2, c, shared)[0]
    one = run_ranks(train, 1, config(BATCH, {}, {}, 2, "fp32"), alone)[0]
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-5)
    for mine, theirs in zip(two["shares"], one["shares"], strict=True):
        assert all(torch.equal(share, theirs[layer]) for layer, share in mine.items())
    by_microbatch = {**BATCH, "aux_loss_over": "microbatch"}
    other = run_ranks(train, 1, config(by_microbatch, {}, {}, 2, "fp32"), alone)[0]
    assert other["norms"][1:] != pytest.approx(one["norms"][1:], rel=1e-3)


def first_gradients(rank: int, c: Any, microbatches: list[list[Batch]]) -> list[parity.Piece]:
    """Gradients of a run's first step, to whose routers an uneven batch came before."""
    engine = Engine(c, rank, torch.device("cpu"))
    engine.init_weights()
    for share in engine.balance.shares().values():
        share.copy_(torch.arange(4.0).softmax(0))
    units = engine.sharded.units.values()
    pieces = lambda: [(p.name, p.shape, p.lo, p.hi, p.grad.clone()) for u in units for p in u.pieces()]  # noqa: E731
    (found,) = parity.learn(engine, [microbatches], pieces)["grads"]
    engine.close()
    return found


def sequences_in(*rows: tuple[int, ...]) -> list[Batch]:
    """Microbatches of these of three sequences, -1 for one of padding."""
    ids = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(5))
    made = []
    for row in rows:
        here, real = ids[[max(n, 0) for n in row]], torch.tensor(row) >= 0
        targets = here[:, 1:].where(real.unsqueeze(1), IGNORED).contiguous()
        numbers = torch.full((len(row), 8), PADDING).where(~real.unsqueeze(1), torch.arange(len(row)).unsqueeze(1))
        made.append((here[:, :-1].contiguous(), targets, documents_of(numbers)))
    return made


@pytest.mark.parametrize("losses", [*LOSSES.values(), BATCH], ids=[*LOSSES, "batch"])
def test_means_are_over_the_tokens_and_sequences_of_the_step_whatever_the_batching(losses: dict[str, Any]) -> None:
    """Three sequences in microbatches of two, on one rank and on two, are three microbatches of one."""
    model = {**dict(layers=2, dense_layers=(0,)), **losses, "vocab": 32}

    def gradients(rows: list[tuple[int, ...]], mesh: dict[str, int]) -> dict[str, Tensor]:
        packed = any(-1 in row for row in rows)
        dp, shape = mesh.get("dp", 1), {"data.packing": "on" if packed else "off", "train.sequences": len(rows[0])}
        c = changed(config(model, mesh, {}, len(rows) // dp, "fp32"), shape)
        made = [batch if packed else batch[:2] for batch in sequences_in(*rows)]
        ranks = run_ranks(first_gradients, dp, c, [made[i : i + dp] for i in range(0, len(made), dp)])
        return parity.whole([piece for rank in ranks for piece in rank])

    wanted = gradients([(0,), (1,), (2,)], {})
    others: list[tuple[list[tuple[int, ...]], dict[str, int]]] = [
        ([(0, 1), (2, -1)], {}), ([(-1, 0), (1, 2)], {"dp": 2}), ([(0, 1), (-1, -1), (2, -1)], {}),
    ]  # fmt: skip
    for rows, mesh in others:
        found = gradients(rows, mesh)
        for name, grad in wanted.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
