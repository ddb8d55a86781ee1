"""What a user may have meant by a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from hocket.settings.former import FORMER


def meant(name: str, known: Iterable[str]) -> str:
    """The likeliest of the known names; empty if none is like it."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)), "")


def meant_setting(name: str, known: Iterable[str]) -> str:
    """The likeliest setting, under its present name; empty if none is like it.

    A right name in the wrong section, or without one, is a likely slip.
    """
    known = list(known)
    last = name.rsplit(".", 1)[-1]
    same = [each for each in known if each.rsplit(".", 1)[-1] == last]
    if same:
        return difflib.get_close_matches(name, same, n=1, cutoff=0.0)[0]
    close = meant(name, [*known, *FORMER])
    return FORMER.get(close, close)
