"""What every benchmark can be told. Imports no torch, for measurements of what starts without it."""

from __future__ import annotations

import argparse
from pathlib import Path


def arguments(about: str | None) -> argparse.ArgumentParser:
    """A parser that knows where the result goes and what this version is called; `about` is the module's docstring."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, default=None, help="folder of the result, default benchmarks/results")
    parser.add_argument("--commit", default="", help="name of this version, where there is no repository")
    return parser
