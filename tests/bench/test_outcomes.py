"""Outcomes of tests are kept as they come, and a run can be continued."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_tests import begin, merged, still_there
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


@pytest.mark.full
def test_outcomes_outside_of_the_tree_leave_pytest_its_root(tmp_path: Path) -> None:
    """Tests keep their names, and find what the settings of pytest let them import."""
    (tmp_path / "pytest.ini").touch()  # where outcomes go may be another project
    chosen = ["tests/gpu/test_grouped.py", "--collect-only"]
    command = [sys.executable, "-m", "benchmarks.gpu_tests", "--out", str(tmp_path), "--commit", "one", *chosen]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "\ntests/gpu/test_grouped.py::test_" in "\n" + ended.stdout, ended.stdout
    assert (tmp_path / "gpu_tests.json").exists()


def test_a_file_of_one_commit_can_be_continued_at_another(tmp_path: Path) -> None:
    path = tmp_path / "gpu_tests.json"
    former = {"commit": "old", "command": "python", "tests": {"a": {"outcome": "passed", "seconds": 1.0}}}
    path.write_text(json.dumps(former))
    result = begin(path, "new", resume=True)
    assert [test["commit"] for test in result["tests"].values()] == ["old"]
    assert [run["commit"] for run in result["origins"]] == ["old", "new"]
    assert begin(path, "new", resume=False)["tests"] == {}


def test_the_last_outcome_of_several_runs_counts_with_its_commit() -> None:
    def run(commit: str, **outcomes: str) -> dict[str, object]:
        return {"commit": commit, "command": "python", "tests": {n: {"outcome": o} for n, o in outcomes.items()}}

    found = merged(
        [run("a", x="passed", y="failed", z="passed"), run("b", x="skipped", y="passed"), run("c", x="skipped")]
    )
    said = {name: (test["outcome"], test["commit"]) for name, test in found["tests"].items()}
    assert said == {"x": ("passed", "a"), "y": ("passed", "b"), "z": ("passed", "a")}
    assert (found["passed"], found["failed"], found["skipped"]) == (3, 0, 0)
    assert [origin["commit"] for origin in found["origins"]] == ["a", "b"], "nothing is left of c"
    assert merged([found, run("d", y="failed")])["tests"]["y"] == {"outcome": "failed", "commit": "d"}


def test_merged_outcomes_leave_out_tests_that_are_gone() -> None:
    here = "tests.bench.test_outcomes::test_merged_outcomes_leave_out_tests_that_are_gone"
    assert still_there(here)
    assert still_there(f"{here}[a case]")
    assert not still_there("tests.bench.test_outcomes::test_that_was_renamed[a case]")
    assert not still_there("tests.bench.test_of_old::test_merged_outcomes_leave_out_tests_that_are_gone")
