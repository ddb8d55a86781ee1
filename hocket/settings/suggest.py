"""Guesses what a user meant by a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LIKE = 0.75
"""Least likeness of a slip: with less, two settings that have nothing to do with each other are alike."""


def meant(name: str, known: Iterable[str]) -> str:
    """The known name of which a name is likely a slip of the hand; empty if there is none.

    Dashes in front and kinds of dashes inside do not count.
    """
    plain = {_plain(each): each for each in known}
    close = difflib.get_close_matches(_plain(name), list(plain), n=1, cutoff=_LIKE)
    return plain[close[0]] if close else ""


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


def meant_elsewhere(name: str, known: Iterable[str]) -> str:
    """The known name whose last word is the same, in another section; empty if there is none, or many have that word.

    A last word that is short, such as `name` or `enable`, says nothing.
    """
    last = _plain(name.rsplit(".", 1)[-1])
    same = [each for each in known if _plain(each.rsplit(".", 1)[-1]) == last]
    return same[0] if len(same) == 1 and "-" in last else ""


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-")
