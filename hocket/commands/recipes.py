"""`hocket recipes`: what there is to train."""

from __future__ import annotations

from hocket.recipes import RECIPES, describe


def run(words: list[str]) -> int:
    """List the recipes, one per line."""
    if words:
        raise ValueError(f"recipes {' '.join(words)} (command line): recipes takes no arguments; fix: hocket recipes")
    width = max(map(len, RECIPES))
    print("\n".join(f"{name:{width}}  {describe(name)}" for name in RECIPES))
    return 0
