"""Dense MLPs whose tokens go through in pieces: the gradients of whole ones, planned bit for bit as plain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.config import Config
from hocket.engine import Engine
from hocket.model.layers import swiglu
from hocket.model.microbatch import Microbatch
from hocket.parallel.in_pieces import in_pieces
from hocket.program.hardware import H200
from hocket.program.network import hardware_of
from hocket.program.simulate import simulate
from hocket.program.stages import costs_of
from hocket.recipes import recipe
from hocket.resolve import resolve
from hocket.settings.rule import Host
from hocket.settings.schema import changed
from hocket.tune.trials import Trials
from tests.helpers.live import LiveBytes
from tests.helpers.parity import LINEAR, assert_parity, batches_of, config, train, whole
from tests.helpers.ranks import run_ranks
from tests.reference import random_batches


def mlp(x: Tensor, into: Tensor, out: Tensor) -> Tensor:
    return swiglu(x @ into.T) @ out.T


@pytest.mark.parametrize("pieces", [2, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_are_those_of_all_tokens(pieces: int, dtype: torch.dtype, frozen: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(*size, generator=generator).to(dtype) / 3 for size in ((10, 8), (12, 8), (8, 6))]
    exact, found = ([x.to(to).requires_grad_() for x in given] for to in (torch.float64, dtype))
    found[2].requires_grad_(not frozen)
    wanted, made = mlp(*exact), in_pieces(lambda x: mlp(x, *found[1:]), found[0], found[1:], pieces)
    close: dict[str, Any] = dict(rtol=1e-5, atol=1e-5) if dtype is torch.float32 else dict(rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(made.double(), wanted, **close)
    wanted.sin().sum().backward()
    made.sin().sum().backward()
    for mine, theirs in zip(found[: 3 - frozen], exact, strict=False):
        assert mine.grad is not None
        assert mine.grad.dtype == dtype
        torch.testing.assert_close(mine.grad.double(), theirs.grad, **close)
    assert (found[2].grad is None) == frozen


def test_gradients_in_bf16_are_added_up_in_fp32() -> None:
    """257 pieces, of which bf16 could not add the last ones: 256 + 1 is 256 there, and 512 + 2 stays 514."""
    x = torch.ones(514, 1, dtype=torch.bfloat16)
    weight = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    in_pieces(lambda piece: piece * weight, x, (weight,), 257).sum().backward()
    assert weight.grad is not None
    assert weight.grad.item() == 512  # 514, rounded once to bf16


CASES: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "merged and deferred": (
        dict(layers=4, dense_layers=(0, 2)), dict(pp=2, dp=2, ep=2),
        dict(chunks=2, layers_per_stage=(1, 1, 1, 1), merge="on", recompute=("attn",)), {"data.packing": "on"},
    ),
    "whole gradients, updates beside": (
        dict(layers=2, experts=0), dict(dp=2), dict(strategy="no_shard", update="next_step"), {},
    ),
    "gradients collected, logits in pieces": (
        dict(layers=2, experts=0), dict(dp=2), dict(strategy="optim", loss_pieces=3), {},
    ),
    "norms behind, zero bubble": (
        dict(layers=2, experts=0, norms="after"), dict(pp=2), dict(order="zb_h1", merge="off", defer_wgrad="on"), {},
    ),
    "on the host": (dict(layers=2, experts=0), dict(dp=2), dict(offload=("mlp:1",)), {}),
    "bf16": (dict(layers=2, experts=0), dict(dp=2), {}, {"precision.compute": "bf16"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_planned_step_is_the_plain_one(case: str) -> None:
    model, mesh, plan, more = CASES[case]
    assert_parity(changed(config(model, mesh, {**plan, "mlp_pieces": 3}, 3, "fp32"), more))


def test_ranks_that_share_sequences_learn_what_they_do_with_whole_mlps() -> None:
    plain = config(dict(layers=2, experts=0), dict(cp=2), dict(strategy="optim_grads"), 2, "fp32")
    plain = changed(plain, {"data.packing": "on", "overlap.cp.method": "gather", "train.eps": LINEAR})
    batches = batches_of(plain)
    both = [run_ranks(train, 2, changed(plain, {"plan.mlp_pieces": n}), batches) for n in (1, 3)]
    weights = [whole([piece for rank in ranks for piece in rank["weights"]]) for ranks in both]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-4, atol=1e-5)


# -- what it costs, and when it is chosen ------------------------------------------------------------------------------

LENGTH = 512


def peaks(layers: int, **plan: Any) -> tuple[int, int]:
    """(real, predicted) most bytes of values and gradients in a step."""
    model = dict(layers=layers, experts=0, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=128, vocab=64)
    c = changed(config(model, {}, dict(merge="off", **plan), 1, "fp32"), {"data.sequence_length": LENGTH})
    engine = Engine(c, 0, torch.device("cpu"))
    engine.init_weights()
    (batches,) = random_batches(c.model, 1, 1, 1, (2, LENGTH))
    microbatches = [Microbatch(*of_ranks[0]) for of_ranks in batches]
    engine.train_step(microbatches, 1e-2)
    with LiveBytes() as live:
        engine.train_step(microbatches, 1e-2)
    costs = costs_of(c, hardware_of(c))
    return live.peak, simulate(engine.program, costs).ranks[0].peak_bytes - costs.fixed_bytes(engine.program, 0)


def test_memory_falls_as_predicted_and_below_that_of_recomputation() -> None:
    torch.set_num_threads(1)
    kept, again, pieces = peaks(4), peaks(4, recompute=("mlp",)), peaks(4, mlp_pieces=8)
    assert kept[0] - pieces[0] == pytest.approx(kept[1] - pieces[1], rel=0.2)
    wide = 2 * LENGTH * 128 * 4  # bytes of one wide tensor; a recomputed MLP has four of them, and gradients, at once
    assert again[0] - pieces[0] > 3 * wide


def long(**more: Any) -> Config:
    given = {
        "mesh.pp": 1, "mesh.dp": 4, "mesh.cp": 2, "data.sequence_length": 131072, "train.sequences": 1,
        "overlap.dp.strategy": "optim_grads_params", "plan.graphs": "off", "hardware.gpu": "h200",
        "hardware.measured": "off", "plan.loss_pieces": 8,
    }  # fmt: skip
    return changed(recipe("llama3_8b"), given | {name.replace("__", "."): value for name, value in more.items()})


def test_pieces_take_a_forward_more_and_keep_a_weight_gradient_in_place_of_wide_tensors() -> None:
    one, eight = (costs_of(long(plan__mlp_pieces=n), H200).table for n in (1, 8))
    assert {key for key, cost in one.items() if eight[key] != cost} == {
        (verb, "mlp", "dense") for verb in ("fwd", "bwd", "wgrad")
    }
    flops = [sum(table[verb, "mlp", "dense"].flops for verb in ("fwd", "bwd", "wgrad")) for table in (one, eight)]
    assert flops[1] == pytest.approx(4 / 3 * flops[0])
    c = long()
    row, weights = 2 * c.tokens * c.model.hidden, 3 * c.model.hidden * c.model.ffn + c.model.hidden
    assert eight["fwd", "mlp", "dense"].saved_bytes == row
    whole_mlp = sum(one[verb, "mlp", "dense"].saved_bytes for verb in ("fwd", "bwd"))
    assert eight["bwd", "mlp", "dense"].saved_bytes == whole_mlp // 8 + 4 * weights
    seconds = [sum(float(table[v, "mlp", "dense"].seconds) for v in ("fwd", "bwd", "wgrad")) for table in (one, eight)]
    assert 1.3 < seconds[1] / seconds[0] < 1.5


def test_auto_takes_pieces_where_they_make_a_step_fit_or_shorter() -> None:
    def decided(memory: float, **more: Any) -> tuple[Any, Any, str, float]:
        sizes = {"model__layers": 4, "data__sequence_length": 262144, "plan__loss_pieces": 64}
        asked = long(plan__recompute=("auto",), **{"plan__mlp_pieces": "auto", **sizes, **more})
        settings = resolve(asked, Host(gpus=8, memory=int(memory * 2**30)))
        why = next(d.reason for d in settings.decisions if d.setting in ("plan.mlp_pieces", "plan.recompute"))
        return settings.plan.mlp_pieces, settings.plan.recompute, why, Trials().step(settings).seconds

    count, parts, why, _ = decided(10_000)
    assert (count, parts) == (1, ())
    assert "are needed without" in why
    found = {memory: decided(memory) for memory in (36, 44, 48, 60, 90)}
    assert {count > 1 for count, *_ in found.values()} == {True, False}
    for memory, (count, parts, why, seconds) in found.items():
        others = decided(memory, plan__mlp_pieces=1)
        if count > 1:
            assert "mlp" not in " ".join(parts)
            assert "instead of" in why
            assert "least, and does not fit" in others[2] or seconds < others[3]
        else:
            assert seconds == others[3]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"mesh__tp": 2}, "gathered and summed .* fix: plan.mlp_pieces = 1, or mesh.tp = 1"),
        ({"plan__recompute": ("mlp:2",)}, "make again .* fix: leave mlp out of plan.recompute"),
        ({"precision__compute": "fp8"}, "products in fp8 .* fix: plan.mlp_pieces = 1, or precision.compute = bf16"),
    ],
)
def test_what_pieces_do_not_go_with(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"plan.mlp_pieces = 2 .*{words}"):
        resolve(long(plan__mlp_pieces=2, **more), Host(gpus=16), {"plan.mlp_pieces": "test"})
