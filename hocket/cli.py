"""The command line: `hocket train`, `hocket plan`, `hocket recipes`.

Nothing here imports torch before a run is known to make sense, so that help and mistakes cost no second.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_type_hints

import tyro

from hocket.config import Config
from hocket.leaves import problem
from hocket.overrides import given
from hocket.recipes import RECIPES, describe, recipe
from hocket.resolve import Settings, replace_leaf, resolve
from hocket.rules import Host

USAGE = """usage: hocket train RECIPE [--setting value ...]   train; Ctrl-C saves and ends, the same command continues
       hocket plan RECIPE [--setting value ...]    show the step that would run, and what it would cost
       hocket recipes                              list the recipes

Every setting of a recipe can be changed, for example --train.steps 50 --plan.merge off --data.paths my/texts
hocket train RECIPE --help lists them all; hocket plan RECIPE --help also has --ops, --svg, --html and --json.
HOCKET_DEBUG=1 shows tracebacks."""

Overrides = Annotated[Config, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]


@dataclass(frozen=True)
class Train:
    """Train a recipe's model. Starts its own processes, or joins those of torchrun or Slurm."""

    config: Overrides
    gpus: int = 0
    """Number of ranks: sets mesh.dp to gpus / mesh.pp. 0 leaves the mesh alone."""


@dataclass(frozen=True)
class Plan:
    """Show the step that a recipe would run: choices, predicted timeline and memory, and the program."""

    config: Overrides
    gpus: int = 0
    """Number of ranks: sets mesh.dp to gpus / mesh.pp. 0 leaves the mesh alone."""
    hardware: Literal["auto", "h200", "laptop"] = "auto"
    """What to predict for; auto takes laptop for fp32 and h200 for bf16."""
    ops: int = 40
    """Lines of the program to print; -1 prints all."""
    json: bool = False
    """Print choices and predicted numbers as JSON instead."""
    svg: str = ""
    """File to draw the predicted timeline into."""
    html: str = ""
    """File to write a page with timeline and numbers to."""


COMMANDS: dict[str, type[Train] | type[Plan]] = {"train": Train, "plan": Plan}
FLAGS: dict[str, dict[str, Any]] = {
    name: {flag: hint for flag, hint in get_type_hints(command).items() if flag != "config"}
    for name, command in COMMANDS.items()
}
"""Flags of the commands themselves, with the types of their values."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 the run failed, 2 the command or its settings make no sense."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that cannot show a character is no reason to fail
        sys.stdout.reconfigure(errors="replace")
    try:
        code = run(words)
    except ValueError as error:
        if os.environ.get("HOCKET_DEBUG") == "1":
            traceback.print_exc()
        print(f"hocket: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def run(words: list[str]) -> int:
    """One command. Returns the exit code; raises ValueError for what the user can mend."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if words else 2
    command, *rest = words
    if command == "recipes" and not rest:
        width = max(map(len, RECIPES))
        print("\n".join(f"{name:{width}}  {describe(name)}" for name in RECIPES))
        return 0
    if command not in COMMANDS:
        reason, fix = "there is no such command", f"{', '.join(COMMANDS)} or recipes"
        raise ValueError(f"{' '.join(words)} (command line): {reason}; fix: {fix}")
    if rest and rest[0] in ("-h", "--help"):
        rest = ["tiny", *rest]
    if not rest or rest[0].startswith("-"):
        fix = f"hocket {command} tiny, or see hocket recipes"
        raise ValueError(f"hocket {command} (command line): the recipe is missing; fix: {fix}")
    options, origins = parse(command, rest[0], rest[1:])
    if isinstance(options, Plan):
        return plan(options, origins)
    from hocket import launch

    return launch.train(options.config, origins)


def parse(command: str, name: str, words: list[str]) -> tuple[Train | Plan, dict[str, str]]:
    """A recipe with its overrides, and where each of them came from."""
    default = recipe(name)
    origins = {} if {"-h", "--help"} & set(words) else given(words, default, FLAGS[command])
    options = tyro.cli(
        COMMANDS[command],
        args=words,
        default=COMMANDS[command](config=default),
        prog=f"hocket {command} {name}",
        use_underscores=True,
    )
    if options.gpus:
        pp = options.config.mesh.pp
        if "mesh.dp" in origins:
            raise ValueError(
                f"gpus = {options.gpus} (command line, --gpus): sets mesh.dp, and {origins['mesh.dp']} does too; "
                "fix: leave one of them out"
            )
        if options.gpus < 0 or options.gpus % pp:
            reason, fix = f"cannot be split over mesh.pp = {pp}", "a multiple of mesh.pp, or change mesh.pp"
            raise ValueError(problem("gpus", options.gpus, {"gpus": "command line, --gpus"}, reason, fix))
        config = replace_leaf(options.config, "mesh.dp", options.gpus // pp)
        options = replace(options, config=config)
        origins["mesh.dp"] = "command line, --gpus"
    return options, {"": f"recipe {name}", **origins}


def plan(options: Plan, origins: dict[str, str]) -> int:
    """Print a plan, or write its picture."""
    from hocket import planning
    from hocket.plan.check import assert_valid
    from hocket.plan.timeline import html_timeline, svg_timeline

    if options.ops < -1:
        raise ValueError(f"ops = {options.ops} (command line, --ops): out of range; fix: 0 or more, or -1 for all")
    if options.svg and options.svg == options.html:
        raise ValueError(f"svg = {options.svg} (command line, --svg): --html names it too; fix: two names")
    settings = resolve_for_plan(options.config, origins)
    assert_valid(planning.program_of(settings))
    hardware = planning.hardware_of(settings, options.hardware)
    for target, draw in ((options.svg, svg_timeline), (options.html, html_timeline)):
        if target:
            program = planning.program_of(settings)
            write(target, draw(planning.predict(settings, program, hardware), program))
    if options.json:
        print(json.dumps(planning.as_json(settings, hardware), indent=1))
    elif not (options.svg or options.html):
        print(planning.report(settings, hardware, shutil.get_terminal_size((120, 40)).columns, options.ops))
    return 0


def resolve_for_plan(config: Config, origins: dict[str, str]) -> Settings:
    """Settings as on hosts with enough GPUs if the recipe computes in bf16, else as on this machine's CPUs.

    A plan can be looked at anywhere, so the GPUs of the run are taken for granted.
    """
    wants_gpus = config.train.device == "cuda" or (config.train.device == "auto" and config.train.dtype == "bf16")
    return resolve(config, Host(gpus=config.mesh.pp * config.mesh.dp if wants_gpus else 0), origins)


def write(target: str, text: str) -> None:
    """Write a file and say so."""
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"{target} (command line): cannot be written ({error.strerror}); fix: name a file in an existing folder"
        ) from None
    print(f"wrote {target}", file=sys.stderr)  # the output proper may be JSON
