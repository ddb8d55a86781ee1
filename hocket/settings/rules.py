"""Which settings may go together: one table of rules.

A broken rule becomes one line: setting, value, where the value came from, the reason, and a fix. Each section of the
configuration has a file of rules beside this one. What a setting needs to have an effect its field says (`OnlyWith`).

Note: [What a setting needs is said beside it]
To resolve a configuration with a setting and without it, and to compare the two steps, would find settings without
effect, too. It would plan once more for each setting that the user gave, know nothing of what no plan has (a schedule,
checkpoints, text), and not say what is missing. So a field names what it needs, in words that are tested here and are
the fix in the message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from hocket.config import Config, ModelConfig
from hocket.config.bounds import OnlyWith
from hocket.program.hardware import hosts_of
from hocket.settings.derived import has_experts, order_matters, shares_units
from hocket.settings.mesh_rules import MESH_RULES, MESH_WORDS
from hocket.settings.model_rules import MODEL_RULES, MODEL_WORDS
from hocket.settings.origins import asked
from hocket.settings.overlap_rules import OVERLAP_RULES
from hocket.settings.plan_rules import PLAN_RULES, PLAN_WORDS
from hocket.settings.rule import NO_EFFECT, Each, Host, Rule, Words
from hocket.settings.schema import annotated, leaf, line, show, types
from hocket.settings.training_rules import TRAINING_RULES, TRAINING_WORDS

RULES: tuple[Rule | Each, ...] = (*MODEL_RULES, *MESH_RULES, *PLAN_RULES, *OVERLAP_RULES, *TRAINING_RULES)
"""The rules by section."""


class Fact(NamedTuple):
    """What an annotation may name beside comparisons such as `mesh.pp above 1`."""

    settings: tuple[str, ...]
    """What it depends on, for messages."""
    holds: Callable[[Config], bool]
    fix: str
    """What makes it hold."""


FACTS = {
    "a model with experts": Fact(("model.experts", "model.dense_layers"), has_experts, "a model with experts"),
    "a dense layer": Fact(("model.dense_layers",), lambda c: "dense" in c.model.kinds(), "more model.dense_layers"),
    "other layers than model.full_layers": Fact(
        ("model.full_layers",),
        lambda c: not set(range(c.model.layers)) <= set(c.model.full_layers),
        "fewer model.full_layers",
    ),
    "a window": Fact(("model.window", "model.full_layers"), lambda c: any(c.model.windows()), "model.window above 0"),
    "shared weights": Fact(("mesh.dp",), shares_units, "mesh.dp above 1"),
    "several hosts": Fact(
        ("network.ranks_per_host",), lambda c: hosts_of(c) > 1, "network.ranks_per_host below {world}"
    ),
    "deferred weight gradients": Fact(
        ("overlap.defer_wgrad",),
        lambda c: c.overlap.defer_wgrad == "on" or order_matters(c.plan.layer_order),
        "overlap.defer_wgrad = on",
    ),
}
_COMPARED = re.compile(r"(\S+) (above|=|other than) (.+)")


def fact_of(text: str) -> Fact:
    """The fact that an annotation names. KeyError for one that there is not."""
    if ", or " in text:
        return _several(text, text.split(", or "), any)
    if " and " in text:
        return _several(text, text.split(" and "), all)
    if not (found := _COMPARED.fullmatch(text)):
        return FACTS[text]
    name, how, rest = found.groups()
    if how == "above":
        return Fact((name,), lambda c: leaf(c, name) > (leaf(c, rest) if rest in types() else float(rest)), text)
    values = rest.split(" or ")
    return Fact((name,), lambda c: (show(leaf(c, name)) in values) == (how == "="), text)


def _several(text: str, parts: list[str], join: Callable[[Iterable[bool]], bool]) -> Fact:
    facts = [fact_of(part) for part in parts]
    names = tuple(name for fact in facts for name in fact.settings)
    return Fact(names, lambda c: join(fact.holds(c) for fact in facts), text)


def without_effect(model: ModelConfig) -> set[str]:
    """Settings of a model whose values change nothing beside its other settings."""
    config = Config(model=model)
    return {
        setting
        for setting, (_, marks) in annotated().items()
        for fact in (fact_of(mark.what) for mark in marks if isinstance(mark, OnlyWith))
        if all(name.startswith("model.") for name in (setting, *fact.settings)) and not fact.holds(config)
    }


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
"""Each rule about each setting, and what each setting needs to have an effect."""


def broken(config: Config, host: Host, origins: Mapping[str, str]) -> list[Rule]:
    """The rules that are broken. Needs a configuration that is within bounds and has no `auto` left."""
    binding = (rule for rule in CHECKS if not rule.remark)
    return [
        rule
        for rule in binding
        if not (rule.only_if_set if not asked(origins, rule.settings[0]) else rule.unless_set)
        and rule.broken(config, host)
    ]


def rule_lines(rules: Sequence[Rule], config: Config, host: Host, origins: Mapping[str, str]) -> list[str]:
    """Broken rules as lines, each about the setting that the user touched if there is one, else about the first."""
    by_setting: dict[str, list[Rule]] = {}
    for rule in rules:
        setting = next((name for name in rule.settings if asked(origins, name)), rule.settings[0])
        by_setting.setdefault(setting, []).append(rule)
    return [line(config, origins, name, *why(some, config, host)) for name, some in by_setting.items()]


def why(rules: Sequence[Rule], config: Config, host: Host) -> tuple[str, str]:
    """The reasons and the fixes of broken rules, numbered if there are several."""
    reasons = [rule_text(rule.reason, config, host) for rule in rules]
    return numbered(reasons), numbered([rule_text(rule.fix, config, host) for rule in rules])


def numbered(texts: Sequence[str]) -> str:
    """Several texts as one."""
    return texts[0] if len(texts) == 1 else "; ".join(f"[{n}] {text}" for n, text in enumerate(texts, start=1))


def rule_text(text: str, config: Config, host: Host) -> str:
    """The reason or fix of a rule, with the values it speaks of filled in."""

    def value(found: re.Match[str]) -> str:
        name = found[1]
        if name in WORDS:
            return str(WORDS[name](config, host))
        return show(getattr(host, name[5:]) if name.startswith("host.") else leaf(config, name))

    return re.sub(r"\{([^{}]+)\}", value, text)


WORDS: Words = {**MODEL_WORDS, **MESH_WORDS, **PLAN_WORDS, **TRAINING_WORDS}
"""What reasons and fixes say beside values of settings and of the host."""
