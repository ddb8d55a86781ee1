"""The table of families whose weights hocket reads and writes."""

from __future__ import annotations

from benchmarks.markdown import table
from hocket.pretrained.tables import FAMILIES, REFUSED


def families() -> str:
    """Families of weights, and what those that are refused would need."""
    there = [[f"`{name}`", f"`{family.architecture}`", "yes"] for name, family in FAMILIES.items()]
    refused = [[f"`{name}`", "", f"refused: {needs}"] for name, needs in sorted(REFUSED.items())]
    return table(["`model_type`", "class of transformers", "in and out"], [*there, *refused])
