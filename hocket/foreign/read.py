"""Names and values out of a command line, `key=value` words, Python's assignments, TOML or JSON.

Every word becomes a pair: what belongs to no setting is a `Stray`, so that nothing is lost unseen.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

from hocket.files import finite

Pairs = list[tuple[str, Any]]
"""(name as it was written, value), in the order in which they were given."""


class Stray(str):
    """In place of a value: why a word is no setting."""

    __slots__ = ()


_NO_FLAG = Stray("belongs to no flag: settings look like --name value")
_NO_KEY = Stray("says nothing: settings look like name=value")
_STARTERS = ("torchrun", "python", "python3", "srun", "export", "-m", "-u", "torch.distributed.run")
"""Words that start a program, and say nothing of what it does."""
_TYPOGRAPHY = str.maketrans("\u201c\u201d\u2018\u2019\u00a0", "\"\"'' ")
"""Quotation marks and spaces of web pages -> those of a shell."""
_DASHES = re.compile(r"^(?:[\u2010-\u2015\u2212]+-*|-[\u2010-\u2015\u2212]+)(?=[A-Za-z])")
"""What web pages make of the two dashes of a flag."""


def scalar(text: str) -> Any:
    """A word as whole number, number, truth value, nothing, or text."""
    words = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
    if text in words:
        return words[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def flags(text: str) -> Pairs:
    """Flags of a command line, and variables in front of it. A flag without a value is True, with several a list."""
    return _flags(_words(text))


def _flags(words: Sequence[str]) -> Pairs:
    found: Pairs = []
    open_ = False  # whether a flag may take a value
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            found.append((name, scalar(value) if equals else True))
            open_ = True
        elif word in _STARTERS or word.endswith(".py"):  # what stands before the program belongs to what starts it
            open_ = False
        elif open_ and (not word.startswith("-") or isinstance(scalar(word), (int, float))):
            name, before = found[-1]
            value = scalar(word)
            several = [*(before if isinstance(before, list) else [before]), value]
            found[-1] = (name, value if before is True else several)
        elif match := re.fullmatch(r"([A-Z][A-Z0-9_]+)=(.*)", word, re.DOTALL):
            found.append((match[1], scalar(match[2])))
        else:
            found.append((word, _NO_FLAG))
            open_ = False
    return found


def keys(text: str) -> Pairs:
    """Assignments: Python's, or words such as `model.tensor_model_parallel_size=4`, with or without a `+` in front."""
    try:
        body = ast.parse(text.translate(_TYPOGRAPHY)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _keys(_words(re.sub(r"\s*=\s*", "=", text)))
    return [pair for each in body for pair in _statement(each)]


def _keys(words: Sequence[str]) -> Pairs:
    found: Pairs = []
    rest: list[str] = []
    for word in words:
        name, equals, value = word.lstrip("+-").partition("=")
        if not equals:
            rest.append(word)
        elif not name or not value or "=" in value:
            found.append((word, _NO_KEY))
        else:
            found.append((name, _listed(value)))
    return found + [(name, _NO_KEY if isinstance(value, Stray) else value) for name, value in _flags(rest)]


def _statement(node: ast.stmt) -> Iterator[tuple[str, Any]]:
    """The settings of a line of Python: an assignment, or an import, which has none."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        yield from _assigned(ast.unparse(node.targets[0]), node.value)
    elif not isinstance(node, (ast.Import, ast.ImportFrom)):
        yield ast.unparse(node), _NO_KEY


def _assigned(name: str, node: ast.expr) -> Iterator[tuple[str, Any]]:
    """A value; the arguments of a call each, with the section in front. A function `..._config` is a recipe."""
    if not isinstance(node, ast.Call):
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            value = _listed(ast.unparse(node))
        yield name, list(value) if isinstance(value, tuple) else value
        return
    function = ast.unparse(node.func).rsplit(".", 1)[-1]
    if function.endswith("_config") and not node.args:
        yield "recipe", function
    elif node.args or not node.keywords:
        yield f"{name} = {ast.unparse(node)}", _NO_KEY
    for each in node.keywords:
        if each.arg:
            yield from _assigned(f"{name}.{each.arg}", each.value)
        else:
            yield ast.unparse(each), _NO_KEY


def _listed(text: str) -> Any:
    """A value, or a list of them in square brackets."""
    if text.startswith("[") and text.endswith("]"):
        return [scalar(part.strip(" '\"")) for part in text[1:-1].split(",") if part.strip()]
    return scalar(text)


def _words(text: str) -> list[str]:
    """Words of a command line, continued over lines or not, also as web pages show them."""
    try:
        words = shlex.split(text.replace("\\\n", " ").translate(_TYPOGRAPHY), comments=False)
    except ValueError as error:
        raise ValueError(f"{text[:40]} (command line): {error}; fix: close the quotation") from None
    return [_DASHES.sub("--", word) for word in words]


def flags_or_file(text: str) -> Pairs:
    """Flags, or the leaves of the TOML or JSON file that is named."""
    return file(text) if text.endswith((".toml", ".json")) and " " not in text else flags(text)


def file(path: str) -> Pairs:
    """All leaves of a TOML or JSON file, with dotted names. Raises ValueError if it cannot be read."""
    try:
        text = finite(path).read_text(encoding="utf-8-sig")
        found = tomllib.loads(text) if path.endswith(".toml") else json.loads(text)
    except OSError as error:
        raise ValueError(f"{path} (command line): cannot be read ({error.strerror}); fix: name a file") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} (command line): {error}; fix: a file of the format that its name says") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} (command line): holds no settings; fix: an object of names and values")
    return list(_leaves(found, ""))


def _leaves(table: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
