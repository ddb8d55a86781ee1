r"""How even ranks' rows are with clones of hot experts, in runs on text with natural routing.

    python -m benchmarks.clone_balance tiny --model.experts 16 --train.sequences 2 --train.microbatches 2 \
        --train.steps 20

Each run is `hocket train` of the recipe with these settings, on gloo and CPUs, with experts over 2 and 4 ranks, and 0,
1 and 2 clones on each. What is measured are the rows that came to each rank in each exchange, as the ranks themselves
count them: those of the fullest rank over the mean, as a mean over layers and microbatches of the steps behind the
first.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.markdown import Result, table
from benchmarks.record import write
from hocket.commands.options import RecipeOptions, parse
from hocket.config import Config
from hocket.program.cloning import fullest
from hocket.resolve import resolve
from hocket.settings.schema import changed
from hocket.train.trainer import Trainer

RANKS, CLONES = (2, 4), (0, 1, 2)


def train(rank: int, world: int, config: Config, folder: str) -> None:
    """One rank of a run; rank 0 leaves what was measured in the folder."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    torch.set_num_threads(1)
    trainer = Trainer(resolve(config), rank, torch.device("cpu"))
    rows: list[int] = []
    actions = trainer.engine.executor.actions
    split: Callable[..., Any] = actions._split

    def counted(op: Any) -> Any:
        splits = split(op)
        rows.append(int(splits.counts_PL.sum()))
        return splits

    actions._split = counted  # type: ignore[method-assign]
    trainer.begin()
    trainer.run()
    every: list[list[int]] = [[] for _ in range(world)]
    dist.all_gather_object(every, rows)
    if rank == 0:
        torch.save(every, Path(folder) / "rows")
    dist.destroy_process_group()


def unevenness(config: Config, folder: str) -> dict[str, Any]:
    """Rows of the fullest rank over the mean, of each exchange but those of the first step: mean and largest."""
    mp.start_processes(train, (config.mesh.world, config, folder), config.mesh.world, start_method="spawn")
    every: list[list[int]] = torch.load(Path(folder) / "rows")
    first = len(every[0]) // config.train.steps  # in which there are no clones yet
    found = [fullest(rows) for rows in zip(*(rank[first:] for rank in every), strict=True)]
    return {"mean": sum(found) / len(found), "largest": max(found), "exchanges": len(found)}


def clone_balance(result: Result) -> str:
    """A row for each mesh and number of clones."""
    rows = [
        [str(row["ranks"]), str(row["clones"]), f"{row['mean']:.3f}", f"{row['largest']:.2f}"] for row in result["rows"]
    ]
    return table(["ranks", "clones on each", "rows of the fullest rank over the mean", "in the worst exchange"], rows)


def main() -> None:
    options, _ = parse(RecipeOptions, "train", sys.argv[1:])
    rows = []
    for ranks in RANKS:
        mesh = {"mesh.pp": 1, "plan.chunks": 1, "mesh.dp": ranks, "mesh.ep": ranks}
        for clones in CLONES:
            with tempfile.TemporaryDirectory() as folder:
                quiet = {"train.eval_every": 0, "train.save_every": 0, "train.log_every": 1000}
                given = {**mesh, **quiet, "overlap.ep.clones": clones, "run.folder": f"{folder}/run"}
                found = unevenness(changed(options.config, given), folder)
            rows.append({"ranks": ranks, "clones": clones, **found})
            print(rows[-1], flush=True)
    print(write("clone_balance", {"rows": rows}))


if __name__ == "__main__":
    main()
