"""Run the tests that need GPUs and keep their outcome as a result file.

    python -m benchmarks.gpu_tests
    python -m benchmarks.gpu_tests -n 4 tests
    python -m benchmarks.gpu_tests --name gpu_tests_rerun tests/gpu/test_bench.py

What is no option of its own goes to pytest, `-n 4` for instance, which runs all tests that measure no time on the same
GPUs beside each other. Exits with pytest's status.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.record import ROOT, write


def outcome(case: ElementTree.Element) -> str:
    """passed, failed or skipped."""
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def run(command: list[str], seconds: float | None) -> int:
    """Run pytest, interrupted after so many seconds. Returns its status."""
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it writes its report
        return process.wait(30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="gpu_tests", help="of the result")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default="")
    parser.add_argument("--seconds", type=float, default=None, help="after which no test begins; those that ran count")
    options, words = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        off = ["-p", "no:cacheprovider", "-p", "no:benchmark"]  # a plugin that stops pytest beside several processes
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", *off, f"--junitxml={report}"]
        status = run([*command, *(words or ["tests"])], options.seconds)
        cases = [case for case in ElementTree.parse(report).iter("testcase") if case.get("classname")]
    tests = {
        f"{case.get('classname')}::{case.get('name')}": {
            "outcome": outcome(case),
            "seconds": float(case.get("time") or 0),
        }
        for case in cases
    }
    counts = {kind: sum(test["outcome"] == kind for test in tests.values()) for kind in ("passed", "failed", "skipped")}
    print(write(options.name, {**counts, "tests": tests}, options.out, options.commit))
    return status


if __name__ == "__main__":
    sys.exit(main())
