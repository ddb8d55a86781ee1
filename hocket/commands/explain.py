"""`hocket explain`: what was decided, why, and what it will do."""

from __future__ import annotations

from hocket.commands import translate


def run(words: list[str]) -> int:
    """Explain a configuration, or settings of another system."""
    if any(word.startswith("--from-") for word in words):
        return translate.run(words)
    print(translate.USAGE)
    return 0
