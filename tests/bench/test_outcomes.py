"""Outcomes of tests are kept as they come, and a run can be continued."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_tests import begin
from benchmarks.outcomes import counted
from benchmarks.record import ROOT
from benchmarks.tables import gpu_tests

FIRST = """
import json, pathlib, pytest
def test_passes(): pass
def test_fails(): raise OSError
def test_skips(): pytest.skip("here")
def test_sees_those_before(): assert len(json.loads(pathlib.Path({path!r}).read_text())["tests"]) == 3
def test_is_stopped(): raise KeyboardInterrupt
def test_would_come_later(): pass
"""
SECOND = """
import pytest
def test_passes(): raise OSError("it has passed at this commit")
def test_fails(): pass
def test_skips(): pass
def test_is_stopped(): pass
"""
THIRD = """
import pytest
def test_passes(): pytest.skip("fewer GPUs")
def test_skips(): raise OSError
"""


def test_outcomes_stay_when_a_run_ends_early_and_the_next_one_continues(tmp_path: Path) -> None:
    path, file = tmp_path / "result.json", tmp_path / "test_some.py"

    def run(source: str, commit: str) -> tuple[int, dict[str, str]]:
        begin(path, commit, resume=True)
        file.write_text(source.format(path=str(path)))
        off = ["-p", "no:cacheprovider", "-p", "no:xdist", "-q", "--import-mode=importlib"]
        kept = ["-p", "benchmarks.outcomes", "--outcomes", str(path), "--commit", commit]
        status = pytest.main([*off, *kept, "--rootdir", str(tmp_path), "-c", str(tmp_path / "none.ini"), str(file)])
        del sys.modules["test_some"]
        found = json.loads(path.read_text())
        assert {kind: found[kind] for kind in ("passed", "failed", "skipped")} == counted(found["tests"])
        return int(status), {name.split("::test_")[1]: test["outcome"] for name, test in found["tests"].items()}

    (tmp_path / "none.ini").write_text("[pytest]\n")
    status, outcomes = run(FIRST, "one")
    assert status == pytest.ExitCode.INTERRUPTED
    assert outcomes == {
        "passes": "passed", "fails": "failed", "skips": "skipped", "sees_those_before": "passed"
    }  # fmt: skip
    status, outcomes = run(SECOND, "one")
    assert status == pytest.ExitCode.OK
    assert set(outcomes.values()) == {"passed"}
    assert len(outcomes) == 5, "what was stopped has run"
    status, outcomes = run(THIRD, "two")
    assert outcomes["passes"] == "passed", "a skip says nothing about what has passed"
    assert outcomes["skips"] == "failed"
    found = json.loads(path.read_text())
    assert [run["commit"] for run in found["origins"]] == ["one", "one", "two"]
    assert found["tests"]["test_some::test_passes"]["commit"] == "one"
    assert found["tests"]["test_some::test_skips"]["commit"] == "two"
    shown = gpu_tests(found)
    assert "| `test_some.py` at `one` | 4 | 0 | 0 |" in shown
    assert "| `test_some.py` at `two` | 0 | 1 | 0 |" in shown


def test_a_file_of_one_commit_can_be_continued_at_another(tmp_path: Path) -> None:
    path = tmp_path / "gpu_tests.json"
    path.write_text((ROOT / "benchmarks" / "results" / "gpu_tests.json").read_text())
    former = json.loads(path.read_text())
    result = begin(path, "new", resume=True)
    assert {test["commit"] for test in result["tests"].values()} == {former["commit"]}
    assert [run["commit"] for run in result["origins"]] == [former["commit"], "new"]
    assert begin(path, "new", resume=False)["tests"] == {}
