"""Outputs that were looked at once, and must stay as they are.

After a change that is meant, `pytest --renew-golden tests/trace` writes them anew; `git diff tests/golden` shows what
has changed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "golden"


def assert_golden(name: str, text: str, config: pytest.Config) -> None:
    """Fail unless a text is what `tests/golden/NAME` holds."""
    path = FOLDER / name
    if config.getoption("--renew-golden"):
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"no {path.name} yet; fix: pytest --renew-golden"
    assert text == path.read_text(encoding="utf-8"), f"{name} has changed; if that is meant: pytest --renew-golden"
