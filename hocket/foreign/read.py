"""Names and values out of a command line, `key=value` words, TOML or JSON."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Pairs = list[tuple[str, Any]]
"""(name as it was written, value), in the order in which they were given."""


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
    """Flags of a command line, and variables in front of it. Words that belong to no flag are passed over.

    A flag without a value is True, one with several values a list.
    """
    found: Pairs = []
    for word in _words(text):
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            found.append((name, scalar(value) if equals else True))
        elif word.endswith(".py"):  # the program; what stands before belongs to torchrun
            continue
        elif not word.startswith("-") and found and found[-1][0].startswith("--"):
            name, before = found[-1]
            value = scalar(word)
            found[-1] = (
                name,
                value if before is True else [*(before if isinstance(before, list) else [before]), value],
            )
        elif match := re.fullmatch(r"([A-Z][A-Z0-9_]+)=(.*)", word):
            found.append((match[1], scalar(match[2])))
    return found


def keys(text: str) -> Pairs:
    """Words such as `model.tensor_model_parallel_size=4`, with or without a `+` in front."""
    found: Pairs = []
    for word in _words(text):
        name, equals, value = word.lstrip("+-").partition("=")
        if equals:
            found.append((name, _listed(value)))
    return found


def _listed(text: str) -> Any:
    """A value, or a list of them in square brackets."""
    if text.startswith("[") and text.endswith("]"):
        return [scalar(part.strip(" '\"")) for part in text[1:-1].split(",") if part.strip()]
    return scalar(text)


def _words(text: str) -> list[str]:
    """Words of a command line, continued over lines or not."""
    try:
        return shlex.split(text.replace("\\\n", " "), comments=False)
    except ValueError as error:
        raise ValueError(f"{text[:40]} (command line): {error}; fix: close the quotation") from None


def flags_or_file(text: str) -> Pairs:
    """Flags, or the leaves of the TOML or JSON file that is named."""
    return file(text) if text.endswith((".toml", ".json")) and " " not in text else flags(text)


def file(path: str) -> Pairs:
    """All leaves of a TOML or JSON file, with dotted names. Raises ValueError if it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
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
