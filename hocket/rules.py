"""All rules between settings, among them those that need the step's program, and how broken ones are reported.

A broken rule becomes one line: setting, value, where the value was set, the reason, and a fix. The rules of a section
are in its file of `hocket/config/`. The rules here depend on the program of a step. What a setting needs to have an
effect is annotated at its field (`OnlyWith`).

Note: [What a setting needs is said beside it]
Comparing a step planned with a setting to one planned without it would also find settings without effect. But it takes
one more plan for each setting of the user, knows nothing of settings outside of plans (a schedule, checkpoints, text),
and cannot say what is missing. So a field names what it needs, in words that are evaluated here and serve as the fix
in the message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from hocket.config import COPIED, Config, Purpose
from hocket.config.data import DATA_RULES
from hocket.config.mesh import MESH_RULES, MESH_WORDS
from hocket.config.model import MODEL_RULES, MODEL_WORDS
from hocket.config.network import NETWORK_RULES
from hocket.config.optimizer import OPTIMIZER_RULES
from hocket.config.overlap import OVERLAP_RULES, TENSOR, on_device
from hocket.config.plan import PLAN_RULES, PLAN_WORDS, named_parts, part_and_layers
from hocket.config.precision import PRECISION_RULES
from hocket.config.rule import MOST_RANKS, NO_EFFECT, Each, Host, OnlyWith, Rule, Words, leaf, problem, show
from hocket.config.run import RUN_RULES
from hocket.config.schema import annotated, asked, changed, types
from hocket.config.train import TRAIN_RULES, TRAIN_WORDS
from hocket.predict.hardware import hosts_of, spread_of
from hocket.predict.tensor_costs import by_pieces
from hocket.program.layer import MERGED, merged_order, order_problem, undeferred
from hocket.program.ops import Layout
from hocket.program.pipeline import groups, warmup
from hocket.program.stages import layout_of
from hocket.program.transformer import GATHERED
from hocket.program.values import lent_to

# ------------------------------------------------------------------------------------------------ model and ranks


def ranks_of_a_host(c: Config, h: Host) -> int:
    """Ranks per host, as configured or as found when the run started."""
    each = c.network.ranks_per_host
    return (h.local_workers or c.mesh.world) if each == "auto" else each


def leaves_host(c: Config, h: Host, purpose: Purpose) -> bool:
    """Whether groups for a purpose span several hosts."""
    return c.mesh.world <= MOST_RANKS and spread_of(c.mesh, purpose, ranks_of_a_host(c, h)).hosts > 1


def no_pieces(c: Config, h: Host) -> str:
    """Why tokens cannot be moved between tensor-parallel ranks in pieces; empty if they can."""
    if c.train.device == "cpu" or c.train.transport == "null":
        return ""
    if c.train.transport == "slow":
        return "the slow transport imitates whole collectives on GPUs"
    if leaves_host(c, h, "tp"):
        return f"pieces are copied between the GPUs of one host, and {ranks_of_a_host(c, h)} ranks are on each"
    if h.no_peer_memory:
        return f"{h.no_peer_memory}, and pieces are copied there"
    return ""


# ------------------------------------------------------------------------------------------------ order of a step


def merges(c: Config, rank: int) -> bool:
    """Whether a pipeline rank has forwards left to merge after its warm-up."""
    if c.plan.order == "merged_v":
        return c.train.microbatches >= 2 * c.mesh.pp
    total = c.train.microbatches * c.plan.chunks
    return warmup(c.mesh.pp, c.plan.chunks, c.train.microbatches, group_of(c), rank, True) < total


def group_of(c: Config) -> int:
    """Microbatches that pass through a chunk before the next chunk starts."""
    return c.plan.group or (2 * c.mesh.pp if c.plan.order == "merged_v" else c.mesh.pp)


_MOST_MICROBATCHES = 128
"""Most microbatches times pipeline ranks of a step simulated for a choice, unless one group already has more."""


def few_microbatches(c: Config) -> int:
    """Microbatches of a step simulated for a choice: three groups, or fewer in a long pipeline."""
    group = group_of(c)
    groups = min(3, max(1, _MOST_MICROBATCHES // (group * c.mesh.pp)))
    return min(c.train.microbatches, groups * group)


def has_pairs(c: Config) -> bool:
    """Whether two microbatches follow each other on one chunk, so that the ends can be merged."""
    return c.train.microbatches > 1 and (c.plan.chunks == 1 or groups(c.train.microbatches, group_of(c))[0] > 1)


def shares_units(c: Config) -> bool:
    """Whether ranks share weights and gradients: all data-parallel ranks do, tensor-parallel ranks those of experts."""
    return c.mesh.data > 1 or (c.mesh.members("gather_experts") > 1 and "moe" in c.model.kinds())


def most_layers(c: Config) -> int:
    """Layers of the longest stage; 0 if the stages are impossible."""
    layout = _layout(c)
    return 0 if layout is None else max(stop - start for start, stop in pairwise(layout.bounds))


# ------------------------------------------------------------------------------------------------ parts of layers


def longest_stage(c: Config) -> int:
    """Most layers of the longest stage: as configured, evenly split, or for any split that costs may choose later."""
    chosen_later = c.plan.layers_per_stage == ("auto",) and c.mesh.pp > 1
    return max(most_layers(c), c.model.layers + 2 - c.stages) if chosen_later else most_layers(c)


def most_named(items: tuple[str, ...]) -> int:
    """The largest layer count of items such as `attn:2`; 0 if none has one."""
    return max((part_and_layers(text)[1] or 0 for text in items), default=0)


def _layout(c: Config) -> Layout | None:
    """None if the stages are impossible; other rules say why."""
    try:
        return layout_of(c)
    except ValueError:
        return None


def made_again(c: Config) -> list[tuple[str, str]]:
    """Offloaded parts that keep nothing, or not all, because they are recomputed: each with the recomputed part."""
    layout = _layout(c) if c.plan.offload and "auto" not in (*c.plan.offload, *c.plan.recompute) else None
    if layout is None:
        return []
    found = (
        (part, part if layout.recomputes(part, at) else lent_to(layout, part, at)) for part, at in layout.offloaded
    )
    return sorted({(part, again) for part, again in found if again})


def recomputes(c: Config, part: str) -> bool:
    """Whether some layer recomputes a part; True if the stages are impossible."""
    layout = _layout(c)
    return layout is None or any(name == part for name, _ in layout.recomputed)


def missing(c: Config, setting: str) -> list[str]:
    """The parts that a setting names and no layer has."""
    layout, parts = _layout(c), named_parts(leaf(c, setting))
    if layout is None:
        return []
    there = {part for part, _ in (layout.recomputed if setting == "plan.recompute" else layout.offloaded)}
    return [part for part in ("dispatch", "experts", "mlp", GATHERED) if part in parts and part not in there]


def order_matters(text: str) -> bool:
    """Whether a layer order differs from the literature's when no weight gradient is deferred."""
    return bool(order_problem(text)) or undeferred(merged_order(text)) != undeferred(MERGED["literature"])


