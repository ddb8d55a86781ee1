"""Section `model`: a decoder transformer, which of its features can be combined, and its initial weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from hocket.config.rule import LONG, MANY, WIDE, Between, Each, Host, OnlyWith, Rule, Words, leaf

EXPERTS = OnlyWith("a model with experts")
LATENT = OnlyWith("model.kv_lora_rank above 0")
DELTA = OnlyWith("model.delta_heads above 0")


RopeKind = Literal["default", "linear", "llama3", "yarn"]
YARN = OnlyWith("model.rope.kind = yarn")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions, apart from their base `model.rope_theta`."""

    kind: RopeKind = "default"
    """How angles are scaled down for sequences longer than those of the original training. default: not at all. linear:
    all alike. llama3 and yarn: only slow pairs, as in Llama 3.1 and in Peng et al. 2023 (YaRN)."""
    width: Annotated[int, Between(0, MANY)] = 0
    """Elements of each head that rotate, from the first. The others have no position. 0 means all."""
    without: Annotated[tuple[int, ...], Between(0)] = ()
    """Layers, by number, whose queries and keys do not rotate."""
    plain_windows: Annotated[
        bool, OnlyWith("model.rope.kind other than default", idle=(False,)), OnlyWith("a window", idle=(False,))
    ] = False
    """Whether layers with a window keep their angles, whatever `kind` is."""
    factor: Annotated[float, Between(1, 1e6), OnlyWith("model.rope.kind = linear or llama3 or yarn")] = 1.0
    """For linear, llama3 and yarn: divisor of the scaled angles."""
    original_positions: Annotated[int, Between(0, LONG), OnlyWith("model.rope.kind = llama3 or yarn")] = 0
    """For llama3 and yarn, which need it: positions of the model before its angles were scaled."""
    low_frequency: Annotated[float, Between(1e-6, 1e6), OnlyWith("model.rope.kind = llama3")] = 1.0
    """For llama3: pairs that turn fewer times than this in the original positions get the full factor."""
    high_frequency: Annotated[float, Between(1e-6, 1e6), OnlyWith("model.rope.kind = llama3")] = 4.0
    """For llama3: pairs that turn more often than this in the original positions keep their angles."""
    beta_fast: Annotated[float, Between(1e-6, 1e6), YARN] = 32.0
    """For yarn: pairs that turn more often than this in the original positions keep their angles."""
    beta_slow: Annotated[float, Between(1e-6, 1e6), YARN] = 1.0
    """For yarn: pairs that turn fewer times than this get the full factor."""
    truncate: Annotated[bool, YARN] = True
    """For yarn: whether the first and the last pair between the two are rounded to integers."""
    attention_factor: Annotated[float, Between(0, 1e6), YARN] = 0.0
    """For yarn: factor on cosines and sines. 0 computes it from `factor`, `mscale` and `mscale_all_dim`."""
    mscale: Annotated[float, Between(0, 1e6), YARN] = 0.0
    """For yarn: weight of ln(factor) in the numerator of that factor, if `mscale_all_dim` is given too."""
    mscale_all_dim: Annotated[float, Between(0, 1e6), YARN] = 0.0
    """For yarn: weight of ln(factor) in its denominator, if `mscale` is given too."""


