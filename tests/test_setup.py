"""Set-up: what the lock file pins, and what people are told when a Python cannot be used."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scripts import setup

ROOT = Path(__file__).resolve().parents[1]


def pinned() -> dict[str, str]:
    return setup.pins(setup.LOCK.read_text())


def test_lock_pins_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "hocket-trace==0.1.0" in project["project"]["dependencies"], "of this repository"
    others = [each for each in project["project"]["dependencies"] if not each.startswith("hocket-trace")]
    wanted = [*others, *project["project"]["optional-dependencies"]["dev"]]
    names = {re.split(r"[<>=]", requirement)[0] for requirement in wanted}
    assert names - {"torch"} <= set(pinned())
    assert set(setup.TOOLS) <= set(pinned())
    assert set(setup.MODELS) <= set(pinned())
    assert set(setup.EVENTS) <= set(pinned())


@pytest.mark.parametrize(
    ("group", "heads"),
    [(setup.MODELS, ("transformers", "accelerate", "peft")), (setup.EVENTS, ("tensorboard",))],
    ids=["models", "events"],
)
def test_what_only_a_group_needs_is_installed_with_it(group: frozenset[str], heads: tuple[str, ...]) -> None:
    """Where it cannot be installed, everything else can."""
    for name, requirement in pinned().items():
        asked_by = set(re.findall(r"^    #(?: {2}| via) (\S.*)$", requirement, re.MULTILINE))
        assert asked_by, name
        assert (name in group) == (name in heads or asked_by <= group), f"{name}: {asked_by}"


def test_the_lock_has_what_tests_of_extras_need() -> None:
    """That of wandb alone is skipped where everything is installed; their reasons say why."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = [re.split(r"[<>=]", each)[0] for extra in ("text", "tensorboard", "checkpoints") for each in extras[extra]]
    assert set(wanted) <= set(pinned())


def test_every_pin_has_a_version_and_a_hash_and_torch_is_apart() -> None:
    assert "torch" not in pinned()
    for name, requirement in pinned().items():
        assert re.match(rf"{re.escape(name)}==\d", requirement)
        assert "--hash=sha256:" in requirement


def test_python_without_ensurepip_is_told_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "ensurepip.py").write_text("raise ImportError('not on this system')")
    code = "import sys; from scripts import setup; setup.create(sys.executable)"
    result = run_python(code, tmp_path)
    assert result.returncode == 1
    assert "cannot make virtual environments" in result.stderr
    assert "apt-get install python3-venv" in result.stderr


def test_old_python_is_told_which_is_needed(tmp_path: Path) -> None:
    result = run_python("import sys; from scripts import setup; sys.version_info = (3, 9, 2); setup.main()", tmp_path)
    assert result.returncode == 1
    assert "needs Python 3.11 or newer" in result.stderr
    assert "is 3.9.2" in result.stderr


def test_launcher_puts_folders_before_what_is_on_the_path(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(setup, "LAUNCHER", tmp_path / "python")
    setup.write_launcher(sys.executable, [tmp_path / "a", tmp_path / "b"])
    code = "import sys; print(*[p for p in sys.path if p.endswith(('/a', '/b', '/c'))])"
    environment = {**os.environ, "PYTHONPATH": "/c"}
    shown = subprocess.run(
        [tmp_path / "python", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout.split() == [str(tmp_path / "a"), str(tmp_path / "b"), "/c"]


def test_a_script_beside_the_clone_imports_the_package(tmp_path: Path, monkeypatch) -> None:
    """Python takes a folder `hocket` beside the script for a package without code, unless it finds the real one."""
    (tmp_path / "hocket").mkdir()
    (tmp_path / "env" / "bin").mkdir(parents=True)
    python = tmp_path / "env" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "train.py").write_text("import hocket; print(hocket.plan.__name__)")
    monkeypatch.setattr(setup, "ENV", tmp_path / "env")
    monkeypatch.setattr(setup, "LAUNCHER", tmp_path / "python")
    monkeypatch.setattr(setup, "run", lambda *command: None)  # installs nothing
    monkeypatch.delenv("PYTHONPATH", raising=False)
    setup.create(sys.executable)
    script = [tmp_path / "python", tmp_path / "train.py"]
    assert subprocess.run(script, capture_output=True, text=True, check=True, cwd=tmp_path).stdout == "plan\n"


def run_python(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{path}:{ROOT}"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
