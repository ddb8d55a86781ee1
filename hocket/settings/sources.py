"""Sources of a configuration: defaults < a preset < a recipe < a TOML file < the command line.

A recipe is a function that returns a whole `Config`. Settings that it leaves at their defaults count as not set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from hocket.config import Config
from hocket.presets import preset
from hocket.recipes import recipe
from hocket.settings.origins import BELOW, DEFAULTS, Implied
from hocket.settings.schema import changed, leaf, no_unit, problem, types
from hocket.settings.suggest import meant, meant_setting
from hocket.settings.tomlfile import Entry, read
from hocket.typed import describe, is_a


@dataclass(frozen=True, kw_only=True)
class Start:
    """The configuration of a run before the settings of the command line."""

    config: Config
    origins: Mapping[str, str]
    problems: tuple[str, ...] = ()
    """Mistakes in the file. The configuration lacks the settings with mistakes."""


def begin(name: str, recipe_flag: str = "", preset_flag: str = "") -> Start:
    """The configuration that a recipe or file names, with what it builds on.

    `name` is a recipe, `module:function` or a file; empty if the recipe is given by flag. Raises ValueError for names
    that do not exist; what is wrong inside a file is returned.
    """
    file = name if is_file(name) else ""
    entries = read(file) if file else []
    problems: list[str] = []
    named = {entry.name: entry for entry in entries if entry.name in BELOW}
    problems += [_misnamed(file, entry) for entry in named.values() if not isinstance(entry.value, str)]
    if not file and name and recipe_flag:
        raise ValueError(
            f"recipe = {recipe_flag} (command line, --recipe): {name} is one too; fix: leave one of them out"
        )
    flags = {"recipe": recipe_flag, "preset": preset_flag}
    words = {key: _named(named.get(key), flag, file) for key, flag in flags.items()}
    chosen, where = (name, "command line") if name and not file else words["recipe"]
    base = recipe(chosen, where) if chosen else Config()
    origins: dict[str, str] = {"": f"recipe {chosen}" if chosen else "default"}
    config, weaker = _with_preset(base, *words["preset"], origins[""])
    origins |= weaker
    for key, (base_name, said) in words.items():
        if base_name and (file or key == "preset"):
            origins[key] = f"{said}, --{key} {base_name}" if flags[key] else said
    changes: dict[str, Any] = {}
    for entry in entries:
        if entry.name not in BELOW:
            found = _check(file, entry, problems)
            changes |= found
            origins |= dict.fromkeys(found, f"{file}:{entry.line}")
    if file and "run.name" not in changes:  # two files that build on one recipe are two runs
        changes["run.name"] = Path(file).stem
    return Start(config=changed(config, changes), origins=origins, problems=tuple(problems))


def is_file(name: str) -> bool:
    """Whether a word names a file rather than a recipe."""
    return name.endswith(".toml") or (":" not in name and "/" in name)


def _named(entry: Entry | None, flag: str, file: str) -> tuple[str, str]:
    """A recipe's or preset's name and where that was said; the command line comes before the file."""
    if flag:
        return flag, "command line"
    return (entry.value, f"{file}:{entry.line}") if entry and isinstance(entry.value, str) else ("", "")


def _with_preset(base: Config, name: str, where: str, recipe_text: str) -> tuple[Config, dict[str, str]]:
    """A recipe's configuration with a preset below it, and the origins that this gives."""
    if not name:
        return base, {}
    changes, origins = {}, dict[str, str]()
    for setting, value in preset(name, where).items():
        there = leaf(base, setting)
        if there == leaf(DEFAULTS, setting):
            changes[setting] = value
            origins[setting] = Implied(f"preset {name}")
        elif there != value:
            origins[setting] = Implied(recipe_text, lost=value, by=f"preset {name}")
    return changed(base, changes), origins


def _check(file: str, entry: Entry, problems: list[str]) -> dict[str, Any]:
    """What a key sets; what is wrong with it is added to `problems`."""
    where, name = f"{file}:{entry.line}", entry.name
    inside = [each for each in types() if each.startswith(f"{name}.")]
    if isinstance(entry.value, dict) and inside:
        keys = [Entry(f"{name}.{key}", value, entry.line) for key, value in entry.value.items()]
        return {name: value for key in keys for name, value in _check(file, key, problems).items()}
    found = _wrong(where, entry, inside)
    if found:
        problems.append(found)
    return {} if found else {name: as_setting(entry.value, types()[name])}


def _wrong(where: str, entry: Entry, inside: list[str]) -> str:
    """The mistake of a key that is not a table of settings. `inside` are the settings of the table of its name."""
    name = entry.name
    if inside:
        example = f"[{name}] with {inside[0].removeprefix(f'{name}.')} = ... below it"
        return f"{name} = {entry.value} ({where}): is a table of settings; fix: {example}"
    if name not in types():
        return _unknown(name, where)
    if isinstance(entry.value, dict):
        return f"{name} ({where}): is a setting, not a table; fix: {name.rsplit('.', 1)[-1]} = {_example(name)}"
    hint = types()[name]
    value = as_setting(entry.value, hint)
    if is_a(value, hint):
        return ""
    return problem(name, value, {name: where}, no_unit(name, value) or f"not {describe(hint)}", _fix(value, hint))


def as_setting(value: Any, hint: Any) -> Any:
    """A value of TOML as settings of a type have it: arrays are tuples, and so is what may be the only item of one."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if get_origin(hint) is tuple and is_a((value,), hint) else value


def _unknown(name: str, where: str) -> str:
    close = meant_setting(name, [*types(), *sections(), *BELOW])
    fix = f"did you mean {close}?" if close else "hocket train RECIPE --help lists all settings"
    return f"{name} ({where}): there is no such setting; fix: {fix}"


def sections() -> list[str]:
    """Dotted names of all tables."""
    names = dict.fromkeys(name.rsplit(".", n)[0] for name in types() for n in (1, 2) if name.count(".") >= n)
    return list(names)


def _misnamed(file: str, entry: Entry) -> str:
    return f'{entry.name} = {entry.value} ({file}:{entry.line}): not text; fix: {entry.name} = "a name"'


def _fix(value: Any, hint: Any) -> str:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    options = [option for kind in kinds for option in get_args(kind) if isinstance(option, str)]
    close = meant(value, options) if isinstance(value, str) else ""
    return f"did you mean {close}?" if close else f"give {describe(hint)}"


def _example(name: str) -> str:
    value = leaf(DEFAULTS, name)
    return f'"{value}"' if isinstance(value, str) else str(value)
