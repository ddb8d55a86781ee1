"""What does communication cost one step of the merged plan? All ranks' traces, with and without communication.

    torchrun --nproc-per-node 8 -m benchmarks.overlap_trace
    torchrun --nproc-per-node 4 -m benchmarks.overlap_trace --preset expert_parallel --transport copy_engine
    torchrun --nproc-per-node 2 -m benchmarks.overlap_trace --preset expert_parallel --lengths 8192 --plan.graphs on

Of the recipe `moe_8gpu`, or of what a preset of `benchmarks/baselines.py` measures, at the first of its lengths; what
is no option of its own goes to `hocket bench`. A step of each is profiled with every op under its name, and read with
`hocket_trace`: per kind of communication how long it ran, waited for peers and was exposed; the tax against the same
step without communication; and how much longer compute kernels take beside it. The profiler slows the host down, so
both steps are also timed without it.

A step that is replayed as one CUDA graph has no ops with names. But no host can be late in it, and the profiler makes
it no longer: so what is hidden there is what the plan hides. Its kernels tell by themselves what they are for.

With --out, the ranks' traces are kept beside the result: the real ones, and of those without communication the first of
every pipeline rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.baselines import PRESETS, words
from benchmarks.bench.command import Bench, for_bench
from benchmarks.options import arguments
from benchmarks.ranks import batch, for_world, join, timed_block
from benchmarks.record import write
from hocket.collector import no_collection
from hocket.commands.options import parse
from hocket.config import Config
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.model.documents import Microbatch
from hocket.recipes import recipe
from hocket.resolve import resolve
from hocket.train.profiling import Recording
from hocket_trace import load, report
from hocket_trace.as_json import to_json
from hocket_trace.compare import compare
from hocket_trace.data import RankTrace
from hocket_trace.table import render

WARM_UP = 3
"""Steps before anything is measured: the rehearsal, and two that overlap."""

KEPT = ("step", "by_rank", "kinds", "classes", "imbalance", "tax", "notes")
"""Of all figures of a report: what the documents' tables are made from, and what one would look up."""


def contenders(config: Config) -> dict[str, Config]:
    """The step, and the same without communication."""
    null = dataclasses.replace(config, train=dataclasses.replace(config.train, transport="null"))
    return {"real": config, "null": null}


def chosen(options: argparse.Namespace, more: list[str], world: int) -> tuple[Config, bool]:
    """The step to record, and whether it updates weights. `more` are words for `hocket bench`."""
    if not options.preset:
        assert not more, f"only with --preset: {more}"
        config, update = for_world(recipe(options.recipe), world), True
    else:
        measured, origins = parse(
            Bench, "bench", words(options.preset, world, ["--train.transport", options.transport, *more])
        )
        config, update = for_bench(measured, origins), measured.optimizer == "on"
        config = changed(config, {"data.sequence_length": measured.lengths[0]})
        config = resolve(config, Host(gpus=world))
    return changed(config, {"train.transport": options.transport, "precision.compute": "bf16"}), update


def record(engine: Engine, rank: int, microbatches: list[Microbatch], path: Path) -> None:
    """Write the trace of one step. The step before it runs under the profiler too, so that it finds it warm."""
    recording = Recording(engine, rank)
    engine.train_step(microbatches, 1e-4)
    torch.cuda.synchronize()
    dist.barrier()
    recording.start()
    with recording.step(WARM_UP + 1):
        engine.train_step(microbatches, 1e-4)
        torch.cuda.synchronize()
    recording.stop()
    recording.write(path)


def step_of(settings: Config, update: bool, rank: int, device: torch.device, path: Path) -> float:
    """Seconds of a step without the profiler, and its trace at `path`."""
    engine = Engine(settings, rank, device, update=update)
    engine.init_weights()
    microbatches = batch(engine, 0)
    for _ in range(WARM_UP):
        engine.train_step(microbatches, 1e-4)
    seconds = statistics.median(timed_block(engine, microbatches, 3))
    record(engine, rank, microbatches, path)
    return seconds


def figures(
    real: Sequence[RankTrace], null: Sequence[RankTrace], config: Config, seconds: Mapping[str, float]
) -> dict[str, Any]:
    """The result, from the traces of all ranks; `seconds` are those of a step without the profiler."""
    found, bound = report(real), report(null)
    whole = to_json(found, compare(found, bound, real, null))
    stages = []
    for p in range(config.mesh.pp):
        ranks = range(p * config.mesh.dp, (p + 1) * config.mesh.dp)
        part = dataclasses.replace(found, steps=tuple(step for step in found.steps if step.rank in ranks))
        stages.append({name: to_json(part)[name] for name in ("ranks", "step", "kinds")})
    return {
        "config": dataclasses.asdict(config),
        "seconds_without_profiler": dict(seconds),
        "stages": stages,
        "report": {name: whole[name] for name in KEPT},
    }


def keep(traces: Mapping[str, Sequence[Path]], dp: int, folder: Path) -> None:
    """Copy the traces worth keeping."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, paths in traces.items():
        for path in paths if name == "real" else paths[::dp]:
            shutil.copyfile(path, folder / f"{name}_{path.name}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--recipe", default="moe_8gpu")
    parser.add_argument("--preset", default="", choices=["", *PRESETS])
    parser.add_argument("--transport", default="nccl", choices=["nccl", "copy_engine"])
    parser.add_argument("--name", default="", help="of the result; empty makes one of the preset")
    options, more = parser.parse_known_args()
    rank, device = join()
    world = dist.get_world_size()
    config, update = chosen(options, more, world)
    folders: list[Any] = [tempfile.mkdtemp(prefix="overlap-trace-") if rank == 0 else ""]
    dist.broadcast_object_list(folders)  # all ranks are on this host
    traces, seconds = {}, {}
    for name, settings in contenders(config).items():
        traces[name] = [Path(folders[0]) / name / f"rank{r}.json.gz" for r in range(world)]
        with no_collection():
            seconds[name] = step_of(settings, update, rank, device, traces[name][rank])
        gc.collect()
        torch.cuda.empty_cache()
    dist.barrier()
    # Two ranks read, the others wait: reading takes longer than all steps.
    mine = load(traces[("real", "null")[rank]]) if rank < 2 else ()
    read: list[Any] = [None] * world
    dist.all_gather_object(read, mine)
    if rank == 0:
        real, null = read[:2]
        result = figures(real, null, config, seconds)
        found, bound = report(real), report(null)
        print(render(found, compare(found, bound, real, null)))
        print(f"without the profiler: {seconds}, of which 'null' is the bound")
        name = f"overlap_trace_{options.preset}" if options.preset else "overlap_trace"
        print(write(options.name or name, result, options.out, options.commit))
        if options.out:
            keep(traces, config.mesh.dp, options.out)
        shutil.rmtree(folders[0])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
