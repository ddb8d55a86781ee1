"""Section `mesh`: how ranks are arranged, the purposes of their groups, and which axes can be combined."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from hocket.config.rule import MOST_RANKS, Between, Each, Host, Rule, Words, leaf

Strategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
"""What data-parallel ranks shard, from nothing to everything. See docs/fsdp.md, Strategies."""

Purpose = Literal[
    "gather_dense",
    "reduce_dense",
    "gather_experts",
    "reduce_experts",
    "replicas",
    "a2a",
    "tp",
    "cp",
    "pp_fwd",
    "pp_bwd",
    "control",
]
"""The purpose of a process group. Every purpose has its own groups, so no two lanes share a group."""

Steps = list[tuple[int, int]]
"""Ranks as sums of multiples: (how many multiples, of which number) for each. The first varies slowest."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How ranks are arranged. There are pp * dp * cp * tp ranks. ep divides dp * cp * tp."""

    pp: Annotated[int, Between(1, 1024)] = 1
    """Pipeline ranks."""
    dp: Annotated[int, Between(1, MOST_RANKS)] = 1
    """Data-parallel ranks of each pipeline rank. Dense weights are sharded over dp * cp ranks, or over `shard` of
    them."""
    cp: Annotated[int, Between(1, MOST_RANKS)] = 1
    """Context-parallel ranks of each data-parallel rank: each has 2 of 2 * cp chunks of every sequence, or with
    data.packing chunks balanced by documents. Layers gather keys and values of the other chunks before attention."""
    ep: Annotated[int, Between(1, MOST_RANKS)] = 1
    """Expert-parallel ranks: neighbours among the dp * cp * tp ranks of a pipeline rank, whose tokens all differ.
    Expert weights are sharded over the remaining dp * cp * tp / ep ranks."""
    tp: Annotated[int, Between(1, MOST_RANKS)] = 1
    """Tensor-parallel ranks of each context-parallel rank. They share its tokens, heads, MLP columns and vocabulary."""
    shard: Annotated[int, Between(0, MOST_RANKS)] = 0
    """Consecutive ranks among the dp * cp ranks that share one copy of the weights; 0 means all of them. ep divides
    shard * tp. If it is less than dp * cp, there are dp * cp / shard replicas (HSDP). Gathers and reduces then stay
    among shard ranks, such as those of a host. A step sums its gradients over the replicas once, after the last
    microbatch's reduces."""

    @property
    def data(self) -> int:
        """Ranks of a pipeline rank that have different tokens, and shard the weights."""
        return self.dp * self.cp

    @property
    def replicas(self) -> int:
        """Copies of the weights among the dp * cp ranks."""
        return self.data // (self.shard or self.data)

    @property
    def world(self) -> int:
        """All ranks."""
        return self.pp * self.data * self.tp

    def grid(self, purpose: Purpose) -> tuple[Steps, Steps]:
        """The groups for a purpose: (members of a group, relative to its first; first members of all groups).

        Pipeline groups are pairs of neighbours. The pair of the last rank and the first, and the groups of a V order,
        are not included: see `Mesh.groups`.
        """
        row, shard, replicas = self.data * self.tp, (self.shard or self.data) * self.tp, self.replicas
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
                return [(self.tp, 1)], [(self.pp * self.data, self.tp)]
            case "cp":
                return [(self.cp, self.tp)], [(self.pp * self.dp, self.cp * self.tp), (self.tp, 1)]
            case "pp_fwd" | "pp_bwd":
                return [(min(self.pp, 2), row)], [(max(self.pp - 1, 1), row), (row, 1)]
            case "control":
                return [(self.world, 1)], []

    def members(self, purpose: Purpose) -> int:
        """Ranks of one group."""
        return math.prod(count for count, _ in self.grid(purpose)[0])


RANKS_OF_A_CORE = 8
"""Most ranks per CPU core that hocket starts if they compute on CPUs: they share the core, and each has its own memory.
Ranks started by torchrun and Slurm are not limited."""


def _uneven(c: Any, h: Host, it: str) -> bool:
    """Whether a size of the model cannot be divided evenly among tensor-parallel ranks."""
    there = {"model.ffn": "dense" in c.model.kinds(), "model.delta_key_heads": any(c.model.deltas())}
    return there.get(it, True) and leaf(c, it) % c.mesh.tp != 0


