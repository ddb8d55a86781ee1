"""Configurations for tests, with settings of plan and overlap under short names."""

from __future__ import annotations

from typing import Any

from hocket.config import Config
from hocket.settings.leaves import changed, types

NAMES = {name.rsplit(".", 1)[-1]: name for name in types() if name.startswith(("plan.", "overlap."))}
"""Last part of a name -> the name. Where two end alike, only dotted names will do."""


def planned(config: Config | None = None, /, **settings: Any) -> Config:
    """A configuration with some settings of `plan` and `overlap` by the last part of their names, as `merge="off"`."""
    return changed(config or Config(), {NAMES[name]: value for name, value in settings.items()})
