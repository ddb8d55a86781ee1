"""`hocket help SETTING`: a setting, or a section of settings. `hocket recipes`: recipes and presets."""

from __future__ import annotations

import re
import shutil
import textwrap

from hocket.commands.options import docstrings
from hocket.config.rule import leaf, show
from hocket.config.schema import DEFAULTS, bounds_of, meant, meant_setting, types, written
from hocket.recipes import PRESETS, RECIPES
from hocket.recipes import describe as described
from hocket.typed import describe


def run(words: list[str]) -> int:
    """Print the description of a setting, or of a section of settings."""
    if not words or words[0] in ("-h", "--help"):
        sections = ", ".join(name for name in docstrings() if name not in types())
        print("\n".join(_wrapped(f"hocket help SETTING, such as train.lr, or a section of settings: {sections}", "")))
        return 0
    topic = words[0].removeprefix("--").replace("-", "_")
    if topic not in docstrings() or words[1:]:
        close = meant(topic, docstrings()) or meant_setting(topic, types())
        fix = f"did you mean {close}?" if close and close != topic else "hocket help -h lists the sections"
        raise ValueError(f"help {' '.join(words)} (command line): there is no such setting; fix: {fix}")
    print(setting(topic))
    return 0


def setting(name: str) -> str:
    """A setting's type, default and meaning. Of a section, all settings with their first sentences."""
    if name in types():
        kind, default = describe(types()[name]), show(leaf(DEFAULTS, name))
        if bounds := bounds_of(name):
            kind += f", {written(bounds.low)} " + (f"to {written(bounds.high)}" if bounds.high < 1e18 else "or more")
        return "\n".join([f"{name}: {kind}; {default} by default", *_wrapped(docstrings()[name])])
    lines = [f"{name}: {docstrings()[name]}"]
    for each in types():
        if each.startswith(f"{name}."):
            lines += [each, *_wrapped(re.split(r"(?<=[.]) ", docstrings()[each], maxsplit=1)[0])]
    return "\n".join(lines)


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    width = min(shutil.get_terminal_size((100, 40)).columns, 120)
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)


def run_recipes(words: list[str]) -> int:
    """List the recipes, one per line, then the presets with what they set."""
    if words and not {"-h", "--help"} & set(words):
        raise ValueError(f"recipes {' '.join(words)} (command line): recipes takes no arguments; fix: hocket recipes")
    width = max(map(len, [*RECIPES, *PRESETS]))
    print("\n".join(f"{name:{width}}  {described(name)}" for name in RECIPES))
    print("\npresets, for --preset:")
    for name, preset in PRESETS.items():
        print(f"{name:{width}}  {preset.description}")
        print("\n".join(f"{'':{width}}    {setting} = {show(value)}" for setting, value in preset.changes.items()))
    return 0
