"""Some of the faults of `benchmarks.faults`, once each, and what becomes of their runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults import BAD_LINK, LINKS, reliability
from benchmarks.faulty_runs import why_no_link
from tests.helpers.command import ROOT, environment

NONE = {"tried": 1, "survived": 0, "told": 0, "lost": 0}
KILLED, CHANGED = "a rank is killed", "a text changes"


@pytest.mark.timeout(300)
def test_runs_survive_or_tell(tmp_path: Path) -> None:
    """One command, which trains the undisturbed run once."""
    words = ["--each", "1", "--out", str(tmp_path), "--commit", "here", "--kinds", KILLED, CHANGED, *LINKS]
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
    for kind in LINKS.keys() - result["not_tried"].keys():
        assert result["faults"][kind] == {**NONE, "survived" if kind == BAD_LINK else "told": 1}


@pytest.mark.parametrize("worse", [False, True], ids=["links", "links that lose packets"])
def test_where_faults_of_links_are_tried(worse: bool) -> None:
    if why := why_no_link(worse):
        pytest.skip(f"they are not tried: {why}")
