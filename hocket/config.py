"""All settings, as frozen dataclasses. A run is one `Config`. A recipe is a function that returns a `Config`.

Section `overlap` is in `overlap_config.py`, `optimizer` in `optimizer_config.py`, `model.rope` in `rope_config.py`,
`hardware` and `network` in `hardware_config.py`; this module exports them all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from hocket.hardware_config import HardwareConfig as HardwareConfig
from hocket.hardware_config import NetworkConfig as NetworkConfig
from hocket.optimizer_config import OptimizerConfig as OptimizerConfig
from hocket.overlap_config import DataOverlap as DataOverlap
from hocket.overlap_config import ExpertOverlap as ExpertOverlap
from hocket.overlap_config import OverlapConfig
from hocket.overlap_config import PipelineOverlap as PipelineOverlap
from hocket.overlap_config import Switch as Switch
from hocket.overlap_config import TensorMethod as TensorMethod
from hocket.overlap_config import TensorOverlap as TensorOverlap
from hocket.overlap_config import Update as Update
from hocket.rope_config import RopeConfig as RopeConfig

Strategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
"""Which parts of a model data-parallel ranks shard, from nothing to everything. See docs/fsdp.md, Strategies."""

Purpose = Literal[
    "gather_dense",
    "reduce_dense",
    "gather_experts",
    "reduce_experts",
    "replicas",
    "a2a",
    "tp",
    "pp_fwd",
    "pp_bwd",
    "control",
]
"""The use of a process group. Every purpose has groups of its own, so no two lanes share a group."""

Steps = list[tuple[int, int]]
"""Ranks as sums of multiples: (how many multiples, of which number) for each. The first varies slowest."""

COPIED: dict[str, tuple[Purpose, ...]] = {
    "copy_engine": ("gather_dense", "reduce_dense", "gather_experts", "reduce_experts", "a2a", "pp_fwd", "pp_bwd"),
    "copy_engine_gathers": ("gather_dense", "gather_experts"),
}
"""Transports that use copy engines -> purposes of the groups that copy engines serve. NCCL's kernels serve the
others."""

BYTES, BYTE_VOCAB = "bytes", 256
"""The tokenizer that needs no file, and its number of tokens."""
LABELS = {"null": "no communication", "slow": "emulated network"}
"""Transports that only serve measurements -> the words that mark all results made with them."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of a decoder transformer. All widths are in elements."""

    vocab: int = 256
    """Number of tokens."""
    hidden: int = 128
    """Width of the residual stream."""
    layers: int = 4
    """Number of transformer layers."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 2
    """Key and value heads; divides `heads`."""
    head_dim: int = 32
    """Width of one head."""
    kv_lora_rank: int = 0
    """Width of the latent of which multi-head latent attention makes keys and values; 0 means plain attention. With it
    `heads` have keys and values of their own, `qk_rope_head_dim` + `qk_nope_head_dim` and `v_head_dim` wide."""
    q_lora_rank: int = 0
    """Width of the latent of which latent attention makes queries; 0 makes them of the hidden state."""
    qk_nope_head_dim: int = 128
    """Elements of each query and key without position. Of latent attention, as the next two."""
    qk_rope_head_dim: int = 64
    """Elements of each query and key that rotate. Those of keys are one for all heads."""
    v_head_dim: int = 128
    """Width of each head's values."""
    ffn: int = 384
    """Width of a dense layer's MLP."""
    dense_layers: tuple[int, ...] = ()
    """Numbers of the layers that have a dense MLP. All other layers are MoE layers. Ignored if experts is 0."""
    experts: int = 0
    """Routed experts per MoE layer; 0 makes every layer dense."""
    top_k: int = 2
    """Experts per token."""
    expert_ffn: int = 128
    """Width of one routed expert."""
    shared_ffn: int = 0
    """Width of the shared expert; 0 means none."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become scores."""
    routing: Literal["learnt", "even"] = "learnt"
    """How experts are chosen. learnt: by the router's scores. even: an even spread that ignores the scores, to measure
    with a balanced load. The scores weigh the experts' outputs in both cases."""
    normalize_top_k: bool = True
    """Divide the chosen scores by their sum."""
    route_scale: float = 1.0
    """Factor on the routing weights."""
    route_groups: int = 1
    """Groups of neighbouring experts, all as large. A token chooses experts in `route_top_groups` of them only."""
    route_top_groups: int = 1
    """Groups in which a token chooses experts; 1 of 1 is all of them."""
    route_group_score: Literal["best", "best_two"] = "best_two"
    """How groups are chosen. best: by their highest score (DeepSeek-V2). best_two: by the sum of their two highest
    scores (DeepSeek-V3). Where there are biases, by scores with them."""
    router_bias: bool = False
    """A bias of the router's logits, which is trained like a weight."""
    expert_bias: bool = False
    """Biases of both products of every routed expert."""
    aux_loss: float = 0.0
    """Coefficient of the load-balancing loss."""
    aux_loss_over: Literal["microbatch", "sequence", "batch"] = "microbatch"
    """Tokens over which the load-balancing loss balances: those of a microbatch, of each sequence, or of a whole step,
    over all microbatches and data-parallel ranks. The loss over a batch goes by the loads of the step before."""
    z_loss: float = 0.0
    """Coefficient of the router's z-loss, which keeps its logits small."""
    bias_rate: float = 0.0
    """Size of one change of the bias that balances the load without a loss; 0 means no bias."""
    tied: bool = False
    """The head uses the embedding's weights. Needs pp = 1."""
    swiglu_limit: float = 0.0
    """Above 0 every MLP and expert computes `gate * sigmoid(swiglu_alpha * gate) * (up + 1)`, with gates cut off at
    this and ups at plus and minus this. 0 computes `silu(gate) * up`."""
    swiglu_alpha: float = 1.702
    """Of SwiGLU with a limit: factor on the gate."""
    window: int = 0
    """Tokens to which a token attends, itself and those before it. 0 means all before it."""
    full_layers: tuple[int, ...] = ()
    """Numbers of the layers that have no window. Ignored if window is 0."""
    sinks: bool = False
    """A learnt logit of each query head that takes part in the softmax and has no value."""
    qk_norm: bool = False
    """RMSNorm on queries and keys."""
    qk_norm_over: Literal["head", "whole"] = "head"
    """What has one norm: each head, with weights that all heads share, or all heads together."""
    qkv_bias: bool = False
    """Biases of queries, keys and values."""
    o_bias: bool = False
    """Bias of what attention adds to the residual stream."""
    norms: Literal["before", "after"] = "before"
    """Where the norms of a layer are: before attention and MLP, or behind them, on what they add to the stream."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding."""
    rope: RopeConfig = RopeConfig()  # noqa: RUF009 (frozen)
    """What else there is to rotary positions."""
    norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    init: Literal["gpt2", "torchtitan"] = "gpt2"
    """How first values are drawn (docs/models.md). Models wider than a few hundred need torchtitan."""
    init_std: float = 0.02
    """Standard deviation of the initial weights, where `init` gives no other."""
    weights: str = ""
    """Folder of Hugging Face whose weights are the first values; `hocket import` sets it. Empty draws them."""

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

    def windows(self) -> tuple[int, ...]:
        """The window of every layer; 0 for none."""
        full = set(self.full_layers)
        return tuple(0 if i in full else self.window for i in range(self.layers))

    def layer_kinds(self) -> tuple[str, ...]:
        """Names of the kinds of layers that plans tell apart: `kinds`, and whether there is a window."""
        named = zip(self.kinds(), self.windows(), strict=True)
        return tuple(f"{kind}_window" if window else kind for kind, window in named)


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How ranks are arranged. There are pp * dp * tp ranks. ep divides dp * tp."""

    pp: int = 1
    """Pipeline ranks."""
    dp: int = 1
    """Data-parallel ranks of each pipeline rank. Dense weights are sharded over them, or over `shard` of them."""
    ep: int = 1
    """Expert-parallel ranks: neighbours among the dp * tp ranks of a pipeline rank, whose tokens all differ. Expert
    weights are sharded over the remaining dp * tp / ep ranks."""
    tp: int = 1
    """Tensor-parallel ranks of each data-parallel rank. They share its sequences, heads, MLP columns and vocabulary."""
    shard: int = 0
    """Neighbouring data-parallel ranks that share one copy of the weights; 0 means all of them. ep divides shard * tp.
    If it is less than dp, there are dp / shard replicas (HSDP). Gathers and reduces then stay among shard ranks, such
    as those of a host. A step sums its gradients over the replicas once, after the last microbatch's reduces."""

    @property
    def replicas(self) -> int:
        """Copies of the weights among the data-parallel ranks."""
        return self.dp // (self.shard or self.dp)

    @property
    def world(self) -> int:
        """All ranks."""
        return self.pp * self.dp * self.tp

    def grid(self, purpose: Purpose) -> tuple[Steps, Steps]:
        """The groups for a purpose: (members of a group, counted from its first; first members of all groups).

        Pipeline groups join neighbours. This leaves out the groups that join the last rank with the first, and the
        groups behind a turn: see `Mesh.groups`.
        """
        row, shard, replicas = self.dp * self.tp, (self.shard or self.dp) * self.tp, self.replicas
        match purpose:
            case "gather_dense" | "reduce_dense":
                return [(shard // self.tp, self.tp)], [(self.pp * replicas, shard), (self.tp, 1)]
            case "gather_experts" | "reduce_experts":
                return [(max(1, shard // self.ep), self.ep)], [(self.pp * replicas, shard), (self.ep, 1)]
            case "replicas":
                return [(replicas, shard)], [(self.pp, row), (shard, 1)]
            case "a2a":
                return [(self.ep, 1)], [(max(1, self.world // self.ep), self.ep)]
            case "tp":
                return [(self.tp, 1)], [(self.pp * self.dp, self.tp)]
            case "pp_fwd" | "pp_bwd":
                return [(min(self.pp, 2), row)], [(max(self.pp - 1, 1), row), (row, 1)]
            case "control":
                return [(self.world, 1)], []

    def members(self, purpose: Purpose) -> int:
        """Ranks of one group."""
        return math.prod(count for count, _ in self.grid(purpose)[0])


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How one optimizer step is ordered."""

    order: Literal["auto", "sequential", "1f1b", "interleaved", "zb_h1", "zb_v", "merged_v"] = "auto"
    """Order of microbatches over pipeline ranks. auto picks sequential, 1f1b or interleaved from pp and chunks. zb_h1
    and zb_v fill the bubble with weight gradients. zb_v and merged_v have two chunks per rank, placed as a V. merged_v
    merges forwards of one chunk with backwards of the other."""
    chunks: int = 1
    """Virtual pipeline stages per rank."""
    layers_per_stage: tuple[int | Literal["auto"], ...] = ("auto",)
    """Layers of every virtual stage; empty splits evenly. The first stage, with the embedding, and the last, with the
    head, may have 0. auto lets all ranks compute for the same time, embedding and head included, if that shortens the
    step and fits into memory."""
    group: int = 0
    """Microbatches that pass through a chunk before the next chunk's turn, in the interleaved order. 0 means the fewest
    that work: mesh.pp, or 1.5 * mesh.pp with a stride of 3."""
    stride: Literal[2, 3] = 2
    """Warm-up steps by which neighbouring ranks of a merged order differ. 3 gives a p2p transfer a step of its own, and
    keeps more activations."""
    recompute: tuple[str, ...] = ()
    """Parts of layers, out of attn, experts and mlp, that keep only their inputs after forward, and run forward again
    before their backward. That takes less memory and more time. attn includes the norms, the router and the shared
    expert. attn:2 recomputes attn in the first two layers of each virtual stage, and attn in all layers. auto
    recomputes as few parts in as few layers as the memory allows."""
    graphs: Switch = "auto"
    """Record a step's calls to the GPU once and replay them as one CUDA graph. The optimizer runs after the graph. auto
    is on if the host would be late otherwise, and memory allows it."""
    layer_order: str = "auto"
    """Order of parts inside one merged layer step: literature, early_release, wgrad_last, or an order of your own such
    as "cB aF eB dF eW dB eF cF aB uB aW uF" (hocket/program/layer.py spells out the named ones). auto is literature, or
    the order that simulations find shorter where all-to-alls are long."""

    @property
    def split(self) -> tuple[int, ...]:
        """Layers of every virtual stage; empty if they are even, or not chosen yet."""
        return tuple(count for count in self.layers_per_stage if count != "auto")

    @property
    def turning(self) -> bool:
        """Whether the stages go down the ranks and up again, as a V."""
        return self.order in ("zb_v", "merged_v")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats. Main weights, gradients at rest, the router and the loss are fp32."""

    compute: Literal["auto", "fp32", "bf16", "fp8"] = "auto"
    """Format in which layers compute, and in which activations and gathered weights travel. auto is bf16 on GPUs and
    fp32 on CPUs. With fp8, products of attention's and MLPs' linear layers take operands in fp8 (e4m3, a scale for each
    row), and all else is as with bf16: the head, the router, attention itself, what travels. That needs a GPU with
    products in fp8 (Ada, Hopper, or newer); on CPUs the same numbers are made in fp32, slowly."""
    fp8_products: tuple[Literal["forward", "dgrad", "wgrad"], ...] = ("forward", "dgrad", "wgrad")
    """With compute = fp8, which products run in fp8: forward, input gradients (dgrad), weight gradients (wgrad). The
    others run in bf16."""
    fp8_ends: tuple[int, int] = (0, 0)
    """With compute = fp8, how many of the first and of the last layers compute in bf16."""
    wire: Literal["auto", "fp32", "bf16"] = "auto"
    """Format in which gradients of weights travel. auto is the format of compute: each rank rounds its gradient to it.
    fp32 with compute in bf16 rounds no gradient, and moves twice the bytes. Where no gradient travels, products add to
    the fp32 gradient. The two gradients of a tied embedding are added up in this format."""
    averages: Literal["fp32", "bf16"] = "fp32"
    """Format in which AdamW's two averages are kept between steps. With bf16 a weight takes 8 bytes beside its copies,
    not 12. A step computes in fp32 and rounds the averages to nearest, so no decay rate of train.betas may be close
    to 1."""

    @property
    def dtype(self) -> str:
        """Format of activations and gathered weights."""
        return "bf16" if self.compute == "fp8" else self.compute


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text to train on."""

    paths: tuple[str, ...] = ()
    """Files, folders or patterns of text or tokens: docs/data.md. Empty: the source of Python's standard library."""
    sources: str = ""
    """A TOML file of several sources of text with weights, in place of data.paths: docs/data.md."""
    text_key: str = "text"
    """Name of the text, or of the messages of a chat, in a line of JSON or a row of a table."""
    prompt_key: str = ""
    """Name of a text there that stands before the text and is not learnt. Empty: there is none."""
    chat_template: str = ""
    """A file with a template of Jinja that makes text of messages. Empty: that of the tokenizer's folder."""
    tokenizer: str = "bytes"
    """`bytes` (a token per byte), or the path of a JSON file of the `tokenizers` package or of a `.model` of
    sentencepiece, or a folder that has one."""
    sequence_length: int = 128
    """Tokens of one sequence."""
    packing: Literal["off", "on", "best_fit"] = "off"
    """on keeps documents that share a sequence apart: attention stays inside each document, positions begin anew in
    each, and no document has to predict the first token of the next. best_fit does too, cuts no document, and fills
    sequences up with padding. off puts only a separator between documents."""
    validation: float = 0.05
    """Share of the tokens that is kept for validation, between 0 and 1."""
    validation_paths: tuple[str, ...] = ()
    """Files, folders or patterns of text for validation. Then no token of data.paths is kept for it."""
    seed: int = 0
    """Seed of the order of documents and sequences."""
    cache: str = ".cache/hocket"
    """Folder for tokenised text."""
    processes: int = 0
    """Processes that tokenise. 0 is one for each core, and no more than there are pieces of 32 MiB."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length, batch, optimizer and machinery of a run."""

    steps: int = 100
    """Optimizer steps of the whole run, counted from its first start."""
    microbatches: int = 8
    """Microbatches per step on every data-parallel rank."""
    sequences: int = 1
    """Sequences per microbatch. A step consumes dp * microbatches * sequences of them."""
    lr: float = 3e-3
    """Learning rate after the warm-up, the highest of the run."""
    min_lr: float = 3e-4
    """Learning rate of the last step, the lowest behind the warm-up. `min_lr_ratio` takes its place if it is set."""
    min_lr_ratio: float = 0.0
    """The lowest learning rate as a fraction of `lr`; 0 leaves it to `min_lr`."""
    warmup: int = 10
    """Steps in which the learning rate rises linearly to `lr`."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """The way of the learning rate behind the warm-up. cosine and linear: it falls from the warm-up to the last step,
    as half a cosine or along a line. wsd (warm-up, stable, decay): it stays `lr`, and falls in the last `decay` steps.
    constant: it stays `lr`."""
    decay: float = 0.2
    """Of wsd: steps in which the learning rate falls. Below 1 it is a fraction of all steps."""
    decay_shape: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """Of wsd: how the learning rate falls. 1-sqrt is one minus the root of the share of the decay that has passed."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices. Vectors (norms, biases) have none, nor has what `optimizer.no_decay`
    names."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's two averages, per step."""
    eps: float = 1e-8
    """AdamW's epsilon, in units of the gradient."""
    clip: float = 1.0
    """Largest norm of the whole gradient; 0 means no clipping."""
    seed: int = 0
    """Seed of the initial weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute. auto takes one GPU per rank if the host has enough GPUs, else the CPU."""
    transport: Literal["auto", "gloo", "nccl", "copy_engine", "copy_engine_gathers", "null", "slow"] = "auto"
    """How collectives move bytes. With copy_engine, gathers, reduces, the experts' all-to-alls and pipeline sends take
    no SM from compute. With copy_engine_gathers only gathers take none. null moves nothing: its results are wrong, and
    its times are bounds. slow imitates a network. auto is copy_engine if all ranks are GPUs of one host that can use it
    and a step fits beside its buffers, else nccl. On CPUs auto is gloo."""
    slow_groups: tuple[Purpose, ...] = ()
    """Purposes of the groups that the slow transport slows; empty means all but control."""
    slow_latency: tuple[float, ...] = ()
    """Seconds that the slow transport adds to every operation: one number, or one for each of slow_groups."""
    slow_bandwidth: tuple[float, ...] = ()
    """Bytes per second and rank of that network: one number, or one for each of slow_groups; 0 means no limit."""
    eval_every: int = 50
    """Steps between validations; 0 means only one at the end."""
    eval_batches: int = 4
    """Batches of one validation, each as large as a step's; 0 means no validation."""
    save_every: int = 0
    """Steps between checkpoints; 0 means only one at the end."""
    keep: int = 2
    """Checkpoints kept; older ones are deleted. 0 writes none, not even at the end."""
    log_every: int = 1
    """Steps between printed lines. Every step goes to metrics.jsonl."""
    experts_every: int = 0
    """Steps between records of the rows that each expert had; 0 means none. Each step records how even they were."""
    writers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Where metrics go beside metrics.jsonl: files of TensorBoard in the run's folder, an offline run of Weights &
    Biases there, a run of MLflow. Each needs its extra, as in pip install 'hocket[tensorboard]'."""
    hang_timeout: float = 300.0
    """Seconds that a rank waits for other ranks. After that it reports what it waits for, and ends."""
    lane_seed: int = 0
    """Seed of the order in which a CPU serves its lanes. Every legal order gives the same result."""
    profile: tuple[int, ...] = ()
    """First step and number of steps to profile. First step 0 is soon after the start; empty profiles none."""

    @property
    def lowest_lr(self) -> float:
        """Learning rate at the end of the decay."""
        return self.lr * self.min_lr_ratio if self.min_lr_ratio else self.min_lr

    @property
    def decay_steps(self) -> int:
        """Steps in which wsd lets the learning rate fall."""
        return max(1, round(self.decay * self.steps)) if self.decay < 1 else int(self.decay)

    def slow_links(self) -> dict[Purpose, tuple[float, float]]:
        """Latency in seconds and bandwidth in bytes per second (inf: no limit) by purpose, for the slow transport."""
        purposes = self.slow_groups or tuple(p for p in get_args(Purpose) if p != "control")
        latencies, bandwidths = (
            values * len(purposes) if len(values) == 1 else values or (0.0,) * len(purposes)
            for values in (self.slow_latency, self.slow_bandwidth)
        )
        return {p: (x, y or math.inf) for p, x, y in zip(purposes, latencies, bandwidths, strict=True)}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Name and place of a run."""

    name: str = "run"
    """Name of the run. Without it the run has the name of its file or recipe."""
    folder: str = ""
    """Folder of metrics, logs and checkpoints; empty means `runs/<name>`, or `runs/<name>-null`."""
    resume: str = "auto"
    """auto continues from the newest complete checkpoint of the folder. off starts over. A path loads that
    checkpoint."""
    port: int = 0
    """TCP port at which ranks meet. 0 takes the port that torchrun or Slurm gave, or picks a free one."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that defines a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Sizes of the model."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Arrangement of the ranks."""
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    """GPUs that predictions assume."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """Network between hosts that predictions assume."""
    plan: PlanConfig = field(default_factory=PlanConfig)
    """Order of one step."""
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    """How communication is hidden."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Number formats."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Length, batch, optimizer and machinery."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """What the optimizer does with which weights."""
    run: RunConfig = field(default_factory=RunConfig)
    """Name and place."""

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch that one rank holds between layers."""
        return self.train.sequences * self.data.sequence_length // self.mesh.tp

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the compute dtype, which must not be `auto`."""
        return 2 if self.precision.dtype == "bf16" else 4

    @property
    def wire_bytes(self) -> int:
        """Bytes of an element of a weight's gradient while it travels."""
        return {"bf16": 2, "fp32": 4}.get(self.precision.wire, self.element_bytes)
