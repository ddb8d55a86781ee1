"""A recipe from the command line: `NAME --setting value ...`, for every command that takes one."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar, get_type_hints

import tyro

from hocket.config import Config
from hocket.leaves import changed, problem
from hocket.overrides import given
from hocket.recipes import recipe


@dataclass(frozen=True)
class RecipeOptions:
    """What every command that takes a recipe takes."""

    config: Annotated[Config, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
    gpus: int = 0
    """Number of ranks: sets mesh.dp to gpus / mesh.pp. 0 leaves the mesh alone."""


Options = TypeVar("Options", bound=RecipeOptions)


def parse(kind: type[Options], command: str, words: list[str]) -> tuple[Options, dict[str, str]]:
    """The options of `hocket COMMAND RECIPE --setting value ...`, and where each setting came from.

    `words` are what follows the command. Raises ValueError for whatever the user can mend.
    """
    if words and words[0] in ("-h", "--help"):
        words = ["tiny", *words]
    if not words or words[0].startswith("-"):
        fix = f"hocket {command} tiny, or see hocket recipes"
        raise ValueError(f"hocket {command} (command line): the recipe is missing; fix: {fix}")
    name, *flags = words
    default = recipe(name)
    own = {flag.rstrip("_"): hint for flag, hint in get_type_hints(kind).items() if flag != "config"}
    origins = {} if {"-h", "--help"} & set(flags) else given(flags, default, own)
    options = tyro.cli(
        kind, args=flags, default=kind(config=default), prog=f"hocket {command} {name}", use_underscores=True
    )
    if options.gpus:
        options, origins["mesh.dp"] = _spread(options, origins), "command line, --gpus"
    return options, {"": f"recipe {name}", **origins}


def _spread(options: Options, origins: dict[str, str]) -> Options:
    """The options on `--gpus` ranks."""
    pp = options.config.mesh.pp
    if "mesh.dp" in origins:
        raise ValueError(
            f"gpus = {options.gpus} (command line, --gpus): sets mesh.dp, and {origins['mesh.dp']} does too; "
            "fix: leave one of them out"
        )
    if options.gpus < 0 or options.gpus % pp:
        reason, fix = f"cannot be split over mesh.pp = {pp}", "a multiple of mesh.pp, or change mesh.pp"
        raise ValueError(problem("gpus", options.gpus, {"gpus": "command line, --gpus"}, reason, fix))
    return replace(options, config=changed(options.config, {"mesh.dp": options.gpus // pp}))


def write(target: str, content: str | bytes) -> None:
    """Write a file that the user named, and say so. Raises ValueError if that cannot be done."""
    try:
        Path(target).write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise ValueError(
            f"{target} (command line): cannot be written ({error.strerror}); fix: name a file in an existing folder"
        ) from None
    print(f"wrote {target}", file=sys.stderr)  # the output proper may be JSON