MESH_RULES: tuple[Rule | Each, ...] = (
    Rule(
        ("mesh.ep", "mesh.dp", "mesh.tp"),
        lambda c, h: c.mesh.data * c.mesh.tp % c.mesh.ep != 0,
        "expert-parallel ranks are on one pipeline rank, and {mesh.ep} does not divide mesh.dp = {mesh.dp}{others}",
        "make mesh.dp x mesh.cp x mesh.tp a multiple of mesh.ep",
    ),
    Rule(
        ("mesh.ep", "model.experts"),
        lambda c, h: c.mesh.ep > 1 and not c.model.has_experts,
        "the model has no MoE layer whose experts could be spread over {mesh.ep} ranks",
        "mesh.ep = 1, or a model with experts",
    ),
    Rule(
        ("mesh.shard", "mesh.dp"),
        lambda c, h: c.mesh.shard > 0 and c.mesh.data % c.mesh.shard != 0,
        "{mesh.shard} ranks cannot share each copy of the weights of mesh.dp = {mesh.dp}{contexts} ranks",
        "a mesh.shard that divides mesh.dp x mesh.cp, or leave mesh.shard out",
    ),
    Rule(
        ("mesh.shard", "mesh.ep", "mesh.tp"),
        lambda c, h: c.mesh.shard * c.mesh.tp % c.mesh.ep != 0,
        "a copy of the weights has all experts, which are on mesh.ep = {mesh.ep} ranks, and {mesh.ep} does not divide "
        "mesh.shard = {mesh.shard}{tensors}",
        "make mesh.shard x mesh.tp a multiple of mesh.ep, or leave mesh.shard out",
    ),
    Rule(
        ("mesh.shard", "overlap.dp.strategy"),
        lambda c, h: c.mesh.replicas > 1 and (c.mesh.shard == 1 or c.overlap.dp.strategy == "no_shard"),
        "every rank has a copy of all weights of its own then, so there is nothing that {mesh.shard} ranks could share",
        "overlap.dp.strategy = no_shard without mesh.shard, or another overlap.dp.strategy and mesh.shard = 2 or more",
    ),
    # Tensor-parallel ranks
    Each(
        {
            "model.heads": "query heads",
            "model.vocab": "tokens of the vocabulary",
            "model.shared_ffn": "columns of the shared expert",
            "model.ffn": "columns of the MLP",
            "model.delta_key_heads": "key heads of delta nets",
        },
        ("mesh.tp", "{it}"),
        _uneven,
        "each tensor-parallel rank has {what} of its own, and {{it}} cannot be spread evenly over mesh.tp = {mesh.tp}",
        "a mesh.tp that divides {it}",
    ),
    Rule(
        ("mesh.tp", "model.kv_heads"),
        lambda c, h: not c.model.latent and c.model.kv_heads % c.mesh.tp != 0 and c.mesh.tp % c.model.kv_heads != 0,
        "tensor-parallel ranks have as many of the {model.kv_heads} key and value heads each, or as many ranks share "
        "each of them, and neither goes with {mesh.tp}",
        "a mesh.tp that divides model.kv_heads, or a mesh.tp that is a multiple of model.kv_heads",
    ),
    Rule(
        ("mesh.tp", "data.sequence_length", "train.sequences"),
        lambda c, h: c.train.sequences * c.data.sequence_length // c.mesh.cp % c.mesh.tp != 0,
        "the tokens of a microbatch ({train.sequences} x {data.sequence_length}{shares}) cannot be spread evenly over "
        "{mesh.tp} ranks",
        "a mesh.tp that divides train.sequences x data.sequence_length{shares}",
    ),
    Rule(
        ("plan.loss_pieces", "mesh.tp"),
        lambda c, h: c.plan.pieces > 1 and c.mesh.tp > 1,
        "each tensor-parallel rank has a part of the vocabulary, and logits of all tokens in it",
        "plan.loss_pieces = 1, or mesh.tp = 1",
    ),
    Rule(
        ("optimizer.name", "mesh.tp"),
        lambda c, h: c.optimizer.name == "muon" and c.mesh.tp > 1,
        "tensor-parallel ranks have parts of matrices, and Muon puts together what data-parallel ranks share",
        "mesh.tp = 1, or optimizer.name = adamw",
    ),
    # Context-parallel ranks
    Rule(
        ("mesh.cp", "data.sequence_length"),
        lambda c, h: c.mesh.cp > 1 and c.data.sequence_length % (2 * c.mesh.cp) != 0,
        "each rank has 2 of 2 x mesh.cp chunks of a sequence, all as long, and {data.sequence_length} tokens cannot be "
        "cut so",
        "a data.sequence_length that is a multiple of 2 x mesh.cp",
    ),
    Rule(
        ("mesh.cp", "model.delta_heads"),
        lambda c, h: c.mesh.cp > 1 and any(c.model.deltas()),
        "a gated delta net goes through a sequence token by token, and no rank has all of one",
        "mesh.cp = 1",
    ),
    Rule(
        ("mesh.cp", "mesh.tp", "model.kv_lora_rank"),
        lambda c, h: c.mesh.cp > 1 and c.mesh.tp > 1 and c.model.latent,
        "in latent attention each tensor-parallel rank makes latents of its own tokens, which context-parallel ranks "
        "would have to reorder",
        "mesh.tp = 1, or mesh.cp = 1",
    ),
    Rule(
        ("model.aux_loss_over", "mesh.cp", "mesh.tp"),
        lambda c, h: c.model.aux_loss_over == "sequence" and c.model.aux_loss > 0 and c.mesh.cp * c.mesh.tp > 1,
        "ranks share the tokens of a sequence (mesh.cp = {mesh.cp}, mesh.tp = {mesh.tp}), and none knows where "
        "all of them went",
        "mesh.cp = 1 and mesh.tp = 1, or model.aux_loss_over = batch or microbatch",
    ),
    # Processes and hosts
    Rule(
        ("mesh.dp", "mesh.pp", "mesh.cp", "mesh.tp"),
        lambda c, h: h.workers > c.mesh.world or (0 < h.workers < c.mesh.world and not c.run.elastic),
        "mesh.pp = {mesh.pp} x mesh.dp = {mesh.dp}{others} is {mesh.world} ranks, but {host.workers} "
        "processes were started",
        "start {mesh.world} processes, or another mesh{elastic}",
    ),
    Rule(
        ("mesh.dp", "mesh.pp", "mesh.cp", "mesh.tp"),
        lambda c, h: c.mesh.world > MOST_RANKS,
        "mesh.pp = {mesh.pp} x mesh.dp = {mesh.dp}{others} is {mesh.world} ranks",
        f"a smaller mesh of {MOST_RANKS} ranks at most",
    ),
    Rule(
        ("mesh.dp", "mesh.pp", "train.device"),
        lambda c, h: c.train.device == "cuda" and 0 < h.gpus < (h.local_workers or c.mesh.world),
        "every rank needs a GPU of its own: this host has {host.gpus} and would run {local_world} ranks",
        "{fewer_ranks}, or train.device = cpu",
    ),
    Rule(
        ("mesh.dp", "mesh.pp", "mesh.cp", "mesh.tp"),
        lambda c, h: c.train.device == "cpu" and not h.workers and 0 < RANKS_OF_A_CORE * h.cores < c.mesh.world,
        "mesh.pp = {mesh.pp} x mesh.dp = {mesh.dp}{others} is {mesh.world} processes that would compute on this host's "
        "CPU cores, and it has {host.cores}",
        f"a smaller mesh of at most {RANKS_OF_A_CORE} ranks for each core, or torchrun or srun on several hosts",
    ),
)


def _times(axis: str, ranks: int, sign: str = "x") -> str:
    return f" {sign} mesh.{axis} = {ranks}" if ranks > 1 else ""


MESH_WORDS: Words = {
    "local_world": lambda c, h: h.local_workers or c.mesh.world,
    "fewer_ranks": lambda c, h: "fewer processes on each host" if h.local_workers else "a smaller mesh",
    "elastic": lambda c, h: ", or run.elastic = True" if h.workers < c.mesh.world else "",
    "contexts": lambda c, h: _times("cp", c.mesh.cp),
    "tensors": lambda c, h: _times("tp", c.mesh.tp),
    "others": lambda c, h: _times("cp", c.mesh.cp) + _times("tp", c.mesh.tp),
    "shares": lambda c, h: _times("cp", c.mesh.cp, "/"),
    "shares_of_heads": lambda c, h: _times("tp", c.mesh.tp, "/"),
}
