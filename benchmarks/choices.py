"""Does hocket choose steps as short as another tree of it, on 1 to 4,096 ranks?

    git worktree add ../before COMMIT
    python -m benchmarks.choices ../before

Each recipe is planned by both trees on each number of ranks, on each GPU in turn, with every setting left to them that
the recipe leaves. Where they choose differently, this tree predicts the step of either choice, so one simulator judges
both. Writes benchmarks/results/choices.json: every case, those with other choices, the worst ratio, and CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.before_after import commit_of
from benchmarks.record import ROOT, write
from hocket.recipes import RECIPES, recipe

RANKS = tuple(2**n for n in range(13))
GPUS = ("h100-sxm", "h200", "b200", "a100-sxm")

PLANNER = """
import contextlib, io, json, sys, time
from hocket.cli import main
for line in sys.stdin:
    said, wrong, start = io.StringIO(), io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(wrong), contextlib.suppress(SystemExit):
        main(["plan", *json.loads(line), "--json"])
    try:
        plan = json.loads(said.getvalue())
        found = {"step": plan["predicted"]["step_seconds"], "choices": plan["choices"]}
    except ValueError:
        found = {"refused": wrong.getvalue().strip()[:300]}
    print(json.dumps({**found, "seconds": time.process_time() - start}), flush=True)
"""
"""Plans what each line of its input says, with whichever tree it is started in."""


class Planner:
    """The planner of a tree, in a process of its own."""

    def __init__(self, tree: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", PLANNER],
            cwd=tree,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def plan(self, words: list[str]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(words), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


def words_of(name: str, ranks: int, gpu: str) -> list[str]:
    """A recipe on so many ranks: with its pipeline where that divides them, and experts on as many as it has."""
    mesh = recipe(name).mesh
    pp = mesh.pp if ranks % mesh.pp == 0 else 1
    dp = ranks // pp
    words = [
        name,
        "--mesh.pp",
        str(pp),
        "--mesh.dp",
        str(dp),
        "--mesh.ep",
        str(min(mesh.ep, dp)),
        "--hardware.gpu",
        gpu,
    ]
    return [*words, "--plan.chunks", "1"] if pp == 1 else words


def compared(case: list[str], before: dict[str, Any], after: dict[str, Any], planner: Planner) -> dict[str, Any]:
    """One case: the choices that differ, and today's prediction of the step with either."""
    row = {"words": " ".join(case), "seconds": [before["seconds"], after["seconds"]]}
    if "refused" in before or "refused" in after:
        return {**row, "refused": [before.get("refused", ""), after.get("refused", "")]}
    old, new = ({each["setting"]: each["value"] for each in plan["choices"]} for plan in (before, after))
    other = {name: [old[name], new[name]] for name in old.keys() & new.keys() if old[name] != new[name]}
    if not other:
        return {**row, "step": after["step"]}
    theirs = [
        word
        for name, (value, _) in other.items()
        for word in (f"--{name}", *map(str, value if isinstance(value, list) else [value]))
    ]
    again = planner.plan([*case, *theirs])
    ratio = after["step"] / again["step"] if "step" in again else None
    return {**row, "step": after["step"], "other": other, "theirs": again.get("step", again), "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", type=Path, help="a tree of the commit before")
    options = parser.parse_args()
    before, after = Planner(options.before.resolve()), Planner(ROOT)
    rows: list[dict[str, Any]] = []
    for i, name in enumerate(RECIPES):
        for j, ranks in enumerate(RANKS):
            case = words_of(name, ranks, GPUS[(i + j) % len(GPUS)])
            rows.append(compared(case, before.plan(case), after.plan(case), after))
            if {"other", "refused"} & rows[-1].keys():
                print(json.dumps(rows[-1]), flush=True)
    ratios = [row["ratio"] for row in rows if row.get("ratio")]
    spent = [sum(row["seconds"][n] for row in rows) for n in (0, 1)]
    found = {
        "before": commit_of(options.before),
        "cases": len(rows),
        "other": sum("other" in row for row in rows),
        "worst": max(ratios, default=1.0),
        "best": min(ratios, default=1.0),
        "seconds": {"before": spent[0], "after": spent[1]},
        "rows": rows,
    }
    print({name: value for name, value in found.items() if name != "rows"})
    write("choices", found)


if __name__ == "__main__":
    main()
