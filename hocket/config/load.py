"""Sources of a configuration: defaults < a preset < a recipe < a TOML file < the command line.

A recipe is a function that returns a whole `Config`. Settings that it leaves at their defaults count as not set. Values
from files and flags are checked one by one: each mistake is one clear line, and all are reported at once.

The standard library's TOML parser gives no line numbers. So lines are searched in the text: a name that is not found,
such as one inside of braces, gets the line of its table. The standard library has no TOML writer.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from hocket.config import Config
from hocket.config.rule import leaf, problem, show
from hocket.config.schema import BELOW, DEFAULTS, Implied, changed, meant_setting, no_unit, quoted, types
from hocket.files import regular_file
from hocket.recipes import preset, recipe
from hocket.typed import describe, is_a


@dataclass(frozen=True, kw_only=True)
class Start:
    """The configuration of a run before the settings of the command line."""

    config: Config
    origins: Mapping[str, str]
    problems: tuple[str, ...] = ()
    """Mistakes in the file. The configuration leaves their settings out."""


def begin(name: str, recipe_flag: str = "", preset_flag: str = "") -> Start:
    """The configuration that a recipe or file names, with what it builds on.

    `name` is a recipe, `module:function` or a file; empty if the recipe is given by flag. Raises ValueError for names
    that do not exist; mistakes inside a file are returned.
    """
    file = name if is_file(name) else ""
    entries = read(file) if file else []
    problems: list[str] = []
    named = {entry.name: entry for entry in entries if entry.name in BELOW}
    for entry in named.values():
        if not isinstance(entry.value, str):
            where = f"{entry.name} = {entry.value} ({file}:{entry.line})"
            problems.append(f'{where}: not text; fix: {entry.name} = "a name"')
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
            found = _settings_of(entry, f"{file}:{entry.line}", problems)
            changes |= found
            origins |= dict.fromkeys(found, f"{file}:{entry.line}")
    if file and "run.name" not in changes:  # two files based on one recipe are two runs
        changes["run.name"] = Path(file).stem
    return Start(config=changed(config, changes), origins=origins, problems=tuple(problems))


def is_file(name: str) -> bool:
    """Whether a word names a file rather than a recipe."""
    return name.endswith(".toml") or (":" not in name and "/" in name)


def _named(entry: Entry | None, flag: str, file: str) -> tuple[str, str]:
    """A recipe's or preset's name, and where it was named; the command line takes precedence over the file."""
    if flag:
        return flag, "command line"
    return (entry.value, f"{file}:{entry.line}") if entry and isinstance(entry.value, str) else ("", "")


def _with_preset(base: Config, name: str, where: str, recipe_text: str) -> tuple[Config, dict[str, str]]:
    """A recipe's configuration on top of a preset, and the resulting origins."""
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


# -- A file ------------------------------------------------------------------------------------------------------------


def _settings_of(entry: Entry, where: str, problems: list[str]) -> dict[str, Any]:
    """The settings of a key; mistakes are added to `problems`."""
    name, value = entry.name, entry.value
    if inside := [each.removeprefix(f"{name}.") for each in types() if each.startswith(f"{name}.")]:
        if isinstance(value, dict):
            keys = [Entry(f"{name}.{key}", each, entry.line) for key, each in value.items()]
            return {name: value for key in keys for name, value in _settings_of(key, where, problems).items()}
        fix = f"[{name}] with {inside[0]} = ... below it"
        problems.append(f"{name} = {value} ({where}): is a table of settings; fix: {fix}")
    elif name not in types():
        sections = {each.rsplit(".", n)[0]: "" for each in types() for n in (1, 2) if each.count(".") >= n}
        problems.append(_unknown(name, where, "", [*types(), *sections, *BELOW]))
    elif isinstance(value, dict):
        default = leaf(DEFAULTS, name)
        example = f'"{default}"' if isinstance(default, str) else default
        problems.append(f"{name} ({where}): is a setting, not a table; fix: {name.rsplit('.', 1)[-1]} = {example}")
    else:
        value, hint = as_setting(value, types()[name]), types()[name]
        if is_a(value, hint):
            return {name: value}
        reason = no_unit(name, value) or f"not {describe(hint)}"
        fix = _give(show(value), hint, leaf(DEFAULTS, name), toml=True)
        problems.append(problem(name, quoted(value, hint), {name: where}, reason, fix))
    return {}


