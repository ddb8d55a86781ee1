"""Reports several problems as one error, so that a user sees all of them at once."""

from __future__ import annotations

from collections.abc import Sequence


def stop_if(problems: Sequence[str], what: str = "settings") -> None:
    """Raise one ValueError for all problems, each a line about one of `what`; do nothing without problems."""
    if len(problems) == 1:
        raise ValueError(problems[0])
    if problems:
        raise ValueError(f"{len(problems)} {what} cannot work:\n" + "\n".join(f"  {problem}" for problem in problems))


def printable(text: str) -> str:
    """Escape characters that control a terminal: names of files may be untrusted."""
    return "".join(c if c == "\n" or c.isprintable() else ascii(c)[1:-1] for c in text)
