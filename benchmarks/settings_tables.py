"""Tables of all settings, from the docstrings of the dataclasses of `config/`. They make up docs/settings.md."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from hocket.commands.options import docstrings
from hocket.config.rule import leaf, show
from hocket.config.schema import DEFAULTS, form_of, types
from hocket.recipes import PRESETS
from hocket.typed import describe


def table(section: str) -> str:
    """The settings of a section in Markdown: name, default, what values there are, and what it means."""
    rows = ["| setting | default | values | |", "| --- | --- | --- | --- |"]
    for name, hint in types().items():
        if name.startswith(f"{section}."):
            cells = [f"`{name}`", _code(leaf(DEFAULTS, name)), _values(name, hint), docstrings()[name]]
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def presets() -> str:
    """The presets in Markdown, with all that they set."""
    rows = ["| preset | for | sets |", "| --- | --- | --- |"]
    for name, preset in PRESETS.items():
        changes = ", ".join(f"`{setting} = {show(value)}`" for setting, value in preset.changes.items())
        rows.append(f"| `{name}` | {preset.description} | {changes} |")
    return "\n".join(rows)


def _code(value: Any) -> str:
    return f"`{show(value)}`" if value not in ("", ()) else ""


def _values(name: str, hint: Any) -> str:
    """Choices and forms. A number's default shows its type, and `hocket help` prints its bounds."""
    if get_origin(hint) is Literal:
        return ", ".join(f"`{each}`" for each in get_args(hint))
    if form := form_of(name):
        return f"{'`auto`, ' if form.auto else ''}such as `{form.example}`"
    return "" if hint in (bool, int, float, str) else describe(hint)