def as_setting(value: Any, hint: Any) -> Any:
    """Convert a TOML value to a setting's type: arrays become tuples, and so does a single item for a tuple."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if get_origin(hint) is tuple and is_a((value,), hint) else value


def _unknown(name: str, where: str, dashes: str, known: Sequence[str]) -> str:
    close = meant_setting(name, known)
    fix = f"did you mean {dashes}{close}?" if close else "hocket train RECIPE --help lists all settings"
    return f"{show(dashes + name)} ({where}): there is no such setting; fix: {fix}"


def _give(shown: str, hint: Any, value: object, toml: bool = False) -> str:
    """What to give instead of a value of the wrong type, in a file or as words. `value` is an example."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    options = [str(option) for kind in kinds if get_origin(kind) is Literal for option in get_args(kind)]
    if close := difflib.get_close_matches(shown, options, n=1):
        return f"did you mean {close[0]}?"
    if not isinstance(value, tuple):
        such = value if value != "" else "a-name"
        return f"give {describe(hint)}, such as {json.dumps(such) if toml else such}"
    item = get_args(hint)[0]
    first = get_args(item)[:1] if get_origin(item) is Literal else {int: (0, 1), str: ("some/folder",)}.get(item, (0,))
    such = list(value) or list(first)
    return f"give {describe(hint)}, such as {json.dumps(such) if toml else ' '.join(map(str, such))}"


# -- The command line: `--overlap.ep.merge off` ------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """The parsed words of a command line."""

    settings: dict[str, Any]
    """Values by dotted name."""
    options: dict[str, Any]
    """Values of the command's own flags."""
    origins: dict[str, str]
    """Where each setting was given, also if its value is wrong."""
    problems: list[str]
    """Unknown flags, flags given twice with different values, wrong values, words without a flag."""


def given(arguments: Sequence[str], config: Config, others: Mapping[str, Any]) -> Given:
    """Parse command-line arguments. `others` are the command's own flags with their types (bool: no value)."""
    known = types()
    found = Given({}, {}, {}, [])
    problems, seen = found.problems, dict[str, list[str]]()
    for flag, words in split(arguments, problems):
        name = flag.removeprefix("--").replace("-", "_")
        hint, shown = others.get(name, known.get(name)), show(" ".join(words)) if words else "(nothing)"
        if seen.setdefault(name, words) != words:
            fix = "give it once, with all of its values" if get_origin(hint) is tuple else "give it once"
            both = f"{show(' '.join(seen[name])) if seen[name] else '(nothing)'} and {shown}"
            problems.append(f"{flag} = {both} (command line): given twice; fix: {fix}")
        if name in others and hint is bool:
            found.options[name] = True
            if words:
                problems.append(f"{flag} (command line): takes no value; fix: leave out {shown}")
        elif name in others:
            if words and not all(words):  # without a value a flag means something else
                problems.append(f"{flag} = (empty) (command line): names nothing; fix: a value, or leave it out")
            elif words and _parses(words, hint):
                found.options[name] = value_of(words, hint)
            else:
                wanted = describe(hint)
                problems.append(f"{flag} = {shown} (command line): not {wanted}; fix: give {wanted}")
        elif name in known:
            found.origins[name] = where = f"command line, {flag}"
            if _parses(words, hint):
                found.settings[name] = value_of(words, hint)
            else:
                fix = _give(shown, hint, leaf(config, name))
                problems.append(f"{name} = {shown} ({where}): not {describe(hint)}; fix: {fix}")
        elif inside := next((each for each in (*known, *others) if each.startswith(f"{name}.")), ""):
            problems.append(f"{flag} (command line): is a section; fix: one of its settings, such as --{inside}")
        else:
            problems.append(_unknown(name, "command line", "--", [*known, *others]))
    return found


def split(arguments: Sequence[str], problems: list[str]) -> list[tuple[str, list[str]]]:
    """Split arguments into (flag, its values)."""
    cut: list[tuple[str, list[str]]] = []
    for word in arguments:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            cut.append((flag, [value] if equals else []))
        elif cut:
            cut[-1][1].append(word)
            if word.startswith("-") and not _parses([word], float):
                fix = f"{cut[-1][0]}={show(word)} if it is a value"
                problems.append(f"{show(word)} (command line): begins like a flag; fix: {fix}")
        else:
            meant = word.lstrip("-")
            fix = f"--{meant}" if meant.partition("=")[0] in types() else "settings look like --train.steps 50"
            problems.append(f"{show(word)} (command line): not a setting; fix: {fix}")
    return cut


def _parses(words: Sequence[str], hint: Any) -> bool:
    """Whether the words after a flag are a value of a type."""
    try:
        value_of(words, hint)
    except ValueError:
        return False
    return True


def value_of(words: Sequence[str], hint: Any) -> Any:
    """The value that the words after a flag have, by its type; for a union, by the first type that they fit.

    Raises ValueError if they fit none.
    """
    args = get_args(hint)
    if get_origin(hint) is tuple:
        if args[-1] is not Ellipsis and len(words) != len(args):
            raise ValueError(f"{len(args)} values are wanted, not {len(words)}")
        return tuple(value_of([word], args[0]) for word in words)
    if get_origin(hint) in (Union, UnionType):
        return value_of(words, next((kind for kind in args if _parses(words, kind)), args[0]))
    (word,) = words
    if hint is bool:
        word = word.capitalize()  # TOML's spelling works too
    if get_origin(hint) is Literal or hint is bool:
        options = {str(option): option for option in args or (True, False)}
        if word not in options:
            raise ValueError(f"{show(word)} is not {describe(hint)}")
        return options[word]
    return hint(word)


