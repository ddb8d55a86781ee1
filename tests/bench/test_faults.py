"""Some of the faults of `benchmarks.faults`, once each, and what becomes of their runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults import BAD_LINK, FULL, HOST, LINK, LINKS, TORCHRUN_KILLED, reliability, why_not
from tests.helpers.command import ROOT, environment

NONE = {"tried": 1, "survived": 0, "told": 0, "lost": 0}
KILLED, CHANGED = "a rank is killed", "a text changes"
OUTCOMES = {LINK: "told", HOST: "told", BAD_LINK: "survived"}
"""What becomes of a run of two hosts, networks of this machine, that meets a fault of the link between them."""


@pytest.mark.timeout(900)
def test_runs_survive_or_tell(tmp_path: Path) -> None:
    """All by one command, which trains the undisturbed run once. No rank outlives its torchrun: it would hold the run's
    folder, and the next start would be refused.
    """
    links = [kind for kind in LINKS if not why_not(kind, tmp_path)]
    words = ["--each", "1", "--out", str(tmp_path), "--commit", "here", "--kinds"]
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", *words, KILLED, CHANGED, FULL, TORCHRUN_KILLED, *LINKS],
        cwd=ROOT, env=environment(), check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    result = json.loads((tmp_path / "faults.json").read_text())
    assert result["lost"] == []
    wanted = {KILLED: "survived", CHANGED: "told", TORCHRUN_KILLED: "survived", **{k: OUTCOMES[k] for k in links}}
    assert {kind: result["faults"][kind] for kind in wanted} == {k: {**NONE, what: 1} for k, what in wanted.items()}
    assert {FULL, *LINKS} <= {*result["faults"], *result["not_tried"]}
    assert reliability(result).splitlines()[-1].startswith("| all | ")
