"""How far an engine's configuration reaches: files outside of config/ that read it, or one of its sections."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import hocket
import hocket.config
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.recipes import recipe
from hocket.resolve import Settings, resolve
from tests.helpers.ranks import run_ranks

PACKAGE = f"{Path(hocket.__file__).parent}/"
MOST = 20
SECTIONS = [each for each in vars(hocket.config).values() if isinstance(each, type) and dataclasses.is_dataclass(each)]
ONE_STAGE = {"mesh.pp": 1, "plan.chunks": 1, "mesh.ep": 1}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "Muon, recomputation, fp8": {
        "optimizer.name": "muon",
        "plan.recompute": ("attn",),
        "overlap.dp.update": "next_step",
        "precision.compute": "fp8",
    },
    "shared sequences of documents": {**ONE_STAGE, "mesh.dp": 1, "mesh.cp": 4, "data.packing": "on"},
    "tensor parallel": {**ONE_STAGE, "mesh.dp": 2, "mesh.tp": 2},
}


def readers(rank: int, settings: Settings) -> set[str]:
    """Files that read an attribute of the configuration, or of a section of it, while an engine is made."""
    found: set[str] = set()
    read: Callable[[object, str], Any] = object.__getattribute__

    def told(section: object, name: str) -> Any:
        if not name.startswith("__"):
            found.add(sys._getframe(1).f_code.co_filename)
        return read(section, name)

    for section in SECTIONS:  # in this process alone
        section.__getattribute__ = told
    Engine(settings, rank, torch.device("cpu")).close()
    return {name.removeprefix(PACKAGE) for name in found if name.startswith(PACKAGE)}


def test_the_configuration_of_an_engine_reaches_few_files() -> None:
    found = set[str]().union(
        *(of for kind in KINDS.values() for of in run_ranks(readers, 4, resolve(changed(recipe("tiny"), kind), Host())))
    )
    outside = {name for name in found if not name.startswith("config/")}
    assert {"engine/engine.py", "program/lower.py", "model/layers.py"} <= outside
    assert len(outside) <= MOST, sorted(outside)
