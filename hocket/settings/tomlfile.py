"""Settings from a TOML file, each with its line, and settings as a TOML file.

The standard library's parser gives values without lines, and stops at the first mistake. So lines are found by a scan
of our own, which knows keys, tables, strings and brackets, and nothing of values. The standard library has no writer.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from hocket.files import finite
from hocket.problems import stop_if

MOST_KEYS = 1000
"""Of a file; there are not as many settings, and a suggestion for every misspelt one takes time."""
_WORD = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_NAME = rf"{_WORD}(?:\s*\.\s*{_WORD})*"
_TABLE = re.compile(rf"\s*\[\s*({_NAME})\s*\]")
_ARRAY = re.compile(rf"\s*\[\[\s*({_NAME})\s*\]\]")
_KEY = re.compile(rf"\s*({_NAME})\s*=")
_QUOTES = ('"""', "'''", '"', "'")


@dataclass(frozen=True)
class Entry:
    """One key of a file."""

    name: str
    """Dotted, with the tables it is in."""
    value: Any
    """A dictionary for a table that is written in braces, or is empty."""
    line: int
    """Counted from 1."""


def read(path: str) -> list[Entry]:
    """The keys of a file in their order. Raises ValueError for a file that cannot be read, with all double keys."""
    try:
        text = finite(path).read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise ValueError(f"{path} (command line): {reason}; fix: name a TOML file that is there") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} (command line): not text; fix: a TOML file, in UTF-8") from None
    lines = list(islice(keys(text), MOST_KEYS + 1))
    if len(lines) > MOST_KEYS:
        raise ValueError(f"{path} (command line): more than {MOST_KEYS} keys; fix: a file of settings")
    stop_if(_no_names(path, lines))
    stop_if(_double(path, lines))
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(_not_toml(path, str(error))) from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        reason = "brackets are too deep" if isinstance(error, RecursionError) else "a number is too long"
        raise ValueError(f"{path} (command line): {reason}; fix: a TOML file of settings") from None
    return [
        Entry(name, _value(tree, name), line) for name, line in lines if not _has_keys(_value(tree, name), name, lines)
    ]


def written(title: str, settings: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> str:
    """A file of settings by dotted name, below `title` as a comment; after each the comment that `sources` has for it.

    The only writer of TOML: whatever title, texts and comments hold, the file sets these settings and no others. Raises
    ValueError for a text that no file of UTF-8 can hold.
    """
    tables: dict[str, list[str]] = {"": []}  # what is in no table comes before all tables
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
            return repr(value)  # TOML's words for no number and infinity are Python's
        case str():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{value!a} is no text of UTF-8") from None
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # all else JSON escapes alike
        case _:
            return "[" + ", ".join(map(_written, value)) + "]"


def _has_keys(value: Any, name: str, lines: list[tuple[str, int]]) -> bool:
    """Whether a name is that of a table whose keys are listed themselves."""
    return isinstance(value, dict) and any(other.startswith(f"{name}.") for other, _ in lines)


def keys(text: str) -> Iterator[tuple[str, int]]:
    """Name and line of every table and key, in their order; keys inside braces are not looked for.

    The name of an array of tables is in brackets, and what has a dot inside of quotes keeps these.
    """
    table, depth, quote = "", 0, ""
    for number, line in enumerate(text.split("\n"), start=1):  # TOML has no other ends of lines
        start = 0
        if not depth and not quote:
            if found := _TABLE.match(line) or _ARRAY.match(line):
                table = _plain(found[1]) if line.lstrip()[:2] != "[[" else f"[{_plain(found[1])}]"
                yield table, number
                continue
            found = _KEY.match(line)
            if not found:
                continue
            name = _plain(found[1])
            yield f"{table}.{name}" if table else name, number
            start = found.end()
        depth, quote = _scan(line, start, depth, quote)


def _scan(line: str, at: int, depth: int, quote: str) -> tuple[int, str]:
    """How deep in brackets, and in which string of several lines, a line ends."""
    while at < len(line):
        if quote:
            if line[at] == "\\" and quote[0] == '"':
                at += 2
            elif line.startswith(quote, at):
                at, quote = at + len(quote), ""
            else:
                at += 1
        elif line[at] == "#":
            break
        elif opened := next((each for each in _QUOTES if line.startswith(each, at)), ""):
            at, quote = at + len(opened), opened
        else:
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(line[at], 0)
            at += 1
    return max(depth, 0), quote if len(quote) == 3 else ""


def _plain(name: str) -> str:
    """A key without spaces, and without quotes where it says the same without."""
    return ".".join(part if "." in part else part.strip("\"'") for part in re.findall(_WORD, name))


def _no_names(path: str, lines: list[tuple[str, int]]) -> list[str]:
    """A line for each name that no setting has because of how it is written."""
    tables = [(name, line) for name, line in lines if re.fullmatch(r"\[.*\]", name)]
    quoted = [(name, line) for name, line in lines if "[" not in name and ('"' in name or "'" in name)]
    return [
        *(f"[{name}] ({path}:{line}): there are no lists of tables; fix: {name}" for name, line in tables),
        *(f"{name} ({path}:{line}): in quotes a dot is part of a name; fix: without quotes" for name, line in quoted),
    ]


def _value(tree: Any, name: str) -> Any:
    for part in name.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _double(path: str, lines: list[tuple[str, int]]) -> list[str]:
    first: dict[str, int] = {}
    found = []
    for name, line in lines:
        if name in first:
            found.append(f"{name} ({path}:{line}): is in line {first[name]} already; fix: keep one of them")
        first.setdefault(name, line)
    return found


def _not_toml(path: str, message: str) -> str:
    place = re.search(r" ?\(at (?:line (\d+), column \d+|end of document)\)", message)
    reason = message[: place.start()] if place else message
    line = f":{place[1]}" if place and place[1] else ""
    hint = 'settings look like steps = 50 below [train], and texts have quotes, as in order = "1f1b"'
    return f"{path}{line}: not TOML: {reason[:1].lower()}{reason[1:]}; fix: {hint}"
