"""Several problems as one error, so that a user sees all of them at once."""

from __future__ import annotations

from collections.abc import Sequence


def stop_if(problems: Sequence[str], what: str = "settings") -> None:
    """Raise one ValueError for all problems, each a line about one of `what`; nothing happens if there are none."""
    if len(problems) == 1:
        raise ValueError(problems[0])
    if problems:
        raise ValueError(f"{len(problems)} {what} cannot work:\n" + "\n".join(f"  {problem}" for problem in problems))


def harmless(text: str) -> str:
    """Lines without what would make a terminal do something: names of files may come from others."""
    return "".join(c if c == "\n" or c.isprintable() else ascii(c)[1:-1] for c in text)
