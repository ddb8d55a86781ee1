"""Run the tests that need GPUs and keep their outcome as a result file.

    python -m benchmarks.gpu_tests --seconds 540
    python -m benchmarks.gpu_tests --resume --seconds 540
    python -m benchmarks.gpu_tests -n 4 tests/gpu/test_bench.py
    python -m benchmarks.gpu_tests --merge monday.json tuesday.json

What is no option of its own goes to pytest, `-n 4` for instance, which runs all tests that measure no time on the same
GPUs beside each other. Outcomes are written as they come, each with its commit. Exits with pytest's status.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.bench.record import origins, provenance, save
from benchmarks.options import arguments
from benchmarks.outcomes import counted
from benchmarks.record import RESULTS, ROOT

PATIENCE = 20.0
"""Seconds in which pytest ends its tests after it was interrupted."""


def run(command: list[str], seconds: float | None) -> int:
    """Run pytest, interrupted after so many seconds, or when this process is asked to end. Returns its status."""
    for asked in (signal.SIGTERM, signal.SIGINT):  # what a shell starts in the background ignores the latter
        signal.signal(asked, signal.default_int_handler)
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait(seconds)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(PATIENCE)
    except subprocess.TimeoutExpired:  # what has ended is written
        process.kill()
        return process.wait()


def begin(path: Path, commit: str, resume: bool) -> dict[str, Any]:
    """Write the file that outcomes go to, with those of earlier runs if they are to be resumed. Returns it."""
    former = json.loads(path.read_text()) if resume and path.exists() else {"tests": {}}
    tests = {name: {"commit": former["commit"], **test} for name, test in former["tests"].items()}
    origin = provenance(commit=commit)
    runs = [*(origins(former) if tests else ()), origin]
    result = {**origin, "origins": runs, **counted(tests), "tests": tests}
    save(path, result)
    return result


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Outcomes of several runs, oldest first: the last one of each test counts, but a skip replaces nothing."""
    tests: dict[str, Any] = {}
    for result in results:
        for name, test in result["tests"].items():
            if test["outcome"] != "skipped" or name not in tests:
                tests[name] = {"commit": result["commit"], **test}
    used = {test["commit"] for test in tests.values()}
    runs = {origin["commit"] + origin["command"]: origin for result in results for origin in origins(result)}
    kept = [origin for origin in runs.values() if origin["commit"] in used]
    return {**kept[-1], "origins": kept, **counted(tests), "tests": tests}


def still_there(name: str) -> bool:
    """Whether a test, called `tests.gpu.test_parity::test_steps[case]`, has not been removed or renamed since."""
    module, _, test = name.partition("::")
    file = ROOT / (module.replace(".", "/") + ".py")
    return file.exists() and f"def {test.partition('[')[0]}(" in file.read_text()


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--name", default="gpu_tests", help="of the result")
    parser.add_argument("--seconds", type=float, default=None, help="after which tests are interrupted")
    parser.add_argument(
        "--resume", action="store_true", help="keep what the file has, and leave out what has passed at this commit"
    )
    parser.add_argument("--merge", nargs="+", type=Path, help="results of runs, oldest first: run nothing")
    options, words = parser.parse_known_args()
    path = ((options.out or RESULTS) / f"{options.name}.json").absolute()
    if options.merge:
        results = [json.loads(file.read_text()) for file in options.merge]
        for result in results:
            result["tests"] = {name: test for name, test in result["tests"].items() if still_there(name)}
        save(path, merged(results))
        print(path)
        return 0
    result = begin(path, options.commit, options.resume)
    # Named, for else pytest takes the folder that is above all paths among its words: that of the outcomes is anywhere.
    root = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    off = ["-p", "no:cacheprovider", "-p", "no:benchmark"]  # a plugin that stops pytest beside several processes
    kept = ["-p", "benchmarks.outcomes", "--outcomes", str(path), "--commit", result["commit"]]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", *root, *off, *kept, *(words or ["tests"])]
    status = run(command, options.seconds)
    print(path)
    return status


if __name__ == "__main__":
    sys.exit(main())
