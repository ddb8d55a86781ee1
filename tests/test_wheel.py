"""What ships: the package that users import, with its data, and nothing else of the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hocket import cli
from tests.helpers.command import ALONE, SMALL, command, environment, text_in

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Wheels of hocket and of hocket-trace, built from a copy of the repository."""
    pytest.importorskip("setuptools", "77.0.3", reason="the wheel is built by setuptools 77.0.3 or newer")
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for folder in ("hocket", "hocket_trace", "benchmarks", "tests", "scripts"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy / file)
    for folder in (copy, copy / "hocket_trace"):
        subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=folder, check=True, capture_output=True)
    return sorted(out.glob("*.whl"))


@pytest.fixture(scope="module")
def shipped(wheels: list[Path]) -> set[str]:
    """Files of hocket's wheel."""
    return set(zipfile.ZipFile(wheels[0]).namelist())


def test_the_wheel_has_the_package_and_nothing_else(shipped: set[str]) -> None:
    files = {path for path in (ROOT / "hocket").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    package = {name for name in shipped if name.split("/")[0].endswith("hocket")}
    assert package == {path.relative_to(ROOT).as_posix() for path in files}
    assert not [name for name in shipped if ".data/" in name]


def test_what_is_installed_works_in_a_clean_folder(wheels: list[Path], tmp_path: Path) -> None:
    """It helps, plans, translates, trains and draws without the checkout."""
    pytest.importorskip("pip", reason="pip installs the wheels")
    there, clean = tmp_path / "installed", tmp_path / "clean"
    clean.mkdir()
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(there)]
    subprocess.run([sys.executable, *install, *map(str, wheels)], check=True, capture_output=True, timeout=50)
    variables = environment() | {"PYTHONPATH": str(there)}

    def run(*words: str) -> str:
        ended = subprocess.run([sys.executable, *words], cwd=clean, env=variables, capture_output=True, text=True)
        assert ended.returncode == 0, ended
        return ended.stdout

    assert run("-c", "import hocket; print(hocket.__file__)").startswith(str(there))
    assert run("-m", "hocket", "--version").startswith("hocket 0.1.0, ")
    assert "Learning rate" in run("-m", "hocket", "help", "train.lr")
    assert run("-m", "hocket", "explain", "--from-megatron", "--bf16 --tensor-model-parallel-size 1", "--gpus", "2")
    run("-m", "hocket", "plan", "tiny", "--html", "plan.html")
    assert "<canvas" in (clean / "plan.html").read_text()
    text = text_in(clean)
    trained = run("-m", "hocket", "train", *SMALL, *ALONE, "--train.steps", "2", "--data.paths", text)
    assert "validation loss" in trained
    run("-m", "hocket", "runs", "--html", "runs.html")
    assert "<polyline" in (clean / "runs.html").read_text()
    assert not {path.name for path in clean.iterdir()} - {"plan.html", "runs.html", "text", "runs", ".cache"}


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["train.lr"], ["train.lr: a number, 1e-30 or more; 0.003 by default", "Learning rate after the warm-up"]),
        (["overlap.pp"], ["overlap.pp.defer_layers"]),
        (["data"], ["data.text_key"]),
        (["-h"], ["hocket help SETTING", "model.rope"]),
    ],
)
def test_help_knows_settings(capsys, words: list[str], parts: list[str]) -> None:
    code, out, _ = command(capsys, "help", *words)
    assert code == 0
    for part in parts:
        assert part in out


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["help", "optimiser"], "fix: did you mean optimizer?"),
        (["help", "quux"], "fix: hocket help -h lists the sections"),
        (["help", "overlap", "quux"], "there is no such setting; fix: "),
    ],
)
def test_what_help_does_not_know_is_one_line(capsys, words: list[str], fix: str) -> None:
    code, _, err = command(capsys, *words)
    assert (code, fix in err, len(err.splitlines())) == (2, True, 1)


def test_no_other_program_ships(shipped: set[str]) -> None:
    code = [name for name in shipped if name.endswith(".py")]
    assert not [name for name in code if "bench" in name]
    assert not [name for name in shipped if "peers" in name]


def test_bench_says_where_it_is_found(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(cli, "CHECKOUT", tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "tiny"])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hocket: bench (command line): benchmarks are not installed with hocket; fix: run it in a ")
