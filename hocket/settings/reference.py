"""Every setting as a table, from the docstrings of `config.py`: the page docs/settings.md is made of these."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hocket import config as config_module
from hocket.config import Config
from hocket.presets import PRESETS
from hocket.settings.leaves import BOUNDS, describe, leaf, show, types, written
from hocket.settings.origins import DEFAULTS


@cache
def docstrings() -> dict[str, str]:
    """Dotted name of every section and setting -> its docstring, as one line."""
    fields: dict[tuple[str, str], str] = {}
    for node in ast.parse(inspect.getsource(config_module)).body:
        if isinstance(node, ast.ClassDef):
            for field, after in zip(node.body, node.body[1:], strict=False):
                named = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                if named and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    fields[node.name, field.target.id] = " ".join(str(after.value.value).split())  # type: ignore[union-attr]
    return dict(_documented(Config, "", fields))


def _documented(section: type[Any], prefix: str, fields: dict[tuple[str, str], str]) -> Iterator[tuple[str, str]]:
    hints = get_type_hints(section)
    for field in dataclasses.fields(section):
        name = f"{prefix}{field.name}"
        yield name, fields[section.__name__, field.name]
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _documented(hints[field.name], f"{name}.", fields)


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
    if get_origin(hint) is Literal:
        return ", ".join(f"`{each}`" for each in get_args(hint))
    low, high = BOUNDS.get(name, (float("-inf"), float("inf")))
    bounds = f", {written(low)} or more" if low > float("-inf") else ""
    bounds += f", {written(high)} at most" if high < 1e18 else ""
    return describe(hint) + bounds
