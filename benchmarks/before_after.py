"""Two trees of hocket in turns on the same GPUs: is a step as long as it was before a change?

    git worktree add ../before COMMIT
    python -m benchmarks.before_after ../before --gpus 2 --seconds 540
    python -m benchmarks.before_after ../before --gpus 2 --case experts_4096 --case sharded_2048

Each case is one contender of `hocket bench`, run in the order before, after, after, before. So each tree is held
beside itself too: `again` is the second run of a tree over its first. Writes benchmarks/results/before_after.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, write

EXPERTS = (
    "qwen3_30b_a3b --model.layers 6 --mesh.pp 1 --plan.chunks 1 --mesh.ep {gpus} --train.microbatches 4 "
    "--against hocket_graph_ce --blocks 3 --steps 3"
)
SHARDED = (
    "llama3_8b --model.layers 16 --train.microbatches 1 --against fully_shard_ce --blocks 3 --steps 6 --compile on"
)
CONTEXT = (
    "qwen3_30b_a3b --model.layers 6 --model.aux_loss 0 --mesh.pp 1 --plan.chunks 1 --mesh.ep 1 --mesh.cp {gpus} "
    "--train.microbatches 1 --optimizer off --against hocket --blocks 3 --steps 2"
)
CASES = {
    "sharded_2048": f"{SHARDED} --lengths 2048",
    "experts_4096": f"{EXPERTS} --lengths 4096",
    "sharded_8192": f"{SHARDED} --lengths 8192",
    "experts_8192": f"{EXPERTS} --lengths 8192",
    "context_32768": f"{CONTEXT} --lengths 32768",
}
TURNS = ("before", "after", "after", "before")


def run(tree: Path, words: list[str]) -> dict[str, Any]:
    """What `hocket bench` of a tree says of its contender. Raises CalledProcessError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hocket", "bench", *words, "--out", f"{folder}/found.json"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
        subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
        (workload,) = json.loads(next(Path(folder).glob("*.json")).read_text())["workloads"]
    (found,) = workload["contenders"].values()
    return {name: found[name] for name in ("seconds", "noise", "peak_bytes")}


def commit_of(tree: Path) -> str:
    """The commit of a tree, or its name where it is no checkout."""
    if not (tree / ".git").exists():
        return tree.name
    found = subprocess.run(["git", "-C", str(tree), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or tree.name


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", type=Path, help="a tree of the commit before")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--case", action="append", choices=CASES, help="these alone, in this order")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many")
    parser.add_argument("--name", default="before_after", help="of the result")
    options = parser.parse_args()
    trees, end, rows = {"before": options.before.resolve(), "after": ROOT}, time.monotonic() + options.seconds, []
    for case in options.case or CASES:
        words, found = (
            f"{CASES[case]} --gpus {{gpus}}".format(gpus=options.gpus).split(),
            dict[str, list[dict[str, Any]]](),
        )
        for turn in TURNS:
            if time.monotonic() < end:
                found.setdefault(turn, []).append(run(trees[turn], words))
        if "after" not in found:
            continue
        first, second = (min(one["seconds"] for one in found[turn]) for turn in ("before", "after"))
        again = {turn: runs[1]["seconds"] / runs[0]["seconds"] for turn, runs in found.items() if len(runs) > 1}
        rows.append(
            {"case": case, "words": " ".join(words), **found, "after_over_before": second / first, "again": again}
        )
        said = "  ".join(f"{turn} again {ratio:.4f}" for turn, ratio in again.items())
        print(f"{case:16} {first * 1e3:8.2f} ms {second * 1e3:8.2f} ms  {second / first:.4f}  {said}", flush=True)
        write(options.name, {"before": commit_of(trees["before"]), "cases": rows})


if __name__ == "__main__":
    main()
