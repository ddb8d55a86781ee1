"""Sizes of the parts of hocket's own layers, per token: see `formulas.PartSize`.

Letters: D hidden, K top_k, E experts, S tokens of a sequence, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hocket.config import ModelConfig
from hocket.program.attending import Attending, Lengths, of_windows, slower
from hocket.program.attending import keys as keys_met
from hocket.program.copies import Copies
from hocket.program.formulas import FUSED, Formulas, PartSize, plus

_BLOCK = 512
"""Keys beyond the diagonal that attention computes for a query, on average, and does not use: an estimate from how its
rate grows from 4,096 to 8,192 tokens."""
_EDGES = 1442
"""What `_BLOCK` counts, at both edges of a window. Timed as `attending.SLOWER`."""
_CHUNK = 64
"""Tokens of a chunk of a delta net's rule."""
_FLASH_BACK = 9
"""Elements that kernels beside the backward of attention read and write, for each of its output: dot products of output
and gradient (2), sums of query gradients in fp32 that are cleared and cast (5), heads that share keys summed up (2)."""


Mixer = Literal["full", "window", "delta"]
"""What a layer's tokens learn of each other by: attention, attention over a window, or a gated delta net."""


@dataclass(frozen=True)
class Shapes:
    """What the size of a part depends on."""

    model: ModelConfig
    seq: int
    """Tokens of a sequence."""
    ep: int
    copies: Copies
    formulas: Formulas
    cp: int = 1
    """Ranks that share a sequence."""
    heads: bool = False
    """Whether these exchange heads."""
    exact: int = 2
    """Elements of the dtype of compute that one in fp32 takes the room of."""
    documents: Lengths = ()
    """How long documents are that share sequences; empty: each sequence is one."""

    def met(self, window: int = 0) -> float:
        """Keys that a query meets on average, with a window or without."""
        return keys_met(self.documents or ((self.seq, self.seq),), window)


def embed(s: Shapes) -> PartSize:
    d = s.model.hidden
    return PartSize(weights=s.model.vocab * d, traffic=2 * d, output=d, saved=1, kept=d + 1)


def head(s: Shapes) -> PartSize:
    d, vocab, w = s.model.hidden, s.model.vocab, s.model.vocab * s.model.hidden
    matmul = PartSize(gemm=w, weights=0 if s.model.tied else w, rows=d + vocab, output=1, grad=d)
    return plus(s.formulas.norm(d), s.formulas.loss(vocab), matmul)


def attention(s: Shapes, mixer: Mixer = "full") -> PartSize:
    """Attention, or what a layer has in place of it, as in a dense layer: all of it, or what parts before it leave."""
    if s.cp == 1:
        return _whole(s, mixer)
    return _from_heads(s) if s.heads else _attended(s, mixer)


