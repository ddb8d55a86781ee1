"""Names and values out of a command line or script, `key=value` words, Python's assignments, TOML or JSON.

Every word becomes a pair: what belongs to no setting is a `Stray`, so that nothing is lost unseen.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hocket.files import finite
from hocket.foreign import shell

Pairs = list[tuple[str, Any]]
"""(name as it was written, value), in the order in which they were given."""


class Stray(str):
    """In place of a value: why a word is no setting."""

    __slots__ = ()


_NO_FLAG = Stray("belongs to no flag: settings look like --name value")
_NO_KEY = Stray("says nothing: settings look like name=value")
_STARTERS = ("torchrun", "python", "python3", "srun", "export", "-m", "-u", "torch.distributed.run")
"""Words that start a program, and say nothing of what it does."""
_RUNS = ("pretrain", "finetune")
"""Functions of Bridge that train as a configuration says."""
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
    """Flags of a command or a script, and variables in front. A flag without a value is True, with several a list."""
    return _flags([_DASHES.sub("--", word) for word in shell.words(text.translate(_TYPOGRAPHY))])


def _flags(words: Sequence[str]) -> Pairs:
    found: Pairs = []
    open_ = False  # whether a flag may take a value
    started = False  # what stands before the program belongs to what starts it
    before = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            found.append((name, scalar(value) if equals else True))
            open_ = True
        elif word == shell.END:
            open_ = started = False
        elif not started and (word in _STARTERS or before == "-m" or word.endswith((".py", ".sh"))):
            open_, started = False, word not in _STARTERS
        elif open_ and (not word.startswith("-") or isinstance(scalar(word), (int, float))):
            name, given = found[-1]
            value = scalar(word)
            several = [*(given if isinstance(given, list) else [given]), value]
            found[-1] = (name, value if given is True else several)
        elif match := re.fullmatch(r"([A-Z][A-Z0-9_]+)=(.*)", word, re.DOTALL):
            found.append((match[1], scalar(match[2])))
        else:
            found.append((word, _NO_FLAG))
            open_ = False
        before = word
    return found


def keys(text: str) -> Pairs:
    """Assignments: Python's, or words such as `model.tensor_model_parallel_size=4`, with or without a `+` in front."""
    lines = re.sub(r"^[^\S\n]*(?:>>>|\.\.\.) ?", "", text.translate(_TYPOGRAPHY), flags=re.MULTILINE)
    try:
        body = ast.parse(textwrap.dedent(lines)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _keys(_words(re.sub(r"\s*=\s*", "=", text)))
    return _statements(body, {})


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


def _statements(body: Sequence[ast.stmt], known: Mapping[str, Any]) -> Pairs:
    found: Pairs = []
    for each in body:
        found += _statement(each, {**known, **dict(found)})
    return found


def _statement(node: ast.stmt, known: Mapping[str, Any]) -> Pairs:
    """The settings of a line of Python: an assignment, or a line that sets nothing. `known` are those before it."""
    match node:
        case ast.Assign(targets=[target]):
            return list(_assigned(ast.unparse(target), node.value, known))
        case ast.AnnAssign(target=target) if node.value is not None:
            return list(_assigned(ast.unparse(target), node.value, known))
        case ast.If(orelse=[]) if "__name__" in ast.unparse(node.test):
            return _statements(node.body, known)
        case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Expr(value=ast.Constant()):
            return []
        case ast.Expr(value=ast.Call(func=ast.Name(id=name))) if name in _RUNS:
            return []
    return [(_one_line(ast.unparse(node)), _NO_KEY)]


def _one_line(text: str) -> str:
    first, *more = text.splitlines()
    return f"{first} ..." if more else first


def _assigned(name: str, node: ast.expr, known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A value; the arguments of a call each, with the section in front. A function `..._config` is a recipe."""
    if not isinstance(node, ast.Call):
        text = ast.unparse(node)
        try:
            value = known[text] if text in known else ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            value = _listed(text)
        yield name, list(value) if isinstance(value, tuple) else value
        return
    function = ast.unparse(node.func).rsplit(".", 1)[-1]
    if function.endswith("_config") and not node.args:
        yield "recipe", function
    elif node.args or not node.keywords:
        yield f"{name} = {_one_line(ast.unparse(node))}", _NO_KEY
    for each in node.keywords:
        if each.arg:
            yield from _assigned(f"{name}.{each.arg}", each.value, known)
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
    """Flags, or what stands in the file that is named: the leaves of TOML or JSON, or the flags of a script."""
    named = " " not in text and "\n" not in text
    if named and text.endswith(".sh"):
        return flags(_text(text))
    return file(text) if named and text.endswith((".toml", ".json")) else flags(text)


def with_files(text: str, names: Sequence[str]) -> Pairs:
    """Flags, or a file, where flags of these `names` name further files, above which the other flags stand."""
    found = flags_or_file(text)
    files = [value for name, value in found if _plain(name) in names and isinstance(value, str)]
    rest = [pair for pair in found if not (_plain(pair[0]) in names and isinstance(pair[1], str))]
    above = {_plain(name) for name, _ in rest}
    return [pair for path in files for pair in file(path) if pair[0] not in above] + rest


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def file(path: str) -> Pairs:
    """All leaves of a TOML or JSON file, with dotted names. Raises ValueError if it cannot be read."""
    text = _text(path)
    try:
        found = (
            tomllib.loads(text)
            if path.endswith(".toml")
            else json.loads(text, object_pairs_hook=_once, parse_float=_number)
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} (command line): {error}; fix: a file of the format that its name says") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} (command line): holds no settings; fix: an object of names and values")
    return list(_leaves(found, ""))


def _text(path: str) -> str:
    try:
        return finite(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path} (command line): cannot be read ({error.strerror}); fix: name a file") from None
    except ValueError:
        raise ValueError(f"{path} (command line): is no text in UTF-8; fix: save it as UTF-8") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, of whose names none is there twice: another reader may take the other one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for at, (name, _) in enumerate(pairs) if name in dict(pairs[:at]))
        raise ValueError(f"{twice} is there twice")
    return found


def _number(text: str) -> float:
    """A number of JSON. Whole ones are whole, as 5e8 is, which stands in many configurations of DeepSpeed."""
    value = float(text)
    return int(value) if "e" in text.lower() and value.is_integer() else value


def _leaves(table: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
