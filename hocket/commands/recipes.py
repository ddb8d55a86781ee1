"""`hocket recipes`: what there is to train, and presets."""

from __future__ import annotations

from hocket.presets import PRESETS
from hocket.recipes import RECIPES, describe
from hocket.settings.schema import show


def run(words: list[str]) -> int:
    """List the recipes, one per line, then the presets with what they set."""
    if words and not {"-h", "--help"} & set(words):
        raise ValueError(f"recipes {' '.join(words)} (command line): recipes takes no arguments; fix: hocket recipes")
    width = max(map(len, [*RECIPES, *PRESETS]))
    print("\n".join(f"{name:{width}}  {describe(name)}" for name in RECIPES))
    print("\npresets, for --preset:")
    for name, preset in PRESETS.items():
        print(f"{name:{width}}  {preset.description}")
        print("\n".join(f"{'':{width}}    {setting} = {show(value)}" for setting, value in preset.changes.items()))
    return 0