# ------------------------------------------------------------------------------------------------ rules about the step

_PARTS = {"plan.recompute": "missing_recompute", "plan.offload": "missing_offload"}
"""Settings that name parts of layers -> the word for named parts that no layer has."""

STEP_RULES: tuple[Rule | Each, ...] = (
    # Orders
    Rule(
        ("plan.layer_order",),
        lambda c, h: bool(order_problem(c.plan.layer_order)),
        "{order}",
        "plan.layer_order = literature, or plan.layer_order = 'cB aF eB dF eW dB eF cF aB uB aW uF'",
    ),
    Rule(
        ("plan.layer_order", "mesh.cp"),
        lambda c, h: c.mesh.cp > 1 and c.plan.layer_order != "literature" and not order_problem(c.plan.layer_order),
        "it orders parts of layers that have their sequences whole; others gather keys and values in between",
        "leave plan.layer_order out, or mesh.cp = 1",
    ),
    Rule(
        ("overlap.ep.merge", "train.microbatches", "plan.chunks"),
        lambda c, h: c.overlap.ep.merge == "on" and not any(merges(c, rank) for rank in range(c.mesh.pp)),
        "all forwards of {train.microbatches} microbatches are warm-up, so nothing would be merged",
        "more train.microbatches, or overlap.ep.merge = off",
    ),
    Rule(
        ("overlap.ep.merge_ends", "plan.group", "train.microbatches"),
        lambda c, h: (
            c.overlap.ep.merge_ends == "on"
            and c.overlap.ep.merge == "on"
            and c.train.microbatches > 1
            and not has_pairs(c)
        ),
        "no two microbatches follow each other on one chunk, so nothing at the ends would be merged",
        "plan.group = 2 or more, or overlap.ep.merge_ends = off",
    ),
    Rule(
        ("overlap.pp.defer_layers", "model.layers", "mesh.pp", "plan.chunks"),
        lambda c, h: c.overlap.pp.late[0] > most_layers(c) > 0,
        "no stage has as many layers",
        "overlap.pp.defer_layers = -1, which means all layers of a stage",
        only_if_set=True,
    ),
    # Parts of layers
    Each(
        _PARTS,
        ("{it}", "plan.layers_per_stage"),
        lambda c, h, it: 0 < longest_stage(c) < most_named(leaf(c, it)),
        "no stage can have as many layers: the longest has {longest} at most",
        "at most {longest} layers in {it}, or no number in {it}, which means all layers",
        only_if_set=True,
    ),
    Each(
        _PARTS,
        ("{it}",),
        lambda c, h, it: bool(missing(c, it)),
        "no layer that it means has the part {{what}}",
        "leave {{what}} out of {it}",
        only_if_set=True,
    ),
    Rule(
        ("plan.offload", "plan.recompute"),
        lambda c, h: bool(made_again(c)),
        "saved tensors are kept in one way, on the host, or made again: {again} of plan.recompute makes again what "
        "{offloaded} of plan.offload would keep",
        "leave {offloaded} out of plan.offload",
    ),
    # What leaves a host
    Rule(
        ("train.transport",),
        lambda c, h: c.train.transport in COPIED and leaves_host(c, h, "control"),
        "copy engines reach the GPUs of one host, and of {mesh.world} ranks {on_a_host} are on each",
        "train.transport = nccl",
    ),
    Rule(
        ("overlap.ep.splits", "mesh.ep"),
        lambda c, h: on_device(c) and leaves_host(c, h, "a2a"),
        "rows are stored into the memory of GPUs of one host, and mesh.ep = {mesh.ep} ranks are not all on one",
        "overlap.ep.splits = host, or a smaller mesh.ep",
    ),
    Rule(
        (TENSOR, "mesh.tp"),
        lambda c, h: by_pieces(c) and bool(no_pieces(c, h)),
        "tokens cannot be moved piece by piece: {no_pieces}",
        "overlap.tp.method = off, or tensor-parallel ranks on GPUs of one host that reach each other, "
        "and no slow transport",
    ),
)


