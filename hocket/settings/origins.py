"""Where settings come from.

Origins are a mapping: dotted name -> where the setting was set, such as `run.toml:6` or `command line, --train.steps`.
Under the key "" is where all others come from: the recipe. What a preset set, or lost to a recipe, is there as
`Implied`: nobody asked for that very setting, so one without effect is worth a remark, not an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hocket.config import Config
from hocket.settings.leaves import leaf

DEFAULTS = Config()


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


def begun_with(origins: Mapping[str, str]) -> tuple[str, list[str]]:
    """The word that names a run's file or recipe on the command line, and the settings that the file sets."""
    places = {setting: re.fullmatch(r"(.+):\d+", origin) for setting, origin in origins.items()}
    files = {setting: place[1] for setting, place in places.items() if place}
    return next(iter(files.values()), origins.get("", "").removeprefix("recipe ")), list(files)
