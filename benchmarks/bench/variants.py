"""Contenders that are hocket with other settings: those that are listed, and any that a user makes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.bench.contender import CONTENDERS, entry
from hocket.config import Config
from hocket.config.rule import Host
from hocket.config.schema import Implied, changed
from hocket.problems import stop_if
from hocket.resolve import Settings, resolve

HOW = ("overlap.", "plan.", "precision.", "train.transport")
"""Settings that say how a step is made. The others say which one, and that is the same for all contenders."""
_OTHER_STEP = "the other contenders would not do the same step"


@dataclass(frozen=True)
class Variant:
    """Hocket with other settings than the rest of the command says."""

    name: str
    words: tuple[str, ...]
    """As on the command line."""


def read(texts: Sequence[str]) -> list[Variant]:
    """Variants as users write them: a name, then settings. Raises ValueError with a line per mistake."""
    found: list[Variant] = []
    problems = []
    for text in texts:
        try:
            name, *words = shlex.split(text)
        except ValueError:  # nothing at all, or a quote that does not end
            name, words = "", []
        reason, fix = "", 'such as --variant "eager --plan.graphs off"'
        if not words or not words[0].startswith("--"):
            reason = "not a name and settings"
        elif not re.fullmatch(r"\w+", name):
            reason, fix = f"{name} is no name", "letters, digits and _"
        elif name in CONTENDERS or name in [variant.name for variant in found]:
            reason, fix = f"{name} is the name of another contender", "another name"
        if reason:
            problems.append(f"variant = {text or '(empty)'} (command line, --variant): {reason}; fix: {fix}")
        found.append(Variant(name, tuple(words)))
    stop_if(problems, "variants")
    return found


def beside_the_point(name: str, settings: Iterable[str]) -> list[str]:
    """A line for each setting that a variant cannot have for itself."""
    return [
        f"{setting} (--variant {name}): {_OTHER_STEP}; fix: set it for all, outside of --variant"
        for setting in settings
        if not setting.startswith(HOW)
    ]


def settled(
    names: Iterable[str], own: Mapping[str, Mapping[str, Any]], config: Config, host: Host, origins: Mapping[str, str]
) -> dict[str, Settings]:
    """The settings of all contenders that have their own; `own` are those that users made.

    Each is resolved like a configuration that says the same. Raises ValueError for those that cannot work.
    """
    made = {}
    for name in names:
        if name in own:
            changes, origin = own[name], f"--variant {name}"
        else:
            changes, origin = entry(name).settings, Implied(f"contender {name}")
        if changes:
            made[name] = resolve(changed(config, changes), host, {**origins, **dict.fromkeys(changes, origin)})
    return made
