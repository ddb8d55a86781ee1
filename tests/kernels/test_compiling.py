"""All kernels compile for a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("words", [[], pytest.param(["every"], marks=pytest.mark.full)], ids=["once", "every shape"])
def test_kernels_compile(words: list[str]) -> None:
    """Those that have changed since the last time: Triton finds the others in its cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling", *words],
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(ROOT / ".cache" / "triton")},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    source = "\n".join(path.read_text() for path in sorted((ROOT / "hocket" / "kernels").glob("*.py")))
    launched = set(re.findall(r"(\w+)\[[^\]]*\]\(", source)) & set(re.findall(r"@triton.jit[^\n]*\ndef (\w+)", source))
    assert launched <= set(done.stdout.split()), "kernels that tests/kernels/compiling.py does not call"
