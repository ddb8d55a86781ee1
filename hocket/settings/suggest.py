"""Guesses what a user meant by a name that does not exist."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_LIKE, _JOINED, _WORD = 0.75, 0.9, 0.6
"""Least likeness of a slip, of one with another number of words, and of each word: with less, two settings that have
nothing to do with each other are alike."""


def meant(name: str, known: Iterable[str]) -> str:
    """The known name of which a name is likely a slip of the hand; empty if there is none.

    Dashes in front and kinds of dashes inside do not count. Of names with as many words each word is like the other's:
    `--data-parallel-size` is no slip of `--context-parallel-size`.
    """
    plain = {_plain(each): each for each in known}
    close = difflib.get_close_matches(_plain(name), list(plain), n=8, cutoff=_LIKE)
    return next((plain[each] for each in close if _word_by_word(_plain(name), each)), "")


def _word_by_word(name: str, other: str) -> bool:
    """Whether two names that are alike are so in each word. Words that are left out or joined are a slip, too."""
    mine, others = re.split(r"[-.]", name), re.split(r"[-.]", other)
    if len(mine) != len(others):
        return difflib.SequenceMatcher(None, name, other).ratio() >= _JOINED
    return all(difflib.SequenceMatcher(None, *pair).ratio() >= _WORD for pair in zip(mine, others, strict=True))


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


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-")
