"""How well does the simulator predict a step once it has seen another one?

    torchrun --nproc-per-node 4 -m benchmarks.calibration

For each shape: two steps of one plan are recorded on all ranks, with the real and with the null transport; costs and
contention are measured on them (`hocket/trace/calibrate.py`). From these, steps of *other* plans of the same sizes are
predicted (other orders, other numbers of microbatches, other sharding), and so are later steps of the recorded plan.
All of them are timed without a profiler: slowest rank, median over steps. Beside it stands what the cost model says
without any measurement.

About 25 s for `dense`, 80 s for `moe` and 30 s for `pipeline` on four H200, and 15 s to start; `--shapes` picks some.
On CPUs (`--nproc-per-node 4`, no GPU) the shapes are tiny and show only that everything works.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.record import write
from benchmarks.step_time import batch
from hocket.config import Config, DataConfig, MeshConfig, ModelConfig, PlanConfig, RunConfig, TrainConfig
from hocket.engine import Engine
from hocket.planning import costs_as_json, hardware_of, predict, program_of
from hocket.recipes import recipe
from hocket.resolve import Settings, resolve
from hocket.rules import Host
from hocket.runtime.comm import Groups
from hocket.trace.align import load
from hocket.trace.calibrate import calibrate
from hocket.trace.compare import compare
from hocket.trace.exposure import report
from hocket.trace.predict import predict as beside
from hocket.train.recording import Recording

WARM_UP, PROFILED = 3, 2

LLAMA = ModelConfig(vocab=32768, hidden=4096, layers=8, heads=32, kv_heads=8, head_dim=128, ffn=14336)
"""Layers of Llama-3 8B, eight of them, and a smaller vocabulary."""

SMALL = {"vocab": 256, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128, "expert_ffn": 64}
"""Sizes for CPUs."""


@dataclass(frozen=True)
class Shape:
    """A recorded plan and the changes that make the plans to predict from it, by name."""

    config: Config
    others: dict[str, dict[str, dict[str, Any]]]


def shapes(world: int, small: bool) -> dict[str, Shape]:
    """All shapes for so many ranks."""
    plain = {"merge": "off", "defer_wgrad": "off", "p2p_defer_layers": 0}
    few = {"train": {"microbatches": 4}}
    moe = recipe("moe_8gpu")
    moe = replace(moe, mesh=MeshConfig(pp=2, dp=world // 2, ep=world // 2))
    dense = Config(
        model=LLAMA,
        mesh=MeshConfig(dp=world),
        data=DataConfig(sequence_length=4096),
        train=TrainConfig(microbatches=4, sequences=1),
        run=RunConfig(name="dense"),
    )
    pipeline = replace(
        dense,
        mesh=MeshConfig(pp=2, dp=world // 2),
        plan=PlanConfig(chunks=2),
        train=replace(dense.train, microbatches=8),
        run=RunConfig(name="pipeline"),
    )
    found = {
        "dense": Shape(
            dense,
            {
                "two microbatches": {"train": {"microbatches": 2}},
                "weights gathered once": {"plan": {"strategy": "optim_grads"}},
                "gathers just in time": {"plan": {"prefetch": 0}},
            },
        ),
        "moe": Shape(
            moe,
            {
                "interleaved": {"plan": plain},
                "sequential": {"plan": {"order": "sequential", **plain}},
                "four microbatches": few,
            },
        ),
        "pipeline": Shape(
            pipeline,
            {
                "one chunk": {"plan": {"chunks": 1}},
                "sequential": {"plan": {"order": "sequential", **plain}},
                "four microbatches": few,
            },
        ),
    }
    return {name: tiny(shape) for name, shape in found.items()} if small else found


def tiny(shape: Shape) -> Shape:
    """A shape small enough for CPUs."""
    c = shape.config
    experts = min(c.model.experts, 8)
    config = replace(
        c,
        model=replace(c.model, **SMALL, layers=4, experts=experts, shared_ffn=0),
        data=replace(c.data, sequence_length=64),
        train=replace(c.train, sequences=2, dtype="fp32"),
    )
    return replace(shape, config=config)


def changed(config: Config, changes: dict[str, dict[str, Any]]) -> Config:
    """The configuration with some leaves of some sections changed."""
    return replace(config, **{name: replace(getattr(config, name), **leaves) for name, leaves in changes.items()})


class Bench:
    """Runs plans one after the other on the ranks of this job."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        self._folder, self._steps = folder, steps
        self._groups: Groups | None = None

    def settings(self, config: Config, transport: str = "auto") -> Settings:
        """Everything chosen, for the hardware of this job."""
        host = Host(gpus=self.world if self.device.type == "cuda" else 0)
        return resolve(changed(config, {"train": {"transport": transport}}), host)

    def run(self, settings: Settings, record: str = "") -> list[float]:
        """Seconds of some steps on the slowest rank; before that, with `record`, traces into that folder."""
        null = settings.train.transport == "null"
        engine = Engine(settings, self.rank, self.device, groups=None if null else self._groups)
        if not null:
            self._groups = engine.groups
        engine.init_weights()
        microbatches = batch(engine, 0)
        for _ in range(WARM_UP):
            engine.train_step(microbatches, 1e-4)
        if record:
            self._record(engine, microbatches, record)
        times = [self._timed(engine, microbatches) for _ in range(self._steps + 1)][1:]
        if null:
            engine.close()
        del engine, microbatches
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return times

    def forget_groups(self) -> None:
        """The next plan has another mesh."""
        if self._groups is not None:
            self._groups.destroy()
            self._groups = None

    def traces(self, record: str) -> list[Path]:
        """The recorded traces of all ranks."""
        return [self._folder / record / f"rank{rank}.json.gz" for rank in range(self.world)]

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _together(self) -> None:
        self._settle()
        dist.barrier()

    def _timed(self, engine: Engine, microbatches: list[Any]) -> float:
        self._together()
        start = time.perf_counter()
        engine.train_step(microbatches, 1e-4)
        self._settle()
        seconds = torch.tensor(time.perf_counter() - start, device=self.device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds)

    def _record(self, engine: Engine, microbatches: list[Any], record: str) -> None:
        recording = Recording(engine, self.rank)
        recording.prepare()
        self._together()
        recording.start()
        for number in range(1, PROFILED + 1):
            self._together()
            with recording.step(number):
                engine.train_step(microbatches, 1e-4)
                self._settle()
        recording.stop()
        recording.write(self.traces(record)[self.rank])
        dist.barrier()


