"""Every setting there is, as frozen dataclasses. A run is one `Config`; a recipe is a function that returns one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from hocket.gpus import GpuName
from hocket.variables import Policy

Switch = Literal["auto", "on", "off"]

Strategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
"""What of a model data-parallel ranks share, from nothing to everything. See docs/fsdp.md, Strategies."""

Update = Literal["auto", "end", "next_step"]
"""When the weights of a planned step are updated. See docs/overlap.md, Updates."""

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
"""What a process group is for. Every purpose has groups of its own, so no two lanes share one."""

Steps = list[tuple[int, int]]
"""Ranks as sums of multiples, the first of which varies slowest: how many multiples, and of what."""

COPIED: dict[str, tuple[Purpose, ...]] = {
    "copy_engine": ("gather_dense", "reduce_dense", "gather_experts", "reduce_experts", "a2a", "pp_fwd", "pp_bwd"),
    "copy_engine_gathers": ("gather_dense", "gather_experts"),
}
"""Transports that use copy engines -> the purposes of the groups that these serve. All others are on NCCL's kernels."""

BYTES, BYTE_VOCAB = "bytes", 256
"""The tokenizer that needs no file, and its number of tokens."""
LABELS = {"null": "no communication", "slow": "emulated network"}
"""Transports that are for measuring -> the words that mark whatever they touch, so that nobody takes it for more."""


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
    ffn: int = 384
    """Width of a dense layer's MLP."""
    dense_layers: tuple[int, ...] = ()
    """Numbers of the layers that have a dense MLP; all others are MoE layers. Ignored if experts is 0."""
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
    """Who chooses experts: the router's scores, or an even spread that ignores them, to measure with a balanced load;
    scores weigh the experts' outputs either way."""
    normalize_top_k: bool = True
    """Divide the chosen scores by their sum."""
    route_scale: float = 1.0
    """Factor on the routing weights."""
    aux_loss: float = 0.0
    """Coefficient of the load-balancing loss."""
    bias_rate: float = 0.0
    """Step of the bias that balances the load without a loss; 0 means no bias."""
    tied: bool = False
    """The head uses the embedding's weights. Needs pp = 1."""
    qk_norm: bool = False
    """RMSNorm on each head's queries and keys."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding."""
    norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""

    def kinds(self) -> tuple[Literal["dense", "moe"], ...]:
        """The kind of every layer."""
        dense = set(self.dense_layers) if self.experts else set(range(self.layers))
        return tuple("dense" if i in dense else "moe" for i in range(self.layers))


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How ranks are arranged. world = pp * dp * tp, and ep divides dp."""

    pp: int = 1
    """Pipeline ranks."""
    dp: int = 1
    """Data-parallel ranks of each pipeline rank; dense weights are sharded over them, or over `shard` of them."""
    ep: int = 1
    """Expert-parallel ranks inside dp; expert weights are sharded over the remaining dp / ep * tp."""
    tp: int = 1
    """Tensor-parallel ranks of each data-parallel one: they share its sequences, heads, MLP columns and vocabulary."""
    shard: int = 0
    """Data-parallel ranks that share one copy of the weights, neighbours, a multiple of ep; 0 means all of them. With
    fewer than dp there are dp / shard replicas: gathers and reduces stay among shard ranks, such as those of a host,
    and a step's gradients are summed over replicas once, behind the last microbatch's reduces (HSDP)."""

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

        Pipeline groups join neighbours. Those of the last rank and the first, and those behind a turn, are left out:
        see `Mesh.groups`.
        """
        row, edp = self.dp * self.tp, max(1, self.dp // self.ep)
        replicas, shard = self.replicas, (self.shard or self.dp) * self.tp
        match purpose:
            case "gather_dense" | "reduce_dense":
                return [(shard // self.tp, self.tp)], [(self.pp * replicas, shard), (self.tp, 1)]
            case "gather_experts" | "reduce_experts":
                members = [(max(1, edp // replicas), self.ep * self.tp), (self.tp, 1)]
                return members, [(self.pp * replicas, shard), (self.ep, self.tp)]
            case "replicas":
                return [(replicas, shard)], [(self.pp, row), (shard, 1)]
            case "a2a":
                return [(self.ep, self.tp)], [(self.pp * edp, self.ep * self.tp), (self.tp, 1)]
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
class HardwareConfig:
    """What computes, for predictions and for what is chosen by them."""

    gpu: Literal["auto", "laptop", GpuName] = "auto"
    """Whose rates, links and memory count. auto is the GPU that the driver names on this host, h200 where there is
    none, and laptop for fp32."""
    measured: str = "auto"
    """File that hocket doctor --measure wrote: its rates take the place of the table's. auto is the one that was kept
    for the GPUs of this host, if all ranks are on it; off is none."""


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """What lies between hosts, for predictions and for what is chosen by them."""

    ranks_per_host: int | Literal["auto"] = "auto"
    """Ranks that share a host: the same number on each, neighbours by their numbers. auto is what torchrun or Slurm
    started here, and all ranks where hocket starts them itself; on GPUs hocket plan takes for granted 8, or the most
    below 8 that divides the ranks."""
    bandwidth: str = "auto"
    """What a rank sends between hosts, and receives at the same time, such as 50GB/s or 400Gb/s: its own adapter's
    share, as NCCL reaches it. auto is 48GB/s: one adapter of 400 Gb/s for each rank."""
    latency: str = "auto"
    """How much longer a message takes to another host than to a rank of the same one, such as 10us. auto is 10us."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How one optimizer step is ordered."""

    order: Literal["auto", "sequential", "1f1b", "interleaved", "zb_h1", "zb_v", "merged_v"] = "auto"
    """Order of microbatches over pipeline ranks; auto picks sequential, 1f1b or interleaved from pp and chunks. zb_h1
    and zb_v fill the bubble with weight gradients; zb_v and merged_v have two chunks per rank, placed as a V, and
    merged_v merges forwards of one with backwards of the other."""
    chunks: int = 1
    """Virtual pipeline stages per rank."""
    layers_per_stage: tuple[int | Literal["auto"], ...] = ("auto",)
    """Layers of every virtual stage; empty splits evenly. auto: so that ranks compute for equally long, embedding and
    head included, where that shortens the step and fits into memory."""
    group: int = 0
    """Microbatches that pass through a chunk before the next chunk's turn, in the interleaved order; 0 means the fewest
    that work: mesh.pp, or 1.5 times as many with a stride of 3."""
    stride: Literal[2, 3] = 2
    """Warm-up steps by which neighbouring ranks of a merged order differ; 3 leaves a p2p transfer a step of its own,
    and keeps more activations."""
    recompute: tuple[Literal["auto", "attn", "experts", "mlp"], ...] = ()
    """Parts of layers that keep only their inputs after forward and run it once more for their backward, which takes
    less memory and more time; attn has the norms, router and shared expert in it. auto: as few as fit into memory."""
    graphs: Switch = "auto"
    """Record a step's calls to the GPU once and replay them as one CUDA graph; the optimizer runs behind it. auto:
    where the host would be late otherwise, and memory allows it."""
    layer_order: str = "auto"
    """Order of parts inside one merged layer step: literature, early_release, wgrad_last, or one spelt out like these
    are in hocket/program/layer.py, such as "cB aF eB dF eW dB eF cF aB uB aW uF". auto: literature, or what simulations
    find shorter where all-to-alls are long."""

    @property
    def split(self) -> tuple[int, ...]:
        """Layers of every virtual stage; empty if they are even, or not chosen yet."""
        return tuple(count for count in self.layers_per_stage if count != "auto")

    @property
    def turning(self) -> bool:
        """Whether the stages go down the ranks and up again, as a V."""
        return self.order in ("zb_v", "merged_v")


@dataclass(frozen=True, kw_only=True)
class DataOverlap:
    """Gathers of weights and reduces of gradients."""

    strategy: Literal["auto", "no_shard", "optim", "optim_grads", "optim_grads_params"] = "optim_grads_params"
    """What data-parallel ranks share instead of each keeping it whole: nothing, the optimizer's state, also gradients,
    or also weights. no_shard and optim keep a step's gradients whole, and reduce them once, in the last microbatch.
    auto shares as little as fits into memory, where that makes a step shorter or moves fewer bytes."""
    prefetch: int = 2
    """Layer passes by which a gather runs ahead of its reader."""
    update: Update = "auto"
    """When weights are updated: end, all of them when a step ends; next_step, unit by unit when the next one begins, on
    a lane of their own, so that first gathers and forwards run beside the updates of other units. auto is next_step
    where copy engines gather and 2% of a step or more is hidden even if forwards gain nothing."""


@dataclass(frozen=True, kw_only=True)
class PipelineOverlap:
    """Sends between pipeline ranks."""

    backward_lane: Switch = "auto"
    """What waits for a gradient from the next pipeline rank: on, the op that reads it; off, the whole merged step that
    it belongs to. auto is on."""
    defer_layers: int | Literal["auto"] = "auto"
    """How many layers of a chunk, the last ones of its backward, compute their weight gradients after the chunk's
    gradient is sent; -1 means all, auto what makes the step shortest."""
    defer_parts: Literal["auto", "attn", "all"] = "auto"
    """Of which parts: attention only, or MLP and experts too."""
    defer_head: int | Literal["auto"] = "auto"
    """For how many microbatches, the last ones, the head's weight gradient (of the vocabulary's projection) waits until
    its rank has nothing else to compute; -1 means all, auto as many as make the step shorter and fit."""


@dataclass(frozen=True, kw_only=True)
class ExpertOverlap:
    """All-to-alls of experts."""

    merge: Switch = "auto"
    """Merge the forward of one microbatch with the backward of another, layer by layer."""
    merge_ends: Switch = "auto"
    """Merge two forwards, or two backwards, where a merged order begins and ends; one more activation in flight."""
    splits: Literal["auto", "host", "device"] = "auto"
    """Who knows how many rows travel to which experts: the host, which waits for it in every layer, or the device
    alone, which needs room of a fixed size. auto: the device in replayed steps."""
    room: float = 2.0
    """Rows that a rank has room for, as a multiple of those of an even load, where splits are known to the device
    alone. A step that needs more is made again with splits that the host knows, and from then on there is more."""
    copies: Literal["auto", "per_expert", "per_rank"] = "auto"
    """How often a token's hidden state is sent: once for each of its experts, or once for each rank that has some of
    them; then that rank sums their outputs. auto sends fewer bytes where compute does not hide them."""


TensorMethod = Literal["auto", "off", "bulk", "ring", "pipeline"]


@dataclass(frozen=True, kw_only=True)
class TensorOverlap:
    """Gathers and sums of tokens inside of tensor-parallel layers: qkv and fc1 gather forward, proj and fc2 sum."""

    method: TensorMethod = "auto"
    """How products and communication are put beside each other, where a layer can: ring gathers piece by piece,
    pipeline sums piece by piece, bulk puts backward's second gather beside what follows. auto leaves it to the roles
    below, and these to the shapes of their layers."""
    pieces: int = 0
    """Pieces of a product, a divisor of mesh.tp; 0 picks the number by the layer's shape."""
    qkv_forward: TensorMethod = "auto"
    """For projections into attention, forward: off or ring; auto takes method."""
    qkv_backward: TensorMethod = "auto"
    """For projections into attention, backward: off, bulk or pipeline."""
    proj_forward: TensorMethod = "auto"
    """For the projection out of attention, forward: off or pipeline."""
    proj_backward: TensorMethod = "auto"
    """For the projection out of attention, backward: off or ring."""
    fc1_forward: TensorMethod = "auto"
    """For projections into an MLP, forward: off or ring. The head does as these do."""
    fc1_backward: TensorMethod = "auto"
    """For projections into an MLP, backward: off, bulk or pipeline."""
    fc2_forward: TensorMethod = "auto"
    """For the projection out of an MLP, forward: off or pipeline."""
    fc2_backward: TensorMethod = "auto"
    """For the projection out of an MLP, backward: off or ring."""


@dataclass(frozen=True, kw_only=True)
class OverlapConfig:
    """What hides communication: one section for each kind, and what serves several."""

    dp: DataOverlap = field(default_factory=DataOverlap)
    """Gathers of weights and reduces of gradients."""
    pp: PipelineOverlap = field(default_factory=PipelineOverlap)
    """Sends between pipeline ranks."""
    ep: ExpertOverlap = field(default_factory=ExpertOverlap)
    """All-to-alls of experts."""
    tp: TensorOverlap = field(default_factory=TensorOverlap)
    """Gathers and sums inside of tensor-parallel layers."""
    on_unmet: Literal["error", "warn"] = "error"
    """What happens to a setting of this section that cannot be had: the run ends, or goes on without it and says so."""
    defer_wgrad: Switch = "auto"
    """Run weight gradients as ops of their own, where the layer order puts them."""
    env: Policy = "set"
    """Environment variables that decide whether communication overlaps, and that are not set: set them for all workers,
    check and say what is missing, or ignore. A value that was set is never changed."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats. Main weights, gradients at rest, the router and the loss are fp32."""

    compute: Literal["auto", "fp32", "bf16"] = "auto"
    """What layers compute in, and what they send: activations and gathered weights. auto is bf16 on GPUs and fp32 on
    CPUs."""
    wire: Literal["auto", "fp32", "bf16"] = "auto"
    """What gradients of weights travel in; auto is what is computed in, to which each rank's gradient is rounded. fp32
    beside bf16 rounds none, for twice the bytes. Where nothing travels, products add to the fp32 gradient. The two
    gradients of a tied embedding are added up in it."""
    averages: Literal["fp32", "bf16"] = "fp32"
    """What AdamW's two averages are kept in between steps. With bf16 a weight takes 8 bytes beside its copies, not 12;
    a step computes in fp32 and rounds to nearest, so no decay rate of train.betas may be close to 1."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text to train on."""

    paths: tuple[str, ...] = ()
    """Files, folders or glob patterns of text; empty means the running Python's own standard library source."""
    tokenizer: str = "bytes"
    """`bytes` (a token per byte), or the path of a JSON file of the `tokenizers` package."""
    sequence_length: int = 128
    """Tokens of one sequence."""
    packing: Literal["off", "on"] = "off"
    """Keep documents that share a sequence apart: attention stays inside of each, positions begin anew, and none is
    asked for the first token of the next. off: a separator is all that stands between them."""
    validation: float = 0.05
    """Share of the tokens that is kept for validation, between 0 and 1."""
    seed: int = 0
    """Seed of the order of documents and sequences."""
    cache: str = ".cache/hocket"
    """Folder for tokenised text."""


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
    """Learning rate of the last step; the way down from `lr` is half a cosine."""
    warmup: int = 10
    """Steps in which the learning rate rises linearly to `lr`."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; vectors (norms, biases) have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's two averages, per step."""
    eps: float = 1e-8
    """AdamW's epsilon, in units of the gradient."""
    clip: float = 1.0
    """Largest norm of the whole gradient; 0 means no clipping."""
    seed: int = 0
    """Seed of the initial weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute; auto takes one GPU per rank if the host has enough of them."""
    transport: Literal["auto", "gloo", "nccl", "copy_engine", "copy_engine_gathers", "null", "slow"] = "auto"
    """How collectives move bytes; with copy_engine gathers, reduces, experts' all-to-alls and pipeline sends take no SM
    from compute, with copy_engine_gathers gathers alone; null pretends to (wrong results, for bounds), slow imitates a
    network. auto is copy_engine where GPUs of one host can have it and a step fits beside its buffers, else nccl; gloo
    on CPUs."""
    slow_groups: tuple[Purpose, ...] = ()
    """Purposes of the groups that the slow transport slows; empty means all but control."""
    slow_latency: tuple[float, ...] = ()
    """Seconds that the slow transport adds to every operation: one number, or one for each of slow_groups."""
    slow_bandwidth: tuple[float, ...] = ()
    """Bytes per second and rank of the imitated network, likewise; 0 means no limit."""
    eval_every: int = 50
    """Steps between validations; 0 means only one at the end."""
    eval_batches: int = 4
    """Batches of one validation, each as large as a step's; 0 means no validation."""
    save_every: int = 0
    """Steps between checkpoints; 0 means only one at the end."""
    keep: int = 2
    """Checkpoints kept; older ones are deleted."""
    log_every: int = 1
    """Steps between printed lines. Every step goes to metrics.jsonl."""
    hang_timeout: float = 300.0
    """Seconds that a rank waits for others before it reports what it waits for and ends."""
    lane_seed: int = 0
    """Seed of the order in which a CPU serves its lanes; any legal order gives the same result."""
    profile: tuple[int, ...] = ()
    """First step and number of steps to record with the profiler; first 0 is soon after the start, empty means none."""

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
    """Name of the run; that of its file or recipe unless it is given."""
    folder: str = ""
    """Folder of metrics, logs and checkpoints; empty means `runs/<name>`, or `runs/<name>-null`."""
    resume: str = "auto"
    """auto continues from the newest complete checkpoint of the folder, off starts over, a path loads that one."""
    port: int = 0
    """TCP port at which ranks meet; 0 picks a free one, or takes what torchrun or Slurm gave."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that defines a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Sizes of the model."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Arrangement of the ranks."""
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    """What computes."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """What lies between hosts."""
    plan: PlanConfig = field(default_factory=PlanConfig)
    """Order of one step."""
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    """What hides communication."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Number formats."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Length, batch, optimizer and machinery."""
    run: RunConfig = field(default_factory=RunConfig)
    """Name and place."""

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch that one rank has between layers."""
        return self.train.sequences * self.data.sequence_length // self.mesh.tp

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the compute dtype, which must not be `auto`."""
        return 2 if self.precision.compute == "bf16" else 4

    @property
    def wire_bytes(self) -> int:
        """Bytes of an element of a gradient of a weight on its way."""
        return {"bf16": 2, "fp32": 4}.get(self.precision.wire, self.element_bytes)
