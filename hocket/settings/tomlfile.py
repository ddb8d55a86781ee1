"""Settings from a TOML file, each with its line, and settings as a TOML file.

The standard library's parser says what a file sets, and not where. So lines are looked up in the text: a name that has
no line there, such as one inside of braces, has that of its table. The standard library has no writer.
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

MOST_KEYS = 1000
"""Of a file; there are not as many settings, and a suggestion for every misspelt one takes time."""
_TABLE = re.compile(r"\s*\[+\s*([^\[\]=#]+?)\s*\]")
_KEY = re.compile(r"\s*([\w.\s\"'-]+?)\s*=")


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
    """The keys of a file in their order. Raises ValueError for a file that cannot be read."""
    text = ""
    try:
        text = finite(path).read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
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
    """Name -> (line, whether it is a key, not the head of a table) of all that looks like either, the first of each."""
    found: dict[str, tuple[int, bool]] = {}
    table = ""
    for number, line in enumerate(text.split("\n"), start=1):  # TOML has no other ends of lines
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
    """What is wrong with a file whose last line has the number `last`."""
    place = re.search(r" ?\(at (?:line (\d+), column \d+|end of document)\)", message)
    reason = message[: place.start()] if place else message
    line = f":{place[1] or last}" if place else ""
    hint = 'settings look like steps = 50 below [train], once each, and texts have quotes, as in order = "1f1b"'
    return f"{path}{line}: not TOML: {reason[:1].lower()}{reason[1:]}; fix: {hint}"


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
