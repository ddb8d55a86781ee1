"""The model: sizes, first values, formulas in float64, and its chunks put together."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hocket import recipes
from hocket.config import ModelConfig
from hocket.layers.norms import rotate
from hocket.model.latent_attention import LatentAttention, softmax_scale
from hocket.model.layers import Attention
from hocket.model.moe import MoELayer
from hocket.model.parts import ExpertPlace
from hocket.model.rotary import rotary_table
from hocket.model.source import init_tensor
from hocket.model.transformer import Chunk
from tests.helpers.chunks import init_chunk
from tests.helpers.plans import small
from tests.reference import Reference, random_batches

CONFIG = small(vocab=64, layers=4, dense_layers=(1,), experts=8, shared_ffn=24, qk_norm=True, init_std=0.2)

PUBLISHED = {
    "llama3_8b": (8.03e9, 8.03e9),
    "mixtral_8x7b": (46.7e9, 12.9e9),
    "qwen3_30b_a3b": (30.53e9, 3.35e9),
    "gpt_oss_20b": (20.91e9, 4.19e9),
    "gpt_oss_120b": (116.83e9, 5.71e9),
    "deepseek_v2_lite": (15.71e9, 2.66e9),
    "moonlight_16b": (15.96e9, 2.91e9),
    "deepseek_v3": (671.0e9, 37.6e9),
    "kimi_k2": (1026e9, 32.9e9),
    "qwen3_next_80b_a3b": (79.67e9, 3.87e9),
}
"""Parameters in all and per token."""


def whole(config: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> Chunk:
    return init_chunk(Chunk(config, range(config.layers)), seed, dtype)


# -- sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_match_the_published_ones(name: str) -> None:
    config = getattr(recipes, name.upper())
    total = active = 0.0
    for param_name, param in Chunk(config, range(config.layers)).named_parameters():
        assert param.is_meta
        total += param.numel()
        active += param.numel() * (config.top_k / config.experts if ".experts." in param_name else 1)
    assert total == pytest.approx(PUBLISHED[name][0], rel=0.002)
    assert active == pytest.approx(PUBLISHED[name][1], rel=0.005)


def test_parameters_are_named_as_in_a_checkpoint() -> None:
    names = [name for name, _ in Chunk(replace(CONFIG, bias_rate=0.1), range(1, 3), False, True).named_parameters()]
    assert names == [
        *(f"layers.1.{n}" for n in ("attn_norm", "ffn_norm", "attn.wq", "attn.wk", "attn.wv", "attn.wo")),
        *(f"layers.1.{n}" for n in ("attn.q_norm", "attn.k_norm", "mlp.w_gate_up", "mlp.w_down")),
        *(f"layers.2.{n}" for n in ("attn_norm", "ffn_norm", "attn.wq", "attn.wk", "attn.wv", "attn.wo")),
        *(f"layers.2.{n}" for n in ("attn.q_norm", "attn.k_norm", "shared.w_gate_up", "shared.w_down")),
        *(f"layers.2.{n}" for n in ("router.weight", "experts.w_gate_up", "experts.w_down")),
        "head.norm",
        "head.weight",
    ]


def test_the_balance_bias_is_a_buffer_in_fp32() -> None:
    model = whole(replace(CONFIG, bias_rate=0.1), torch.bfloat16)
    buffers = dict(model.named_buffers())
    assert list(buffers) == [f"layers.{i}.router.bias" for i in (0, 2, 3)]
    assert all(b.dtype is torch.float32 and not b.any() for b in buffers.values())
    assert not dict(whole(CONFIG).named_buffers())


# -- first values --------------------------------------------------------------------------------------------


def test_first_values_do_not_depend_on_the_mesh() -> None:
    full = dict(whole(CONFIG).named_parameters())
    for ep_size in (2, 4):
        for ep_rank in range(ep_size):
            for layers, first, last in ((range(2), True, False), (range(2, 4), False, True)):
                chunk = Chunk(CONFIG, layers, first, last, ep=ExpertPlace(ep_size, ep_rank))
                for name, param in init_chunk(chunk, seed=0).named_parameters():
                    expected = full[name].chunk(ep_size)[ep_rank] if ".experts." in name else full[name]
                    assert torch.equal(param, expected), name


def test_first_values_differ_by_seed_parameter_and_expert() -> None:
    a = init_tensor("layers.0.attn.wq", (8, 8), CONFIG, 0)
    assert not torch.equal(a, init_tensor("layers.0.attn.wq", (8, 8), CONFIG, 1))
    assert not torch.equal(a, init_tensor("layers.1.attn.wq", (8, 8), CONFIG, 0))
    experts = init_tensor("layers.0.experts.w_down", (2, 8, 8), CONFIG, 0)
    assert not torch.equal(experts[0], experts[1])


def test_spread_of_first_values() -> None:
    plain = init_tensor("layers.0.attn.wq", (200, 200), CONFIG, 0)
    output = init_tensor("layers.0.experts.w_down", (4, 100, 100), CONFIG, 0)
    assert plain.std().item() == pytest.approx(0.2, rel=0.02)
    assert output.std().item() == pytest.approx(0.2 / math.sqrt(8), rel=0.02)
    assert torch.equal(init_tensor("layers.0.attn.q_norm", (8,), CONFIG, 0), torch.ones(8))


# -- formulas ------------------------------------------------------------------------------------------------


def test_rotary_keeps_length_and_depends_on_distance_alone() -> None:
    table = rotary_table(12, 8, 10000.0, torch.device("cpu"))
    q, k = torch.randn(8), torch.randn(8)
    turned_q = rotate(q.expand(1, 12, 1, 8), table)[0, :, 0]
    turned_k = rotate(k.expand(1, 12, 1, 8), table)[0, :, 0]
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(12))
    assert torch.equal(turned_q[0], q)
    scores = turned_q @ turned_k.t()
    for distance in range(-11, 12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(scores[0, 0], scores[0, 5])


def test_rotary_table_is_usable_after_inference_mode() -> None:
    with torch.inference_mode():
        table = rotary_table(7, 8, 123.0, torch.device("cpu"))
    assert rotary_table(7, 8, 123.0, torch.device("cpu")) is table
    rotate(torch.randn(1, 7, 1, 8, requires_grad=True), table).sum().backward()


def exact_attention(attention: Attention, h_BSD: Tensor) -> Tensor:
    """Every head by itself, in float64, with the mask written out."""
    c = attention.config
    wq, wk, wv, wo = (w.detach().double() for w in (attention.wq, attention.wk, attention.wv, attention.wo))
    h = h_BSD.double()
    seq = h.shape[1]
    angle = torch.arange(seq)[:, None] * c.rope_theta ** -(torch.arange(0, c.head_dim, 2) / c.head_dim).double()

    def prepared(w: Tensor, head: int, turn: bool) -> Tensor:
        x = h @ w[head * c.head_dim : (head + 1) * c.head_dim].t()
        if not turn:
            return x
        x = x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt()
        pair = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([pair.real, pair.imag], -1)

    heads = []
    for head in range(c.heads):
        kv = head // (c.heads // c.kv_heads)
        scores = prepared(wq, head, True) @ prepared(wk, kv, True).transpose(1, 2) / math.sqrt(c.head_dim)
        scores = scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ prepared(wv, kv, False))
    return torch.cat(heads, -1) @ wo.t()


def test_attention_against_float64() -> None:
    attention = whole(CONFIG).layer(0).attn
    assert isinstance(attention, Attention)
    h = torch.randn(2, 11, 32)
    torch.testing.assert_close(attention(h).double(), exact_attention(attention, h), rtol=1e-4, atol=1e-5)


def exact_latent_attention(attention: LatentAttention, h_BSD: Tensor) -> Tensor:
    """Every head by itself, in float64, with the mask and both latents written out."""
    c, w = attention.config, {name: value.detach().double() for name, value in attention.named_parameters()}
    h, seq, turned = h_BSD.double(), h_BSD.shape[1], c.qk_rope_head_dim

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def placed(x: Tensor) -> Tensor:
        angle = torch.arange(seq)[:, None] * c.rope_theta ** -(torch.arange(0, turned, 2) / turned).double()
        pair = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([pair.real, pair.imag], -1)

    queries = normed(h @ w["wq_a"].t(), w["q_a_norm"]) @ w["wq_b"].t()
    turning, latent = (h @ w["wkv_a"].t()).split([turned, c.kv_lora_rank], -1)
    made = normed(latent, w["kv_a_norm"]) @ w["wkv_b"].t()
    heads = []
    for q, kv in zip(queries.chunk(c.heads, -1), made.chunk(c.heads, -1), strict=True):
        key, value = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        scores = placed(q[..., :turned]) @ placed(turning).mT + q[..., turned:] @ key.mT
        scores = (scores / math.sqrt(turned + c.qk_nope_head_dim)).masked_fill(
            torch.ones(seq, seq).triu(1).bool(), -math.inf
        )
        heads.append(scores.softmax(-1) @ value)
    return torch.cat(heads, -1) @ w["wo"].t()


def test_latent_attention_against_float64() -> None:
    sizes = dict(kv_lora_rank=12, q_lora_rank=20, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, norm_eps=0.1)
    attention = whole(small(layers=1, experts=0, init_std=0.3, **sizes)).layer(0).attn
    assert isinstance(attention, LatentAttention)
    with torch.no_grad():
        for norm in (attention.q_a_norm, attention.kv_a_norm):
            norm.normal_(1, 0.3)
    h = torch.randn(2, 11, 32)
    torch.testing.assert_close(attention(h).double(), exact_latent_attention(attention, h), rtol=1e-4, atol=1e-5)


def test_the_scale_of_latent_attention_grows_as_published() -> None:
    """By (0.1 * mscale_all_dim * ln 40 + 1) ** 2, with 0.707 in V2-Lite, and 1 in V3."""
    for model, grown in ((recipes.DEEPSEEK_V2_LITE, 1.58963), (recipes.DEEPSEEK_V3, 1.87385)):
        assert softmax_scale(model) * 192**0.5 == pytest.approx(grown, rel=1e-5)
    assert softmax_scale(recipes.MOONLIGHT_16B) == 192**-0.5


def test_moe_layer_against_one_expert_at_a_time() -> None:
    layer = whole(CONFIG).layer(0)
    assert isinstance(layer, MoELayer)
    assert layer.shared is not None
    x = torch.randn(2, 9, 32)
    x1 = x + layer.attn(F.rms_norm(x, (32,), layer.attn_norm, CONFIG.norm_eps))
    h = F.rms_norm(x1, (32,), layer.ffn_norm, CONFIG.norm_eps)
    scores = (h @ layer.router.weight.t()).softmax(-1)
    top = scores.topk(2, -1)
    weights = torch.zeros_like(scores).scatter(-1, top.indices, top.values / top.values.sum(-1, keepdim=True))
    expected = x1 + layer.shared(h)
    for e in range(8):
        gate, up = (h @ layer.experts.w_gate_up[e]).chunk(2, -1)
        expected = expected + weights[..., e, None] * (F.silu(gate) * up @ layer.experts.w_down[e])
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)


def test_no_position_sees_later_ones() -> None:
    model = whole(CONFIG)
    ids = torch.randint(64, (1, 10))
    changed = ids.clone()
    changed[0, 6:] = (changed[0, 6:] + 1) % 64
    a, b = model(ids), model(changed)
    torch.testing.assert_close(a[:, :6], b[:, :6])
    assert not torch.allclose(a[:, 6:], b[:, 6:])


def test_tied_head_is_one_parameter() -> None:
    model = whole(replace(CONFIG, tied=True))
    assert model.embed is not None
    assert model.head is not None
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())
    model.loss(model(torch.tensor([[1, 2]])), torch.tensor([[2, 3]])).backward()
    assert model.embed.weight.grad is not None
    assert model.embed.weight.grad[9].any(), "a token that is no input gets its gradient from the head"
    last = Chunk(replace(CONFIG, tied=True), range(2, 4), False, True)
    ends = [name for name, _ in last.named_parameters() if not name.startswith("layers.")]
    assert ends == ["embed.weight", "head.norm"]


def test_chunks_in_a_row_are_the_whole_model() -> None:
    model = whole(CONFIG)
    ids, targets = torch.randint(64, (2, 8)), torch.randint(64, (2, 8))
    first = init_chunk(Chunk(CONFIG, range(3), True, False), 0)
    last = init_chunk(Chunk(CONFIG, range(3, 4), False, True), 0)
    assert first.head is None
    assert last.embed is None
    assert torch.equal(last.loss(last(first(ids)), targets), model.loss(model(ids), targets))


def test_experts_on_other_ranks_need_a_plan() -> None:
    chunk = init_chunk(Chunk(CONFIG, range(4), ep=ExpertPlace(2, 1)), 0)
    assert chunk.first_expert == 4
    with pytest.raises(AssertionError, match="a plan must move the rows"):
        chunk(torch.zeros(1, 4, dtype=torch.int64))


# -- the plain reference itself ------------------------------------------------------------------------------


def test_reference_is_gradient_accumulation() -> None:
    """Against one backward of the mean loss over everything, with one set of parameters."""
    config = replace(CONFIG, aux_loss=0.0)
    batches = random_batches(config, steps=1, microbatches=2, dp=2, shape=(2, 6))
    result = Reference(config, dp=2).run(batches)
    model = whole(config)
    losses = [model.loss(model(ids), targets) for microbatch in batches[0] for ids, targets in microbatch]
    torch.stack(losses).mean().backward()
    assert [loss for microbatch in result.losses[0] for loss in microbatch] == pytest.approx(
        [loss.item() for loss in losses]
    )
    for name, param in model.named_parameters():
        assert param.grad is not None
        torch.testing.assert_close(result.grads[0][name], param.grad, rtol=1e-3, atol=1e-6)
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters() if p.grad is not None))
    assert result.norms == pytest.approx([norm], rel=1e-4)


def test_reference_hardly_changes_with_expert_parallelism() -> None:
    """The rows of two ranks in one matrix product: other roundings, same mathematics."""
    config = replace(CONFIG, aux_loss=0.01, bias_rate=0.01)
    batches = random_batches(config, steps=2, microbatches=2, dp=4, shape=(2, 6))
    one, two = (Reference(config, dp=4, ep=ep, clip=0.5).run(batches) for ep in (1, 2))
    for a, b in zip(one.losses[0], two.losses[0], strict=True):
        assert a == pytest.approx(b, rel=1e-6)
    for name, grad in one.grads[0].items():
        torch.testing.assert_close(two.grads[0][name], grad, rtol=1e-5, atol=1e-5 * grad.abs().max().item())
    assert one.norms == pytest.approx(two.norms, rel=1e-4)
    assert one.biases.keys() == two.biases.keys() == {f"layers.{i}.router.bias" for i in (0, 2, 3)}
    assert one.biases["layers.0.router.bias"].any()


def test_all_ways_of_rows_are_as_exact_in_bf16() -> None:
    """Weights are applied inside the experts, behind them on their rank, or by the tokens' rank: none is worse."""
    batches = random_batches(CONFIG, steps=1, microbatches=2, dp=4, shape=(2, 6))
    exact = Reference(CONFIG, dp=4).run(batches).grads[0]
    off = []
    for ep, per_rank in ((1, False), (2, False), (2, True)):
        run = Reference(CONFIG, dp=4, ep=ep, per_rank=per_rank, dtype=torch.bfloat16).run(batches)
        off.append(math.sqrt(sum((run.grads[0][name] - g).square().sum().item() for name, g in exact.items())))
    assert max(off) < 1.2 * min(off)


def test_reference_learns() -> None:
    config = replace(
        recipes.TINY, layers=3, hidden=32, head_dim=8, dense_layers=(1,), ffn=32, expert_ffn=16, shared_ffn=16
    )
    step = random_batches(config, steps=1, microbatches=1, dp=2, shape=(2, 8))[0]
    losses = Reference(config, dp=2, ep=2, clip=1.0).run([step] * 8).losses
    assert sum(losses[-1][0]) < sum(losses[0][0]) - 1.0
