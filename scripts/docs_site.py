"""Hooks of mkdocs: pages of the site that lie beside docs/, the reference, and links that lead out of docs/.

Pages are written to be read in the repository, so the site changes their links and nothing else.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BESIDE = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "hocket_trace/README.md": "hocket-trace.md",
}
"""Pages beside docs/ -> their names on the site."""
_LINK = re.compile(r"(!?)\[([^\]]+)\]\((?![a-z]+:|#)([^)\s#]*)(#[^)\s]*)?\)")


def reference() -> str:
    """A page with the docstrings of all public names."""
    import hocket

    modules = {f"hocket.{name}": f"hocket.{hocket._MODULES.get(name, '')}.{name}" for name in hocket.__all__}
    named = {name: home.replace("..", ".") for name, home in modules.items()} | {"hocket_trace": "hocket_trace"}
    blocks = (f"::: {home}\n    options:\n      heading: {name}\n" for name, home in named.items())
    return "\n".join(["# Public names\n", *blocks])


def for_site(markdown: str, place: str) -> str:
    """A page's text with the links of the site. `place` is the page's path in the repository.

    What is no page, such as a file of code, keeps its words and loses its link.
    """
    pages = BESIDE | {f"docs/{path}": path for path in _below(ROOT / "docs")}
    here = posixpath.dirname(pages[place])

    def link(found: re.Match[str]) -> str:
        picture, words, target, heading = found.group(1), found.group(2), found.group(3), found.group(4) or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        if path not in pages:
            return words
        return f"{picture}[{words}]({posixpath.relpath(pages[path], here or '.')}{heading})"

    return _LINK.sub(link, markdown)


def _below(folder: Path) -> list[str]:
    """Files of a folder, as paths from there."""
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that do not lie in docs/."""
    generated = type(next(iter(files))).generated  # mkdocs's File
    for source, name in BESIDE.items():
        files.append(generated(config, name, content=for_site((ROOT / source).read_text("utf-8"), source)))
    files.append(generated(config, "reference.md", content=reference()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Mend the links of a page of docs/."""
    return markdown if page.file.generated_by else for_site(markdown, f"docs/{page.file.src_uri}")
