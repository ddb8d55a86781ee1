"""Sizes of the parts of hocket's own layers, per token: weights, FLOPs, and the elements that they move and keep.

Operations other than matmuls are torch's (`STOCK`), or one fused kernel each (`FUSED`). "Elements" count numbers,
whatever their dtype. Backward moves twice as many as forward. Letters: D hidden, K top_k, E experts, S tokens of a
sequence, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from hocket.config import ModelConfig
from hocket.program.documents import AttentionWork, Lengths, of_windows, slower
from hocket.program.documents import keys as keys_met
from hocket.program.ops import Layout
from hocket.program.parts import END_UNITS, Mixer, Part, Unit
from hocket.program.transformer import EMBED, HEAD


@dataclass(frozen=True, slots=True)
class PartSize:
    """One part of one layer, or embed or head. All but `weights` are elements (or FLOPs) per token."""

    gemm: int = 0
    """Weights of ordinary matmuls that a token uses."""
    grouped: int = 0
    """Weights of experts that a token uses."""
    weights: int = 0
    """Weights of the part on one expert-parallel rank."""
    rows: int = 0
    """Elements other than weights that its matmuls read and write, in each direction."""
    casts: int = 0
    """Input elements that casts read in forward, if its matmuls run in fp8; about as many in backward."""
    core: int = 0
    """FLOPs of the attention core, forward."""
    masked: int = 0
    """FLOPs that the core computes and then masks, forward: blocks on the diagonal are computed whole."""
    traffic: int = 0
    """Elements read and written outside matmuls, forward."""
    back: int = 0
    """Additional elements in backward, beyond twice as many."""
    routes: int = 0
    """How often experts are chosen, in each direction."""
    output: int = 0
    """Elements of fwd's output."""
    grad: int = 0
    """Elements of bwd's output."""
    saved: int = 0
    """Elements that fwd keeps for bwd, including its input."""
    lent: int = 0
    """Those of `saved` that are gathered for the part: if they are gathered again, they need not be kept."""
    handed: int = 0
    """Output elements that are also in `saved`; they count as output if the part is recomputed."""
    kept: int = 0
    """Elements that bwd keeps for wgrad: inputs of matmuls and gradients of their outputs."""

    def __add__(self, other: PartSize) -> PartSize:
        return PartSize(*(getattr(self, name) + getattr(other, name) for name in _FIELDS))


_FIELDS = tuple(field.name for field in fields(PartSize))


def linear(inputs: int, outputs: int, bias: bool = False, cast: bool = True) -> PartSize:
    """A product with a weight of [outputs, inputs]. Without `cast`, the kernel before it writes fp8 itself."""
    w = inputs * outputs
    return PartSize(
        gemm=w, weights=w + bias * outputs, rows=inputs + outputs, casts=cast * inputs, traffic=2 * bias * outputs
    )


