"""Arguments of all commands that take a recipe: `NAME --setting value ...`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NoReturn, TypeVar, get_type_hints

import tyro

from hocket.config import Config
from hocket.config.load import begin, given, split
from hocket.config.rule import problem
from hocket.config.schema import changed, meant
from hocket.problems import stop_if


@dataclass(frozen=True)
class RecipeOptions:
    """Flags of all commands that take a recipe."""

    config: Annotated[Config, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
    gpus: int = 0
    """Number of ranks: sets mesh.dp to what the other axes leave of them; 0 leaves the mesh alone."""
    recipe: str = ""
    """Recipe that a file builds on, or module:function of your own."""
    preset: str = ""
    """Several settings at once, weaker than what a recipe, a file or a flag says: throughput, memory or debug."""


Options = TypeVar("Options", bound=RecipeOptions)


def parse(kind: type[Options], command: str, words: list[str]) -> tuple[Options, dict[str, str]]:
    """The options of `hocket COMMAND RECIPE --setting value ...`, and where each setting came from.

    `words` are the arguments after the command. A TOML file may replace the recipe. Raises ValueError for user errors.
    """
    if words and words[0] in ("-h", "--help"):
        words = ["tiny", *words]
    name, flags = (words[0], words[1:]) if words and not words[0].startswith("-") else ("", words)
    early = {flag: values[0] for flag, values in split(flags, []) if flag in ("--recipe", "--preset") and values}
    if not name and not early.get("--recipe"):
        fix = f"hocket {command} tiny, hocket {command} run.toml, or see hocket recipes"
        raise ValueError(f"hocket {command} (command line): the recipe is missing; fix: {fix}")
    start = begin(name, early.get("--recipe", ""), early.get("--preset", ""))
    prog = f"hocket {command} {name or early['--recipe']}"
    if {"-h", "--help"} & set(flags):
        stop_if(start.problems)
        _join_docstrings(kind)
        pairs_off, default = (tyro.conf.FlagCreatePairsOff,), kind(config=start.config)
        tyro.cli(kind, args=flags, default=default, prog=prog, use_underscores=True, config=pairs_off)  # prints, exits
    fields = {field.name.rstrip("_"): field.name for field in dataclasses.fields(kind) if field.name != "config"}
    hints = get_type_hints(kind)
    found = given(flags, start.config, {name: hints[field] for name, field in fields.items()})
    stop_if([*start.problems, *found.problems])
    own = {fields[name]: value for name, value in found.options.items()}
    options, origins = kind(config=changed(start.config, found.settings), **own), {**start.origins, **found.origins}
    if options.gpus:
        options, origins["mesh.dp"] = _spread(options, found.origins), "command line, --gpus"
    return options, origins


class Parser(ArgumentParser):
    """Parser of a command without a recipe."""

    def __init__(self, command: str, about: str) -> None:
        super().__init__(f"hocket {command}", description=about, allow_abbrev=False)

    def read(self, words: Sequence[str]) -> Namespace:
        """The parsed arguments. The value of a flag may begin with dashes. Raises ValueError for user errors."""
        joined, left, seen = list[str](), list(words), set[str]()
        if {"-h", "--help"} & set(words):
            left = ["--help"]
        while left:
            word = left.pop(0)
            action = self._option_string_actions.get(word.partition("=")[0])
            if action is not None and action.dest in seen:
                self.error(f"argument {action.option_strings[0]}: given twice")
            seen |= {action.dest} if action is not None else set()
            takes = left and action is not None and action.nargs is None and "=" not in word
            joined.append(f"{word}={left.pop(0)}" if takes else word)
        return self.parse_intermixed_args(joined)

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].partition(" ")[0].partition("=")[0]
        close = meant(unknown, self._option_string_actions) if unknown.startswith("--") else ""
        fix = f"did you mean {close}?" if close else f"{self.prog} --help"
        raise ValueError(f"{self.prog} (command line): {message}; fix: {fix}")


def some(word: str) -> str:
    """A nonempty argument, for a parser."""
    if not word:
        raise ArgumentTypeError("names nothing")
    return word


def within(kind: Callable[[str], float], least: float, most: float) -> Callable[[str], float]:
    """Numbers within bounds, for a parser."""

    def number(word: str) -> float:
        value = kind(word)
        if not least <= value <= most:
            raise ArgumentTypeError(f"{word} is not from {least:g} to {most:g}")
        return value

    return number


def _join_docstrings(kind: type[Any]) -> None:
    """Give tyro each docstring as one line: by default, its help also breaks lines where the docstring does."""
    texts, hints = field_docstrings(kind), get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name in texts:
            field.metadata = MappingProxyType({**field.metadata, "help": texts[field.name]})
        if dataclasses.is_dataclass(hints[field.name]):
            _join_docstrings(hints[field.name])


def field_docstrings(kind: type[Any]) -> dict[str, str]:
    """The docstrings of a dataclass's fields, with those of its bases, each as one line."""
    found: dict[str, str] = {}
    for each in reversed([c for c in kind.__mro__ if dataclasses.is_dataclass(c)]):
        (node,) = ast.parse(inspect.getsource(each)).body
        assert isinstance(node, ast.ClassDef)
        for field, after in pairwise(node.body):
            named = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if named and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found[field.target.id] = " ".join(str(after.value.value).split())  # type: ignore[union-attr]
    return found


@cache
def docstrings() -> dict[str, str]:
    """Dotted name of every section and setting -> its docstring, as one line."""
    return dict(_documented(Config, ""))


def _documented(section: type[Any], prefix: str) -> Iterator[tuple[str, str]]:
    hints, texts = get_type_hints(section), field_docstrings(section)
    for field in dataclasses.fields(section):
        name = f"{prefix}{field.name}"
        yield name, texts[field.name]
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _documented(hints[field.name], f"{name}.")


def said(words: Sequence[str], config: Config) -> dict[str, Any]:
    """The settings in command-line arguments, by dotted name. Raises ValueError for invalid ones."""
    found = given(words, config, {})
    stop_if(found.problems)
    return found.settings


def _spread(options: Options, origins: dict[str, str]) -> Options:
    """The options, with mesh.dp such that the mesh has `--gpus` ranks."""
    mesh = options.config.mesh
    others = mesh.pp * mesh.cp * mesh.tp
    if "mesh.dp" in origins:
        raise ValueError(
            f"gpus = {options.gpus} (command line, --gpus): sets mesh.dp, and {origins['mesh.dp']} does too; "
            "fix: leave one of them out"
        )
    if options.gpus < 0 or options.gpus % others:
        axes = "".join(f" x mesh.{name} = {n}" for name, n in (("cp", mesh.cp), ("tp", mesh.tp)) if n > 1)
        reason = f"cannot be split over mesh.pp = {mesh.pp}{axes}"
        fix = f"a multiple of {others} above 0, or another mesh"
        raise ValueError(problem("gpus", options.gpus, {"gpus": "command line, --gpus"}, reason, fix))
    return replace(options, config=changed(options.config, {"mesh.dp": options.gpus // others}))


def write(target: str, content: str | bytes) -> None:
    """Write a file that the user named, and print its name. Raises ValueError on failure."""
    try:
        Path(target).write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise ValueError(
            f"{target} (command line): cannot be written ({error.strerror}); fix: name a file in an existing folder"
        ) from None
    print(f"wrote {target}", file=sys.stderr)  # the output proper may be JSON
