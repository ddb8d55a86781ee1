"""Tokens that go through the head in pieces: the loss and gradients of whole logits, planned bit for bit as plain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hocket.config import Config
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.kernels import IGNORED
from hocket.layers.vocabulary import loss_in_pieces
from hocket.predict.cost import costs_of
from hocket.predict.hardware import H200
from hocket.resolve import resolve
from tests.helpers.parity import LINEAR, assert_parity, batches_of, config, train, whole
from tests.helpers.ranks import run_ranks


@pytest.mark.parametrize("pieces", [2, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_loss_and_gradients_are_those_of_whole_logits(pieces: int, dtype: torch.dtype, ignored: str) -> None:
    generator = torch.Generator().manual_seed(0)
    h, weight = torch.randn(10, 8, generator=generator).to(dtype), torch.randn(33, 8, generator=generator).to(dtype)
    targets = torch.randint(33, (10,), generator=generator)
    targets[slice(0, {"none": 0, "some": 4, "all": 10}[ignored])] = IGNORED
    exact, found = ([x.to(to).requires_grad_() for x in (h, weight)] for to in (torch.float64, dtype))
    sums = F.cross_entropy(exact[0] @ exact[1].T, targets, ignore_index=IGNORED, reduction="sum")
    wanted = sums / max(1, int((targets != IGNORED).sum()))
    loss = loss_in_pieces(found[0], found[1], targets, pieces)
    assert loss.dtype is torch.float32
    close: dict[str, Any] = dict(rtol=1e-5, atol=1e-5) if dtype is torch.float32 else dict(rtol=3e-2, atol=1e-2)
    torch.testing.assert_close(loss.double(), wanted.double(), **close)
    (wanted * -3).backward()
    (loss * -3).backward()
    for mine, theirs in zip(found, exact, strict=True):
        assert mine.grad is not None
        assert mine.grad.dtype == dtype
        torch.testing.assert_close(mine.grad.double(), theirs.grad, **close)
    with torch.no_grad():
        assert torch.equal(loss_in_pieces(found[0], found[1], targets, pieces), loss.detach())


def test_logits_of_one_piece_alone_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    product = torch.Tensor.__matmul__

    def counted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        made.append(a.shape[0] * b.shape[1])
        return product(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", counted)
    h, weight = torch.randn(32, 4, requires_grad=True), torch.randn(100, 4, requires_grad=True)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        loss = loss_in_pieces(h, weight, torch.arange(32), 4)
    loss.backward()
    assert max(made) == 8 * 100
    assert max(saved) == h.numel()


CASES: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "merged and deferred": (
        dict(layers=4, dense_layers=(0,)), dict(pp=2, dp=2, ep=2),
        dict(chunks=2, layers_per_stage=(1, 1, 1, 1), merge="on", defer_head=-1), {"data.packing": "on"},
    ),
    "whole gradients, updates beside": (
        dict(layers=2, experts=0), dict(dp=2), dict(strategy="no_shard", update="next_step"), {},
    ),
    "tied, gradients collected": (dict(layers=2, experts=0, tied=True), dict(dp=2), dict(strategy="optim"), {}),
    "zero bubble": (
        dict(layers=2, experts=0), dict(pp=2), dict(order="zb_h1", merge="off", defer_wgrad="on"), {},
    ),
    "bf16": (dict(layers=2, experts=0), dict(dp=2), {}, {"precision.compute": "bf16"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_planned_step_is_the_plain_one(case: str) -> None:
    model, mesh, plan, more = CASES[case]
    assert_parity(changed(config(model, mesh, {**plan, "loss_pieces": 3}, 3, "fp32"), more))


def test_ranks_that_share_sequences_learn_what_they_do_with_whole_logits() -> None:
    plain = config(dict(layers=2, experts=0), dict(cp=2), dict(strategy="optim_grads"), 2, "fp32")
    plain = changed(plain, {"data.packing": "on", "overlap.cp.method": "gather", "train.eps": LINEAR})
    batches = batches_of(plain)
    both = [run_ranks(train, 2, changed(plain, {"plan.loss_pieces": n}), batches) for n in (1, 3)]
    weights = [whole([piece for rank in ranks for piece in rank["weights"]]) for ranks in both]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-4, atol=1e-5)


# -- what it costs, and when it is chosen ------------------------------------------------------------------------------


def long(**more: Any) -> Config:
    from hocket.recipes import recipe

    given = {
        "mesh.pp": 1, "mesh.dp": 4, "mesh.cp": 2, "data.sequence_length": 131072, "train.sequences": 1,
        "overlap.dp.strategy": "optim_grads_params", "plan.graphs": "off", "hardware.gpu": "h200",
    }  # fmt: skip
    return changed(recipe("llama3_8b"), given | {name.replace("__", "."): value for name, value in more.items()})


def test_pieces_take_a_product_more_and_keep_the_weight_gradient_in_place_of_logits() -> None:
    one, four = (costs_of(long(plan__loss_pieces=n), H200).table for n in (1, 4))
    changed_keys = {key for key, cost in one.items() if four[key] != cost}
    assert changed_keys == {(verb, "head", "") for verb in ("fwd", "bwd", "wgrad")}
    c = long()
    flops = [sum(table[verb, "head", ""].flops for verb in ("fwd", "bwd", "wgrad")) for table in (one, four)]
    assert flops[1] == pytest.approx(4 / 3 * flops[0])
    logits, weights = c.tokens * c.model.vocab * 2, c.model.vocab * c.model.hidden
    for verb, kept in (("fwd", 4 * c.tokens), ("bwd", 4 * weights)):
        less = one[verb, "head", ""].saved_bytes - four[verb, "head", ""].saved_bytes
        assert less == logits - logits // 4 - kept
    seconds = [sum(float(table[verb, "head", ""].seconds) for verb in ("fwd", "bwd", "wgrad")) for table in (one, four)]
    assert 1.25 < seconds[1] / seconds[0] < 1.45


def test_auto_takes_as_many_as_a_step_needs_and_goes_before_recomputation() -> None:
    def decided(memory: float, **more: Any) -> tuple[Any, str]:
        asked = long(plan__loss_pieces="auto", **more)
        settings = resolve(asked, Host(gpus=8, memory=int(memory * 2**30)))
        return settings.plan.loss_pieces, next(d.reason for d in settings.decisions if d.setting == "plan.loss_pieces")

    assert decided(10_000) == (1, decided(10_000)[1])
    assert "are needed without" in decided(10_000)[1]
    whole = int(decided(10_000)[1].split()[0])
    count, why = decided((whole - 20) / 0.9)  # the strategy alone saves 8 GiB
    assert count in (2, 4, 8)
    assert "loss_pieces = 1 does not fit" in why
    count, why = decided(80)
    assert count > 1
    assert "nothing fits" in why
    assert decided(80, mesh__tp=2)[0] == 1
    assert decided(20, data__sequence_length=1024, train__sequences=1)[0] == 1, "logits are little"


def test_tensor_parallel_ranks_refuse_pieces() -> None:
    with pytest.raises(ValueError, match=r"plan.loss_pieces = 2 .*part of the vocabulary.*fix: plan.loss_pieces = 1"):
        resolve(long(plan__loss_pieces=2, mesh__tp=2), Host(gpus=16), {"plan.loss_pieces": "test"})
