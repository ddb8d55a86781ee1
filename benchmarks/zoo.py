"""Runs the zoo: programs as people write them, unsharded, under FSDP2 and under `hocket.fully_shard`, on CPU ranks.

python -m benchmarks.zoo                  all programs, into benchmarks/results/fsdp_zoo.json
python -m benchmarks.zoo llama "GAN"      those with these words in their names, shown only
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from benchmarks.markdown import Result, table

SAID = {
    "bits": "right, bit for bit",
    "right": "right",
    "refused": "refused",
    "wrong": "**wrong**",
    "failed": "**fails in its midst**",
    "hangs": "**hangs**",
}
"""What the judge says (`tests/fsdp/zoo/judge.py`), in words."""


def rows(result: Result) -> str:
    """The table of programs: how they end, and why not well."""
    cells = []
    for name, row in result["programs"].items():
        ours, theirs = row["hocket"], row["fsdp2"]
        why = [f"hocket: {row['no'] or ours['why']}"] * bool(ours["why"])
        why += [f"FSDP2: {theirs['why'].replace('|', '/')[:160]}"] * bool(theirs["why"])
        cells.append([name, SAID[ours["kind"]], SAID[theirs["kind"]], "; ".join(why)])
    return table(["program", "hocket", "FSDP2", "why not"], cells)


def counts(result: Result) -> str:
    """How many programs end in which way."""
    programs = result["programs"].values()
    kinds = [
        kind for kind in SAID if any(row[form]["kind"] == kind for row in programs for form in ("hocket", "fsdp2"))
    ]
    head = [f"of {len(programs)} programs", *(SAID[kind] for kind in kinds)]
    rows = [
        [shown, *(str(sum(row[form]["kind"] == kind for row in programs)) for kind in kinds)]
        for form, shown in (("hocket", "hocket"), ("fsdp2", "FSDP2"))
    ]
    return table(head, rows)


def main() -> None:
    from tests.fsdp.zoo.judge import judge, programs

    words = sys.argv[1:]
    known = programs()
    names = [name for name in known if not words or any(word in name for word in words)]
    found: dict[str, Any] = {}
    for name, forms in judge(names, ["hocket", "fsdp2"]).items():
        found[name] = {"no": known[name].no, **{form: asdict(verdict) for form, verdict in forms.items()}}
        print(f"{name:40} " + "  ".join(f"{form}: {one.kind} {one.why[:100]}" for form, one in forms.items()))
    if words:
        return
    from benchmarks.record import write

    result = {
        "question": "Which programs train under fully_shard to the weights of the run that is not sharded?",
        "method": "ranks of gloo: two, or four on two axes; losses and weights beside one process with the data of all",
        "programs": found,
    }
    print(write("fsdp_zoo", result))


if __name__ == "__main__":
    main()