# -- TOML: settings from a file, each with its line, and settings as a file --------------------------------------------

MOST_KEYS = 1000
"""Most keys of a file: there are fewer settings, and suggestions for misspelt ones take time."""
_TABLE = re.compile(r"\s*\[+\s*([^\[\]=#]+?)\s*\]")
_KEY = re.compile(r"\s*([\w.\s\"'-]+?)\s*=")


@dataclass(frozen=True)
class Entry:
    """One key of a file."""

    name: str
    """Dotted, with its tables."""
    value: Any
    """A dictionary for an inline or empty table."""
    line: int
    """Counted from 1."""


def read(path: str) -> list[Entry]:
    """The keys of a file, in order. Raises ValueError for a file that cannot be read."""
    text = ""
    try:
        text = regular_file(path).read_text(encoding="utf-8-sig")  # some editors write a byte order mark
        tree = tomllib.loads(text)
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise ValueError(f"{path} (command line): {reason}; fix: name a TOML file that is there") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} (command line): not text; fix: a TOML file, in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(_not_toml(path, str(error), text.count("\n") + 1)) from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        reason = "brackets are too deep" if isinstance(error, RecursionError) else "a number is too long"
        raise ValueError(f"{path} (command line): {reason}; fix: a TOML file of settings") from None
    found = list(islice(_entries(path, tree, "", lines_of(text), 1), MOST_KEYS + 1))
    if len(found) > MOST_KEYS:
        raise ValueError(f"{path} (command line): more than {MOST_KEYS} keys; fix: a file of settings")
    return found


def _entries(
    path: str, tree: Mapping[str, Any], table: str, lines: Mapping[str, tuple[int, bool]], line: int
) -> Iterator[Entry]:
    """The keys of a table whose own line is `line`."""
    for key, value in tree.items():
        name = f"{table}{key}"
        at, is_key = lines.get(name, (line, False))
        if "." in key:
            raise ValueError(f"{name!r} ({path}:{at}): in quotes a dot is part of a name; fix: without quotes")
        if isinstance(value, dict) and value and not is_key:
            yield from _entries(path, value, f"{name}.", lines, at)
        else:
            yield Entry(name, value, at)


def lines_of(text: str) -> dict[str, tuple[int, bool]]:
    """Name -> (line, whether it is a key rather than a table header), for the first occurrence of each."""
    found: dict[str, tuple[int, bool]] = {}
    table = ""
    for number, line in enumerate(text.split("\n"), start=1):  # TOML has no other line ends
        if head := _TABLE.match(line):
            table = _plain(head[1])
            found.setdefault(table, (number, False))
        elif key := _KEY.match(line):
            name = _plain(key[1])
            found.setdefault(f"{table}.{name}" if table else name, (number, True))
    return found


def _plain(name: str) -> str:
    """A name without spaces and quotes."""
    return ".".join(part.strip(" \t\"'") for part in name.split("."))


def _not_toml(path: str, message: str, last: int) -> str:
    """The message about invalid TOML in a file of `last` lines."""
    place = re.search(r" ?\(at (?:line (\d+), column \d+|end of document)\)", message)
    reason = message[: place.start()] if place else message
    line = f":{place[1] or last}" if place else ""
    hint = 'settings look like steps = 50 below [train], once each, and texts have quotes, as in order = "1f1b"'
    return f"{path}{line}: not TOML: {reason[:1].lower()}{reason[1:]}; fix: {hint}"


def written(title: str, settings: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> str:
    """A TOML file of settings by dotted name, with `title` as a comment, and comments from `sources` after settings.

    The only TOML writer: whatever title, texts and comments contain, the file sets these settings and no others. Raises
    ValueError for text that UTF-8 cannot encode.
    """
    tables: dict[str, list[str]] = {"": []}  # keys without a table come first
    for setting, value in settings.items():
        table, _, name = setting.rpartition(".")
        after = f"  {_comment(sources[setting])}" if sources and setting in sources else ""
        tables.setdefault(table, []).append(f"{_key(name)} = {_written(value)}{after}")
    heads = {table: ["[" + ".".join(map(_key, table.split("."))) + "]"] if table else [] for table in tables}
    blocks = ["\n".join([*heads[table], *rows]) for table, rows in tables.items() if rows]
    return "\n\n".join([_comment(title), *blocks]) + "\n"


def _comment(text: str) -> str:
    return "# " + "".join(x if x.isprintable() else ascii(x)[1:-1] for x in text)


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _written(name)


def _written(value: bool | int | float | str | tuple[Any, ...]) -> str:
    """A value as TOML."""
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)  # nan and inf have the same names in TOML
        case str():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{value!a} is no text of UTF-8") from None
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # other escapes are those of JSON
        case _:
            return "[" + ", ".join(map(_written, value)) + "]"
