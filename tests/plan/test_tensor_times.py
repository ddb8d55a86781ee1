"""The model and the rule of tensor-parallel layers, beside what was measured on four GPUs."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tensor_parallel import model_of, settings
from hocket.config.overlap import DIRECTIONS, ROLES, Direction, Role, possible
from hocket.predict.hardware import H200
from hocket.predict.tensor_costs import cell_of, seconds, splits_of
from hocket.resolve import Settings

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FILES = ("tensor_parallel", "tensor_parallel_as_8")
MODELS = ("llama3_8b", "llama3_70b")
ROWS = [(f, m, role, direction) for f in FILES for m in MODELS for role in ROLES for direction in DIRECTIONS]
LATE = 0.8
"""Where the host took a larger share of a way's time, it is what was measured, and it varies twofold."""


@dataclass(frozen=True)
class Measured:
    seconds: float
    host: float
    """As a share of the seconds."""


@cache
def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


@cache
def resolved(file: str, model: str) -> Settings:
    return settings(model_of(model, result(file)), result(file)["tp"], result(file)["tokens"])


def measured(file: str, model: str, role: str, direction: str) -> dict[str, Measured]:
    """By way, such as `ring/4`; what the rule of then took was measured twice. Without what was given up."""
    found = result(file)["models"][model]
    taken = found["auto"][role]
    method, splits = taken[direction == "backward"], taken[2][direction == "backward"]
    names = {"auto": method if method in ("off", "bulk") else f"{method}/{splits}", "plain again": "plain"}
    blocks: dict[str, list[float]] = {}
    hosts: dict[str, float] = {}
    for name, figures in found["roles"][role][direction].items():
        way = names.get(name, name)
        if way == "products alone" or "queue" in way:
            continue
        blocks.setdefault(way, []).extend(figures["all"])
        hosts[way] = max(hosts.get(way, 0.0), figures["host_seconds"] / figures["seconds"])
    return {way: Measured(statistics.median(values), hosts[way]) for way, values in blocks.items()}


def name_of(s: Settings, role: Role, direction: Direction) -> str:
    splits = splits_of(s, role, direction)
    return s.overlap.tp.way(role, direction) + (f"/{splits}" if splits else "")


@pytest.mark.parametrize(("file", "model", "role", "direction"), ROWS)
def test_what_the_rule_takes_was_the_fastest(file: str, model: str, role: Role, direction: Direction) -> None:
    ways = measured(file, model, role, direction)
    taken = ways[name_of(resolved(file, model), role, direction)]
    fastest = min(way.seconds for way in ways.values() if way.host < LATE)
    assert taken.seconds < 1.03 * fastest
    assert taken.seconds < ways["plain"].seconds / 0.99


def test_the_model_takes_as_long_as_was_measured() -> None:
    errors = {}
    for file, model, role, direction in ROWS:
        cell, ways = cell_of(resolved(file, model), role, direction), measured(file, model, role, direction)
        for method in possible(role, direction):
            for splits in (0, 1, 2, 4):
                way = ways.get(f"{method}/{splits}" if splits else method)
                if way and way.host < LATE:
                    predicted = seconds(cell, method, splits, H200)
                    errors[file, model, role, direction, method, splits] = abs(math.log(predicted / way.seconds))
    assert len(errors) > 80
    assert statistics.mean(errors.values()) < 0.05
    assert max(errors.values()) < 0.2, max(errors, key=errors.__getitem__)
