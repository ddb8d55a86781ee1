"""What a configuration says between the lines: facts that rules, choices and reports go by. Imports no torch."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

from hocket.config import Config, Purpose
from hocket.config.bounds import MOST_RANKS
from hocket.config.layout import part_and_layers
from hocket.program.hardware import spread_of
from hocket.program.layer import MERGED, at_once, merged_order, order_problem
from hocket.program.ops import Layout
from hocket.program.pipeline import ZERO_BUBBLE, groups, smallest_group, warmup
from hocket.program.stages import layout_of
from hocket.program.transformer import GATHERED
from hocket.program.values import lent_to
from hocket.settings.rule import Host
from hocket.settings.schema import leaf

# ------------------------------------------------------------------------------------------------ model and ranks


def has_experts(c: Config) -> bool:
    return "moe" in c.model.kinds()


def ranks_of_a_host(c: Config, h: Host) -> int:
    """Ranks of a host, as the settings give them or as the run found them."""
    each = c.network.ranks_per_host
    return (h.local_workers or c.mesh.world) if each == "auto" else each


def leaves_host(c: Config, h: Host, purpose: Purpose) -> bool:
    """Whether the groups for a purpose have ranks on several hosts."""
    return c.mesh.world <= MOST_RANKS and spread_of(c.mesh, purpose, ranks_of_a_host(c, h)).hosts > 1


def no_pieces(c: Config, h: Host) -> str:
    """Why tokens of tensor-parallel ranks cannot be moved piece by piece; empty if they can."""
    if c.train.device == "cpu" or c.train.transport == "null":
        return ""
    if c.train.transport == "slow":
        return "the slow transport imitates whole collectives on GPUs"
    if leaves_host(c, h, "tp"):
        return f"pieces are copied between the GPUs of one host, and {ranks_of_a_host(c, h)} ranks are on each"
    if h.no_peer_memory:
        return f"{h.no_peer_memory}, and pieces are copied there"
    return ""


def slowed(c: Config) -> list[str]:
    """The purposes that items of `train.slow` name; empty texts for all."""
    return [item.rpartition(":")[0] for item in c.train.slow]


def slowed_alone(c: Config) -> list[str]:
    """Purposes that `train.slow` names, and whose groups have one rank each."""
    return [purpose for purpose in get_args(Purpose) if purpose in slowed(c) and c.mesh.members(purpose) == 1]


# ------------------------------------------------------------------------------------------------ order of a step


def stages(c: Config) -> int:
    return c.mesh.pp * c.plan.chunks


CHUNKS = {
    "1f1b": range(1, 2),
    "zb_h1": range(1, 2),
    "zb_v": range(2, 3),
    "merged_v": range(2, 3),
    "interleaved": range(2, 1025),
}
"""Order -> the numbers of chunks that a rank may have."""


def merges(c: Config, rank: int) -> bool:
    """Whether a pipeline rank has forwards left to merge after its warm-up."""
    if c.plan.order == "merged_v":
        return c.train.microbatches >= 2 * c.mesh.pp
    total = c.train.microbatches * c.plan.chunks
    return warmup(c.mesh.pp, c.plan.chunks, c.train.microbatches, group_of(c), rank, True, c.plan.stride) < total


def group_of(c: Config) -> int:
    """Microbatches that pass through a chunk before the next chunk starts."""
    fewest = 2 * c.mesh.pp if c.plan.order == "merged_v" else smallest_group(c.mesh.pp, c.plan.stride)
    return c.plan.group or fewest


_MOST = 128
"""Microbatches times pipeline ranks of a simulated step, unless one group has more already."""


def few_microbatches(c: Config) -> int:
    """Microbatches of a step that is simulated to choose by its time: three groups, or fewer of a long pipeline."""
    group = group_of(c)
    groups = min(3, max(1, _MOST // (group * c.mesh.pp)))
    return min(c.train.microbatches, groups * group)


def has_pairs(c: Config) -> bool:
    """Whether two microbatches follow each other on one chunk, so that the ends can be merged."""
    return c.train.microbatches > 1 and (c.plan.chunks == 1 or groups(c.train.microbatches, group_of(c))[0] > 1)


def waits_for_counts(c: Config) -> bool:
    """Whether the host waits for the routers in each layer."""
    return c.model.experts > 0 and c.mesh.ep > 1 and c.overlap.ep.splits != "device"


def shares_units(c: Config) -> bool:
    """Whether ranks share weights and gradients: data-parallel ones all, tensor-parallel ones those of experts."""
    return c.mesh.data > 1 or (c.mesh.members("gather_experts") > 1 and "moe" in c.model.kinds())


def separate_wgrads(c: Config) -> bool:
    """Whether the order gives all weight gradients steps of their own."""
    return c.plan.order in ZERO_BUBBLE


def fills_bubble(c: Config) -> bool:
    """Whether the order gives some weight gradients steps of their own, where a rank would rest."""
    return separate_wgrads(c) or c.plan.order == "merged_v"


def nothing_to_put_behind(c: Config) -> str:
    """Why no weight gradient runs behind a send for the send's sake; empty if some can."""
    if c.mesh.pp == 1:
        return "with one pipeline rank nothing is sent"
    if c.overlap.defer_wgrad == "off":
        return "weight gradients are not deferred (overlap.defer_wgrad = off)"
    if separate_wgrads(c):
        return f"in the order {c.plan.order} all weight gradients have steps of their own"
    if c.overlap.pp.defer_layers == 0:
        return "overlap.pp.defer_layers = 0 moves none"
    return ""


