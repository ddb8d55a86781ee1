"""The tables of families whose weights hocket reads and writes, and of the memory that takes."""

from __future__ import annotations

from benchmarks.markdown import Result, table
from hocket.pretrained.families import FAMILIES, REFUSED


def families() -> str:
    """Families of weights, and what those that are refused would need."""
    there = [[f"`{name}`", f"`{family.architecture}`", "yes"] for name, family in FAMILIES.items()]
    refused = [[f"`{name}`", "", f"refused: {needs}"] for name, needs in sorted(REFUSED.items())]
    return table(["`model_type`", "class of transformers", "in and out"], [*there, *refused])


WAYS = {
    "planned": "a run's first weights, from `model.weights`",
    "load": "`load_pretrained`, `fully_shard`",
    "buckets": "`pretrained_buckets`",
    "save": "`save_pretrained`",
}


def weights_memory(result: Result) -> str:
    """What ranks take beyond their shards while weights come in and go out."""
    rows = [
        [WAYS[row["what"]], *(f"{row[size] / 1e6:,.0f} MB" for size in ("shards", "largest", "peak"))]
        for row in result["rows"]
    ]
    return table(["", "shards of a rank", "largest parameter, in fp32", "most memory beyond shards"], rows)
