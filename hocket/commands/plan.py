"""`hocket plan`: the step that would run, as text, numbers or a picture."""

from __future__ import annotations

import json as json_module
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from hocket import planning
from hocket.commands.options import RecipeOptions, parse, write
from hocket.config import Config
from hocket.config.load import split
from hocket.environment import driver_names
from hocket.machine import host_for_plan
from hocket.model.tokenizer import known_tokenizer
from hocket.planned import check_patterns
from hocket.predict.cost import CostTable
from hocket.predict.hardware import hardware_of
from hocket.program.check import assert_valid
from hocket.program.documents import by_documents
from hocket.resolve import Settings, resolve
from hocket.sizes import parse_bytes
from hocket.timeline import html_timeline, svg_timeline
from hocket.tune import search as tuner
from hocket.tune.trials import model_costs


@dataclass(frozen=True)
class Plan(RecipeOptions):
    """Show the step that a recipe would run: choices, predicted timeline and memory, and the program."""

    ops: int = 40
    """Lines of the program to print; -1 prints all."""
    json: bool = False
    """Print choices and predicted numbers as JSON instead."""
    svg: str = ""
    """File to draw the predicted timeline into."""
    html: str = ""
    """File to write a page with timeline and numbers to."""
    search: bool = False
    """Search the settings of the plan that make the step shortest. Settings of the command line stay."""
    memory: str = ""
    """Most memory of a rank in a plan that --search finds, such as 80GiB. Empty means the memory of the hardware."""


def run(words: list[str]) -> int:
    """Print a plan, or write its picture."""
    options, origins = parse(Plan, "plan", words)
    drawn = next((name for name in ("search", "json", "svg", "html") if getattr(options, name)), "")
    if drawn and "--ops" in dict(split(words, [])):
        reason = f"no effect: with --{drawn} no program is printed"
        raise ValueError(f"ops = {options.ops} (command line, --ops): {reason}; fix: leave out one of them")
    if options.ops < -1:
        raise ValueError(f"ops = {options.ops} (command line, --ops): out of range; fix: 0 or more, or -1 for all")
    if options.svg and options.svg == options.html:
        raise ValueError(f"svg = {options.svg} (command line, --svg): --html names it too; fix: two names")
    if options.memory and not options.search:
        raise ValueError("memory (command line, --memory): there is no --search; fix: add --search, or leave it out")
    settings = resolve_for_plan(options.config, origins)
    check_patterns(settings)
    if options.search:
        text, fits = search(options, origins)
        print(text)
        return 0 if fits else 1
    hardware = hardware_of(settings)
    settings = with_documents(settings)
    program = planning.program_of(settings)
    assert_valid(program)
    if options.svg:
        write(options.svg, svg_timeline(planning.predict(settings, program, hardware), program))
    if options.html:
        head = planning.page_head(settings, program, hardware)
        write(options.html, html_timeline(planning.predict(settings, program, hardware), program, *head))
    if options.json:
        print(json_module.dumps(planning.as_json(settings, program, hardware), indent=1))
    elif not (options.svg or options.html):
        width = shutil.get_terminal_size((120, 40)).columns
        print(planning.report(settings, program, hardware, width, options.ops))
    return 0


def task_of(options: Plan, origins: dict[str, str]) -> tuner.Task:
    """The task of `--search`."""
    settings = resolve_for_plan(options.config, origins)
    hardware = hardware_of(settings)
    return tuner.Task(
        config=options.config,
        origins=origins,
        resolve=resolve_for_plan,
        cap=bytes_of(options.memory) if options.memory else hardware.memory,
    )


def bytes_of(text: str) -> int:
    """The bytes in a size such as `80GiB`. Raises ValueError."""
    try:
        size = parse_bytes(text, "memory")
    except ValueError:
        raise ValueError(f"memory = {text} (command line, --memory): not a size; fix: give one such as 80GiB") from None
    if not size:
        raise ValueError(f"memory = {text} (command line, --memory): no plan fits in nothing; fix: give more than 0")
    return size


def search(options: Plan, origins: dict[str, str]) -> tuple[str, bool]:
    """The best plan under the cap, as text or JSON, and whether it fits."""
    if options.svg or options.html:
        raise ValueError("search (command line): draws nothing; fix: leave out --svg and --html, or --search")
    task = task_of(options, origins)
    result = tuner.search(task)
    if options.json:
        return json_module.dumps(tuner.as_json(task, result), indent=1), result.fits
    return tuner.report(task, result), result.fits


def with_documents(settings: Settings) -> Settings:
    """The settings with the documents of the first step, if their text has been tokenised here, for the prediction."""
    if not by_documents(settings):
        return settings
    from hocket.train.data import known_documents

    return replace(settings, host=replace(settings.host, documents=known_documents(settings)))


def resolve_for_plan(
    config: Config,
    origins: dict[str, str],
    price: Callable[[Config], CostTable] = model_costs,
    gives_up: bool = False,
    memory: int = 0,
) -> Settings:
    """Resolve settings for hosts with enough GPUs if the recipe computes in bf16, else for this machine's CPUs.

    A plan needs no GPU: the run's GPUs are assumed to be of this machine's kind. The tokenizer is used if it is here.
    `memory` replaces the memory of the GPU that a rank can use.
    """
    host = host_for_plan(config, driver_names())
    host = replace(host, memory=memory or host.memory)
    with suppress(ValueError):
        host = replace(host, tokenizer_begin=known_tokenizer(config.data, origins).begin)
    return resolve(config, host, origins, price, gives_up)
