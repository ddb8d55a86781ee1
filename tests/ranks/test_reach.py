"""How far an engine's configuration reaches: files outside of config/ that read it, or one of its sections."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import hocket
import hocket.config
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.recipes import recipe
from hocket.resolve import Settings, resolve
from tests.helpers.ranks import run_ranks

PACKAGE = Path(hocket.__file__).parent
MOST = 20
SECTIONS = tuple(
    each for each in vars(hocket.config).values() if isinstance(each, type) and dataclasses.is_dataclass(each)
)
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
    """Files with a function that got the configuration, or a section of it, while an engine was made."""
    found: set[str] = set()

    def look(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            given = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
            if any(isinstance(frame.f_locals.get(name), SECTIONS) for name in given):
                found.add(file.relative_to(PACKAGE).as_posix())

    sys.setprofile(look)
    try:
        engine = Engine(settings, rank, torch.device("cpu"))
    finally:
        sys.setprofile(None)
    engine.close()
    return {name for name in found if not name.startswith("config/")}


@pytest.mark.timeout(300)
def test_the_configuration_of_an_engine_reaches_few_files() -> None:
    found = set[str]().union(
        *(of for kind in KINDS.values() for of in run_ranks(readers, 4, resolve(changed(recipe("tiny"), kind), Host())))
    )
    assert {"engine/engine.py", "program/lower.py", "runtime/comm.py"} <= found
    assert len(found) <= MOST, sorted(found)
