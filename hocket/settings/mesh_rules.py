"""Rules of sections `mesh` and `network`: what the axes divide, and where the ranks are."""

from __future__ import annotations

from hocket.config import Config
from hocket.config.bounds import MOST_RANKS
from hocket.settings.derived import has_experts, no_pieces, ranks_of_a_host
from hocket.settings.rule import Each, Host, Rule, Words
from hocket.settings.schema import leaf

RANKS_OF_A_CORE = 8
"""Most ranks that hocket starts for each CPU core where they compute on CPUs: they take turns, and each has memory of
its own. Those of torchrun and Slurm are there already."""
_RANKS = "network.ranks_per_host"


def _given(c: Config) -> int:
    """Ranks of a host as the settings give them; 0 if they give none."""
    return 0 if c.network.ranks_per_host == "auto" else c.network.ranks_per_host


def _uneven(c: Config, h: Host, it: str) -> bool:
    """Whether tensor-parallel ranks cannot have as much each of what a layer has so many of."""
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
        lambda c, h: c.mesh.ep > 1 and not has_experts(c),
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
        "of latent attention each tensor-parallel rank makes latents of tokens of its own, which context-parallel ones "
        "would have to put together in another order",
        "mesh.tp = 1, or mesh.cp = 1",
    ),
    Rule(
        ("model.aux_loss_over", "mesh.cp", "mesh.tp"),
        lambda c, h: c.model.aux_loss_over == "sequence" and c.model.aux_loss > 0 and c.mesh.cp * c.mesh.tp > 1,
        "ranks share the tokens of a sequence (mesh.cp = {mesh.cp}, mesh.tp = {mesh.tp}), and none knows where all of "
        "them went",
        "mesh.cp = 1 and mesh.tp = 1, or model.aux_loss_over = batch or microbatch",
    ),
    # Processes and hosts
    Rule(
        ("mesh.dp", "mesh.pp", "mesh.cp", "mesh.tp"),
        lambda c, h: h.workers > c.mesh.world or (0 < h.workers < c.mesh.world and not c.run.elastic),
        "mesh.pp = {mesh.pp} x mesh.dp = {mesh.dp}{others} is {world} ranks, but {host.workers} processes were started",
        "start {world} processes, or another mesh{elastic}",
    ),
    Rule(
        ("mesh.dp", "mesh.pp", "mesh.cp", "mesh.tp"),
        lambda c, h: c.mesh.world > MOST_RANKS,
        "mesh.pp = {mesh.pp} x mesh.dp = {mesh.dp}{others} is {world} ranks",
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
        "mesh.pp = {mesh.pp} x mesh.dp = {mesh.dp}{others} is {world} processes that would compute on this host's "
        "CPU cores, and it has {host.cores}",
        f"a smaller mesh of at most {RANKS_OF_A_CORE} ranks for each core, or torchrun or srun on several hosts",
    ),
    Rule(
        (_RANKS, "mesh.dp", "mesh.pp", "mesh.tp"),
        lambda c, h: bool(_given(c)) and c.mesh.world % _given(c) != 0,
        "all hosts have the same number of ranks, and {network.ranks_per_host} does not divide {world}",
        "a network.ranks_per_host that divides {world}, or leave network.ranks_per_host out",
    ),
    Rule(
        (_RANKS,),
        lambda c, h: h.workers == c.mesh.world and 0 < h.local_workers < _given(c) <= c.mesh.world,
        "of {host.workers} processes only {host.local_workers} are on this host",
        "network.ranks_per_host = {host.local_workers}, or leave network.ranks_per_host out",
    ),
    Rule(
        (_RANKS, "mesh.dp"),
        lambda c, h: (
            not _given(c) and h.workers == c.mesh.world and h.local_workers > 0 and h.workers % h.local_workers != 0
        ),
        "{host.local_workers} of {host.workers} processes are on this host, so others have another number, and what "
        "is on which host is not known here",
        "as many processes on every host, or network.ranks_per_host = a number that divides those of each",
    ),
)


def _times(axis: str, ranks: int, sign: str = "x") -> str:
    return f" {sign} mesh.{axis} = {ranks}" if ranks > 1 else ""


MESH_WORDS: Words = {
    "world": lambda c, h: c.mesh.world,
    "local_world": lambda c, h: h.local_workers or c.mesh.world,
    "on_a_host": ranks_of_a_host,
    "fewer_ranks": lambda c, h: "fewer processes on each host" if h.local_workers else "a smaller mesh",
    "elastic": lambda c, h: ", or run.elastic = True" if h.workers < c.mesh.world else "",
    "contexts": lambda c, h: _times("cp", c.mesh.cp),
    "tensors": lambda c, h: _times("tp", c.mesh.tp),
    "others": lambda c, h: _times("cp", c.mesh.cp) + _times("tp", c.mesh.tp),
    "shares": lambda c, h: _times("cp", c.mesh.cp, "/"),
    "shares_of_heads": lambda c, h: _times("tp", c.mesh.tp, "/"),
    "no_pieces": no_pieces,
}