def _joined(texts: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(texts))


STEP_WORDS: Words = {
    "longest": lambda c, h: longest_stage(c),
    "order": lambda c, h: order_problem(c.plan.layer_order),
    "missing_recompute": lambda c, h: _joined(missing(c, "plan.recompute")),
    "missing_offload": lambda c, h: _joined(missing(c, "plan.offload")),
    "offloaded": lambda c, h: _joined(part for part, _ in made_again(c)),
    "again": lambda c, h: _joined(part for _, part in made_again(c)),
    "on_a_host": ranks_of_a_host,
    "no_pieces": no_pieces,
}

# ------------------------------------------------------------------------------------------------ all rules

RULES: tuple[Rule | Each, ...] = (
    *MODEL_RULES,
    *MESH_RULES,
    *NETWORK_RULES,
    *PLAN_RULES,
    *OVERLAP_RULES,
    *PRECISION_RULES,
    *DATA_RULES,
    *TRAIN_RULES,
    *OPTIMIZER_RULES,
    *RUN_RULES,
    *STEP_RULES,
)
"""The rules by section."""


class Fact(NamedTuple):
    """A condition that annotations may name, besides comparisons such as `mesh.pp above 1`."""

    settings: tuple[str, ...]
    """The settings it depends on, for messages."""
    holds: Callable[[Config], bool]
    fix: str
    """The change that makes it hold."""


FACTS = {
    "a model with experts": Fact(
        ("model.experts", "model.dense_layers"), lambda c: c.model.has_experts, "a model with experts"
    ),
    "a dense layer": Fact(("model.dense_layers",), lambda c: "dense" in c.model.kinds(), "more model.dense_layers"),
    "other layers than model.full_layers": Fact(
        ("model.full_layers",),
        lambda c: not set(range(c.model.layers)) <= set(c.model.full_layers),
        "fewer model.full_layers",
    ),
    "a window": Fact(("model.window", "model.full_layers"), lambda c: any(c.model.windows()), "model.window above 0"),
    "shared weights": Fact(("mesh.dp",), shares_units, "mesh.dp above 1"),
    "several hosts": Fact(
        ("network.ranks_per_host",), lambda c: hosts_of(c) > 1, "network.ranks_per_host below {mesh.world}"
    ),
    "deferred weight gradients": Fact(
        ("overlap.defer_wgrad",),
        lambda c: c.overlap.defer_wgrad == "on" or order_matters(c.plan.layer_order),
        "overlap.defer_wgrad = on",
    ),
}
_COMPARED = re.compile(r"(\S+) (above|=|other than) (.+)")


