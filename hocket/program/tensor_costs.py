"""What tensor parallelism adds to the costs of a plan's ops, and takes from them.

An op of a tensor-parallel rank computes on its share of tokens, or on all of them with its share of the weights: either
way on 1 / tp of the work, which is what the cost model says of so many fewer tokens. Added are gathers and sums of
tokens, as far as they are not hidden beside products (`tensor_ways.py`). Units are those of a model whose heads, MLPs
and vocabulary are as narrow as a rank's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from hocket.config import Config, ModelConfig
from hocket.program.cost import CostTable, OpCost
from hocket.program.hardware import Hardware, Link
from hocket.program.ops import Layout
from hocket.program.schedule import CostKey
from hocket.program.tensor_times import LIKE, Direction, Role
from hocket.program.tensor_ways import cell_of, time_of

_SPREAD = ("heads", "ffn", "shared_ffn", "vocab", "delta_heads", "delta_key_heads")
"""Numbers of the model of which each rank has a part."""
_UNITS = ("gather", "reduce", "add", "step", "update")
"""Verbs whose costs go by the size of units."""


def model_of_rank(c: Config) -> ModelConfig:
    """A model with the weights that one tensor-parallel rank has."""
    m, tp = c.model, c.mesh.tp
    narrow = {name: getattr(m, name) // tp for name in _SPREAD}
    return replace(m, **narrow, kv_heads=max(1, m.kv_heads // tp))


def model_of_ranks(c: Config) -> ModelConfig:
    """The model as all tensor-parallel ranks together compute it: heads that several of them have count as often."""
    return replace(c.model, kv_heads=max(c.mesh.tp, c.model.kv_heads))


def with_tensors(costs: CostTable, of_rank: CostTable, c: Config, hardware: Hardware, layout: Layout) -> CostTable:
    """`costs`, those of the whole model on one rank's tokens, with the units of `of_rank`, and with communication."""
    table = {key: of_rank.table[key] if key[0] in _UNITS else cost for key, cost in costs.table.items()}
    hardware = _imitated(c, hardware)
    for key, cost in table.items():
        waits, received = _inside(c, key, hardware, layout)
        if received:
            seconds = cost.seconds + waits
            table[key] = replace(cost, seconds=seconds, inner_seconds=waits, inner_bytes=received)
    for key in [key for key in table if key[0] == "wgrad"]:
        table[key] = replace(table[key], grad_bytes=of_rank.table.get(key, OpCost()).grad_bytes)
    return replace(costs, table=table, slot_bytes=of_rank.slot_bytes, state_bytes=of_rank.state_bytes)


def _imitated(c: Config, hardware: Hardware) -> Hardware:
    """The hardware with what an imitated network adds to the transfers of tokens."""
    if c.train.transport != "slow" or "tp" not in c.train.slow_links():
        return hardware
    latency, bandwidth = c.train.slow_links()["tp"]

    def slower(link: Link) -> Link:
        return Link(link.latency + latency, 1 / (1 / link.bandwidth + 1 / bandwidth))

    return replace(
        hardware, links={**hardware.links, "tp": slower(hardware.links["tp"])}, copies=slower(hardware.copies)
    )


def _inside(c: Config, key: CostKey, hardware: Hardware, layout: Layout) -> tuple[float, int]:
    """Seconds in which an op waits for tensor-parallel peers, and bytes that it gets from them."""
    verb, part, kind = key
    if verb not in ("fwd", "bwd", "recompute"):
        return 0.0, 0
    direction: Direction = "backward" if verb == "bwd" else "forward"
    moved = cell_of(c, "fc1", "forward").moved * (c.mesh.tp - 1) // c.mesh.tp
    described = layout.by_kind[kind].by_name[part] if kind else layout.part(part)
    roles = [role for role in described.products if c.model.shared_ffn or not role.startswith("shared_")]
    times = [
        (hardware.links["tp"].seconds(moved), 1)
        if role == "embed"
        else time_of(c, LIKE.get(role, cast(Role, role)), direction, hardware)
        for role in roles
    ]
    summed = _sums_of_norms(c) if "qkv" in described.products else 0
    waits = hardware.links["tp"].seconds(summed) if summed else 0.0
    return waits + sum(waits for waits, _ in times), summed + sum(count for _, count in times) * moved


def _sums_of_norms(c: Config) -> int:
    """Bytes that a rank gets for the norms of whole queries and keys: a number in fp32 of each for every token."""
    if not c.model.qk_norm or c.model.qk_norm_over == "head":
        return 0
    return 2 * 4 * 2 * c.tokens * (c.mesh.tp - 1)
