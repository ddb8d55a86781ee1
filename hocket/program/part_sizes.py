"""Sizes of the parts of hocket's own layers, per token: weights, FLOPs, and what they move and keep.

Operations beside matmuls are torch's own (`STOCK`), or one kernel each (`FUSED`). "Elements" count numbers, whatever
their dtype. Backward moves twice as many as forward. Letters: D hidden, K top_k, E experts, S tokens of a sequence, R
rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from hocket.config import ModelConfig
from hocket.program.documents import Attending, Lengths, of_windows, slower
from hocket.program.documents import keys as keys_met


@dataclass(frozen=True, slots=True)
class PartSize:
    """One part of one layer, or embed or head. All but `weights` are elements (or FLOPs) per token."""

    gemm: int = 0
    """Weights of ordinary matmuls that a token meets."""
    grouped: int = 0
    """Weights of its experts that a token meets."""
    weights: int = 0
    """Weights of the part on one expert-parallel rank."""
    rows: int = 0
    """Elements that its matmuls read and write beside weights, in each direction."""
    casts: int = 0
    """Elements of their inputs that a cast reads, if they run in fp8, forward; about as many backward."""
    core: int = 0
    """FLOPs of the attention core, forward."""
    masked: int = 0
    """FLOPs that the core does and then masks, forward: blocks on the diagonal are computed whole."""
    traffic: int = 0
    """Elements read and written outside matmuls, forward."""
    back: int = 0
    """Those backward, beyond twice as many."""
    routes: int = 0
    """How often experts are chosen, in each direction."""
    output: int = 0
    """Elements of the value that fwd produces."""
    grad: int = 0
    """Elements of the value that bwd produces."""
    saved: int = 0
    """Elements that fwd keeps for bwd, its input included."""
    lent: int = 0
    """Of these, elements of what is gathered for the part: what is gathered again need not be kept."""
    handed: int = 0
    """Elements of its value that something saved keeps anyway; the value alone does if the part is recomputed."""
    kept: int = 0
    """Elements that bwd keeps for wgrad: inputs of matmuls and gradients of their outputs."""


_NAMES = tuple(field.name for field in fields(PartSize))


def plus(*sizes: PartSize) -> PartSize:
    return PartSize(*(sum(getattr(size, name) for size in sizes) for name in _NAMES))


@dataclass(frozen=True, kw_only=True)
class Formulas:
    """Elements that each formula moves forward, and keeps for its backward, for every element of its width."""

    norm_traffic: int
    norm_saved: int
    """Its input, and everything up to the scaled one that a matmul reads."""
    norm_kept: int
    swiglu_traffic: int
    """For every element of the inner width."""
    swiglu_saved: int
    weighted_saved: int
    """More of these, where each row has a weight."""
    rotary_traffic: int
    """For every element of queries and keys."""
    rotary_with_norm: bool
    """Whether the norm of each head is made on the way, from which one more tensor is saved."""
    loss_traffic: int
    """For every word."""
    loss_saved: int

    def norm(self, width: int) -> PartSize:
        """RMSNorm and its scale."""
        kept = self.norm_kept * width
        return PartSize(weights=width, traffic=self.norm_traffic * width, saved=self.norm_saved * width, kept=kept)

    def swiglu(self, width: int, inner: int) -> PartSize:
        """Values of a gated MLP but for its input, which a norm keeps.

        wgrad needs gradients of gate and up, and the product with the gradient of what is made of it.
        """
        return PartSize(traffic=self.swiglu_traffic * inner, saved=self.swiglu_saved * inner, kept=3 * inner + width)

    def positions(self, width: int, normed: bool) -> PartSize:
        """Rotary positions of queries and keys, `width` elements together, and the norm of each head before them.

        All heads share one scale, whose few weights are left out.
        """
        rotary = PartSize(traffic=self.rotary_traffic * width)
        if not normed:
            return rotary
        if self.rotary_with_norm:
            return plus(rotary, PartSize(saved=width))
        norm = self.norm(width)
        return plus(rotary, PartSize(traffic=norm.traffic, saved=norm.saved, kept=norm.kept))

    def loss(self, words: int) -> PartSize:
        """Cross-entropy of logits. Their gradient is what wgrad reads."""
        return PartSize(traffic=self.loss_traffic * words, saved=self.loss_saved * words, kept=words)


STOCK = Formulas(
    norm_traffic=4, norm_saved=3, norm_kept=3, swiglu_traffic=5, swiglu_saved=4, weighted_saved=1,
    rotary_traffic=12, rotary_with_norm=False, loss_traffic=8, loss_saved=2,
)  # fmt: skip
"""torch's operations: norms keep input, normed and scaled; SwiGLU keeps gate, up, silu(gate) and product; rotary
positions and the loss are computed in fp32."""
FUSED = Formulas(
    norm_traffic=2, norm_saved=2, norm_kept=1, swiglu_traffic=3, swiglu_saved=3, weighted_saved=0,
    rotary_traffic=2, rotary_with_norm=True, loss_traffic=1, loss_saved=1,
)  # fmt: skip
"""One kernel each (`hocket/kernels/`): what is read and written once. The loss leaves its gradient in the logits."""


def orthogonal_flops(elements: int, rows: int, columns: int) -> float:
    """FLOPs of Muon's iteration of matrices of [rows, columns] that have so many elements together.

    Each of five rounds multiplies a matrix of [a, b], a <= b, by itself, the square by itself, and that by the matrix:
    `4 a a b + 2 a a a` (Jordan et al. 2024).
    """
    a, b = sorted((rows, columns))
    return 5 * elements * (4 * a + 2 * a * a / b)


# ----------------------------------------------------------------------------------------------------------- part sizes
#
# The parts themselves.


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
    weights = w + biases + 2 * _scales(s)
    rows = 2 * (d + width + kv) + gates
    matmuls = PartSize(gemm=w, weights=weights, rows=rows, casts=rows // 2, traffic=2 * biases, output=d, grad=d)
    # Queries and gates are taken apart; a sigmoid and a product follow.
    beside = PartSize(traffic=3 * d + 9 * gates, back=_FLASH_BACK * width)
    if m.sinks:
        beside = plus(beside, PartSize(weights=m.heads, traffic=2 * width))
    core = plus(_core(s, mixer == "window", width), beside)
    kept = PartSize(saved=values, kept=values - gates + d)
    return plus(f.norm(d), _turned(s, width + kv), matmuls, core, kept)


def _turned(s: Shapes, width: int) -> PartSize:
    """Rotary positions of queries, or keys, `width` elements together, and their norms: of each head, or of all."""
    whole = s.model.qk_norm and s.model.qk_norm_over != "head"
    return plus(s.formulas.positions(width, _scales(s) > 0), s.formulas.norm(width) if whole else PartSize())


def _scales(s: Shapes) -> int:
    """Weights that the norms of heads of queries, or of keys, share."""
    return s.model.head_dim if s.model.qk_norm and s.model.qk_norm_over == "head" else 0


def keys(s: Shapes) -> PartSize:
    """Keys and values of a rank's own tokens, with the layer's first norm."""
    m, f = s.model, s.formulas
    if m.latent:
        return plus(f.norm(m.hidden), _latent_keys(s))
    d, kv = m.hidden, m.kv_heads * m.head_dim
    weights = 2 * d * kv + (2 * kv if m.qkv_bias else 0) + _scales(s)
    rows = d + 2 * kv
    size = PartSize(gemm=2 * d * kv, weights=weights, rows=rows, casts=d, traffic=4 * kv, output=2 * kv, grad=d)
    return plus(f.norm(d), _turned(s, kv), size, PartSize(kept=2 * kv))


def kv(s: Shapes) -> PartSize:
    """Keys and values of all ranks, or of this rank's heads; gradients of its tokens'."""
    m = s.model
    if s.heads:
        return PartSize(output=_own_keys(s), grad=_own_keys(s))
    row = m.kv_lora_rank + m.qk_rope_head_dim if m.latent else 2 * m.kv_heads * m.head_dim
    return PartSize(output=row * s.cp, grad=row)


def queries(s: Shapes) -> PartSize:
    """Queries of a rank's own tokens, and gates."""
    m = s.model
    if m.latent:
        return _latent_queries(s)
    d, width = m.hidden, m.heads * m.head_dim
    made = 2 * width if m.attn_gate else width
    weights = d * made + (made if m.qkv_bias else 0) + _scales(s)
    size = PartSize(gemm=d * made, weights=weights, rows=d + made, casts=d, output=made, grad=d, kept=made)
    return plus(_turned(s, width), size)


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
    saved = 2 * keys + (2 * wide if wide else made) + values
    rest = PartSize(traffic=3 * d, saved=saved, kept=keys + made + values + d)
    size = plus(queries, latent, out, norms, heads, _latent_core(s, wide), rest)
    return replace(size, weights=size.weights + size.gemm)