def measure(bench: Bench, name: str, shape: Shape) -> dict[str, Any]:
    """Record, time and (on rank 0) predict all plans of a shape."""
    begin = time.perf_counter()
    base = bench.settings(shape.config)
    null = bench.settings(shape.config, "null")
    plans = {"as recorded": base} | {
        other: bench.settings(changed(shape.config, changes)) for other, changes in shape.others.items()
    }
    times = {"as recorded": bench.run(base, name)}
    bound = bench.run(null, f"{name}-null")
    times |= {other: bench.run(settings) for other, settings in plans.items() if other != "as recorded"}
    bench.forget_groups()
    spent = time.perf_counter() - begin
    if bench.rank:
        return {}
    return {
        "config": {f.name: dataclasses.asdict(getattr(base, f.name)) for f in dataclasses.fields(Config)},
        "seconds_of_the_run": spent,
        "bound": {"seconds": statistics.median(bound), "steps": bound},
        **predictions(bench, name, plans, times),
    }


def predictions(
    bench: Bench, name: str, plans: Mapping[str, Settings], times: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """What the recorded steps say about all plans of a shape."""
    real, null = load(bench.traces(name)), load(bench.traces(f"{name}-null"))
    costs = calibrate(real, null)
    recorded, tax = report(real), compare(report(real), report(null), real, null)
    rows = {}
    for plan, settings in plans.items():
        program, hardware = program_of(settings), hardware_of(settings)
        measured = statistics.median(times[plan])
        predicted = float(predict(settings, program, hardware, costs).makespan)
        rows[plan] = {
            "measured": measured,
            "steps": list(times[plan]),
            "predicted": predicted,
            "modelled": float(predict(settings, program, hardware).makespan),
            "ratio": measured / predicted,
        }
        print(f"{name:10} {plan:24} measured {measured:.4f} s  predicted {predicted:.4f} s  {measured / predicted:.3f}")
    explained = {
        "calibrated": beside(real, recorded, costs).explained,
        "modelled": beside(real, recorded, tax=tax).explained,
    }
    found = costs_as_json(costs)
    return {
        "plans": rows,
        "recorded_step": recorded.step_seconds,
        "tax": {"share": tax.share, "parts": tax.parts, "slow-down": {row.name: row.share for row in tax.classes}},
        "explained": explained,
        "costs": {key: value for key, value in found.items() if key != "from"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["dense", "moe", "pipeline"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--keep-traces", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=300))
    box: list[Any] = [tempfile.mkdtemp(prefix="calibration-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    folder = Path(box[0])
    bench = Bench(folder, options.steps)
    known = shapes(bench.world, small=not cuda)
    found = {name: measure(bench, name, known[name]) for name in options.shapes}
    if bench.rank == 0:
        if options.keep_traces:
            shutil.copytree(folder, options.keep_traces, dirs_exist_ok=True)
        shutil.rmtree(folder)
        print(write("calibration", {"shapes": found}, options.out, options.commit))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
