"""Which settings may go together: one table of rules.

A broken rule becomes one line: setting, value, where the value came from, the reason, and a fix. Each section of the
configuration has a file of rules beside this one. `effects.py` adds those about settings without effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hocket.config import Config
from hocket.settings.effects import EFFECTS
from hocket.settings.mesh_rules import MESH_RULES, MESH_WORDS
from hocket.settings.model_rules import MODEL_RULES, MODEL_WORDS
from hocket.settings.origins import asked
from hocket.settings.overlap_rules import OVERLAP_RULES
from hocket.settings.plan_rules import PLAN_RULES, PLAN_WORDS
from hocket.settings.rule import Each, Host, Rule, Words
from hocket.settings.schema import leaf, line, show
from hocket.settings.training_rules import TRAINING_RULES, TRAINING_WORDS

RULES: tuple[Rule | Each, ...] = (*MODEL_RULES, *MESH_RULES, *PLAN_RULES, *OVERLAP_RULES, *TRAINING_RULES)
"""The rules by section."""
CHECKS: tuple[Rule, ...] = (*(one for rule in RULES for one in rule.each()), *EFFECTS)
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