def _latent_core(s: Shapes, wide: int) -> PartSize:
    """Its products, where zeros fill keys and values up to `wide`; 0: they have a width each."""
    keys, values = s.model.heads * s.model.key_width, s.model.heads * s.model.v_head_dim
    filled, met = 2 * wide - keys - values if wide else 0, round(2 * s.met())
    masked = met * filled + _BLOCK * (filled + keys + values)
    return PartSize(core=met * (keys + values), masked=masked, back=_FLASH_BACK * (wide or values))


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
    products = PartSize(
        gemm=s.cp * kv * made + values * d, weights=kv * made + values * d, rows=s.cp * (kv + made) + values + d,
        output=d, grad=keys + s.cp * row,
    )  # fmt: skip
    saved = keys + s.cp * (kv + (2 * wide if wide else keys + made)) + 2 * values
    rest = PartSize(traffic=3 * d + 2 * s.cp * (row + keys + wide), saved=saved, kept=s.cp * made + d)
    return plus(products, _latent_core(s, wide), rest)


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


# --------------------------------------------------------------------------------------------------------------- copies
#
# How many rows a token sends to experts on other ranks: one per expert, or one per rank that has some of them.


def ranks_per_token(model: ModelConfig, ep: int) -> float:
    """Ranks that have some of a token's experts, on average, where all sets of `top_k` experts are equally likely.

    A rank has none of them in C(E - E / ep, K) of C(E, K) cases.
    """
    e, k = model.experts, model.top_k
    return ep * (1 - math.comb(e - e // ep, k) / math.comb(e, k))


def label_bytes(top_k: int) -> int:
    """Bytes that a row sent once per rank has behind its hidden state (`layers/rows.py`): a place, int32, and a
    weight, fp32, for each choice, padded so that rows stay aligned.
    """
    return -(-8 * top_k // 64) * 64


@dataclass(frozen=True, slots=True)
class Copies:
    """What a token sends. Elements count numbers of the compute dtype."""

    count: float
    """Rows per token, on average."""
    room: int
    """Rows per token that the tensor of sent rows has, as many as there can be."""
    label: int = 0
    """Elements of a row's label."""
    per_rank: bool = False
    """Weights travel in labels, and rows are weighted and summed before they return."""


def copies_of(model: ModelConfig, ep: int, per_rank: bool, dtype_bytes: int) -> Copies:
    """What a token sends, one way or the other."""
    if not per_rank or ep == 1:
        return Copies(model.top_k, model.top_k)
    label = label_bytes(model.top_k) // dtype_bytes
    return Copies(ranks_per_token(model, ep), min(model.top_k, ep), label, True)


def elements_sent(model: ModelConfig, copies: Copies) -> float:
    """Elements that a token sends to experts and gets back, whether to another rank or not."""
    return copies.count * (2 * model.hidden + copies.label)


# ------------------------------------------------------------------------------------------------------------ fp8 costs
#
# What products in fp8 cost, beside what they would cost in bf16.
#
# A product in fp8 is faster, and its operands are half as large. Casts read and write more: the input of a product when
# it runs forward, its output's gradient before backward, transposed copies of both before the weight gradient, and each
# gathered copy of a weight. SwiGLU writes fp8 itself. Experts' weight gradients stay bf16 (`layers/fp8.py`).
#
# Rates are ratios to bf16 on an H200 (benchmarks/results/fp8_products.json): of Llama-3 8B's products at 8,192 tokens
# 1.86 to 1.91 forward and backward and 1.74 to 1.87 for weight gradients; of grouped ones 1.32 to 1.72. What layers are
# predicted to gain stands beside what they gained in tests/plan/test_fp8_costs.py.


PRODUCTS = {"fwd": "forward", "recompute": "forward", "bwd": "dgrad", "wgrad": "wgrad"}
"""Verb -> the product that it computes, as `precision.fp8` names it."""
RATES = {"forward": 1.88, "dgrad": 1.88, "wgrad": 1.78}
GROUPED = {"forward": 1.6, "dgrad": 1.6, "wgrad": 1.0}
"""How much faster a product is than in bf16: of linear layers, and of experts."""
ISSUED = 4 / 3
"""How much longer the host issues an op, for the kernels of casts: a traced step of six layers of Qwen3-30B-A3B has
2,636 kernels in fp8 and 1,976 in bf16."""
DRAWN = 0.5
"""Power that a product's FLOP draws, of what one in bf16 does: about, as half of the bits are multiplied."""


@dataclass(frozen=True)
class Fp8:
    """Which products run in fp8."""

    products: tuple[str, ...]
    """Some of forward, dgrad and wgrad."""
    ends: tuple[int, int] = (0, 0)
    """The first and the last layers without."""
    casts: float = 2.0
    """How often a microbatch has to cast a weight: at each of its two gathers, or its share of once a step."""
    gathered: tuple[str, ...] = ()
    """Units that are gathered in fp8: nothing of them is cast but shards, once a step."""

    def share(self, kinds: Sequence[str], kind: str, verb: str) -> float:
        """Share of the layers of a kind whose op of a verb runs products in fp8. `kinds` has those of all layers."""
        if PRODUCTS.get(verb) not in self.products:
            return 0.0
        first, last = self.ends
        numbers = [number for number, other in enumerate(kinds) if other == kind]
        return sum(first <= number < len(kinds) - last for number in numbers) / max(1, len(numbers))

    def beside(self, kinds: Sequence[str], kind: str, unit: str) -> float:
        """Bytes of fp8 beside each weight that is there: its cast, if it is none itself, and a transposed copy."""
        copies = 1 if unit in self.gathered else 2
        return copies * max(self.share(kinds, kind, "fwd"), self.share(kinds, kind, "bwd"))

    def travelling(self, kinds: Sequence[str], kind: str, unit: str) -> float:
        """Share of a unit's weights, in all layers of a kind, that are gathered in fp8."""
        return self.share(kinds, kind, "fwd") if unit in self.gathered else 0.0

    def seconds(self, dense: float, grouped: float, verb: str) -> float:
        """Of products that take `dense` and `grouped` seconds in bf16."""
        product = PRODUCTS[verb]
        return dense / RATES[product] + grouped / GROUPED[product]

    def moved(self, size: PartSize, tokens: int, verb: str) -> float:
        """Bytes that casts read and write in an op."""
        if verb == "wgrad":  # transposed copies of both operands
            return 2.0 * tokens * size.rows if size.gemm else 0.0
        weights = 5 if verb == "fwd" or not size.grouped else 3  # a transposed copy too
        weights -= 3 if ("experts" if size.grouped else "dense") in self.gathered else 0
        return 3.0 * tokens * size.casts + weights * size.weights * self.casts / 2

    def saved(self, size: PartSize, tokens: int, verb: str) -> int:
        """Bytes that an op keeps less of than in bf16: operands of weight gradients of linear layers."""
        if size.grouped or "wgrad" not in self.products:
            return 0
        return tokens * (size.casts if verb == "fwd" else size.kept)
