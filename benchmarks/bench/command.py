"""`hocket bench`: hocket, its bound and other programs take turns on the same step."""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from benchmarks.bench import resumed, variants
from benchmarks.bench.contender import CONTENDERS, entry, find, load, why_not
from hocket.commands.options import RecipeOptions, parse, said
from hocket.config import Config
from hocket.config.rule import problem
from hocket.config.schema import changed
from hocket.problems import stop_if
from hocket.resolve import Settings, resolve


@dataclass(frozen=True)
class Bench(RecipeOptions):
    """Measure the step of a recipe: hocket against others, in turns, on the same ranks."""

    against: str = ""
    """Other contenders, with commas between them; empty takes the bounds and what fits the recipe."""
    variant: tuple[str, ...] = ()
    """Contenders that are hocket with settings of their own, each a name and settings in quotes, such as
    "eager --plan.graphs off"; they take part beside the others."""
    blocks: int = 6
    """Blocks of each contender; six are the fewest that make an interval of 95 %."""
    steps: int = 3
    """Timed steps of a block."""
    gate_steps: int = 8
    """Steps over which all contenders must have the same losses before anything is timed."""
    optimizer: Literal["on", "off"] = "on"
    """Whether the optimizer is part of the step; off leaves forward, backward and gradient reduction."""
    compile: Literal["on", "off"] = "off"
    """Whether contenders made of the plain stack compile their layers; hocket runs eagerly."""
    alone: bool = False
    """Build each contender anew for each of its blocks, with nothing beside it in memory, where all have no room at
    once."""
    lengths: tuple[int, ...] = ()
    """Sequence lengths to measure one after the other; empty takes the recipe's."""
    out: str = ""
    """JSON file to write the result to, after every round."""
    resume: bool = False
    """Keep what the file of --out has, and measure the lengths that it has not whole."""
    seconds: float = 0.0
    """Time after which no round begins, so that what was measured is printed; 0 is no limit."""
    commit: str = ""
    """Name of this version for the result, where there is no repository."""


def run(words: list[str]) -> int:
    """Measure, or list the contenders. Returns the exit code."""
    if "--list" in words:
        if more := [word for word in words if word != "--list"]:
            raise ValueError(f"{' '.join(more)} (command line): no effect beside --list; fix: hocket bench --list")
        print(contenders())
        return 0
    began = time.monotonic()
    options, origins = parse(Bench, "bench", words)
    config = for_bench(options, origins)
    own = {variant.name: changes(variant.name, variant.words, config) for variant in variants.read(options.variant)}
    names = chosen(options.against, config)
    find(names)
    names = (*names, *own)
    from benchmarks.bench.run import Bench as Measurement
    from benchmarks.bench.run import Sized, bench_rank
    from hocket.launching import launch
    from hocket.launching.worker import Job

    configs = [changed(config, {"data.sequence_length": length}) for length in _lengths(options)]
    if options.lengths:
        origins["data.sequence_length"] = "command line, --lengths"
    settings, worker = launch.prepare_and_resolve(configs[0], origins)
    check(names, settings, origins)
    former = resumed.read(options.out, settings) if options.resume else ()
    sized = tuple(
        Sized(
            settings if one is configs[0] else resolve(one, settings.host, origins),
            variants.settled(names, own, one, settings.host, origins),
        )
        for one in configs
    )
    for name in names:
        if not entry(name).package:  # before workers are forked, which then need not; who knows what others start
            load(name)
    measurement = Measurement(
        names=names,
        sized=sized,
        blocks=options.blocks,
        steps=options.steps,
        gate_steps=options.gate_steps,
        optimizer=options.optimizer == "on",
        compile=options.compile == "on",
        out=options.out,
        commit=options.commit,
        until=began + options.seconds if options.seconds else math.inf,
        former=former,
        alone=options.alone,
    )
    return launch.run_job(settings, worker, Job(functools.partial(bench_rank, measurement, say), "start it again"))


def _lengths(options: Bench) -> tuple[int, ...]:
    """Sequence lengths: as asked for, or the recipe's."""
    return options.lengths or (options.config.data.sequence_length,)


def say(text: str) -> None:
    print(text, flush=True)


def contenders() -> str:
    """All contenders, one per line."""
    width = max(map(len, CONTENDERS))
    needs = {name: f" (needs {entry.package})" if entry.package else "" for name, entry in CONTENDERS.items()}
    return "\n".join(f"{name:{width}}  {entry.about}{needs[name]}" for name, entry in CONTENDERS.items())