def most_layers(c: Config) -> int:
    """Layers of the longest stage; 0 if the stages cannot be."""
    layout = _layout(c)
    return 0 if layout is None else max(stop - start for start, stop in pairwise(layout.bounds))


# ------------------------------------------------------------------------------------------------ parts of layers


def named_parts(items: tuple[str, ...]) -> tuple[str, ...]:
    """The parts that items such as `attn:2` name."""
    return tuple(text.partition(":")[0] for text in items)


def recomputed_parts(c: Config) -> tuple[str, ...]:
    """The parts that `plan.recompute` names."""
    return named_parts(c.plan.recompute)


def longest_stage(c: Config) -> int:
    """Layers that the longest stage may have: of given stages, of even ones, or of any that costs may choose later."""
    chosen_later = c.plan.layers_per_stage == ("auto",) and c.mesh.pp > 1
    return max(most_layers(c), c.model.layers + 2 - stages(c)) if chosen_later else most_layers(c)


def most_named(items: tuple[str, ...]) -> int:
    """The largest number of layers that an item such as `attn:2` names; 0 if none names one."""
    return max((part_and_layers(text)[1] or 0 for text in items), default=0)


def named_twice(items: tuple[str, ...]) -> bool:
    """Whether items name a part twice, or anything beside auto."""
    parts = named_parts(items)
    return len(set(parts)) < len(parts) or {"auto"} < set(parts)


def _layout(c: Config) -> Layout | None:
    """None where the stages cannot be, for which rules of their own say why."""
    try:
        return layout_of(c)
    except ValueError:
        return None


def made_again(c: Config) -> list[tuple[str, str]]:
    """Parts that are offloaded and keep nothing, or not all, and the recomputed parts that make it again."""
    layout = _layout(c) if c.plan.offload and "auto" not in (*c.plan.offload, *c.plan.recompute) else None
    if layout is None:
        return []
    found = (
        (part, part if layout.recomputes(part, at) else lent_to(layout, part, at)) for part, at in layout.offloaded
    )
    return sorted({(part, again) for part, again in found if again})


def recomputes(c: Config, part: str) -> bool:
    """Whether some layer recomputes a part; True where the stages cannot be."""
    layout = _layout(c)
    return layout is None or any(name == part for name, _ in layout.recomputed)


def _offloads(c: Config, part: str) -> bool:
    """Whether some layer offloads a part; True where the stages cannot be."""
    layout = _layout(c)
    return layout is None or any(name == part for name, _ in layout.offloaded)


def missing(c: Config, setting: str) -> list[str]:
    """The parts that a setting names and no layer has."""
    there = recomputes if setting == "plan.recompute" else _offloads
    parts = named_parts(leaf(c, setting))
    return [part for part in ("dispatch", "experts", "mlp", GATHERED) if part in parts and not there(c, part)]


def order_matters(text: str) -> bool:
    """Whether a layer order differs from the literature's where no weight gradient is deferred."""
    return bool(order_problem(text)) or at_once(merged_order(text)) != at_once(MERGED["literature"])
