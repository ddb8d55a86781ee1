"""Where settings come from.

Origins are a mapping: dotted name -> where the setting was set, such as `run.toml:6` or `command line, --train.steps`.
The key "" has the origin of all other settings: the recipe. The keys `recipe` and `preset` say where a file or a flag
named them, such as `command line, --preset memory`. A setting that a preset made, or lost to a recipe, has an origin of
type `Implied`: the user did not ask for this very setting. If it has no effect, that is a remark, not an error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from hocket.config import Config
from hocket.settings.schema import leaf, types

DEFAULTS = Config()
BELOW = ("recipe", "preset")
"""Keys of a file that are not settings: they name what the file builds on. Flags may name it too."""
_FLAG = "command line, "


class Implied(str):
    """The origin of a setting that came with something else. `lost` is a preset's value that a recipe overruled."""

    __slots__ = ("by", "lost")

    lost: Any
    by: str

    def __new__(cls, text: str, lost: Any = None, by: str = "") -> Implied:
        made = super().__new__(cls, text)
        made.lost, made.by = lost, by
        return made

    def __reduce__(self) -> tuple[type[Implied], tuple[str, Any, str]]:
        return Implied, (str(self), self.lost, self.by)


def asked(origins: Mapping[str, str], setting: str) -> bool:
    """Whether the user set this very setting, in a file or on the command line."""
    return setting in origins and not isinstance(origins[setting], Implied)


def source(config: Config, origins: Mapping[str, str], setting: str) -> str:
    """Where the value of a setting in an unresolved configuration comes from."""
    if setting in origins:
        return str(origins[setting])
    return "default" if leaf(config, setting) == leaf(DEFAULTS, setting) else origins.get("", "configuration")


def command_words(config: Config, origins: Mapping[str, str], also: Collection[str] = ()) -> list[str]:
    """Words for `hocket train` that give a configuration: its recipe or file, and flags for the settings beyond it.

    `also` are settings that get a flag wherever they were set.
    """
    filed = {name: place[1] for name, text in origins.items() if (place := re.fullmatch(r"(.+):\d+", text))}
    recipe = origins.get("", "").partition("recipe ")[2]
    start = next(iter(filed.values()), recipe) or config.run.name
    below = [word for name in BELOW for word in origins.get(name, "").partition(_FLAG)[2].split()]
    flagged = {name for name in origins if name not in filed and asked(origins, name)}
    flags = [word for name in types() if name in flagged or name in also for word in _flag(name, leaf(config, name))]
    return [start, *below, *flags]


def _flag(name: str, value: Any) -> list[str]:
    return [f"--{name}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
