"""Some of the faults of `benchmarks.faults`, once each, and what becomes of their runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults import LINK, reliability
from tests.helpers.command import ROOT, environment

NONE = {"survived": 0, "told": 0, "lost": 0}


def faults(folder: Path, *kinds: str) -> dict[str, dict[str, object]]:
    """The result of the command for some kinds of faults."""
    words = ["--each", "1", "--out", str(folder), "--commit", "here", "--kinds", *kinds]
    command = [sys.executable, "-m", "benchmarks.faults", *words]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment(), check=False, capture_output=True, text=True, timeout=400
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    return json.loads((folder / "faults.json").read_text())


def test_runs_survive_or_tell(tmp_path: Path) -> None:
    killed, flipped, changed = "a rank is killed", "a bit of a checkpoint flips", "a text changes"
    result = faults(tmp_path, killed, flipped, changed)
    assert result["faults"][killed] == {"tried": 1, **NONE, "survived": 1}
    assert result["faults"][flipped] == {"tried": 1, **NONE, "survived": 1}
    assert result["faults"][changed] == {"tried": 1, **NONE, "told": 1}
    assert reliability(result).splitlines()[-1] == "| all | 3 | 2 | 1 | 0 |"


def test_both_sides_of_a_link_that_is_cut_end_in_one_line_and_go_on(tmp_path: Path) -> None:
    result = faults(tmp_path, LINK)
    if LINK in result["not_tried"]:
        pytest.skip(str(result["not_tried"][LINK]))
    assert result["faults"][LINK] == {"tried": 1, **NONE, "told": 1}
