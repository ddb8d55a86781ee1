"""The command line: `hocket train`, `hocket plan` and the other commands of `commands/`.

It imports torch only after it has checked the command and its settings, so help and mistakes are answered at once.
"""

from __future__ import annotations

import importlib
import io
import os
import platform
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from hocket.problems import printable

COMMANDS = {
    "train": "train.run",
    "plan": "plan.run",
    "trace": "",
    "bench": "",
    "explain": "explain.run",
    "doctor": "doctor.run",
    "recipes": "help.run_recipes",
    "runs": "runs.run",
    "import": "models.run_import",
    "export": "models.run_export",
    "generate": "models.run_generate",
    "eval": "models.run_eval",
    "help": "help.run",
}
"""Command -> the function `words -> exit code` in a module of `commands/`. `run` handles those without one."""

CHECKOUT = Path(__file__).resolve().parents[1]
"""The root of the checkout, if hocket runs from one."""

USAGE = """usage: hocket train RECIPE [--setting value ...]   train; Ctrl-C saves and ends, the same command continues
       hocket plan RECIPE [--setting value ...]    show the step that would run, and what it would cost
       hocket bench RECIPE [--against NAME,NAME]   compare the step with others; --list names them
       hocket trace FILE... [--null FILE...]       show what communication cost, from profiler traces
       hocket explain RECIPE [--setting value ...] say what hides communication, what does not, and why
       hocket explain runs/NAME                    the same of a run, as it was when the run was started
       hocket explain --from-megatron "FLAGS"      flags of Megatron-LM and Megatron Bridge as hocket's settings
       hocket import DIR FILE.toml                 settings of a model of Hugging Face, which begin with its weights
       hocket export RUN DIR                       a run's model as Hugging Face has it: config.json and safetensors
       hocket generate RUN --prompt TEXT           what a run's model, or a published one, goes on with
       hocket eval RUN --data.paths PATH...        the loss of a run's model, or a published one, on other text
       hocket doctor                               check environment and hardware: what costs overlap here
       hocket recipes                              list recipes, and presets with what they set
       hocket runs [DIR...] [--html FILE]          list runs: how far they came, their loss; their curves as a page
       hocket help SETTING                         a setting, or a section of settings such as overlap.dp
       hocket --version                            versions of hocket, torch and Python

In place of RECIPE there may be a TOML file of settings, or module:function of your own; --preset comes before them.
Every setting of a recipe can be changed, for example --train.steps 50 --overlap.ep.merge off --data.paths my/texts
hocket train RECIPE --help lists them all; hocket plan RECIPE --help also has --ops, --svg, --html and --json.
HOCKET_DEBUG=1 shows tracebacks."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 success, 1 the run failed, 2 the command or its settings are wrong."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack a character: do not fail
        sys.stdout.reconfigure(errors="replace")
    try:
        code = run(words)
        sys.stdout.flush()  # detects a closed pipe here, not at exit
    except ValueError as error:
        if os.environ.get("HOCKET_DEBUG") == "1":
            traceback.print_exc()
        print(f"hocket: {printable(str(error))}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def run(words: list[str]) -> int:
    """Run one command. Returns the exit code; raises ValueError for mistakes that the user can fix."""
    if not words or words[0] in ("-h", "--help") or words == ["help"]:
        print(USAGE)
        return 0 if words else 2
    if words == ["--version"]:
        print(f"hocket {_version('hocket')}, torch {_version('torch')}, Python {platform.python_version()}")
        return 0
    command, *rest = words
    if command not in COMMANDS:
        reason = "there is no such command"
        raise ValueError(f"{' '.join(words)} (command line): {reason}; fix: one of {', '.join(COMMANDS)}")
    if command == "bench":
        return _bench(rest)
    if command == "trace":
        return importlib.import_module("hocket_trace.cli").run(rest, "hocket trace")
    module, function = COMMANDS[command].split(".")
    return getattr(importlib.import_module(f"hocket.commands.{module}"), function)(rest)


def _bench(words: list[str]) -> int:
    """Benchmark a step against other programs, using the folder `benchmarks` of a checkout."""
    if not (CHECKOUT / "benchmarks" / "bench" / "command.py").exists():
        reason = "benchmarks are not installed with hocket"
        raise ValueError(f"bench (command line): {reason}; fix: run it in a checkout, set up by make setup")
    sys.path.insert(0, str(CHECKOUT))
    return importlib.import_module("benchmarks.bench.command").run(words)


def _version(package: str) -> str:
    """The version in the package's metadata, which needs no import; a bare checkout has none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"
