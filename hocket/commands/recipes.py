"""`hocket recipes`: what there is to train, and presets."""

from __future__ import annotations

from hocket.presets import PRESETS
from hocket.recipes import RECIPES, describe


def run(words: list[str]) -> int:
    """List the recipes, one per line, then the presets."""
    if words:
        raise ValueError(f"recipes {' '.join(words)} (command line): recipes takes no arguments; fix: hocket recipes")
    width = max(map(len, [*RECIPES, *PRESETS]))
    print("\n".join(f"{name:{width}}  {describe(name)}" for name in RECIPES))
    print("\npresets, for --preset:")
    print("\n".join(f"{name:{width}}  {preset.description}" for name, preset in PRESETS.items()))
    return 0
