"""Queries about single settings: names, types and bounds, where each was set, and suggestions for wrong names.

Origins are a mapping: dotted name -> where the setting was set, such as `run.toml:6` or `command line, --train.steps`.
The key "" has the origin of all other settings: the recipe. The keys `recipe` and `preset` say where a file or a flag
named them, such as `command line, --preset memory`. A setting that a preset set, or that a recipe overrode, has an
origin of type `Implied`: the user did not ask for it. If it has no effect, that is a remark, not an error.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar, get_type_hints

from hocket.config import Config
from hocket.config.rule import ANY, FILLED, UNPRINTABLE, Between, Form, leaf, problem
from hocket.typed import describe, is_a

ConfigLike = TypeVar("ConfigLike", bound=Config)


@cache
def annotated() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Dotted name of every setting -> (its type, the bounds and forms of its annotation), in tree order."""
    return dict(_annotated(Config, ""))


def _annotated(section: type[Any], prefix: str) -> Iterator[tuple[str, tuple[Any, tuple[Any, ...]]]]:
    hints = get_type_hints(section, include_extras=True)
    for field in dataclasses.fields(section):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _annotated(hint, f"{prefix}{field.name}.")
        else:
            marks = getattr(hint, "__metadata__", ())
            yield f"{prefix}{field.name}", (hint.__origin__ if marks else hint, marks)


@cache
def types() -> dict[str, Any]:
    """Dotted name of every setting -> its type, in tree order."""
    return {name: hint for name, (hint, _) in annotated().items()}


def bounds_of(setting: str) -> Between | None:
    """Smallest and largest value of a setting's numbers; None if it has no bounds."""
    return next((mark for mark in annotated()[setting][1] if isinstance(mark, Between)), None)


def form_of(setting: str) -> Form | None:
    """The form of a setting's texts; None if it has none."""
    return next((mark for mark in annotated().get(setting, ("", ()))[1] if isinstance(mark, Form)), None)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries of settings, by dotted names."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def changed(config: ConfigLike, changes: Mapping[str, Any]) -> ConfigLike:
    """A configuration with other values for some settings, by dotted name. Each section is built once."""
    whole: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for setting, value in changes.items():
        name, _, rest = setting.partition(".")
        if rest:
            parts.setdefault(name, {})[rest] = value
        else:
            whole[name] = value
            parts.pop(name, None)
    for name, inner in parts.items():
        whole[name] = changed(whole[name] if name in whole else getattr(config, name), inner)
    return dataclasses.replace(config, **whole) if whole else config


def impossible(config: Config, origins: Mapping[str, str]) -> dict[str, str]:
    """The settings with a wrong type, an unknown choice, or a value out of bounds, each with a line about it."""
    values = {setting: leaf(config, setting) for setting in types()}
    return {
        setting: problem(setting, value, origins, *wrong)
        for setting, value in values.items()
        if (wrong := _wrong(setting, value))
    }


def _wrong(setting: str, value: object) -> tuple[str, str] | None:
    """Why a setting cannot have a value, and a fix; None if it can."""
    (hint, marks), form = annotated()[setting], form_of(setting)
    if not is_a(value, hint):
        return no_unit(setting, value) or f"not {describe(hint)}", f"give {describe(hint)}"
    if FILLED in marks and not all(text.strip() for text in texts_of(value)):
        return "is empty", "a text, or leave it out"
    if unprintable(value):
        return "has a character that cannot be shown", "leave it out"
    if form and (reason := unreadable(form, value)):
        return reason, form.words
    bounds = beyond(setting, value)
    return ("out of range", bounds) if bounds else None


def unprintable(value: object) -> bool:
    """Whether a text, or one of several, has characters that do not belong into a line, such as control characters."""
    return any(unicodedata.category(x) in UNPRINTABLE for text in texts_of(value) for x in text)


def texts_of(value: object) -> list[str]:
    """The texts in a value: itself, or items of a tuple."""
    return [text for text in (value if isinstance(value, tuple) else (value,)) if isinstance(text, str)]


def no_unit(setting: str, value: object) -> str:
    """Why a number is not valid for a setting with a unit; empty for anything else."""
    form = form_of(setting)
    return f'has no unit, as "{form.example}" has' if form and isinstance(value, int | float) else ""


def unreadable(form: Form, value: object) -> str:
    """Why a text, or one of several, does not have the form; empty if all have."""
    for text in texts_of(value):
        try:
            if not (form.auto and text == "auto"):
                form.read(text)
        except ValueError as error:
            return str(error)
    return ""


