"""Planned steps on context-parallel ranks against the plain sequential step: the same but for the order of sums."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.config import Config, RopeConfig
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.model.context import (
    TOLERANCE,
    Context,
    ContextRank,
    by_heads,
    context_of,
    imbalance_of,
    of_heads,
    shares,
    work_of,
    zigzag,
)
from hocket.model.documents import Microbatch, documents_of, whole_sequences
from hocket.model.layers import Attention
from hocket.program.documents import of_windows
from hocket.runtime.weights import DTYPES
from tests.helpers import parity
from tests.helpers.parity import adamw, batches_of, config
from tests.helpers.plans import small
from tests.helpers.ranks import run_ranks
from tests.ranks import test_tensor_parity as tensors
from tests.ranks.test_parity import PROJECTIONS
from tests.reference import Reference, microbatch


def of(model: dict[str, Any], mesh: dict[str, int], plan: dict[str, Any], **settings: Any) -> Config:
    """A configuration of two context-parallel ranks, with documents that share sequences unless told otherwise."""
    microbatches, dtype = settings.pop("microbatches", 2), settings.pop("dtype", "fp32")
    mesh = {"cp": 2, **mesh}
    c = config({"layers": 2, **model}, mesh, plan, microbatches, dtype)
    return changed(c, {"data.packing": "on", "overlap.cp.method": "gather", **settings})


MOE, DENSE = dict(dense_layers=(0,), shared_ffn=16), dict(experts=0)
SINKS = dict(window=3, full_layers=(1,), sinks=True)
GATED = dict(attn_gate=True, norm_plus_one=True, qk_norm=True, rope=RopeConfig(without=(0,)))
TENSORS = {"overlap.tp.method": ("off",)}
HEADS = {"overlap.cp.method": "heads"}
WINDOWS = dict(window=3, full_layers=(1,))
CASES: dict[str, Config] = {
    "dense": of(DENSE, {}, {}),
    "sequences of one document": of(MOE, {}, {}, **{"data.packing": "off"}),
    "windows and sinks, experts over cp ranks": of({**MOE, **SINKS}, {"ep": 2}, dict(merge="on")),
    "sinks of several chunks, whole gradients": of({**DENSE, **SINKS}, {}, dict(strategy="no_shard")),
    "gates, replicas": of({**MOE, **GATED}, {"dp": 2, "shard": 2}, dict(update="next_step")),
    "norms behind, interleaved": of(
        {**DENSE, **PROJECTIONS["normed"], "norms": "after", "layers": 4},
        {"pp": 2}, dict(chunks=2, layers_per_stage=(1, 1, 1, 1), recompute=("attn:1",), strategy="optim"),
    ),
    "biases, no shards": of(
        {**MOE, "qkv_bias": True, "o_bias": True}, {},
        dict(strategy="no_shard", merge="on", recompute=("dispatch",)),
    ),
    "heads over tensor-parallel ranks": of(
        {**DENSE, **GATED, "vocab": 32, "window": 3, "full_layers": (1,)}, {"tp": 2}, {}, **TENSORS
    ),
    "latents, merged, gathered again": of(
        {**MOE, **PROJECTIONS["latent"]}, {"ep": 2},
        dict(merge="on", merge_ends="off", recompute=("attn", "dispatch", "kv")),
    ),
    "latents of queries": of({**DENSE, **PROJECTIONS["latent queries"]}, {}, {}, **{"data.packing": "off"}),
    "exchanged heads": of({**DENSE, **GATED, "kv_heads": 1}, {}, dict(recompute=("attn:1",)), **HEADS),
    "exchanged heads of sequences of one document": of(
        {**MOE, **WINDOWS, "rope": RopeConfig(without=(0,))}, {"ep": 2}, dict(merge="on", merge_ends="off"), **HEADS,
        **{"data.packing": "off"},
    ),
    "exchanged heads of tensor-parallel ranks": of(
        {**DENSE, **GATED, "vocab": 32, **WINDOWS}, {"tp": 2}, {}, **TENSORS, **HEADS
    ),
    "four ranks": of({**DENSE, **GATED, **SINKS}, {"cp": 4}, dict(recompute=("attn:1",))),
    "balanced": of({**MOE, "aux_loss": 0.5}, {"ep": 2}, dict(merge="on", merge_ends="off", recompute=("attn",))),
    "balanced, sequences of one document": of(
        {**MOE, "aux_loss": 0.5, "z_loss": 0.1}, {"dp": 2}, {}, **{"data.packing": "off"}
    ),
    "balanced over tensor-parallel ranks": of(
        {**MOE, "aux_loss": 0.5, "vocab": 32}, {"tp": 2}, {}, **TENSORS, **{"data.packing": "off"}
    ),
    "tied, zero bubble": of(
        {**MOE, "tied": True, "layers": 2}, {"pp": 2}, dict(order="zb_h1", layers_per_stage=(1, 1), defer_wgrad="on")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_the_plain_one(name: str) -> None:
    c = CASES[name]
    batches = batches_of(c)[:1]
    plain = Reference(c.model, c.mesh.dp, dtype=DTYPES[c.precision.dtype], clip=c.train.clip, optimizer=adamw)
    wanted = plain.run(batches)
    how = tensors if c.mesh.tp > 1 else parity
    ranks = run_ranks(how.train, c.mesh.world, c, batches)
    grads = how.whole([piece for rank in ranks for piece in rank["grads"][0]])
    assert grads.keys() == wanted.grads[0].keys()
    for parameter, grad in wanted.grads[0].items():
        close(grads[parameter], grad, f"gradient of {parameter}")
    assert all(math.isclose(rank["norms"][0], wanted.norms[0], rel_tol=1e-5) for rank in ranks)


def close(found: Tensor, wanted: Tensor, what: str) -> None:
    worst, scale = (found - wanted).abs().max(), wanted.abs().max()
    assert worst <= 1e-5 * (scale + 1e-6), f"{what}: off by {worst:.3g} of {scale:.3g}"


@pytest.mark.parametrize("method", ["gather", "heads"])
def test_the_order_of_ops_changes_no_bit_nor_does_a_validation(method: str) -> None:
    model = dict(layers=4, dense_layers=(0,), **(WINDOWS if method == "heads" else SINKS))
    how = {"overlap.cp.method": method}
    again = ("attn:1", "kv") if method == "gather" else ("attn",)
    interleaved = dict(chunks=2, layers_per_stage=(1,) * 4, merge="on", defer_layers=1, recompute=again)
    at_once = dict(merge="on", defer_wgrad="off", update="next_step", recompute=again[1:])
    plain = of(model, {}, dict(merge="off"), **how)
    others = (
        of(model, {"pp": 2}, interleaved, **how),
        of(model, {}, at_once, **how),
    )
    batches = batches_of(plain, 1)
    wanted, *found = (_weights_and_validation(c, batches, seed) for seed, c in enumerate((plain, *others)))
    for weights, validation in found:
        assert validation == wanted[1]
        assert all(torch.equal(weights[name], value) for name, value in wanted[0].items())


def _weights_and_validation(c: Config, batches: Any, lane_seed: int) -> tuple[dict[str, Tensor], float]:
    ranks = run_ranks(train_and_validate, c.mesh.world, c, batches, lane_seed)
    losses = [rank["validation"] for rank in ranks]
    return parity.whole([piece for rank in ranks for piece in rank["weights"]]), sum(losses)


def train_and_validate(rank: int, c: Config, batches: Any, lane_seed: int = 0) -> dict[str, Any]:
    Engine.lane_seed = lane_seed  # in this process alone
    engine = Engine(c, rank, torch.device("cpu"))
    engine.init_weights()
    mine = [[microbatch(of_ranks[engine.where.dp]) for of_ranks in step] for step in batches]
    result = engine.train_step(mine[0], 1e-2)
    agreed = engine.agree(result.loss, imbalance=result.imbalance)
    validation = engine.evaluate(mine[0]).item()
    pieces = [(p.name, p.shape, p.lo, p.hi, p.main.clone()) for u in engine.sharded.units.values() for p in u.pieces()]
    engine.assert_clean()
    engine.close()
    return {"weights": pieces, "validation": validation, "told": (result.imbalance, agreed.imbalance)}


@pytest.mark.parametrize("windows", [{}, WINDOWS])
def test_ranks_know_how_uneven_a_step_was_and_agree_on_the_worst(windows: dict[str, Any]) -> None:
    c = of({**DENSE, **windows}, {"dp": 2}, {})
    batches = batches_of(c, 1)
    bounds = [[of_ranks[rank][2].bounds for of_ranks in batches[0]] for rank in range(2)]
    layers = of_windows(c.model.windows(), 8)
    own = [imbalance_of([shares(each, 8, 2, layers).work for each in of_rank]) for of_rank in bounds]
    told = [rank["told"] for rank in run_ranks(train_and_validate, c.mesh.world, c, batches)]
    assert own[0] != own[1]
    assert [mine for mine, _ in told] == [own[0], own[0], own[1], own[1]]
    assert [worst for _, worst in told] == pytest.approx([max(own)] * 4, rel=1e-6)


def test_ranks_are_given_every_token_once_in_chunks_that_go_by_documents() -> None:
    """A long document among short ones: zigzag chunks leave one rank with most of the attention."""
    batch, length, ranks = 2, 128, 2
    numbers = torch.arange(batch * length).view(batch, length) // 4
    numbers[0, 32:96] = 1000
    documents, ids = documents_of(numbers), torch.arange(batch * length).view(batch, length)
    whole = Microbatch(ids, ids + 1, documents=documents)
    plain = imbalance_of([work_of(documents.bounds, zigzag(batch, length, ranks))])
    found = [ContextRank(batch, length, ranks, rank, torch.device("cpu")) for rank in range(ranks)]
    parts = [each.parts([whole])[0] for each in found]
    assert plain > 0.3 > TOLERANCE > max(each.imbalance or 0.0 for each in found)
    assert sorted(torch.cat([part.ids.flatten() for part in parts]).tolist()) == list(range(batch * length))
    for part in parts:
        assert part.ids.shape == (batch, length // ranks)
        assert torch.equal(part.targets, part.ids + 1)
        assert isinstance(part.documents, Context)
        assert torch.equal(part.documents.position_T, documents.position_T[part.ids.flatten()])
    by_heads = ContextRank(batch, length, ranks, 0, torch.device("cpu"), even=None)
    assert by_heads.parts([whole])[0].ids[0].tolist() == [*range(32), *range(96, 128)]
    assert by_heads.imbalance is None
    assert found[0].parts([Microbatch(ids, ids)])[0].documents is found[0].whole
    assert found[0].imbalance is None


def test_without_communication_a_step_runs_alone() -> None:
    c = changed(of(MOE, {"ep": 2}, dict(merge="on")), {"train.transport": "null"})
    engine = Engine(c, 0, torch.device("cpu"))
    engine.init_weights()
    loss = engine.train_step([microbatch(of_ranks[0]) for of_ranks in batches_of(c)[0]], 1e-2).loss
    engine.assert_clean()
    assert loss.numel() == 1  # of keys that nobody has sent, so it means nothing


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_attention_of_some_heads_in_all_tokens_has_the_bits_of_all(kv_heads: int, packed: bool) -> None:
    batch, length, ranks, width = 2, 32, 4, 8
    attn = Attention(small(heads=8, kv_heads=kv_heads, head_dim=width, window=9, full_layers=(0,)), number=int(packed))
    generator = torch.Generator().manual_seed(0)
    documents = documents_of(torch.randint(4, (batch, length), generator=generator).sort(1).values) if packed else None
    whole, chunks = documents or whole_sequences(batch, length, torch.device("cpu")), zigzag(batch, length, ranks)
    places = [torch.cat([torch.arange(c.start, c.stop) for c in mine]) for mine in chunks]
    sizes = {"q": 8, "k": kv_heads, "v": kv_heads}
    inputs = {n: torch.randn(batch * length, h, width, generator=generator).requires_grad_() for n, h in sizes.items()}
    wanted = attn.whole(inputs["q"], inputs["k"], inputs["v"], batch, documents).flatten(1)
    queries, kv = [], []
    for mine in places:
        q, k, v = (x[mine] for x in inputs.values())
        queries.append(by_heads(q, ranks).unflatten(0, (ranks, -1)))
        kv.append(by_heads(attn.by_head(torch.cat([k.flatten(1), v.flatten(1)], 1)), ranks).unflatten(0, (ranks, -1)))
    found = torch.zeros_like(wanted)
    for_rank = []
    for rank in range(ranks):
        context = replace(context_of(whole, chunks, rank), documents=documents)
        kv_UX, q_UX = (torch.cat([x[rank] for x in sent]) for sent in (kv, queries))
        for_rank.append(attn.of_own_heads(kv_UX, q_UX, context).unflatten(0, (ranks, -1)))
    for rank, mine in enumerate(places):
        found[mine] = of_heads(torch.cat([x[rank] for x in for_rank]), ranks)
    assert torch.equal(found, wanted)
    grad = torch.randn(wanted.shape, generator=generator)
    both = (torch.autograd.grad(out, tuple(inputs.values()), grad) for out in (wanted, found))
    for of_whole, of_parts in zip(*both, strict=True):
        torch.testing.assert_close(of_parts, of_whole, rtol=0, atol=0 if kv_heads >= ranks else 1e-5)


def test_chunks_make_every_rank_attend_to_as_much() -> None:
    for ranks in (2, 4):
        chunks = zigzag(2, 16 * ranks, ranks)
        assert sorted(token for mine in chunks for chunk in mine for token in chunk) == list(range(2 * 16 * ranks))
        met = [sum(token % (16 * ranks) + 1 for chunk in mine for token in chunk) for mine in chunks]
        assert len(set(met)) == 1
    with pytest.raises(ValueError, match="a sequence of 10 tokens cannot be cut into 4 chunks"):
        zigzag(1, 10, 2)
