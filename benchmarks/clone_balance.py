"""How even ranks' rows are with clones of hot experts, in runs on text with natural routing.

    python -m benchmarks.clone_balance tiny --mesh.pp 1 --plan.chunks 1 --mesh.dp 2 --mesh.ep 2 --train.steps 60

Each run is `hocket train` of the recipe with these settings, on gloo and CPUs, with 0, 1 and 2 clones on each rank.
What is measured are the rows that came to each rank in each exchange, as the ranks themselves count them: those of the
fullest rank over the mean, as a mean over layers and microbatches of the steps behind the first.
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

from benchmarks.markdown import table
from hocket.commands.options import RecipeOptions, parse
from hocket.config import Config
from hocket.program.cloning import fullest
from hocket.resolve import resolve
from hocket.settings.schema import changed
from hocket.train.trainer import Trainer

CLONES = (0, 1, 2)


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


def unevenness(config: Config, folder: str) -> tuple[float, float]:
    """Rows of the fullest rank over the mean: as a mean over exchanges, and in the worst one."""
    mp.start_processes(train, (config.mesh.world, config, folder), config.mesh.world, start_method="spawn")
    every: list[list[int]] = torch.load(Path(folder) / "rows")
    first = len(every[0]) // config.train.steps  # in which there are no clones yet
    found = [fullest(rows) for rows in zip(*(rank[first:] for rank in every), strict=True)]
    return sum(found) / len(found), max(found)


def main() -> None:
    options, _ = parse(RecipeOptions, "train", sys.argv[1:])
    lines = []
    for clones in CLONES:
        with tempfile.TemporaryDirectory() as folder:
            given = {"overlap.ep.clones": clones, "run.folder": f"{folder}/run", "train.eval_every": 0}
            mean, worst = unevenness(changed(options.config, {**given, "train.save_every": 0}), folder)
        lines.append([str(clones), f"{mean:.3f}", f"{worst:.2f}"])
    print(table(["clones on each rank", "fullest rank over the mean", "in the worst exchange"], lines))


if __name__ == "__main__":
    main()
