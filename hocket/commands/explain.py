"""`hocket explain`: the decisions of a run and their reasons."""

from __future__ import annotations

import json as json_module
import os
import sys
from dataclasses import dataclass, replace
from typing import Annotated

import tyro

from hocket.commands import megatron
from hocket.commands.options import RecipeOptions, parse
from hocket.commands.plan import resolve_for_plan, with_documents
from hocket.config import Config
from hocket.environment import stopping
from hocket.explain.build import explain, in_traces, read
from hocket.explain.explanation import Explanation, to_text
from hocket.measured import other_ways, other_work
from hocket.planned import check_patterns
from hocket.recipes import RECIPES
from hocket.resolve import Settings
from hocket.variables import passed, survey
from hocket_trace import load, report
from hocket_trace.cli import trace_files


@dataclass(frozen=True)
class Explain(RecipeOptions):
    """Say what hides communication in a run and what does not, why, what was chosen, and what it will cost.

    Needs no GPU. `hocket explain runs/NAME` prints what was decided when that run was started instead, and
    `hocket explain --from-megatron "FLAGS"` translates settings of Megatron-LM; see its --help.
    """

    json: bool = False
    """Print the explanation as JSON."""
    from_: Annotated[tuple[str, ...], tyro.conf.arg(name="from")] = ()
    """Traces of a run of the same sizes, one per rank, or its folder: show them beside the predictions."""


def run(words: list[str]) -> int:
    """Explain a configuration, or translate settings of Megatron-LM. Returns the exit code."""
    if foreign := [name for word in words if (name := word.partition("=")[0]).startswith("--from-")]:
        if strange := [name for name in foreign if name != "--from-megatron"]:
            fix = "--from-megatron, also for Megatron Bridge, or the tables of docs/coming-from.md"
            raise ValueError(f"explain {strange[0]} (command line): nothing translates this system; fix: {fix}")
        return megatron.run(words)
    if words and of_run(words[0]):
        return show_run(*words)
    if words and "/" in words[0] and not words[0].endswith(".toml") and not os.path.exists(words[0]):
        reason, fix = "there is no such folder of a run", "the folder of a run that was started, or a recipe"
        raise ValueError(f"{words[0]} (command line): {reason}; fix: {fix}")
    options, origins = parse(Explain, "explain", words)
    settings, refused = settle(options.config, origins)
    check_patterns(settings)
    variables = survey(os.environ, passed(sys.modules))
    reasons = (*filter(None, [refused]), *stopping(os.environ, variables))
    found = replace(explain(with_documents(settings), variables), refused=reasons)
    if options.from_:
        found = with_traces(found, settings, options.from_, origins)
    print(json_module.dumps(found.as_json(), indent=1) if options.json else to_text(found))
    for reason in reasons:
        print(f"hocket: a run would not start: {reason}", file=sys.stderr)
    return 1 if reasons else 0


def of_run(word: str) -> bool:
    """Whether an argument is the folder of a run, or a file in it, rather than a recipe."""
    return word.endswith(".json") or (os.path.isdir(word) and word not in RECIPES)


def show_run(name: str, *words: str) -> int:
    """Print the explanation that a run wrote when it started. Returns the exit code."""
    if strange := [word for word in words if word != "--json"]:
        reason = f"{name} is a run's, in which everything is settled, and only --json goes with it"
        raise ValueError(f"{' '.join(strange)} (command line): {reason}; fix: leave it out, or name a recipe")
    found, text = read(name)
    print(json_module.dumps(found, indent=1) if words else text)
    return 0


def settle(config: Config, origins: dict[str, str]) -> tuple[Settings, str]:
    """The resolved settings, and why a run would refuse them; empty if it would not.

    If a setting below `overlap` can't work, it is resolved as if it had been left open, to show what would run instead.
    Raises ValueError for what can't be explained either way.
    """
    try:
        return resolve_for_plan(config, origins), ""
    except ValueError as error:
        try:
            return resolve_for_plan(config, origins, gives_up=True), str(error)
        except ValueError:
            raise error from None


def with_traces(found: Explanation, settings: Settings, paths: tuple[str, ...], origins: dict[str, str]) -> Explanation:
    """The explanation with what traces of the run show. Raises ValueError if the traced run's sizes differ."""
    traces = load(trace_files(paths))
    for name, here, there in other_work(settings, traces[0]):
        origin = origins.get(name) or origins.get("", "")
        raise ValueError(
            f"{name} = {here} ({origin}): {traces[0].source} was measured with {there}, so its ops have other work to "
            f"do; fix: {name} {there}, or a trace of this setting"
        )
    measured = in_traces(report(traces), found.predicted)
    note = "; ".join((measured.note, *other_ways(settings, traces[0])))
    return replace(found, measured=replace(measured, note=note))
