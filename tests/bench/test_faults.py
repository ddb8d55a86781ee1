"""Some of the faults of `benchmarks.faults`, once each, and what becomes of their runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults import LINK, reliability
from tests.helpers.command import ROOT, environment

NONE = {"tried": 1, "survived": 0, "told": 0, "lost": 0}
KILLED, CHANGED = "a rank is killed", "a text changes"


@pytest.mark.timeout(300)
def test_runs_survive_or_tell(tmp_path: Path) -> None:
    """One command, which trains the undisturbed run once."""
    words = ["--each", "1", "--out", str(tmp_path), "--commit", "here", "--kinds", KILLED, CHANGED, LINK]
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", *words],
        cwd=ROOT, env=environment(), check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    result = json.loads((tmp_path / "faults.json").read_text())
    assert result["faults"][KILLED] == {**NONE, "survived": 1}
    assert result["faults"][CHANGED] == {**NONE, "told": 1}
    assert result["lost"] == []
    assert reliability(result).splitlines()[-1].startswith("| all | ")
    if LINK in result["not_tried"]:
        pytest.skip(f"{LINK}: {result['not_tried'][LINK]}")
    assert result["faults"][LINK] == {**NONE, "told": 1}
