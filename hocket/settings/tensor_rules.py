"""Rules for tensor parallelism: which sizes mesh.tp must divide, and which methods its layers allow."""

from __future__ import annotations

from hocket.config import Config
from hocket.config.overlap import DIRECTIONS, ROLES, Method
from hocket.settings.network_rules import leaves_host, ranks_of_a_host
from hocket.settings.rule import Host, Rule

METHOD = "overlap.tp.method"


def no_pieces(c: Config, h: Host) -> str:
    """Why tokens cannot be moved piece by piece; empty if they can."""
    if c.train.device == "cpu" or c.train.transport == "null":
        return ""
    if c.train.transport == "slow":
        return "the slow transport imitates whole collectives on GPUs"
    if leaves_host(c, h, "tp"):
        return f"pieces are copied between the GPUs of one host, and {ranks_of_a_host(c, h)} ranks are on each"
    if h.no_peer_memory:
        return f"{h.no_peer_memory}, and pieces are copied there"
    return ""


def _ways(c: Config) -> set[Method]:
    """All methods of a configuration of which some may not be chosen yet."""
    return {c.overlap.tp.way(role, direction) for role in ROLES for direction in DIRECTIONS}


def _uneven(c: Config, number: int) -> bool:
    return number % c.mesh.tp != 0


TENSOR_RULES: tuple[Rule, ...] = (
    *(
        Rule(
            ("mesh.tp", setting),
            lambda c, h, name=name: _uneven(c, getattr(c.model, name)),
            f"{what}, and {{model.{name}}} of them cannot be spread evenly over {{mesh.tp}} ranks",
            f"a mesh.tp that divides {setting}",
        )
        for setting, name, what in (
            ("model.heads", "heads", "each tensor-parallel rank has query heads of its own"),
            ("model.vocab", "vocab", "each tensor-parallel rank has a range of the tokens of the vocabulary"),
            ("model.shared_ffn", "shared_ffn", "each tensor-parallel rank has some columns of the shared expert"),
        )
    ),
    Rule(
        ("mesh.tp", "model.kv_heads"),
        lambda c, h: not c.model.latent and _uneven(c, c.model.kv_heads) and c.mesh.tp % c.model.kv_heads != 0,
        "tensor-parallel ranks have as many of the {model.kv_heads} key and value heads each, or as many ranks share "
        "each of them, and neither goes with {mesh.tp}",
        "a mesh.tp that divides model.kv_heads, or a mesh.tp that is a multiple of model.kv_heads",
    ),
    Rule(
        ("mesh.tp", "model.delta_key_heads"),
        lambda c, h: any(c.model.deltas()) and _uneven(c, c.model.delta_key_heads),
        "each tensor-parallel rank has key heads of delta nets of its own, and {model.delta_key_heads} of them cannot "
        "be spread evenly over {mesh.tp} ranks",
        "a mesh.tp that divides model.delta_key_heads",
    ),
    Rule(
        ("mesh.tp", "model.ffn"),
        lambda c, h: "dense" in c.model.kinds() and _uneven(c, c.model.ffn),
        "each tensor-parallel rank has some columns of the MLP, and {model.ffn} cannot be spread evenly over {mesh.tp}",
        "a mesh.tp that divides model.ffn",
    ),
    Rule(
        ("mesh.tp", "data.sequence_length", "train.sequences"),
        lambda c, h: _uneven(c, c.train.sequences * c.data.sequence_length // c.mesh.cp),
        "the tokens of a microbatch ({train.sequences} x {data.sequence_length}{shares}) cannot be spread evenly over "
        "{mesh.tp} ranks",
        "a mesh.tp that divides train.sequences x data.sequence_length{shares}",
    ),
    Rule(
        (METHOD, "mesh.tp"),
        lambda c, h: c.mesh.tp > 1 and bool(_ways(c) & {"ring", "pipeline"}) and bool(no_pieces(c, h)),
        "tokens cannot be moved piece by piece: {no_pieces}",
        "overlap.tp.method = off, or tensor-parallel ranks on GPUs of one host that reach each other, "
        "and no slow transport",
    ),
    Rule(
        (METHOD, "mesh.tp"),
        lambda c, h: c.mesh.tp == 1,
        "no effect: mesh.tp = 1, so nothing is communicated inside of layers",
        "mesh.tp above 1, or leave it out",
        only_if_set=True,
    ),
)