PLAIN = RopeConfig()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of a decoder transformer. All widths are in elements."""

    vocab: Annotated[int, Between(2, LONG)] = 256
    """Vocabulary size."""
    hidden: Annotated[int, Between(1, WIDE)] = 128
    """Width of the residual stream."""
    layers: Annotated[int, Between(1, 1024)] = 4
    """Number of transformer layers."""
    heads: Annotated[int, Between(1, MANY)] = 4
    """Query heads."""
    kv_heads: Annotated[int, Between(1, MANY), OnlyWith("model.kv_lora_rank = 0")] = 2
    """Key and value heads; divides `heads`."""
    head_dim: Annotated[int, Between(2, MANY), OnlyWith("model.kv_lora_rank = 0")] = 32
    """Width of one head."""
    kv_lora_rank: Annotated[int, Between(0, WIDE)] = 0
    """Width of the latent for keys and values in multi-head latent attention; 0 means plain attention. With it all
    `heads` have their own keys and values, `qk_rope_head_dim` + `qk_nope_head_dim` and `v_head_dim` wide."""
    q_lora_rank: Annotated[int, Between(0, WIDE), LATENT] = 0
    """Width of the latent for queries in latent attention; 0 computes them from the hidden state."""
    qk_nope_head_dim: Annotated[int, Between(1, MANY), LATENT] = 128
    """Elements of each query and key without position. For latent attention, like the next two."""
    qk_rope_head_dim: Annotated[int, Between(2, MANY), LATENT] = 64
    """Elements of each query and key that rotate. All heads share those of keys."""
    v_head_dim: Annotated[int, Between(1, MANY), LATENT] = 128
    """Width of each head's values."""
    delta_heads: Annotated[int, Between(0, MANY), OnlyWith("other layers than model.full_layers", idle=(0,))] = 0
    """Value heads of gated delta nets, a linear attention that replaces attention in all layers but `full_layers`; 0
    means attention everywhere."""
    delta_key_heads: Annotated[int, Between(1, MANY), DELTA] = 16
    """Heads of a delta net's queries and keys; divides `delta_heads`. For delta nets, like the next three."""
    delta_key_dim: Annotated[int, Between(1, MANY), DELTA] = 128
    """Width of a query and of a key."""
    delta_value_dim: Annotated[int, Between(1, MANY), DELTA] = 128
    """Width of a value."""
    delta_conv: Annotated[int, Between(1, MANY), DELTA] = 4
    """Tokens over which queries, keys and values are convolved, including the current one."""
    ffn: Annotated[int, Between(1, WIDE), OnlyWith("a dense layer", remark=True)] = 384
    """Width of a dense layer's MLP."""
    dense_layers: Annotated[tuple[int, ...], Between(0), OnlyWith("model.experts above 0", idle=((),))] = ()
    """Numbers of the layers that have a dense MLP. All other layers are MoE layers. Ignored if experts is 0."""
    experts: Annotated[int, Between(0, MANY)] = 0
    """Routed experts per MoE layer; 0 makes every layer dense."""
    top_k: Annotated[int, Between(1, MANY), EXPERTS] = 2
    """Experts per token."""
    expert_ffn: Annotated[int, Between(1, WIDE), EXPERTS] = 128
    """Width of one routed expert."""
    shared_ffn: Annotated[int, Between(0, WIDE), EXPERTS] = 0
    """Width of the shared expert; 0 means none."""
    shared_gate: Annotated[
        bool, OnlyWith("a model with experts", idle=(False,)), OnlyWith("model.shared_ffn above 0", idle=(False,))
    ] = False
    """The shared expert's output is multiplied by the sigmoid of a dot product of the token and a vector."""
    router: Annotated[Literal["softmax", "sigmoid"], EXPERTS] = "softmax"
    """How router logits become scores."""
    routing: Annotated[Literal["learnt", "even"], EXPERTS] = "learnt"
    """How experts are chosen. learnt: by the router's scores. even: an even spread that ignores the scores, to measure
    with a balanced load. The scores weight the experts' outputs in both cases."""
    normalize_top_k: Annotated[bool, EXPERTS] = True
    """Divide the chosen scores by their sum."""
    route_scale: Annotated[float, Between(1e-6, 1e12), EXPERTS] = 1.0
    """Factor on the routing weights."""
    route_groups: Annotated[int, Between(1, MANY), EXPERTS] = 1
    """Equal groups of consecutive experts. A token chooses experts only in `route_top_groups` of them."""
    route_top_groups: Annotated[int, Between(1, MANY), EXPERTS] = 1
    """Groups in which a token chooses experts; 1 of 1 is all of them."""
    route_group_score: Annotated[
        Literal["best", "best_two"], EXPERTS, OnlyWith("model.route_groups above model.route_top_groups")
    ] = "best_two"
    """How groups are chosen. best: by their highest score (DeepSeek-V2). best_two: by the sum of their two highest
    scores (DeepSeek-V3). Scores include balancing biases."""
    router_bias: Annotated[bool, EXPERTS] = False
    """A trained bias of the router's logits."""
    expert_bias: Annotated[bool, EXPERTS] = False
    """Biases of both products of every routed expert."""
    aux_loss: Annotated[float, Between(0), EXPERTS] = 0.0
    """Coefficient of the load-balancing loss."""
    aux_loss_over: Annotated[
        Literal["microbatch", "sequence", "batch"], EXPERTS, OnlyWith("model.aux_loss above 0", idle=("microbatch",))
    ] = "microbatch"
    """Tokens over which the load-balancing loss balances: those of a microbatch, of each sequence, or of a whole step,
    over all microbatches and ranks. The loss over a batch uses the loads of the previous step."""
    z_loss: Annotated[float, Between(0), EXPERTS] = 0.0
    """Coefficient of the router's z-loss, which keeps its logits small."""
    bias_rate: Annotated[float, Between(0), EXPERTS, OnlyWith("model.routing = learnt", remark=True)] = 0.0
    """Change per step of the bias that balances the load without a loss; 0 means no bias."""
    tied: bool = False
    """The head uses the embedding's weights. If the two are on different pipeline ranks, both hold them, and update
    them alike."""
    swiglu_limit: Annotated[float, Between(0, 1e6)] = 0.0
    """Above 0 every MLP and expert computes `gate * sigmoid(swiglu_alpha * gate) * (up + 1)`, with gates clamped from
    above at this value and ups to plus and minus it. 0 computes `silu(gate) * up`."""
    swiglu_alpha: Annotated[float, Between(1e-6, 1e6), OnlyWith("model.swiglu_limit above 0")] = 1.702
    """For SwiGLU with a limit: factor on the gate."""
    window: Annotated[
        int,
        Between(0, LONG),
        OnlyWith("other layers than model.full_layers", idle=(0,)),
        OnlyWith("data.sequence_length above model.window", idle=(0,), remark=True),
    ] = 0
    """Number of tokens, up to and including itself, that a token attends to. 0 means all before it."""
    full_layers: Annotated[
        tuple[int, ...], Between(0), OnlyWith("model.window above 0, or model.delta_heads above 0", idle=((),))
    ] = ()
    """Numbers of the layers with full attention. The others have a window, or with `delta_heads` a gated delta net.
    Ignored if there is neither."""
    sinks: bool = False
    """A learnt logit of each query head that takes part in the softmax without a value."""
    qk_norm: bool = False
    """RMSNorm on queries and keys."""
    qk_norm_over: Annotated[Literal["head", "whole"], OnlyWith("model.qk_norm = True")] = "head"
    """Scope of one norm: each head, with weights that all heads share, or all heads together."""
    qkv_bias: bool = False
    """Biases of queries, keys and values."""
    o_bias: bool = False
    """Bias of attention's output projection."""
    attn_gate: bool = False
    """Attention's output is multiplied by the sigmoid of a projection of the token, before the output projection."""
    norm_plus_one: bool = False
    """Norms multiply by 1 + weight, with weights that start at 0. The norm of a delta net's output does not."""
    norms: Literal["before", "after"] = "before"
    """Position of a layer's norms: before attention and MLP, or after them, on their outputs."""
    rope_theta: Annotated[float, Between(1e-6, 1e12)] = 10000.0
    """Base of the rotary embedding."""
    rope: RopeConfig = PLAIN
    """Further settings of rotary positions."""
    norm_eps: Annotated[float, Between(1e-30, 1e30)] = 1e-6
    """Epsilon of RMSNorm."""
    init: Literal["gpt2", "torchtitan"] = "gpt2"
    """How initial weights are drawn (docs/models.md). Models wider than a few hundred need torchtitan."""
    init_std: Annotated[float, Between(0)] = 0.02
    """Standard deviation of the initial weights, unless `init` defines another."""
    weights: str = ""
    """Hugging Face folder of the initial weights; `hocket import` sets it. Empty draws them."""

    @property
    def latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.kv_lora_rank > 0

    @property
    def key_width(self) -> int:
        """Width of a query and of a key."""
        return self.qk_rope_head_dim + self.qk_nope_head_dim if self.latent else self.head_dim

    def kinds(self) -> tuple[Literal["dense", "moe"], ...]:
        """The kind of every layer."""
        dense = set(self.dense_layers) if self.experts else set(range(self.layers))
        return tuple("dense" if i in dense else "moe" for i in range(self.layers))

    @property
    def has_experts(self) -> bool:
        """Whether some layer is a MoE layer."""
        return "moe" in self.kinds()

    def windows(self) -> tuple[int, ...]:
        """The window of every layer; 0 for none."""
        full = set(self.full_layers)
        return tuple(0 if i in full else self.window for i in range(self.layers))

    def deltas(self) -> tuple[bool, ...]:
        """Whether each layer has a gated delta net in place of attention."""
        full = set(self.full_layers)
        return tuple(self.delta_heads > 0 and i not in full for i in range(self.layers))

    def layer_kinds(self) -> tuple[str, ...]:
        """The kinds of layers that plans distinguish: `kinds`, and whether there is a window or a delta net."""
        suffixes = [
            "_delta" if delta else "_window" if window else ""
            for delta, window in zip(self.deltas(), self.windows(), strict=True)
        ]
        return tuple(kind + more for kind, more in zip(self.kinds(), suffixes, strict=True))


