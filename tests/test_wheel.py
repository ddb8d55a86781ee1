"""What ships: the package that users import, with its data, and nothing else of the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hocket import cli
from hocket.commands import bench

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Files of a wheel that is built from a copy of the repository."""
    pytest.importorskip("setuptools", "77.0.3", reason="the wheel is built by setuptools 77.0.3 or newer")
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for folder in ("hocket", "benchmarks", "tests", "scripts"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy / file)
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=copy, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_has_the_package_and_nothing_else(shipped: set[str]) -> None:
    files = {path for path in (ROOT / "hocket").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    package = {name for name in shipped if ".dist-info/" not in name}
    assert package == {path.relative_to(ROOT).as_posix() for path in files}


def test_no_other_program_ships(shipped: set[str]) -> None:
    assert not [name for name in shipped if "bench" in name and name != "hocket/commands/bench.py"]
    assert not [name for name in shipped if "peers" in name]


def test_bench_says_where_it_is_found(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(bench, "CHECKOUT", tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "tiny"])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hocket: bench (command line): benchmarks are not installed with hocket; fix: run it in a ")
