"""From what a hocket run says about itself in its traces back to its settings and its program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

from hocket.config import Config
from hocket.plan.ops import Op, Program
from hocket.planning import program_of
from hocket.resolve import Settings
from hocket.settings.former import flat, put, renamed
from hocket.settings.leaves import leaf, out_of_bounds, types
from hocket.settings.origins import DEFAULTS
from hocket.settings.rule import Host
from hocket.settings.rules import broken_rules
from hocket.trace.data import RankTrace

VERSION = 1
"""Of the metadata that this code understands."""

_LATER: dict[str, Any] = {
    "overlap.pp.backward_lane": "on",
    "overlap.pp.defer_head": 0,
    "overlap.ep.merge_ends": "off",
    "overlap.ep.copies": "per_expert",
    "overlap.ep.splits": "host",
    "plan.graphs": "off",
    "overlap.dp.update": "end",
    "overlap.ep.room": 2.0,
    "mesh.tp": 1,
    "model.routing": "learnt",
    "plan.recompute": (),
    "data.packing": "off",
    **{name: "auto" for name in types() if name.startswith(("network.", "hardware."))},
    **{name: "off" for name in types() if name.startswith("overlap.tp.") and leaf(DEFAULTS, name) == "auto"},
}
"""Settings that came after the first traces, and what runs did before there was a choice."""


def settings_of(trace: RankTrace) -> Settings:
    """The settings of the run that a trace is of. Raises ValueError if it is not of a hocket run, or of another one."""
    run = trace.run
    if not run:
        raise ValueError(
            f"{trace.source}: says nothing about settings, so it is not of a hocket run or was cut; "
            "fix: a trace written by hocket train --train.profile"
        )
    if run.get("version") != VERSION:
        raise ValueError(
            f"{trace.source}: its metadata has version {run.get('version')}, this hocket reads version {VERSION}; "
            "fix: read it with the hocket that wrote it"
        )
    config = stored_config(run.get("settings"), trace.source)
    origins = {"": trace.source}
    if problems := out_of_bounds(config, origins):
        raise ValueError(problems[0])
    host = Host(gpus=config.mesh.world if config.train.device == "cuda" else 0)
    if problems := broken_rules(config, host, origins):
        raise ValueError(problems[0])
    if run.get("pp_rank", 0) not in range(config.mesh.pp):
        raise ValueError(
            f"{trace.source}: its metadata has pp_rank {run['pp_rank']} of {config.mesh.pp}, so it was edited; "
            "fix: the trace as hocket train --train.profile wrote it"
        )
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(Config)}
    return Settings(**fields, host=host)


def stored_config(stored: Any, source: str) -> Config:
    """A configuration from its stored settings, of a hocket of any time. Raises ValueError if it is none."""
    return _build(Config, _of_today(stored), source, "settings")


def pipeline_rank(trace: RankTrace) -> int:
    """The pipeline rank of a trace's rank."""
    return int(trace.run.get("pp_rank", 0))


def ops_by_name(program: Program, rank: int) -> dict[str, Op]:
    """The ops of a pipeline rank by the names that they have in a trace."""
    return {str(op): op for op in program.ranks[rank]}


def rebuilt(trace: RankTrace) -> tuple[Settings, Program]:
    """Settings and program of the run that a trace is of. Raises ValueError if that cannot be told."""
    settings = settings_of(trace)
    return settings, program_of(settings)


_WORK = ("model", "mesh", "train.sequences", "precision.compute", "data.sequence_length")
"""Settings, or whole sections of them, that say what one op of a plan has to do."""


_WAYS = (
    "overlap.dp.strategy", "overlap.ep.copies", "overlap.ep.splits", "overlap.ep.room", "overlap.tp",
    "precision.wire", "train.transport", "network",
)  # fmt: skip
"""Settings, or whole sections of them, that say how an op of a plan does what it has to."""


def assert_same_work(real: RankTrace, null: RankTrace) -> None:
    """Raise ValueError unless `null` is of a run with the null transport whose ops do the same as those of `real`."""
    if null.run.get("transport") != "null":
        raise ValueError(
            f"{null.source}: its transport is {null.run.get('transport') or 'not known'}, not null, so it is no run "
            "without communication; fix: a trace of the same run with --train.transport null"
        )
    for name, a, b in different_work(settings_of(real), settings_of(null)):
        raise ValueError(f"{name} = {b} ({null.source}): {real.source} has {a}; fix: two runs of the same sizes")


def different_work(one: Config, other: Config) -> list[tuple[str, Any, Any]]:
    """Name and both values of every setting by which the ops of two plans differ in what they have to do."""
    return _different(_WORK, one, other)


def other_ways(planned: Config, measured: RankTrace) -> list[str]:
    """Notes on settings by which the ops of a plan do in another way what those of a traced run did."""
    return [
        f"{name} = {here}, measured with {there}: ops that this changes take other times than in the traces"
        for name, here, there in _different(_WAYS, planned, settings_of(measured))
    ]


def _different(settings: Sequence[str], one: Config, other: Config) -> list[tuple[str, Any, Any]]:
    names = [name for name in types() if any(f"{name}.".startswith(f"{setting}.") for setting in settings)]
    pairs = [(name, leaf(one, name), leaf(other, name)) for name in names]
    return [(name, a, b) for name, a, b in pairs if a != b]


def _of_today(stored: Any) -> Any:
    """Stored settings with today's names, and with those that came later."""
    if not isinstance(stored, Mapping):
        return stored
    tree = renamed(stored)
    there = flat(tree)
    later = {**_LATER, "precision.wire": there.get("precision.compute")}
    tree.setdefault("network", {})
    tree.setdefault("hardware", {})
    for setting in types():
        default = leaf(DEFAULTS, setting)  # of a section that came later; what is automatic now was something then
        if setting not in there and isinstance(tree.get(setting.split(".")[0]), Mapping):
            if setting in later or (setting.startswith("overlap.") and default != "auto"):
                put(tree, setting, later.get(setting, default))
    return tree


def _build(kind: type[Any], values: Any, source: str, where: str) -> Any:
    """A configuration dataclass from nested dictionaries that have all of its fields and no others."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{source}: its metadata has no {where}; fix: a trace written by hocket train --train.profile")
    hints = get_type_hints(kind)
    names = {field.name for field in dataclasses.fields(kind)}
    if strange := sorted(names ^ set(values)):
        missing = [name for name in strange if name in names]
        raise ValueError(
            f"{source}: {where} {'lacks' if missing else 'has an unknown'} {(missing or strange)[0]}, so it was "
            "written by another version of hocket; fix: read it with the hocket that wrote it"
        )
    parts = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(hints[name]):
            value = _build(hints[name], value, source, f"{where}.{name}")
        parts[name] = tuple(value) if isinstance(value, list) else value
    return kind(**parts)
