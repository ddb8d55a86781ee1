"""Settings from the command line: `--overlap.ep.merge off`, checked one by one, so that each mistake is one clear line.

`given` finds out which settings were given (for the origin that messages name) and reports unknown settings and wrong
values, all at once; `value_of` makes values of the words that it lets pass. Help is tyro's.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from hocket.config import Config
from hocket.settings.schema import leaf, show, types
from hocket.settings.suggest import meant_setting
from hocket.typed import describe


def given(arguments: Sequence[str], config: Config, others: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Where every setting among command-line arguments was given, by dotted name, and what is wrong with them.

    `others` are the flags of the command itself with the type of their value (bool: none). Wrong are unknown flags,
    flags given twice with different values, wrong values, words that belong to no flag.
    """
    known = types()
    found: dict[str, str] = {}
    problems: list[str] = []
    seen: dict[str, list[str]] = {}
    for flag, words in split(arguments, problems):
        name = flag.removeprefix("--").replace("-", "_")
        hint = others.get(name, known.get(name))
        if seen.setdefault(name, words) != words:
            fix = "give it once, with all of its values" if get_origin(hint) is tuple else "give it once"
            both = " and ".join(show(" ".join(values)) if values else "(nothing)" for values in (seen[name], words))
            problems.append(f"{flag} = {both} (command line): given twice; fix: {fix}")
        if name in others:
            problems += _check_other(flag, words, hint)
        elif name in known:
            found[name] = f"command line, {flag}"
            problems += _check(name, flag, words, config)
        else:
            problems.append(_unknown(flag, name, [*known, *others]))
    return found, problems


def split(arguments: Sequence[str], problems: list[str]) -> list[tuple[str, list[str]]]:
    """Cut arguments into (flag, its values)."""
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


def _unknown(flag: str, name: str, known: Sequence[str]) -> str:
    if inside := next((each for each in known if each.startswith(f"{name}.")), ""):
        return f"{flag} (command line): is a section; fix: one of its settings, such as --{inside}"
    close = meant_setting(name, known)
    hint = f"did you mean --{close}?" if close else "hocket train RECIPE --help lists all settings"
    return f"{show(flag)} (command line): there is no such setting; fix: {hint}"


def _check(name: str, flag: str, words: Sequence[str], config: Config) -> list[str]:
    hint = types()[name]
    shown = show(" ".join(words)) if words else "(nothing)"
    if _parses(words, hint):
        return []
    wanted = describe(hint)
    guess = difflib.get_close_matches(shown, map(str, get_args(hint)), n=1) if get_origin(hint) is Literal else []
    fix = f"did you mean {guess[0]}?" if guess else f"give {wanted}, such as {_example(leaf(config, name), hint)}"
    return [f"{name} = {shown} (command line, {flag}): not {wanted}; fix: {fix}"]


def _check_other(flag: str, words: Sequence[str], kind: Any) -> list[str]:
    if kind is bool:
        return [f"{flag} (command line): takes no value; fix: leave out {show(' '.join(words))}"] if words else []
    said = bool(words) and all(words)  # an empty value is a mistake: without a value a flag means something else
    if said and _parses(words, kind):
        return []
    shown, wanted = show(" ".join(words)) if words else "(nothing)", describe(kind)
    if words and not said:
        return [f"{flag} = (empty) (command line): names nothing; fix: a value, or leave it out"]
    return [f"{flag} = {shown} (command line): not {wanted}; fix: give {wanted}"]


def _parses(words: Sequence[str], hint: Any) -> bool:
    """Whether the words after a flag are a value of a type."""
    try:
        value_of(words, hint)
    except ValueError:
        return False
    return True


def value_of(words: Sequence[str], hint: Any) -> Any:
    """The value of a type that the words after a flag are; of a union, that of its first type that they fit.

    Raises ValueError if they are none.
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
        word = word.capitalize()  # as TOML has it, too
    if get_origin(hint) is Literal or hint is bool:
        options = {str(option): option for option in args or (True, False)}
        if word not in options:
            raise ValueError(f"{show(word)} is not {describe(hint)}")
        return options[word]
    return hint(word)


def _example(value: object, hint: Any) -> str:
    if isinstance(value, tuple):
        item = get_args(hint)[0]
        if get_origin(item) is Literal:
            return str(get_args(item)[0])
        return " ".join(map(str, value)) or {int: "0 1", str: "some/folder"}.get(item, "0")
    return str(value) if value != "" else "a-name"