def fact_of(text: str) -> Fact:
    """The fact that an annotation names. Raises KeyError for an unknown one."""
    if ", or " in text:
        return _combined(text, text.split(", or "), any)
    if " and " in text:
        return _combined(text, text.split(" and "), all)
    if not (found := _COMPARED.fullmatch(text)):
        return FACTS[text]
    name, how, rest = found.groups()
    if how == "above":
        return Fact((name,), lambda c: leaf(c, name) > (leaf(c, rest) if rest in types() else float(rest)), text)
    values = rest.split(" or ")
    return Fact((name,), lambda c: (show(leaf(c, name)) in values) == (how == "="), text)


def _combined(text: str, parts: list[str], join: Callable[[Iterable[bool]], bool]) -> Fact:
    facts = [fact_of(part) for part in parts]
    names = tuple(name for fact in facts for name in fact.settings)
    return Fact(names, lambda c: join(fact.holds(c) for fact in facts), text)


def _effects() -> Iterator[Rule]:
    for setting, (_, marks) in annotated().items():
        for mark in marks:
            if isinstance(mark, OnlyWith):
                fact = fact_of(mark.what)
                values = ", ".join(f"{name} = {{{name}}}" for name in fact.settings)
                reason = f"without {mark.what} ({values})" if mark.what in FACTS else f"with {values}"
                yield Rule(
                    (setting, *fact.settings),
                    partial(_idle, setting, mark.idle, fact.holds),
                    f"{NO_EFFECT} {reason}",
                    f"{fact.fix}, or leave it out",
                    only_if_set=not mark.remark,
                    remark=mark.remark,
                )


def _idle(setting: str, idle: tuple[object, ...], holds: Callable[[Config], bool], c: Config, h: Host) -> bool:
    return leaf(c, setting) not in idle and not holds(c)


CHECKS: tuple[Rule, ...] = (*(one for rule in RULES for one in rule.each()), *_effects())
"""Each rule for each of its settings, and the conditions under which settings have an effect."""


def broken(config: Config, host: Host, origins: Mapping[str, str]) -> list[Rule]:
    """The broken rules. The configuration must be within bounds, with no `auto` left."""
    binding = (rule for rule in CHECKS if not rule.remark)
    return [
        rule
        for rule in binding
        if not (rule.only_if_set if not asked(origins, rule.settings[0]) else rule.unless_set)
        and rule.broken(config, host)
    ]


def refusal(c: Config, h: Host, values: Mapping[str, Any]) -> str | None:
    """Why settings cannot have these values: a rule's reason, empty if they have no effect. None if they can."""
    tried = changed(c, values)
    rules = (rule for rule in CHECKS if not rule.remark and values.keys() & set(rule.settings))
    rule = next((rule for rule in rules if rule.broken(tried, h)), None)
    if rule is None:
        return None
    return "" if rule.without_effect else rule_text(rule.reason, tried, h)


def rule_lines(rules: Sequence[Rule], config: Config, host: Host, origins: Mapping[str, str]) -> list[str]:
    """Broken rules as lines, each about the first of its settings that the user set, else about its first setting."""
    by_setting: dict[str, list[Rule]] = {}
    for rule in rules:
        setting = next((name for name in rule.settings if asked(origins, name)), rule.settings[0])
        by_setting.setdefault(setting, []).append(rule)
    return [problem(name, leaf(config, name), origins, *why(some, config, host)) for name, some in by_setting.items()]


def why(rules: Sequence[Rule], config: Config, host: Host) -> tuple[str, str]:
    """The reasons and the fixes of broken rules, numbered if there are several."""
    reasons = [rule_text(rule.reason, config, host) for rule in rules]
    return numbered(reasons), numbered([rule_text(rule.fix, config, host) for rule in rules])


def numbered(texts: Sequence[str]) -> str:
    """Several texts as one."""
    return texts[0] if len(texts) == 1 else "; ".join(f"[{n}] {text}" for n, text in enumerate(texts, start=1))


def rule_text(text: str, config: Config, host: Host) -> str:
    """The reason or fix of a rule, with values filled in."""

    def value(found: re.Match[str]) -> str:
        name = found[1]
        if name in WORDS:
            return str(WORDS[name](config, host))
        return show(getattr(host, name[5:]) if name.startswith("host.") else leaf(config, name))

    return re.sub(r"\{([^{}]+)\}", value, text)


WORDS: Words = {**MODEL_WORDS, **MESH_WORDS, **PLAN_WORDS, **TRAIN_WORDS, **STEP_WORDS}
"""Words in reasons and fixes, besides values of settings and of the host."""