def for_bench(options: Bench, origins: dict[str, str]) -> Config:
    """The recipe without what a benchmark leaves out. Raises ValueError for options that make no sense."""
    least = {"blocks": 1, "steps": 1, "gate_steps": 2}
    counts = {name: getattr(options, name) for name in least}
    problems = [
        _bad(n, count, "out of range", f"{least[n]} or more") for n, count in counts.items() if count < least[n]
    ]
    if any(length < 1 for length in options.lengths):
        problems.append(_bad("lengths", " ".join(map(str, options.lengths)), "out of range", "1 or more each"))
    if len(set(options.lengths)) < len(options.lengths):
        problems.append(_bad("lengths", " ".join(map(str, options.lengths)), "names one twice", "name each once"))
    if options.lengths and origins.get("data.sequence_length", "").startswith("command line"):
        length, fix = options.config.data.sequence_length, "leave one of them out"
        problems.append(problem("data.sequence_length", length, origins, "--lengths sets it too", fix))
    if options.out and not Path(options.out).absolute().parent.is_dir():
        problems.append(_bad("out", options.out, "cannot be written (no such folder)", "name a file in a folder"))
    if options.resume and not options.out:
        problems.append(_bad("resume", "on", "there is no file to continue", "name it with --out"))
    if not options.seconds >= 0:  # so that nan fails too
        problems.append(_bad("seconds", options.seconds, "out of range", "0 (no limit) or more"))
    if options.out and Path(options.out).is_dir():
        problems.append(_bad("out", options.out, "cannot be written (it is a folder)", "name a file in it"))
    config = options.config
    if "train.clip" in origins and config.train.clip:
        fix = "leave it out: benchmarks never clip"
        problems.append(problem("train.clip", config.train.clip, origins, "contenders clip differently", fix))
    stop_if(problems)
    config = changed(config, {"train.clip": 0.0})
    return config if config.run.folder else changed(config, {"run.folder": f"runs/bench-{config.run.name}"})


def chosen(against: str, config: Config) -> tuple[str, ...]:
    """The names of all who take part; hocket always does, with a plan unless another way is named."""
    names = [name.strip() for name in against.split(",") if name.strip()]
    if not names:
        if config.mesh.pp > 1:
            names = ["hocket", "hocket_sequential", "hocket_interleaved", "hocket_null"]
        elif config.mesh.cp > 1:
            names = ["hocket", "hocket_null"]
        elif config.mesh.ep > 1:
            names = ["bound", "ep_sync", "hocket", "hocket_null"]
        else:
            names = ["bound", "fsdp2", "fsdp2_tuned", "hocket", "hocket_null"]
    named = any(CONTENDERS[name].ours and not CONTENDERS[name].bound for name in names if name in CONTENDERS)
    return tuple(names if named else ["hocket", *names])


def changes(name: str, words: tuple[str, ...], config: Config) -> dict[str, Any]:
    """What the words of a variant set, by dotted name. Raises ValueError for what they cannot."""
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    others = [flag for flag in flags if flag.removeprefix("--") in {each.name for each in fields(Bench)}]
    fix = "give it to the command, outside of --variant"
    stop_if(
        [f"{flag} (--variant {name}): is of the whole benchmark, not of one contender; fix: {fix}" for flag in others]
    )
    try:
        found = said(words, config)
    except ValueError as error:
        raise ValueError(str(error).replace("(command line", f"(--variant {name}")) from None
    stop_if(variants.beside_the_point(name, found))
    reasons = {
        "null": ("it would compute something else", "--against hocket_null measures that"),
        "slow": ("the others would run on another network", "set it for all, outside of --variant"),
    }
    if (transport := found.get("train.transport")) in reasons:
        raise ValueError(
            problem("train.transport", transport, {"train.transport": f"--variant {name}"}, *reasons[transport])
        )
    return found


def check(names: tuple[str, ...], settings: Settings, origins: dict[str, str]) -> None:
    """Raise ValueError, before anything starts, for contenders and settings that do not go together."""
    problems = [reason for name in names if (reason := why_not(name, settings))]
    others = [name for name in names if not entry(name).make.startswith("benchmarks.bench.ours")]
    transport = settings.train.transport
    if transport == "null":
        reason, fix = "leaves out communication for hocket alone", "--against hocket_null measures that"
        problems.append(problem("train.transport", transport, origins, reason, fix))
    if transport == "slow" and others:
        reason, fix = f"slows hocket alone, and {', '.join(others)} would run at full speed", "only hocket contenders"
        problems.append(problem("train.transport", transport, origins, reason, fix))
    if others and settings.model.tied:
        problems.append(problem("model.tied", True, origins, "the plain stack cannot tie", "model.tied = False"))
    if others and settings.model.bias_rate:
        reason, fix = "the plain stack does not move balance biases", "--model.bias_rate 0"
        problems.append(problem("model.bias_rate", settings.model.bias_rate, origins, reason, fix))
    if others and settings.model.z_loss:
        reason, fix = "the other contenders have no such loss", "--model.z_loss 0"
        problems.append(problem("model.z_loss", settings.model.z_loss, origins, reason, fix))
    if others and settings.model.aux_loss and settings.model.aux_loss_over != "microbatch":
        reason, fix = "the other contenders balance microbatches", "--model.aux_loss_over microbatch"
        problems.append(problem("model.aux_loss_over", settings.model.aux_loss_over, origins, reason, fix))
    if others and settings.optimizer.name != "adamw":
        reason, fix = "the other contenders have AdamW alone", "--optimizer.name adamw"
        problems.append(problem("optimizer.name", settings.optimizer.name, origins, reason, fix))
    if others and settings.optimizer.no_decay:
        reason, fix = "the plain stack lets all matrices decay", "leave it out"
        problems.append(problem("optimizer.no_decay", settings.optimizer.no_decay, origins, reason, fix))
    stop_if(problems)


def _bad(name: str, value: object, reason: str, fix: str) -> str:
    return problem(name, value, {name: f"command line, --{name}"}, reason, fix)
