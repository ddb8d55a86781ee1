"""Settings that have moved: stored ones are found again under today's names."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from hocket.config import Config
from hocket.settings.former import FORMER, flat, put, renamed
from hocket.settings.leaves import types


def test_a_former_name_is_no_setting_and_its_new_one_is() -> None:
    assert not set(FORMER) & set(types())
    assert set(FORMER.values()) <= set(types())


@pytest.mark.parametrize(("former", "now"), FORMER.items())
def test_a_stored_setting_is_found_under_its_new_name(former: str, now: str) -> None:
    stored: dict[str, object] = {"model": {"layers": 4}}
    put(stored, former, "x")
    before = repr(stored)
    assert flat(renamed(stored)) == {"model.layers": 4, now: "x"}
    assert repr(stored) == before


def test_a_stored_value_is_found_under_its_new_name() -> None:
    for former, now in (("on", "next_step"), ("off", "end"), ("auto", "auto")):
        assert renamed({"overlap": {"dp": {"gather_in_update": former}}}) == {"overlap": {"dp": {"update": now}}}


def test_settings_of_today_are_left_alone() -> None:
    today = asdict(Config())
    assert renamed(today) == today
    assert list(flat(today)) == list(types())
