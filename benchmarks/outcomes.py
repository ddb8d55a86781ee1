"""A plugin of pytest that keeps outcomes in a result file, as they come: a run that is killed leaves what it has.

    python -m pytest -p benchmarks.outcomes --outcomes FILE --commit COMMIT

The file is there already, with the run's origin; `benchmarks.gpu_tests` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench.record import save

KINDS = ("passed", "failed", "skipped")


def counted(tests: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """How many tests passed, failed and were skipped."""
    return {kind: sum(test["outcome"] == kind for test in tests.values()) for kind in KINDS}


def named(nodeid: str) -> str:
    """`tests/gpu/test_a.py::test_b` as `tests.gpu.test_a::test_b`."""
    file, _, test = nodeid.partition("::")
    return f"{file.removesuffix('.py').replace('/', '.')}::{test or 'collected'}"


def outcome(reports: Iterable[str]) -> str:
    """Of a test, from the outcomes of its set-up, its call and its end."""
    found = set(reports)
    return next(kind for kind in ("failed", "skipped", "passed") if kind in found)


class Recorder:
    """Writes a test's outcome when the test has ended. A skip does not replace what an earlier run has seen."""

    def __init__(self, path: Path, commit: str) -> None:
        self.path, self.commit = path, commit
        self.result: dict[str, Any] = json.loads(path.read_text())
        self.reports: dict[str, list[pytest.TestReport]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reports = self.reports.setdefault(report.nodeid, [])
        reports.append(report)
        if report.when == "teardown":
            del self.reports[report.nodeid]
            self.keep(report.nodeid, outcome(each.outcome for each in reports), sum(each.duration for each in reports))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.keep(report.nodeid, "failed", 0.0)

    def keep(self, nodeid: str, outcome: str, seconds: float) -> None:
        tests = self.result["tests"]
        if outcome != "skipped" or named(nodeid) not in tests:
            tests[named(nodeid)] = {"outcome": outcome, "seconds": round(seconds, 3), "commit": self.commit}
            save(self.path, {**self.result, **counted(tests)})


class Left:
    """Leaves out what has passed at this commit."""

    def __init__(self, path: Path, commit: str) -> None:
        tests = json.loads(path.read_text())["tests"].items()
        self.passed = {name for name, test in tests if (test["outcome"], test["commit"]) == ("passed", commit)}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        gone = [item for item in items if named(item.nodeid) in self.passed]
        items[:] = [item for item in items if named(item.nodeid) not in self.passed]
        config.hook.pytest_deselected(items=gone)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="result file that outcomes are kept in")
    parser.addoption("--commit", default="", help="what the result file calls this version")


def pytest_configure(config: pytest.Config) -> None:
    """Workers of xdist collect what is left, and the process that started them writes."""
    path, commit = config.getoption("outcomes"), config.getoption("commit")
    config.pluginmanager.register(Left(path, commit))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path, commit))
