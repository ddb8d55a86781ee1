"""Where settings come from.

Origins are a mapping: dotted name -> where the setting was set, such as `run.toml:6` or `command line, --train.steps`.
Under the key "" is where all others come from: the recipe. Under `recipe` and `preset` is where a file or a flag named
what lies below the settings, such as `command line, --preset memory`. What a preset set, or lost to a recipe, is there
as `Implied`: nobody asked for that very setting, so one without effect is worth a remark, not an error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from hocket.config import Config
from hocket.settings.schema import leaf, types

DEFAULTS = Config()
BELOW = ("recipe", "preset")
"""What a file builds on, or a flag names: keys of a file that are not settings."""
_FLAG = "command line, "


class Implied(str):
    """The origin of a setting that came with something else. `lost` is what a preset said, where a recipe won."""

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
    """What to give to `hocket train` for a configuration: its recipe or file, and flags for what these do not bring.

    `also` are settings that get a flag whoever set them.
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