@dataclass(frozen=True, kw_only=True)
class Formulas:
    """Elements that each formula moves in forward, and keeps for its backward, per element of its width."""

    norm_traffic: int
    norm_saved: int
    """Its input, and everything up to the scaled tensor that a matmul reads."""
    norm_kept: int
    swiglu_traffic: int
    """Per element of the inner width."""
    swiglu_saved: int
    weighted_saved: int
    """Additional ones if each row has a weight."""
    rotary_traffic: int
    """Per element of queries and keys."""
    rotary_with_norm: bool
    """Whether the norm of each head is fused with rotary positions, which saves one more tensor."""
    loss_traffic: int
    """Per vocabulary entry."""
    loss_saved: int

    def norm(self, width: int) -> PartSize:
        """RMSNorm and its scale."""
        kept = self.norm_kept * width
        return PartSize(weights=width, traffic=self.norm_traffic * width, saved=self.norm_saved * width, kept=kept)

    def swiglu(self, width: int, inner: int) -> PartSize:
        """A gated MLP's values without its input, which a norm keeps.

        wgrad needs gradients of gate and up, and the product with the gradient of its output.
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
            return rotary + PartSize(saved=width)
        norm = self.norm(width)
        return rotary + PartSize(traffic=norm.traffic, saved=norm.saved, kept=norm.kept)

    def loss(self, words: int) -> PartSize:
        """Cross-entropy of logits. wgrad reads their gradient."""
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
"""One kernel each (`hocket/kernels/`), which reads and writes once. The loss writes its gradient over the logits."""


def orthogonal_flops(elements: int, rows: int, columns: int) -> float:
    """FLOPs of Muon's iteration on matrices of [rows, columns] with `elements` elements in total.

    Each of five rounds multiplies a matrix of [a, b], a <= b, by itself, the square by itself, and that by the matrix:
    `4 a a b + 2 a a a` (Jordan et al. 2024).
    """
    a, b = sorted((rows, columns))
    return 5 * elements * (4 * a + 2 * a * a / b)


# ----------------------------------------------------------------------------------------------------------- part sizes


_BLOCK = 512
"""Keys beyond the diagonal that attention computes for a query on average, and masks: an estimate from how its rate
grows from 4,096 to 8,192 tokens."""
_EDGES = 1442
"""The same as `_BLOCK`, for both edges of a window. Timed like `attending.SLOWER`."""
_CHUNK = 64
"""Tokens of a chunk in the delta rule."""
_FLASH_BACK = 9
"""Elements that kernels around the backward of attention move, per output element: dot products of output and gradient
(2), fp32 sums of query gradients that are cleared and cast (5), sums over heads that share keys (2)."""


@dataclass(frozen=True)
class Shapes:
    """What the size of a part depends on."""

    model: ModelConfig
    layout: Layout
    seq: int = 1
    """Tokens of a sequence."""
    formulas: Formulas = STOCK
    dtype_bytes: int = 2
    documents: Lengths = ()
    """Lengths of documents that share sequences; empty: each sequence is one document."""
    mixer: Mixer = "full"

    @cached_property
    def copies(self) -> Copies:
        return copies_of(self.model, self.layout.ep, self.layout.per_rank, self.dtype_bytes)

    @property
    def width(self) -> int:
        """Width of all query heads."""
        return self.model.heads * self.model.head_dim

    @property
    def gates(self) -> int:
        """Width of all gates."""
        return self.width if self.model.attn_gate else 0

    @property
    def kv(self) -> int:
        """Width of all key heads, or of all value heads."""
        return self.model.kv_heads * self.model.head_dim

    @property
    def scale(self) -> int:
        """Weights of the norm that query heads, or key heads, share."""
        return self.model.head_dim if self.model.qk_norm and self.model.qk_norm_over == "head" else 0

    def positions(self, width: int) -> PartSize:
        """Rotary positions of queries, or keys, `width` elements together, and norms per head or over all heads."""
        whole = self.model.qk_norm and self.model.qk_norm_over != "head"
        return self.formulas.positions(width, self.scale > 0) + (self.formulas.norm(width) if whole else PartSize())

    def met(self, window: int = 0) -> float:
        """Keys that a query attends to on average, optionally within a window."""
        return keys_met(self.documents or ((self.seq, self.seq),), window)

    def core(self) -> PartSize:
        """Products of queries and keys, and of scores and values: 4 FLOPs per element of width and key attended to.

        That is half of the sequence on average, and in a window of w tokens w - w^2 / 2S: the first tokens have fewer.
        """
        m, width = self.model, self.width
        window = m.window if self.mixer == "window" and m.window < self.seq else 0
        met, edge = 4 * self.met(window), _EDGES if window else _BLOCK
        masked = round(slower(window, m.sinks) * met + 2 * edge) * width
        sinks = PartSize(weights=m.heads, traffic=2 * width) if m.sinks else PartSize()
        return PartSize(core=round(met) * width, masked=masked, back=_FLASH_BACK * width) + sinks


def embed(s: Shapes) -> PartSize:
    d = s.model.hidden
    return PartSize(weights=s.model.vocab * d, traffic=2 * d, output=d, saved=1, kept=d + 1)


def head(s: Shapes) -> PartSize:
    d, product = s.model.hidden, linear(s.model.hidden, s.model.vocab)
    product = replace(product, weights=0) if s.model.tied else product
    return s.formulas.norm(d) + s.formulas.loss(s.model.vocab) + product + PartSize(output=1, grad=d)


def attention(s: Shapes) -> PartSize:
    """Attention, or the layer's other mixer: all of it, or with context parallelism what its other parts leave."""
    if s.layout.cp > 1:
        return _from_heads(s) if s.layout.heads else _attended(s)
    d, width, kv, gates = s.model.hidden, s.width, s.kv, s.gates
    if s.model.latent or s.mixer == "delta":
        return s.formulas.norm(d) + (_latent(s) if s.model.latent else _delta(s))
    products = linear(d, width + 2 * kv + gates, s.model.qkv_bias) + linear(width, d, s.model.o_bias)
    products = replace(products, weights=products.weights + 2 * s.scale, casts=products.rows // 2)
    # Queries and gates are split; a sigmoid and a product follow.
    kept = 2 * width + 2 * kv + gates
    rest = PartSize(traffic=3 * d + 9 * gates, saved=kept + gates, kept=kept + d, output=d, grad=d)
    return s.formulas.norm(d) + s.positions(width + kv) + products + s.core() + rest


def keys(s: Shapes) -> PartSize:
    """Keys and values of a rank's own tokens, with the layer's first norm."""
    d, kv = s.model.hidden, s.kv
    if s.model.latent:
        return s.formulas.norm(d) + _latent_keys(s)
    product = linear(d, 2 * kv, s.model.qkv_bias)
    product = replace(product, weights=product.weights + s.scale, traffic=4 * kv)
    return s.formulas.norm(d) + s.positions(kv) + product + PartSize(output=2 * kv, grad=d, kept=2 * kv)


def kv(s: Shapes) -> PartSize:
    """Keys and values of all ranks' tokens, or of this rank's heads; gradients of its own tokens' keys and values."""
    m = s.model
    if s.layout.heads:
        return PartSize(output=_own_keys(s), grad=_own_keys(s))
    row = m.kv_lora_rank + m.qk_rope_head_dim if m.latent else 2 * s.kv
    return PartSize(output=row * s.layout.cp, grad=row)


def queries(s: Shapes) -> PartSize:
    """Queries of a rank's own tokens, and gates."""
    d, made = s.model.hidden, s.width + s.gates
    if s.model.latent:
        return _latent_queries(s)
    product = linear(d, made, s.model.qkv_bias)
    product = replace(product, weights=product.weights + s.scale, traffic=0)
    return s.positions(s.width) + product + PartSize(output=made, grad=d, kept=made)


def _attended(s: Shapes) -> PartSize:
    """Attention of a rank's own queries to gathered, reordered keys and values, and the residual.

    It keeps the output for each chunk of queries, and the whole output once more.
    """
    if s.model.latent:
        return _latent_attended(s)
    d, width, kv, made = s.model.hidden, s.width, s.kv * s.layout.cp, s.width + s.gates
    saved = PartSize(saved=made + 2 * width + 2 * kv, lent=2 * kv, kept=d)
    rest = PartSize(traffic=3 * d + 4 * kv + 9 * s.gates, output=d, grad=made + 2 * kv)
    return s.core() + replace(linear(width, d, s.model.o_bias), traffic=0) + saved + rest


def _own_keys(s: Shapes) -> int:
    """Keys and values of a rank's own heads for all tokens, per token of the rank."""
    return 2 * s.model.head_dim * max(s.model.kv_heads, s.layout.cp)


def spread(s: Shapes) -> PartSize:
    """Queries, or outputs, of a rank's own heads for all tokens: as many as of all heads for its own tokens."""
    return PartSize(output=s.width, grad=s.width)


def core(s: Shapes) -> PartSize:
    """Attention of all tokens, for a rank's own heads. Rows are reordered into sequences, and back."""
    width, kv = s.width, _own_keys(s)
    return s.core() + PartSize(traffic=2 * (2 * width + kv), output=width, grad=width + kv, saved=2 * width + kv)


def _from_heads(s: Shapes) -> PartSize:
    """The output projection of all heads for a rank's own tokens, and the residual."""
    d, width, gates = s.model.hidden, s.width, s.gates
    rest = PartSize(traffic=3 * d + 2 * width + 9 * gates, saved=width + gates, kept=d, output=d, grad=width + gates)
    return replace(linear(width, d, s.model.o_bias), traffic=0) + rest


def into_heads(model: ModelConfig) -> tuple[int, int]:
    """Combined inputs and outputs of the products that make heads. For latent attention, the sum of its two inputs.

    In a model with delta nets, those of the majority kind of layer.
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
    """Outputs of the products that make a delta net's queries, keys, values and gates, and two numbers per head."""
    keys, values = model.delta_key_heads * model.delta_key_dim, model.delta_heads * model.delta_value_dim
    return 2 * (keys + values + model.delta_heads)


def _delta(s: Shapes) -> PartSize:
    """A gated delta net without its first norm.

    The core is the chunked delta rule: products of keys, queries and values within a chunk of C tokens, the solution of
    a triangular system, and products with the state, K x V per head.
    """
    m, d = s.model, s.model.hidden
    h, k, v = m.delta_heads, m.delta_key_dim, m.delta_value_dim
    values, made = h * v, delta_made(m)
    mixed = 2 * m.delta_key_heads * k + values
    core = PartSize(core=h * (_CHUNK * (5 * k + 3 * v) + 6 * k * v), weights=mixed * m.delta_conv + 2 * h + v)
    # The convolution and SiLU; queries and keys for each value head, in and out; the norm of outputs, and their gates.
    traffic = 6 * mixed + 2 * h * k + 2 * values + 5 * values + 3 * d
    saved, kept = made + 2 * mixed + 2 * h * k + 2 * values, made + mixed + values + d
    rest = PartSize(traffic=traffic, saved=saved, kept=kept, output=d, grad=d)
    return linear(d, made) + linear(values, d) + core + replace(s.formulas.norm(values), weights=0) + rest


# Latent attention makes keys and values from latents. Fused kernels need equal widths of both: zeros pad them.


def _latent(s: Shapes) -> PartSize:
    """Latent attention without its first norm."""
    m, d, kv, turned = s.model, s.model.hidden, s.model.kv_lora_rank, s.model.qk_rope_head_dim
    keys, values, made, wide = _latent_widths(s)
    products = _of_latents(s, d, m.q_lora_rank, keys) + _of_latents(s, d, kv, made, turned) + linear(values, d)
    moved = 3 * d + 2 * keys + (2 * (wide + values) if wide else 0)
    saved = 2 * keys + (2 * wide if wide else made) + values
    rest = PartSize(traffic=moved, saved=saved, kept=keys + made + values + d, output=d, grad=d)
    return products + s.formulas.positions(keys + turned, False) + _latent_core(s) + rest


def _latent_widths(s: Shapes) -> tuple[int, int, int, int]:
    """Widths over all heads: of keys, of values, of the products from latents; and the padded width, 0 if unpadded."""
    m = s.model
    made, wide = m.qk_nope_head_dim + m.v_head_dim, max(m.key_width, m.v_head_dim) if s.formulas is FUSED else 0
    return m.heads * m.key_width, m.heads * m.v_head_dim, m.heads * made, m.heads * wide


def _of_latents(s: Shapes, inputs: int, latents: int, outputs: int, beside: int = 0) -> PartSize:
    """A product through normed latents, made together with `beside` other outputs; a plain product without latents."""
    if not latents:
        return linear(inputs, outputs)
    products = linear(inputs, latents + beside) + linear(latents, outputs)
    return products + s.formulas.norm(latents) + PartSize(kept=latents + beside)


def _latent_core(s: Shapes) -> PartSize:
    keys, values, _, wide = _latent_widths(s)
    filled, met = 2 * wide - keys - values if wide else 0, round(2 * s.met())
    masked = met * filled + _BLOCK * (filled + keys + values)
    return PartSize(core=met * (keys + values), masked=masked, back=_FLASH_BACK * (wide or values))


def _latent_keys(s: Shapes) -> PartSize:
    """The gathered tensors of latent attention: normed latents, and rotated keys."""
    d, latents, turned = s.model.hidden, s.model.kv_lora_rank, s.model.qk_rope_head_dim
    row = latents + turned
    moved = PartSize(traffic=2 * row, output=row, grad=d, kept=row)
    return linear(d, row) + s.formulas.norm(latents) + s.formulas.positions(turned, False) + moved


def _latent_queries(s: Shapes) -> PartSize:
    """Queries of a rank's own tokens, through a latent of their own if there is one."""
    d, keys = s.model.hidden, _latent_widths(s)[0]
    products = _of_latents(s, d, s.model.q_lora_rank, keys)
    return products + s.formulas.positions(keys, False) + PartSize(output=keys, grad=d, kept=keys)


def _latent_attended(s: Shapes) -> PartSize:
    """Keys and values from all ranks' latents, computed on each rank, and attention of its own queries to them."""
    m, d, cp, kv = s.model, s.model.hidden, s.layout.cp, s.model.kv_lora_rank
    row, (keys, values, made, wide) = kv + m.qk_rope_head_dim, _latent_widths(s)
    products = linear(cp * kv, made) + linear(values, d)
    products = replace(products, weights=kv * made + values * d, rows=cp * (kv + made) + values + d)
    saved = keys + cp * (kv + (2 * wide if wide else keys + made)) + 2 * values
    moved = 3 * d + 2 * cp * (row + keys + wide)
    rest = PartSize(traffic=moved, saved=saved, kept=cp * made + d, output=d, grad=keys + cp * row)
    return products + _latent_core(s) + rest


def _gated(s: Shapes, ffn: int) -> PartSize:
    """A gated MLP for every token."""
    d = s.model.hidden
    return linear(d, 2 * ffn) + linear(ffn, d, cast=False) + s.formulas.swiglu(d, ffn) + PartSize(output=d)


def mlp(s: Shapes) -> PartSize:
    d = s.model.hidden
    return s.formulas.norm(d) + _gated(s, s.model.ffn) + PartSize(traffic=3 * d, grad=d)


def attending(model: ModelConfig, seq: int) -> AttentionWork:
    """The attention work of all layers of a model, for documents in sequences of `seq` tokens."""
    layers = zip(model.deltas(), model.windows(), strict=True)
    return of_windows((window for delta, window in layers if not delta), seq, model.sinks)


def attention_and_routing(s: Shapes) -> PartSize:
    """Attention, second norm, shared expert, router and permutation, unless rows are made later.

    The residual is not in the output: the norm keeps that tensor, so it counts as saved. So do the router's tokens.
    """
    m, copies, d, e = s.model, s.copies, s.model.hidden, s.model.experts
    shared = _gated(s, m.shared_ffn) if m.shared_ffn else PartSize()
    if m.shared_ffn and m.shared_gate:
        shared += PartSize(gemm=d, weights=d, traffic=3 * d, saved=d + 1, kept=1)
    moved, output, handed = 2 * copies.sent(d), copies.sent(d, copies.room), d
    if s.layout.makes_rows_later:
        moved, output, handed = 0, 0, 2 * d
    probs = 0 if copies.per_rank else m.top_k
    losses = (m.z_loss > 0) + (m.aux_loss > 0 and m.aux_loss_over != "microbatch")
    scores = 4 // s.dtype_bytes * e * (1 + losses)  # fp32, once per additional loss in autograd
    router = replace(linear(d, e, cast=False), weights=d * e + (e if m.router_bias else 0), routes=1)
    rest = PartSize(traffic=moved, output=output + probs, saved=scores, kept=scores, handed=handed)
    return replace(attention(s), output=0) + s.formulas.norm(d) + shared + router + rest


def dispatch(s: Shapes) -> PartSize:
    """Rows sent, or made from tokens and sent. If all experts are on this rank, rows and their weights stay here."""
    d, copies = s.model.hidden, s.copies
    rows = copies.sent(d)
    if not s.layout.makes_rows_later:
        return PartSize(output=rows, grad=copies.sent(d, copies.room))
    return PartSize(output=rows, grad=d, traffic=2 * rows, back=-2 * rows)


def experts(s: Shapes) -> PartSize:
    """Rows are copied into grouped order, and back. With a bias in the second product a rank keeps the experts'
    outputs, for gradients of the routing weights.
    """
    m, copies, f, ep = s.model, s.copies, s.formulas, s.layout.ep
    d, k, ffn, here = m.hidden, m.top_k, m.expert_ffn, m.experts // ep
    w, received = 3 * d * ffn, round(copies.count * d)
    moved, extra = 2 * (k * d + received) if ep > 1 else 0, 0
    if copies.per_rank or ep == 1:
        extra = k * d * copies.per_rank if m.expert_bias else f.weighted_saved * k * ffn
    grad = copies.sent(d)
    rows = PartSize(saved=k * d + extra, lent=k * d, kept=k * d, traffic=moved, output=received, grad=grad)
    products = PartSize(grouped=k * w, weights=here * w, rows=k * (2 * d + 3 * ffn), casts=k * (d + ffn))
    if m.expert_bias:  # one pass each adds biases in place and sums their gradients
        b = 2 * ffn + d
        products += PartSize(weights=here * b, traffic=2 * k * b, back=-3 * k * b)
    return f.swiglu(k * d, k * ffn) + rows + products


def combine(s: Shapes) -> PartSize:
    moved = round(s.copies.count * s.model.hidden)
    return PartSize(output=moved, grad=moved)


def unpermute(s: Shapes) -> PartSize:
    m, copies, d = s.model, s.copies, s.model.hidden
    rows, shared = round(copies.count * d), d if m.shared_ffn else 0
    size = PartSize(traffic=rows + 2 * d + shared, output=d, grad=rows)
    if copies.per_rank or (s.layout.ep == 1 and not m.expert_bias):
        return size
    kept = rows if s.layout.ep == 1 else 0  # returned rows are a value with the same lifetime
    return size + PartSize(grad=m.top_k, saved=kept + 2 * m.top_k)


SIZES: Mapping[str, Callable[[Shapes], PartSize]] = {
    size.__name__: size
    for size in (
        embed, head, attention, mlp, keys, kv, queries, spread, core,
        attention_and_routing, dispatch, experts, combine, unpermute,
    )
}  # fmt: skip
"""The sizes of hocket's own parts, by the names in `Part.size`."""


def size_of(part: Part, shapes: Shapes) -> PartSize:
    """The sizes of a part, by its own cost function or by the one of `SIZES` that it names."""
    if not part.size:
        raise ValueError(f"part {part.name!r} has no cost function: give its description a `size`")
    return part.size(shapes) if callable(part.size) else SIZES[part.size](replace(shapes, mixer=part.mixer))


def unit_weights(model: ModelConfig, layout: Layout, unit: Unit, kind: str) -> int:
    """Weights (elements) of one unit of such a layer, unsharded; for experts those of one expert-parallel rank."""
    parts = (EMBED, HEAD) if unit in END_UNITS else layout.by_kind[kind].parts
    return sum(size_of(part, Shapes(model, layout)).weights for part in parts if layout.unit(part.name) == unit)


def model_flops_per_token(model: ModelConfig, seq: int) -> float:
    """FLOPs that training on one token needs, for MFU: `6 N_active + 6 S w` per attention layer.

    N_active are the matmul weights that a token uses (its own experts only, the head, not the embedding table). Causal
    attention counts half of the square: `3 * 2 S w` for forward and backward, and within its window for a layer with
    one. Recomputation does not count.
    """
    layout = Layout(model.layer_kinds())
    shapes = Shapes(model, layout, seq)
    flops = 6.0 * size_of(HEAD, shapes).gemm
    for kind in layout.layer_types:
        sizes = [size_of(part, shapes) for part in kind.parts]
        flops += layout.kinds.count(kind.name) * sum(6 * (size.gemm + size.grouped) + 3 * size.core for size in sizes)
    return flops


# --------------------------------------------------------------------------------------------------------------- copies
#
# Rows that a token sends to experts on other ranks: one per expert, or one per rank that has some of them.


def ranks_per_token(model: ModelConfig, ep: int) -> float:
    """Average number of ranks that hold experts of a token, if all sets of `top_k` experts are equally likely.

    A rank has none of them in C(E - E / ep, K) of C(E, K) cases.
    """
    e, k = model.experts, model.top_k
    return ep * (1 - math.comb(e - e // ep, k) / math.comb(e, k))


def label_bytes(top_k: int) -> int:
    """Bytes of the label after a row's hidden state with one copy per rank (`layers/rows.py`): an int32 place and an
    fp32 weight per choice, padded so that rows stay aligned.
    """
    return -(-8 * top_k // 64) * 64


@dataclass(frozen=True, slots=True)
class Copies:
    """The rows that a token sends. Elements count numbers of the compute dtype."""

    count: float
    """Rows per token, on average."""
    room: int
    """Rows per token in the tensor of sent rows: the maximum."""
    label: int = 0
    """Elements of a row's label."""
    per_rank: bool = False
    """Weights travel in labels, and rows are weighted and summed before they return."""

    def sent(self, width: int, rows: float = 0.0) -> int:
        """Elements of `rows` labelled rows; 0 means `count`."""
        return round((rows or self.count) * (width + self.label))


def copies_of(model: ModelConfig, ep: int, per_rank: bool, dtype_bytes: int) -> Copies:
    """The rows that a token sends, with one copy per expert or per rank."""
    if not per_rank or ep == 1:
        return Copies(model.top_k, model.top_k)
    label = label_bytes(model.top_k) // dtype_bytes
    return Copies(ranks_per_token(model, ep), min(model.top_k, ep), label, True)


def elements_sent(model: ModelConfig, copies: Copies) -> float:
    """Elements that a token sends to experts and gets back, to its own rank too."""
    return copies.count * (2 * model.hidden + copies.label)


# ------------------------------------------------------------------------------------------------------------ fp8 costs
#
# The costs of products in fp8, relative to bf16.
#
# A product in fp8 is faster, and its operands are half as large. Casts read and write more: the input of a product in
# forward, its output's gradient before backward, transposed copies of both before the weight gradient, and each
# gathered copy of a weight. SwiGLU writes fp8 itself. Experts' weight gradients stay bf16 (`layers/fp8.py`).
#
# Rates are ratios to bf16 on an H200 (benchmarks/results/fp8_products.json): for Llama-3 8B's products at 8,192 tokens
# 1.86 to 1.91 forward and backward and 1.74 to 1.87 for weight gradients; for grouped ones 1.32 to 1.72.
# tests/plan/test_fp8_costs.py compares predicted and measured gains of layers.


PRODUCTS = {"fwd": "forward", "recompute": "forward", "bwd": "dgrad", "wgrad": "wgrad"}
"""Verb -> the product that it computes, as `precision.fp8` names it."""
RATES = {"forward": 1.88, "dgrad": 1.88, "wgrad": 1.78}
GROUPED = {"forward": 1.6, "dgrad": 1.6, "wgrad": 1.0}
"""Speed of a product relative to bf16: of linear layers, and of experts."""
ISSUED = 4 / 3
"""Relative issue time of an op, with the kernels of casts: a traced step of six layers of Qwen3-30B-A3B has 2,636
kernels in fp8 and 1,976 in bf16."""
DRAWN = 0.5
"""Power per FLOP relative to bf16: roughly, since half of the bits are multiplied."""


@dataclass(frozen=True)
class Fp8:
    """Which products run in fp8."""

    products: tuple[str, ...]
    """A subset of forward, dgrad and wgrad."""
    ends: tuple[int, int] = (0, 0)
    """Number of first and of last layers without fp8."""
    casts: float = 2.0
    """Casts of a weight per microbatch: one at each of its two gathers, or a share of one cast per step."""
    gathered: tuple[str, ...] = ()
    """Units that are gathered in fp8: only their shards are cast, once a step."""

    def share(self, kinds: Sequence[str], kind: str, verb: str) -> float:
        """Share of the layers of a kind whose op of a verb runs in fp8. `kinds` has those of all layers."""
        if PRODUCTS.get(verb) not in self.products:
            return 0.0
        first, last = self.ends
        numbers = [number for number, other in enumerate(kinds) if other == kind]
        return sum(first <= number < len(kinds) - last for number in numbers) / max(1, len(numbers))

    def beside(self, kinds: Sequence[str], kind: str, unit: str) -> float:
        """Bytes of fp8 copies per resident weight: its cast, unless gathered in fp8, and a transposed copy."""
        copies = 1 if unit in self.gathered else 2
        return copies * max(self.share(kinds, kind, "fwd"), self.share(kinds, kind, "bwd"))

    def travelling(self, kinds: Sequence[str], kind: str, unit: str) -> float:
        """Share of a unit's weights, over all layers of a kind, that are gathered in fp8."""
        return self.share(kinds, kind, "fwd") if unit in self.gathered else 0.0

    def seconds(self, dense: float, grouped: float, verb: str) -> float:
        """Seconds of products that take `dense` and `grouped` seconds in bf16."""
        product = PRODUCTS[verb]
        return dense / RATES[product] + grouped / GROUPED[product]

    def moved(self, size: PartSize, tokens: int, verb: str) -> float:
        """Bytes that casts read and write in an op."""
        if verb == "wgrad":  # transposed copies of both operands
            return 2.0 * tokens * size.rows if size.gemm else 0.0
        weights = 5 if verb == "fwd" or not size.grouped else 3  # with a transposed copy
        weights -= 3 if ("experts" if size.grouped else "dense") in self.gathered else 0
        return 3.0 * tokens * size.casts + weights * size.weights * self.casts / 2

    def saved(self, size: PartSize, tokens: int, verb: str) -> int:
        """Bytes by which an op keeps less than in bf16: operands of weight gradients of linear layers."""
        if size.grouped or "wgrad" not in self.products:
            return 0
        return tokens * (size.casts if verb == "fwd" else size.kept)
