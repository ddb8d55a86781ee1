"""The page of all settings."""

from __future__ import annotations

from benchmarks.settings_tables import docstrings, presets, table
from hocket.config import Config
from hocket.config.schema import types
from hocket.recipes import PRESETS


def test_every_setting_and_section_has_a_docstring_of_its_own() -> None:
    found = docstrings()
    assert set(types()) <= set(found)
    assert all(len(text) > 3 and "\n" not in text for text in found.values())
    assert found["overlap.ep.merge"].startswith("Merge the forward")
    assert found["overlap.ep"] == "All-to-alls of experts."


def test_the_tables_have_every_setting_once() -> None:
    rows = [line for section in vars(Config()) for line in table(section).splitlines()[2:]]
    assert [row.split("`")[1] for row in rows] == list(types())
    (chunks,) = [row for row in rows if "`plan.chunks`" in row]
    assert chunks == "| `plan.chunks` | `1` |  | Virtual pipeline stages per rank. |"
    assert "| `auto`, `on`, `off` |" in next(row for row in rows if "`overlap.ep.merge`" in row)


def test_presets_are_listed_with_what_they_set() -> None:
    text = presets()
    assert all(f"| `{name}` |" in text for name in PRESETS)
    assert "`overlap.dp.prefetch = 4`" in text