def beyond(setting: str, value: object) -> str:
    """The violated bound of a setting's numbers; empty if all are inside."""
    bounds = bounds_of(setting)
    low, high = (bounds.low, bounds.high) if bounds else (-ANY, ANY)
    numbers = [x for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, int | float)]
    if all(low <= x <= high and x != ANY for x in numbers):
        return ""
    if high == ANY:
        return f"at least {written(low)}{', and no infinity' if ANY in numbers else ''}"
    return f"at most {written(high)}" if all(x >= low for x in numbers) else f"at least {written(low)}"


def written(bound: float) -> str:
    """A bound as one would type it."""
    return f"{bound:.0f}" if bound == int(bound) and abs(bound) < 1e12 else f"{bound:g}"


def ill_typed(config: Config, origins: Mapping[str, str]) -> list[str]:
    """One line per section or setting of a wrong type, which only a configuration made in Python can have."""
    return list(_ill_typed(Config, config, "", origins))


def _ill_typed(kind: type[Any], section: Any, prefix: str, origins: Mapping[str, str]) -> Iterator[str]:
    for name, hint in get_type_hints(kind).items():
        value, is_section = getattr(section, name), dataclasses.is_dataclass(hint)
        if is_section and isinstance(value, hint):
            yield from _ill_typed(hint, value, f"{prefix}{name}.", origins)
        elif is_section or not is_a(value, hint):
            wanted = f"a {hint.__name__}" if is_section else describe(hint)
            yield problem(prefix + name, quoted(value, hint), origins, f"not {wanted}", f"give {wanted}")


def quoted(value: object, hint: Any) -> object:
    """A value for a message: a text is quoted if a number or truth value is expected, since it may look like one."""
    return f'"{value}"' if isinstance(value, str) and hint in (bool, int, float) else value


def digest(config: Config) -> str:
    """A short hash of what a configuration says about a step: all settings except name and folder of the run."""
    said = {setting: leaf(config, setting) for setting in types() if not setting.startswith("run.")}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:12]


# -- Where settings come from ------------------------------------------------------------------------------------------

DEFAULTS = Config()
BELOW = ("recipe", "preset")
"""Keys of a file that are not settings: they name what the file builds on. Flags may name it too."""
_FLAG = "command line, "


class Implied(str):
    """The origin of a setting that was set indirectly. `lost` is a preset's value that a recipe overrode."""

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
    """The origin of a setting's value in an unresolved configuration."""
    if setting in origins:
        return str(origins[setting])
    return "default" if leaf(config, setting) == leaf(DEFAULTS, setting) else origins.get("", "configuration")


def command_words(config: Config, origins: Mapping[str, str], also: Collection[str] = ()) -> list[str]:
    """Words for `hocket train` that give a configuration: its recipe or file, and flags for further settings.

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


# -- What a user meant by a name that does not exist ------------------------------------------------------------------

_LIKE, _JOINED, _WORD = 0.75, 0.9, 0.6
"""Minimum similarity of a misspelt name, of one with another number of words, and of each word. Below these, unrelated
settings would match."""


def meant(name: str, known: Iterable[str]) -> str:
    """The known name that a misspelt name most likely means; empty if there is none.

    Leading dashes and kinds of dashes do not count. Names with equally many words must be similar in each word:
    `--data-parallel-size` does not mean `--context-parallel-size`.
    """
    plain = {_plain(each): each for each in known}
    close = difflib.get_close_matches(_plain(name), list(plain), n=8, cutoff=_LIKE)
    return next((plain[each] for each in close if _word_by_word(_plain(name), each)), "")


def _word_by_word(name: str, other: str) -> bool:
    """Whether two similar names are similar in each word. Words may be missing or joined."""
    mine, others = re.split(r"[-.]", name), re.split(r"[-.]", other)
    if len(mine) != len(others):
        return difflib.SequenceMatcher(None, name, other).ratio() >= _JOINED
    return all(difflib.SequenceMatcher(None, *pair).ratio() >= _WORD for pair in zip(mine, others, strict=True))


def meant_setting(name: str, known: Iterable[str]) -> str:
    """The most likely setting; empty if none is similar.

    A name that is (nearly) right but in the wrong section, or without one, matches first.
    """
    known = list(known)
    last = name.rsplit(".", 1)[-1]
    lasts = [each.rsplit(".", 1)[-1] for each in known]
    close = difflib.get_close_matches(last, lasts, n=1, cutoff=0.8)
    same = [each for each, its_last in zip(known, lasts, strict=True) if its_last in close]
    if same:
        return difflib.get_close_matches(name, same, n=1, cutoff=0.0)[0]
    return meant(name, known)


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-")
