"""Some of the faults of `benchmarks.faults`, once each, and what becomes of their runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import BAD_LINK, FULL, HOST, LINK, LINKS, TORCHRUN_KILLED, reliability, why_not
from tests.helpers.command import ROOT, environment

NONE = {"tried": 1, "survived": 0, "told": 0, "lost": 0}
KILLED, CHANGED = "a rank is killed", "a text changes"
OUTCOMES = {LINK: "told", HOST: "told", BAD_LINK: "survived"}
"""What becomes of a run of two hosts, networks of this machine, that meets a fault of the link between them."""


def tried(folder: Path, *kinds: str) -> dict[str, Any]:
    """What the command finds out about faults, each tried once."""
    words = ["--each", "1", "--out", str(folder), "--commit", "here", "--kinds", *kinds]
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", *words],
        cwd=ROOT, env=environment(), check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    result = json.loads((folder / "faults.json").read_text())
    assert result["lost"] == []
    return result


@pytest.mark.timeout(300)
def test_runs_survive_or_tell(tmp_path: Path) -> None:
    """One command, which trains the undisturbed run once."""
    result = tried(tmp_path, KILLED, CHANGED, FULL)
    assert result["faults"][KILLED] == {**NONE, "survived": 1}
    assert result["faults"][CHANGED] == {**NONE, "told": 1}
    assert FULL in {**result["faults"], **result["not_tried"]}
    assert reliability(result).splitlines()[-1].startswith("| all | ")


@pytest.mark.timeout(300)
def test_no_rank_outlives_its_torchrun(tmp_path: Path) -> None:
    """Else it would hold the run's folder, and the next start would be refused."""
    assert tried(tmp_path, TORCHRUN_KILLED)["faults"] == {TORCHRUN_KILLED: {**NONE, "survived": 1}}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", LINKS)
def test_two_hosts_whose_link_is_broken(tmp_path: Path, kind: str) -> None:
    if why := why_not(kind, tmp_path):
        pytest.skip(f"it is not tried here: {why}")
    assert tried(tmp_path, kind)["faults"] == {kind: {**NONE, OUTCOMES[kind]: 1}}
