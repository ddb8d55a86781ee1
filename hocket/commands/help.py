"""`hocket help TOPIC`: a page of the documentation, a section of one, a setting, or a section of settings."""

from __future__ import annotations

import re
import shutil
import sysconfig
import textwrap
from pathlib import Path

from hocket.commands.options import docstrings
from hocket.presets import PRESETS
from hocket.recipes import RECIPES
from hocket.recipes import describe as described
from hocket.settings.origins import DEFAULTS
from hocket.settings.schema import leaf, meant, meant_setting, show, types
from hocket.typed import describe

_ABOVE = Path(__file__).resolve().parents[2]
_SHIPPED = "share/hocket/docs"
"""Where a wheel has the pages, below what it is installed into."""


def run(words: list[str]) -> int:
    """Print what is known of a topic."""
    if not words or words[0] in ("-h", "--help"):
        print(topics())
        return 0
    topic, heading = words[0].removesuffix(".md").removeprefix("--").replace("-", "_"), " ".join(words[1:])
    found = {name.replace("-", "_"): file for name, file in pages().items()}
    said = [page(found[topic].read_text(encoding="utf-8"), heading, words[0])] if topic in found else []
    said += [setting(topic)] if topic in docstrings() and not heading else []  # a page and a section share some names
    if not said:
        close = meant(topic, [*found, *docstrings()]) or meant_setting(topic, types())
        fix = f"did you mean {close}?" if close else "hocket help -h lists the topics"
        raise ValueError(f"help {' '.join(words)} (command line): there is no such topic; fix: {fix}")
    print("\n\n".join(said))
    return 0


def pages() -> dict[str, Path]:
    """The pages of the documentation by name: of the checkout, or of the installation."""
    installed = (_ABOVE, sysconfig.get_path("data"), sysconfig.get_path("data", "posix_user"))  # the first: --target
    places = (_ABOVE / "docs", *(Path(place, _SHIPPED) for place in installed))
    found = [sorted(place.glob("*.md")) for place in places if (place / "index.md").exists()]
    return {file.stem: file for file in found[0]} if found else {}


def topics() -> str:
    """All topics: pages with their titles, and sections of settings."""
    lines = ["hocket help PAGE [HEADING], of:"]
    for name, file in pages().items():
        with file.open(encoding="utf-8") as text:
            lines.append(f"  {name:20} {text.readline().lstrip('# ').strip()}")
    sections = [name for name in docstrings() if name not in types()]
    text = f"hocket help SETTING, such as train.lr, or a section of settings: {', '.join(sections)}"
    return "\n".join([*lines, "", *textwrap.wrap(text, _width())])


def page(text: str, heading: str, name: str) -> str:
    """What a page says before its first section, and the headings of these; or one section."""
    head, *sections = re.split(r"^(?=## )", _plain(text), flags=re.MULTILINE)
    titles = {section.partition("\n")[0].removeprefix("## "): section for section in sections}
    if not heading:
        more = "".join(f"\n  {title}" for title in titles)
        return head.strip() + (f"\n\nMore, by hocket help {name} HEADING:{more}" if more else "")
    found = [title for title in titles if title.lower().startswith(heading.lower())] or [meant(heading, titles)]
    if not found[0]:
        raise ValueError(
            f"help {name} {heading} (command line): the page has no such heading; fix: hocket help {name} lists them"
        )
    return titles[found[0]].strip()


def _plain(markdown: str) -> str:
    """A page as a terminal shows it: without comments, pictures and addresses of links."""
    text = re.sub(r"<!--.*?-->\n?|!\[[^\]]*\]\([^)]*\)\n?", "", markdown, flags=re.DOTALL)
    return re.sub(r"\[([^\]]+)\]\([^)\s]+\)", r"\1", text)


def setting(name: str) -> str:
    """A setting with its type, default and meaning; of a section every setting, and the first sentence on each."""
    if name in types():
        default = show(leaf(DEFAULTS, name))
        return "\n".join([f"{name}: {describe(types()[name])}; {default} by default", *_wrapped(docstrings()[name])])
    lines = [f"{name}: {docstrings()[name]}"]
    for each in types():
        if each.startswith(f"{name}."):
            lines += [each, *_wrapped(re.split(r"(?<=[.]) ", docstrings()[each], maxsplit=1)[0])]
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _width(), initial_indent="  ", subsequent_indent="  ")


def _width() -> int:
    return min(shutil.get_terminal_size((100, 40)).columns, 120)


# -- `hocket recipes`: what there is to train, and presets -------------------------------------------------------------


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