def _whole(s: Shapes, mixer: Mixer) -> PartSize:
    """With its norm and residual."""
    m, f = s.model, s.formulas
    if m.latent or mixer == "delta":
        return plus(f.norm(m.hidden), _latent(s) if m.latent else _delta(s))
    d, width, kv = m.hidden, m.heads * m.head_dim, m.kv_heads * m.head_dim
    gates = width if m.attn_gate else 0
    w, values = d * (2 * (width + kv) + gates), 2 * width + 2 * kv + 2 * gates  # query, gate, key, value and output
    biases = (width + gates + 2 * kv if m.qkv_bias else 0) + (d if m.o_bias else 0)
    by_head = m.qk_norm and m.qk_norm_over == "head"
    weights = w + biases + (2 * m.head_dim if by_head else 0)
    rows = 2 * (d + width + kv) + gates
    matmuls = PartSize(gemm=w, weights=weights, rows=rows, casts=rows // 2, traffic=2 * biases, output=d, grad=d)
    # Queries and gates are taken apart; a sigmoid and a product follow.
    beside = PartSize(traffic=3 * d + 9 * gates, back=_FLASH_BACK * width)
    if m.sinks:
        beside = plus(beside, PartSize(weights=m.heads, traffic=2 * width))
    core = plus(_core(s, mixer == "window", width), beside)
    heads = f.positions(width + kv, by_head)
    if m.qk_norm and not by_head:
        heads = plus(heads, f.norm(width + kv))
    return plus(f.norm(d), heads, matmuls, core, PartSize(saved=values, kept=values - gates + d))


def keys(s: Shapes) -> PartSize:
    """Keys and values of a rank's own tokens, with the layer's first norm."""
    m, f = s.model, s.formulas
    if m.latent:
        return plus(f.norm(m.hidden), _latent_keys(s))
    d, kv = m.hidden, m.kv_heads * m.head_dim
    by_head = m.qk_norm and m.qk_norm_over == "head"
    weights = 2 * d * kv + (2 * kv if m.qkv_bias else 0) + (m.head_dim if by_head else 0)
    rows = d + 2 * kv
    size = PartSize(gemm=2 * d * kv, weights=weights, rows=rows, casts=d, traffic=4 * kv, output=2 * kv, grad=d)
    norms = f.norm(kv) if m.qk_norm and not by_head else PartSize()
    return plus(f.norm(d), f.positions(kv, by_head), norms, size, PartSize(kept=2 * kv))


def kv(s: Shapes) -> PartSize:
    """Keys and values of all ranks, or of this rank's heads; gradients of its tokens'."""
    m = s.model
    if s.heads:
        return PartSize(output=_own_keys(s), grad=_own_keys(s))
    row = m.kv_lora_rank + m.qk_rope_head_dim if m.latent else 2 * m.kv_heads * m.head_dim
    return PartSize(output=row * s.cp, grad=row)


def queries(s: Shapes) -> PartSize:
    """Queries of a rank's own tokens, and gates."""
    m, f = s.model, s.formulas
    if m.latent:
        return _latent_queries(s)
    d, width = m.hidden, m.heads * m.head_dim
    made = 2 * width if m.attn_gate else width
    by_head = m.qk_norm and m.qk_norm_over == "head"
    weights = d * made + (made if m.qkv_bias else 0) + (m.head_dim if by_head else 0)
    size = PartSize(gemm=d * made, weights=weights, rows=d + made, casts=d, output=made, grad=d, kept=made)
    return plus(f.positions(width, by_head), f.norm(width) if m.qk_norm and not by_head else PartSize(), size)


def _attended(s: Shapes, mixer: Mixer = "full") -> PartSize:
    """Attention of a rank's own queries to gathered keys and values, put into order, and the residual.

    What the queries of each chunk have found is kept, and all of it in one piece.
    """
    m = s.model
    if m.latent:
        return _latent_attended(s)
    d, width, kv = m.hidden, m.heads * m.head_dim, m.kv_heads * m.head_dim * s.cp
    made = 2 * width if m.attn_gate else width
    weights = d * width + (d if m.o_bias else 0) + (m.heads if m.sinks else 0)
    sinks = PartSize(traffic=2 * width) if m.sinks else PartSize()
    beside = PartSize(traffic=3 * d + 4 * kv + 9 * (made - width), back=_FLASH_BACK * width)
    out = PartSize(gemm=d * width, weights=weights, rows=width + d, casts=width, output=d, grad=made + 2 * kv)
    kept = PartSize(saved=made + 2 * width + 2 * kv, lent=2 * kv, kept=d)
    return plus(_core(s, mixer == "window", width), beside, sinks, out, kept)


def _own_keys(s: Shapes) -> int:
    """Keys and values of a rank's own heads in all tokens, per token of the rank."""
    return 2 * s.model.head_dim * max(s.model.kv_heads, s.cp)


def spread(s: Shapes) -> PartSize:
    """Queries of a rank's own heads in all tokens, or what these have found: as many as of all heads in its tokens."""
    width = s.model.heads * s.model.head_dim
    return PartSize(output=width, grad=width)


def core(s: Shapes, mixer: Mixer = "full") -> PartSize:
    """Attention of all tokens, of a rank's own heads. Rows are put into the order of sequences, and back."""
    width, kv = s.model.heads * s.model.head_dim, _own_keys(s)
    moved = PartSize(traffic=2 * (2 * width + kv), output=width, grad=width + kv, saved=2 * width + kv)
    return plus(_core(s, mixer == "window", width), moved, PartSize(back=_FLASH_BACK * width))


def _from_heads(s: Shapes) -> PartSize:
    """The projection of what all heads have found in a rank's own tokens, and the residual."""
    m = s.model
    d, width = m.hidden, m.heads * m.head_dim
    gates = width if m.attn_gate else 0
    beside = PartSize(traffic=3 * d + 2 * width + 9 * gates, saved=width + gates, kept=d)
    weights = d * width + (d if m.o_bias else 0)
    return plus(beside, PartSize(d * width, weights=weights, rows=width + d, casts=width, output=d, grad=width + gates))


def into_heads(model: ModelConfig) -> tuple[int, int]:
    """Inputs and outputs of the products that make heads, as one. Those of latent attention have two inputs, added.

    Of a model with delta nets, those of the kind that most layers have.
    """
    if mostly_deltas(model):
        return model.hidden, delta_made(model)
    if not model.latent:
        queries = 2 * model.heads if model.attn_gate else model.heads
        return model.hidden, (queries + 2 * model.kv_heads) * model.head_dim
    made = model.heads * (model.key_width + model.qk_nope_head_dim + model.v_head_dim)
    return (model.q_lora_rank or model.hidden) + model.kv_lora_rank, made


def mostly_deltas(model: ModelConfig) -> bool:
    """Whether most layers have a delta net."""
    return 2 * sum(model.deltas()) > model.layers


def delta_made(model: ModelConfig) -> int:
    """Outputs of the products that make a delta net's queries, keys, values, gates, and two numbers of each head."""
    keys, values = model.delta_key_heads * model.delta_key_dim, model.delta_heads * model.delta_value_dim
    return 2 * (keys + values + model.delta_heads)


def _delta(s: Shapes) -> PartSize:
    """A gated delta net without its first norm.

    The core is the rule in chunks: products of keys, queries and values within a chunk of C tokens, the solution of a
    triangular system, and products with the memory, K x V for each head.
    """
    m, f = s.model, s.formulas
    d, h, k, v = m.hidden, m.delta_heads, m.delta_key_dim, m.delta_value_dim
    keys, values, made = m.delta_key_heads * k, h * v, delta_made(m)
    mixed = 2 * keys + values
    w = d * (made + values)
    weights = w + mixed * m.delta_conv + 2 * h + v
    core = PartSize(core=h * (_CHUNK * (5 * k + 3 * v) + 6 * k * v))
    # The convolution and SiLU; queries and keys for each value head, in and out; the norm of outputs, and their gates.
    beside = PartSize(traffic=6 * mixed + 2 * h * k + 2 * values + 5 * values + 3 * d)
    matmuls = PartSize(gemm=w, weights=weights, rows=2 * d + made + values, output=d, grad=d)
    norm = replace(f.norm(values), weights=0)
    saved = made + 2 * mixed + 2 * h * k + 2 * values
    return plus(matmuls, core, beside, norm, PartSize(saved=saved, kept=made + mixed + values + d))


def _latent(s: Shapes) -> PartSize:
    """Latent attention without its first norm. Fused kernels take one width of keys and values: zeros fill it up."""
    m, f = s.model, s.formulas
    d, h, q, kv, turned = m.hidden, m.heads, m.q_lora_rank, m.kv_lora_rank, m.qk_rope_head_dim
    keys, values, made = h * m.key_width, h * m.v_head_dim, h * (m.qk_nope_head_dim + m.v_head_dim)
    wide = h * max(m.key_width, m.v_head_dim) if f is FUSED else 0
    queries = (
        PartSize(gemm=q * (d + keys), rows=d + 2 * q + keys, kept=q) if q else PartSize(gemm=d * keys, rows=d + keys)
    )
    latent = PartSize(gemm=d * (kv + turned) + kv * made, rows=d + 2 * kv + turned + made, kept=kv + turned)
    out = PartSize(gemm=values * d, rows=values + d, output=d, grad=d)
    norms = plus(f.norm(kv), f.norm(q) if q else PartSize())
    heads = plus(f.positions(keys + turned, False), PartSize(traffic=2 * keys + (2 * (wide + values) if wide else 0)))
    filled, met = 2 * wide - keys - values if wide else 0, round(2 * s.met())
    core = PartSize(
        core=met * (keys + values), masked=met * filled + _BLOCK * (filled + keys + values),
        traffic=3 * d, back=_FLASH_BACK * (wide or values),
    )  # fmt: skip
    saved = 2 * keys + (2 * wide if wide else made) + values
    size = plus(queries, latent, out, norms, heads, core, PartSize(saved=saved, kept=keys + made + values + d))
    return replace(size, weights=size.weights + size.gemm)


def _latent_keys(s: Shapes) -> PartSize:
    """What latent attention gathers: latents, normed, and rotated keys."""
    m, f = s.model, s.formulas
    d, row = m.hidden, m.kv_lora_rank + m.qk_rope_head_dim
    size = PartSize(gemm=d * row, weights=d * row, rows=d + row, traffic=2 * row, output=row, grad=d, kept=row)
    return plus(size, f.norm(m.kv_lora_rank), f.positions(m.qk_rope_head_dim, False))


def _latent_queries(s: Shapes) -> PartSize:
    """Queries of a rank's own tokens, through a latent of their own if they have one."""
    m, f = s.model, s.formulas
    d, q, keys = m.hidden, m.q_lora_rank, m.heads * m.key_width
    w = q * (d + keys) if q else d * keys
    size = PartSize(gemm=w, weights=w, rows=d + 2 * q + keys, output=keys, grad=d, kept=q + keys)
    return plus(size, f.norm(q) if q else PartSize(), f.positions(keys, False))


def _latent_attended(s: Shapes) -> PartSize:
    """Keys and values of all ranks' latents, which each makes for itself, and attention of its own queries to them."""
    m, f = s.model, s.formulas
    d, h, kv, row = m.hidden, m.heads, m.kv_lora_rank, m.kv_lora_rank + m.qk_rope_head_dim
    keys, values, made = h * m.key_width, h * m.v_head_dim, h * (m.qk_nope_head_dim + m.v_head_dim)
    wide = h * max(m.key_width, m.v_head_dim) if f is FUSED else 0
    filled, met = 2 * wide - keys - values if wide else 0, round(2 * s.met())
    products = PartSize(
        gemm=s.cp * kv * made + values * d, weights=kv * made + values * d, rows=s.cp * (kv + made) + values + d,
        output=d, grad=keys + s.cp * row,
    )  # fmt: skip
    core = PartSize(
        core=met * (keys + values), masked=met * filled + _BLOCK * (filled + keys + values),
        traffic=3 * d + 2 * s.cp * (row + keys + wide), back=_FLASH_BACK * (wide or values),
    )  # fmt: skip
    saved = keys + s.cp * (kv + (2 * wide if wide else keys + made)) + 2 * values
    return plus(products, core, PartSize(saved=saved, kept=s.cp * made + d))


def mlp(s: Shapes) -> PartSize:
    d, ffn = s.model.hidden, s.model.ffn
    w, rows = 3 * d * ffn, 2 * d + 3 * ffn
    size = PartSize(gemm=w, weights=w, rows=rows, casts=d, traffic=3 * d, output=d, grad=d)
    return plus(s.formulas.norm(d), s.formulas.swiglu(d, ffn), size)


def _core(s: Shapes, windowed: bool, width: int) -> PartSize:
    """Products of queries and keys, and of those with values: 4 * `width` FLOPs for every key that a query meets.

    That is half of the sequence on average, and in a window of w tokens w - w^2 / 2S: the first tokens have fewer.
    """
    window = s.model.window if windowed and s.model.window < s.seq else 0
    met, edge = 4 * s.met(window), _EDGES if window else _BLOCK
    return PartSize(core=round(met) * width, masked=round(slower(window, s.model.sinks) * met + 2 * edge) * width)


def attending(model: ModelConfig, seq: int) -> Attending:
    """What all layers of a model do for documents in sequences of `seq` tokens."""
    layers = zip(model.deltas(), model.windows(), strict=True)
    return of_windows((window for delta, window in layers if not delta), seq, model.sinks)


def attention_and_routing(s: Shapes, mixer: Mixer = "full", made: bool = True) -> PartSize:
    """Attention, second norm, shared expert, router and permutation, if rows are `made` here.

    The residual is not in the output: the norm keeps that tensor, so it counts as saved. So do tokens, for the router.
    """
    model, copies, f = s.model, s.copies, s.formulas
    d, sh, e = model.hidden, model.shared_ffn, model.experts
    w, probs = d * e + 3 * d * sh, 0 if copies.per_rank else model.top_k
    weights = w + (e if model.router_bias else 0)
    shared = plus(f.swiglu(d, sh), PartSize(output=d, rows=2 * d + 3 * sh, casts=d)) if sh else PartSize()
    if sh and model.shared_gate:
        w, weights, shared = w + d, weights + d, plus(shared, PartSize(traffic=3 * d, saved=d + 1, kept=1))
    moved, output = (2 * _rows(copies.count, d, copies), _rows(copies.room, d, copies)) if made else (0, 0)
    router = PartSize(rows=d + e, routes=1)
    losses = (model.z_loss > 0) + (model.aux_loss > 0 and model.aux_loss_over != "microbatch")
    scores = s.exact * e * (1 + losses)  # fp32, as much for each loss that autograd makes of them
    rest = PartSize(gemm=w, weights=weights, traffic=moved, output=output + probs, saved=scores, kept=scores)
    rest = replace(rest, handed=d if made else 2 * d)
    return plus(replace(attention(s, mixer), output=0), f.norm(d), shared, router, rest)


def dispatch(s: Shapes, made: bool = False) -> PartSize:
    """Rows sent, or with `made` made of tokens and sent. Where all experts are here, their weights are beside them."""
    d, copies = s.model.hidden, s.copies
    rows = _rows(copies.count, d, copies)
    if not made:
        return PartSize(output=rows, grad=_rows(copies.room, d, copies))
    return PartSize(output=rows, grad=d, traffic=2 * rows, back=-2 * rows)


def experts(s: Shapes) -> PartSize:
    """Rows are copied into grouped order, and out of it. With a bias behind the second product a rank keeps what its
    experts make, for gradients of the weights of choices.
    """
    model, copies, f, ep = s.model, s.copies, s.formulas, s.ep
    d, k = model.hidden, model.top_k
    w, values, received = 3 * d * model.expert_ffn, f.swiglu(k * d, k * model.expert_ffn), round(copies.count * d)
    moved = 2 * (k * d + received) if ep > 1 else 0
    grad, extra = _rows(copies.count, d, copies), 0
    if copies.per_rank or ep == 1:
        extra = k * d * copies.per_rank if model.expert_bias else f.weighted_saved * k * model.expert_ffn
    rows = PartSize(saved=k * d + extra, lent=k * d, kept=k * d, traffic=moved, output=received, grad=grad)
    rows_of = k * (2 * d + 3 * model.expert_ffn)
    matmuls = PartSize(grouped=k * w, weights=model.experts // ep * w, rows=rows_of, casts=k * (d + model.expert_ffn))
    if model.expert_bias:  # added to what is there, and summed up once from gradients that are there
        b = 2 * model.expert_ffn + d
        matmuls = plus(matmuls, PartSize(weights=model.experts // ep * b, traffic=2 * k * b, back=-3 * k * b))
    return plus(values, rows, matmuls)


def combine(s: Shapes) -> PartSize:
    moved = round(s.copies.count * s.model.hidden)
    return PartSize(output=moved, grad=moved)


def unpermute(s: Shapes) -> PartSize:
    model, copies = s.model, s.copies
    d = model.hidden
    rows, shared = round(copies.count * d), d if model.shared_ffn else 0
    size = PartSize(traffic=rows + 2 * d + shared, output=d, grad=rows)
    if copies.per_rank or (s.ep == 1 and not model.expert_bias):
        return size
    kept = rows if s.ep == 1 else 0  # rows that came back are a value, which lives as long
    return plus(size, PartSize(grad=model.top_k, saved=kept + 2 * model.top_k))


def _rows(count: float, width: int, copies: Copies) -> int:
    """Elements of labelled rows."""
    return round(count * (width + copies.label))
