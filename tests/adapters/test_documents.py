"""docs/models.md says what is: its programs run, and its families are those of the tests."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.adapters.checking import check_layer
from tests.adapters.families import DENSE, EXPERTS, REFUSED
from tests.helpers.ranks import run_ranks

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
SECTIONS = TEXT.partition("\n## A model of transformers\n")[2].partition("\n## Plans from Python\n")[0]
PRETRAINED, SAVED, PACKED, LAYER = re.findall(r"```python\n(.*?)```", SECTIONS, flags=re.DOTALL)


def program(rank: int, folder: str) -> tuple[float, bool]:
    known: dict[str, Any] = {}
    with patch.object(dist, "init_process_group"):  # the group is there already
        exec(PRETRAINED, known)
    exec(SAVED.replace("checkpoints/", f"{folder}/"), known)
    values = known["step"].state_dict()
    loaded = all(torch.equal(p.detach(), values[name]) for name, p in known["model"].named_parameters())
    first = known["loss"]
    exec(PACKED, known)
    return first, loaded and 5 < known["loss"] < 8 and known["loss"] != first


def test_the_first_program_and_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5", exc_type=ImportError)
    (loss, loaded), other = run_ranks(program, 2, str(tmp_path))
    assert (loss, loaded) == other
    assert loaded
    assert 5 < loss < 8


@pytest.mark.timeout(180)
def test_the_layer_computes_what_its_forward_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "layer_of_the_page.py").write_text(LAYER)
    monkeypatch.syspath_prepend(str(tmp_path))
    layer = importlib.import_module("layer_of_the_page")
    check_layer(layer.Layer(), hidden=16)


@pytest.mark.parametrize(
    ("row", "families"), [("without experts", DENSE), ("with experts", EXPERTS), ("refused", REFUSED)]
)
def test_the_families(row: str, families: dict[str, Any]) -> None:
    (cells,) = re.findall(rf"^\| {row} \| (`.*) \|$", TEXT, flags=re.MULTILINE)
    assert re.findall(r"`(\w+)`", cells) == list(families)
