"""Guesses what a user meant by a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def meant(name: str, known: Iterable[str]) -> str:
    """The likeliest of the known names; empty if none is like it."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)), "")


def meant_setting(name: str, known: Iterable[str]) -> str:
    """The likeliest setting; empty if none is like it.

    A right name, or nearly so, in the wrong section, or without one, is a likely slip.
    """
    known = list(known)
    last = name.rsplit(".", 1)[-1]
    lasts = [each.rsplit(".", 1)[-1] for each in known]
    close = difflib.get_close_matches(last, lasts, n=1, cutoff=0.8)
    same = [each for each, its_last in zip(known, lasts, strict=True) if its_last in close]
    if same:
        return difflib.get_close_matches(name, same, n=1, cutoff=0.0)[0]
    return meant(name, known)