_SHARED = {
    "model.kv_heads": "model.heads",
    "model.delta_key_heads": "model.delta_heads",
    "model.route_groups": "model.experts",
    "mesh.ep": "model.experts",
}
"""Setting -> the size that it divides."""
_CHOSEN = {"model.top_k": "model.experts", "model.route_top_groups": "model.route_groups"}
"""Setting -> the size that limits it."""


def _uneven(c: Any, h: Host, it: str) -> bool:
    return not (c.model.latent and it == "model.kv_heads") and leaf(c, _SHARED[it]) % leaf(c, it) != 0


MODEL_RULES: tuple[Rule | Each, ...] = (
    Each(
        _SHARED,
        ("{what}", "{it}"),
        _uneven,
        "{what} = {{what}} cannot be spread evenly over {it} = {{it}}",
        "make {what} a multiple of {it}, or a {it} that divides {what}",
    ),
    Each(
        _CHOSEN,
        ("{it}", "{what}"),
        lambda c, h, it: leaf(c, it) > leaf(c, _CHOSEN[it]) > 0,
        "a token cannot choose {{it}} of {what} = {{what}}",
        "{it} at most {what}",
    ),
    Each(
        {"model.head_dim": "", "model.qk_rope_head_dim": ""},
        ("{it}", "model.kv_lora_rank"),
        lambda c, h, it: c.model.latent == (it == "model.qk_rope_head_dim") and leaf(c, it) % 2 != 0,
        "the rotary embedding turns pairs of elements",
        "an even {it}",
    ),
    Each(
        {"model.hidden": "", "model.expert_ffn": ""},
        ("{it}", "precision.compute"),
        lambda c, h, it: c.model.has_experts and leaf(c, it) * c.element_bytes % 16 != 0,
        "products of experts need rows of a multiple of 16 bytes, and {precision.compute} has {element_bytes} "
        "per element",
        "make {it} a multiple of {unit}",
    ),
    Each(
        {"model.dense_layers": "", "model.full_layers": "", "model.rope.without": ""},
        ("{it}", "model.layers"),
        lambda c, h, it: any(layer >= c.model.layers for layer in leaf(c, it)),
        "it names layers that do not exist; they are numbered 0 to {last_layer}",
        "{it} with smaller numbers, or more model.layers",
    ),
    Each(
        {
            "model.qk_norm": "norms of its heads, but of its latents",
            "model.qkv_bias": "biases",
            "model.o_bias": "biases",
            "model.sinks": "sinks",
            "model.attn_gate": "gates",
            "model.norm_plus_one": "norms with one added to their weights",
            "model.window": "windows",
            "model.delta_heads": "delta nets in other layers",
            "model.rope.width": "width of its own that rotates: model.qk_rope_head_dim has",
        },
        ("{it}", "model.kv_lora_rank"),
        lambda c, h, it: c.model.latent and bool(leaf(c, it)),
        "latent attention has no {what}",
        "leave {it} out, or model.kv_lora_rank = 0",
    ),
    Rule(
        ("model.norms", "model.experts"),
        lambda c, h: c.model.norms == "after" and c.model.has_experts,
        "layers with experts have their norms before attention and experts",
        "model.norms = before, or model.experts = 0",
    ),
    Rule(
        ("model.window",),
        lambda c, h: c.model.window == 1,
        "a token that attends to itself alone needs no queries and keys, and flash attention has no such window",
        "model.window = 0, which means all tokens before it, or model.window = 2 or more",
    ),
    Rule(
        ("model.delta_heads", "model.window"),
        lambda c, h: c.model.delta_heads > 0 and c.model.window > 0,
        "layers that are not model.full_layers have either a window or a delta net",
        "model.window = 0, or model.delta_heads = 0",
    ),
    Rule(
        ("model.delta_heads", "train.device"),
        lambda c, h: any(c.model.deltas()) and c.train.device == "cuda" and bool(h.no_delta_kernels),
        "torch's operations compute gated delta nets, which is slow: {host.no_delta_kernels}",
        "pip install hocket[linear], and what it needs here",
        remark=True,
    ),
    Rule(
        ("model.delta_heads", "train.device", "precision.compute"),
        lambda c, h: any(c.model.deltas()) and c.train.device == "cuda" and c.precision.compute == "fp32",
        "torch's operations compute gated delta nets in fp32, which is slow: kernels take bf16",
        "precision.compute = bf16",
        remark=True,
    ),
    # Experts
    Rule(
        ("model.route_top_groups", "model.top_k", "model.route_groups"),
        lambda c, h: (
            c.model.has_experts
            and c.model.top_k <= c.model.experts
            and c.model.top_k * c.model.route_groups > c.model.experts * c.model.route_top_groups
        ),
        "{model.route_top_groups} of {model.route_groups} groups have fewer than model.top_k = {model.top_k} of the "
        "{model.experts} experts",
        "more model.route_top_groups, or fewer model.route_groups",
    ),
    Rule(
        ("model.route_group_score", "model.route_groups"),
        lambda c, h: (
            c.model.route_group_score == "best_two"
            and c.model.route_top_groups < c.model.route_groups == c.model.experts
        ),
        "a group of one expert has no two scores",
        "model.route_group_score = best, or fewer model.route_groups",
    ),
    # Rotary positions
    Rule(
        ("model.rope.width", "model.head_dim"),
        lambda c, h: not c.model.latent and (c.model.rope.width % 2 != 0 or c.model.rope.width > c.model.head_dim),
        "pairs of elements rotate, and a head has {model.head_dim}",
        "an even model.rope.width up to model.head_dim, or model.rope.width = 0, which turns all of them",
    ),
    Rule(
        ("model.rope.original_positions", "model.rope.kind"),
        lambda c, h: c.model.rope.kind in ("llama3", "yarn") and c.model.rope.original_positions == 0,
        "{model.rope.kind} goes by how often a pair turns in the positions that the model was trained on first",
        "model.rope.original_positions above 0, or model.rope.kind = default",
    ),
    Rule(
        ("model.rope.high_frequency", "model.rope.low_frequency"),
        lambda c, h: c.model.rope.kind == "llama3" and c.model.rope.high_frequency <= c.model.rope.low_frequency,
        "pairs between the two are slowed down in part, and model.rope.low_frequency is {model.rope.low_frequency}",
        "model.rope.high_frequency above model.rope.low_frequency",
    ),
    Rule(
        ("model.rope.beta_fast", "model.rope.beta_slow"),
        lambda c, h: c.model.rope.kind == "yarn" and c.model.rope.beta_slow > c.model.rope.beta_fast,
        "pairs between the two are slowed down in part, and model.rope.beta_slow is {model.rope.beta_slow}",
        "model.rope.beta_fast at least model.rope.beta_slow",
    ),
    Rule(
        ("model.rope_theta", "model.rope.kind"),
        lambda c, h: c.model.rope.kind == "yarn" and c.model.rope_theta == 1,
        "all pairs turn alike, and yarn slows down those that turn less often than others",
        "another model.rope_theta, or model.rope.kind = default",
    ),
)

