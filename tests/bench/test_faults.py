"""Some of the faults of `benchmarks.faults`, once each, and what becomes of their runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults import BAD_LINK, FULL, HOST, LINK, TORCHRUN_KILLED, reliability, why_not
from tests.helpers.command import ROOT, environment

NONE = {"tried": 1, "survived": 0, "told": 0, "lost": 0}
KILLED, CHANGED = "a rank is killed", "a text changes"
OUTCOMES = {
    KILLED: "survived", CHANGED: "told", TORCHRUN_KILLED: "survived", LINK: "told", HOST: "told", BAD_LINK: "survived",
}  # fmt: skip
"""What becomes of a run. One whose disk is full may survive or tell. The last three are of two hosts, networks of this
machine, and of the link between them."""


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kinds", [(KILLED, LINK), (FULL, CHANGED, TORCHRUN_KILLED, HOST, BAD_LINK)], ids=["one of each sort", "others"]
)
def test_runs_survive_or_tell(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """All by one command, which trains the undisturbed run once. No rank outlives its torchrun: it would hold the run's
    folder, and the next start would be refused.
    """
    absent = {kind for kind in kinds if why_not(kind, tmp_path)}
    words = ["--each", "1", "--out", str(tmp_path), "--commit", "here", "--kinds"]
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", *words, *kinds],
        cwd=ROOT, env=environment(), check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    result = json.loads((tmp_path / "faults.json").read_text())
    assert result["lost"] == []
    wanted = {kind: {**NONE, OUTCOMES[kind]: 1} for kind in kinds if kind in OUTCOMES and kind not in absent}
    assert {kind: result["faults"][kind] for kind in wanted} == wanted
    assert {*result["not_tried"]} == absent
    assert {*result["faults"]} == {*kinds} - absent
    assert reliability(result).splitlines()[-1].startswith("| all | ")