MODEL_WORDS: Words = {
    "last_layer": lambda c, h: c.model.layers - 1,
    "unit": lambda c, h: 16 // c.element_bytes,
}


SOURCES = {
    "gpt2": "Radford et al. 2019, GPT-2, section 2.3",
    "torchtitan": "torchtitan's Llama 3, Qwen3 and DeepSeek-V3, torchtitan/models/common/param_init.py",
}


def spreads(name: str, model: ModelConfig) -> tuple[float, float]:
    """Standard deviations of a weight's initial values: for gate and up stacked in one weight, of each of the two.

    With `gpt2` all weights have `init_std`, except projections onto the residual stream, which have it divided by
    sqrt(2 * layers). So the stream's variance does not grow with depth.

    With `torchtitan` embeddings have 1. Much smaller ones are dominated by the first layers' outputs, which are similar
    for all tokens, and routers then send all tokens to the same experts. The head has hidden ** -0.5, and so has a tied
    embedding. Layer i, counted from 0, draws `wo`, `w_down`, the up half of `w_gate_up`, and its router with `init_std`
    / sqrt(2 * (i + 1)). Unlike the original, the head's values are not truncated at three standard deviations.
    """
    std, leaf = model.init_std, name.rsplit(".", 1)[-1]
    if model.init == "gpt2":
        return (std / (2 * model.layers) ** 0.5 if leaf in ("wo", "w_out", "w_down") else std,) * 2
    unit, number, *_ = name.split(".")
    if unit in ("embed", "head"):
        return (1.0 if unit == "embed" and not model.tied else model.hidden**-0.5,) * 2
    deep = std / (2 * (int(number) + 1)) ** 0.5
    first = deep if leaf in ("wo", "w_out", "w_down") or name.endswith("router.weight") else std
    return first, deep if leaf == "w_gate_up" else first


def described(model: ModelConfig) -> str:
    """The origin of the initial weights, for explanations."""
    if model.weights:
        return f"no effect: first values are read from {model.weights}"
    outs = ["w_out" if delta else "wo" for delta in model.deltas()]
    known = ["embed.weight", "head.weight", *(f"layers.{i}.attn.{outs[i]}" for i in (0, model.layers - 1))]
    known += ["layers.0.router.weight"] if len(set(model.kinds()) - {"dense"}) else []
    each = ", ".join(f"{name} {spreads(name, model)[0]:.3g}" for name in dict.fromkeys(known))
    return f"standard deviations are {model.init_std:g}, but {each} ({SOURCES[model.init]})"
