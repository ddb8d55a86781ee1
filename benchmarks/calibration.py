"""How well does the simulator predict a step once it has seen another one?

    torchrun --nproc-per-node 4 -m benchmarks.calibration

For each shape: a step of one plan is recorded on all ranks, with the real and with the null transport; costs are
measured on it (`hocket/measured.py`). From these, steps of *other* plans of the same sizes are
predicted (other orders, other numbers of microbatches, other sharding), and so are later steps of the recorded plan
and those of the plan that `hocket plan --search` finds with these costs. All of them are timed without a profiler:
slowest rank, median over steps. Beside it stands what the cost model says without any measurement.

Shapes come in the order of what they take, and the result is written after each, so that a run that is cut short keeps
what it has. Estimated for four H200: 150 s in all; `dense` 25 s, `pipeline` 35 s, `moe` 75 s, the start 15 s.
`--shapes` picks some. On CPUs (`--nproc-per-node 4`, no GPU) the shapes are tiny and show only that everything works.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.options import arguments
from benchmarks.ranks import batch, timed_block
from benchmarks.record import write
from hocket.config import Config, DataConfig, MeshConfig, ModelConfig, PlanConfig, RunConfig, TrainConfig
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.environment import prepare
from hocket.measured import calibrate
from hocket.model.documents import Microbatch
from hocket.planning import costs_as_json, predict, program_of
from hocket.predict.cost import CostTable, Measurement
from hocket.predict.hardware import hardware_of
from hocket.program.mesh import Mesh
from hocket.program.stages import mesh_of
from hocket.recipes import PLAIN, recipe
from hocket.resolve import Settings, resolve
from hocket.runtime.comm import Groups
from hocket.runtime.world import everyone, join_world, leave_world
from hocket.train.profiling import Recording
from hocket.tune.search import Task, search
from hocket_trace.align import align
from hocket_trace.compare import compare
from hocket_trace.data import RankTrace
from hocket_trace.exposure import report
from hocket_trace.read import read

PATIENCE = 90.0
"""Seconds that a phase may take. After them, every rank says where it stands and ends."""

LLAMA = ModelConfig(vocab=32768, hidden=4096, layers=8, heads=32, kv_heads=8, head_dim=128, ffn=14336)
"""Layers of Llama-3 8B, eight of them, and a smaller vocabulary."""

SMALL = {"vocab": 256, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128, "expert_ffn": 64}
"""Sizes for CPUs."""


@dataclass(frozen=True)
class Shape:
    """A recorded plan and the changes that make the plans to predict from it, by name."""

    config: Config
    others: dict[str, dict[str, Any]]


def shapes(world: int, small: bool) -> dict[str, Shape]:
    """All shapes for so many ranks."""
    sequential = {"plan.order": "sequential", **PLAIN}
    few = {"train.microbatches": 4}
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
                "two microbatches": {"train.microbatches": 2},
                "weights gathered once": {"overlap.dp.strategy": "optim_grads"},
                "gathers just in time": {"overlap.dp.prefetch": 0},
            },
        ),
        "pipeline": Shape(
            pipeline,
            {
                "one chunk": {"plan.chunks": 1},
                "sequential": sequential,
                "four microbatches": few,
            },
        ),
        "moe": Shape(
            moe,
            {
                "interleaved": PLAIN,
                "sequential": sequential,
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
        precision=replace(c.precision, compute="fp32"),
        train=replace(c.train, sequences=2),
    )
    return replace(shape, config=config)


class Clock:
    """How long every phase takes. What it has measured is in `spent`, by name."""

    def __init__(self, aloud: bool) -> None:
        self._aloud = aloud
        self.spent: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around a phase, which has PATIENCE seconds."""
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        start = time.perf_counter()
        yield
        faulthandler.cancel_dump_traceback_later()
        self.spent[name] = time.perf_counter() - start
        if self._aloud:
            print(f"{name:40} {self.spent[name]:6.1f} s", flush=True)


class Bench:
    """Runs plans one after the other on the ranks of this job."""

    def __init__(self, rank: int, device: torch.device, folder: Path, steps: int) -> None:
        self.rank, self.device = rank, device
        self._folder, self._steps = folder, steps
        self._groups: dict[Mesh, Groups] = {}
        """Shared by the plans of a mesh, and never given back: see `leave_world`."""

    def settings(self, config: Config, transport: str = "") -> Settings:
        """Everything chosen, for the hardware of this job; on NCCL or gloo if no transport is named."""
        on_gpus = self.device.type == "cuda"
        host = Host(gpus=dist.get_world_size() if on_gpus else 0)
        transport = transport or ("nccl" if on_gpus else "gloo")
        return resolve(changed(config, {"train.transport": transport, "train.hang_timeout": PATIENCE}), host)

    def run(self, name: str, settings: Settings, clock: Clock, record: bool = False) -> list[float]:
        """Seconds of some steps on the slowest rank; before that, with `record`, one is recorded.

        With the null transport none is timed.
        """
        null, mesh = settings.train.transport == "null", mesh_of(settings)
        with clock.phase(f"{name}: build"):
            engine = Engine(settings, self.rank, self.device, groups=None if null else self._groups.get(mesh))
            if not null:
                self._groups[mesh] = engine.groups
            engine.init_weights()
            microbatches = batch(engine, 0)
            engine.train_step(microbatches, 1e-4)  # the rehearsal
            self._settle()
        if record:
            with clock.phase(f"{name}: record"):
                self._record(engine, microbatches, self.trace(name))
        times = []
        if null:
            engine.close()
        else:
            with clock.phase(f"{name}: time"):
                times = timed_block(engine, microbatches, self._steps)
        del engine, microbatches
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return times

    def trace(self, name: str) -> Path:
        """The recorded trace of this rank."""
        return self._folder / name / f"rank{self.rank}.json.gz"

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _record(self, engine: Engine, microbatches: list[Microbatch], path: Path) -> None:
        """Write the trace of one step, behind two with which memory and profiler warm up."""
        recording = Recording(engine, self.rank)
        for _ in range(2):
            engine.train_step(microbatches, 1e-4)
        self._settle()
        everyone(None)
        engine.executor.annotate()  # a step that is replayed is issued here: costs are those of ops
        recording.start()
        with recording.step(1):
            engine.train_step(microbatches, 1e-4)
            self._settle()
        recording.stop()
        recording.write(path)


def measure(bench: Bench, name: str, shape: Shape) -> dict[str, Any]:
    """Record, time and (on rank 0) predict all plans of a shape."""
    clock = Clock(bench.rank == 0)
    base, null = bench.settings(shape.config), bench.settings(shape.config, "null")
    others = {plan: bench.settings(changed(shape.config, changes)) for plan, changes in shape.others.items()}
    first, bound = f"{name}, as recorded", f"{name}, null"
    times = {"as recorded": bench.run(first, base, clock, record=True)}
    bench.run(bound, null, clock, record=True)
    with clock.phase(f"{name}: read traces"):  # every rank its own
        found = everyone((read(bench.trace(first)), read(bench.trace(bound))))
        real, without = (align(traces) for traces in zip(*found, strict=True)) if bench.rank == 0 else ((), ())
    with clock.phase(f"{name}: search"):
        best = everyone(None if bench.rank else searched(shape.config, base, calibrate(real)))[0]
        others |= {"as searched": bench.settings(best)} if best else {}
    times |= {plan: bench.run(f"{name}, {plan}", settings, clock) for plan, settings in others.items()}
    if bench.rank:
        return {}
    with clock.phase(f"{name}: predict"):
        predicted = predictions(real, without, {"as recorded": base, **others}, times)
    for plan, row in predicted["plans"].items():
        both = f"measured {row['measured']:.4f} s  predicted {row['predicted']:.4f} s"
        print(f"{name:10} {plan:24} {both}  {row['ratio']:.3f}", flush=True)
    config = {f.name: dataclasses.asdict(getattr(base, f.name)) for f in dataclasses.fields(Config)}
    return {"config": config, "seconds_spent": clock.spent, **predicted}


def searched(config: Config, base: Settings, costs: Measurement) -> Settings | None:
    """The best plan that the search finds for measured costs; None if that is the one that was recorded."""

    def again(
        other: Config,
        origins: dict[str, str],
        price: Callable[[Config], CostTable],
        *,
        memory: int = 0,
    ) -> Settings:
        host = dataclasses.replace(base.host, memory=memory or base.host.memory)
        return resolve(other, host, origins, price)

    hardware = hardware_of(base)
    task = Task(config=config, origins={}, resolve=again, hardware=hardware, measured=costs, cap=hardware.memory)
    changes = search(task).path[-1].changes
    return task.settled(changes) if changes else None


def predictions(
    real: Sequence[RankTrace],
    null: Sequence[RankTrace],
    plans: Mapping[str, Settings],
    times: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """What the recorded steps say about all plans of a shape."""
    costs = calibrate(real)
    recorded = report(real)
    tax = compare(recorded, report(null), real, null)
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
            "plan": dataclasses.asdict(settings.plan),
            "overlap": dataclasses.asdict(settings.overlap),
        }
    found = costs_as_json(costs)
    return {
        "plans": rows,
        "recorded_step": recorded.step_seconds,
        "tax": {"share": tax.share, "parts": tax.parts, "slow-down": {row.name: row.share for row in tax.classes}},
        "costs": {key: value for key, value in found.items() if key != "from"},
    }


def join() -> tuple[int, torch.device]:
    """Join the ranks that torchrun started. Returns this one's number and device."""
    prepare(os.environ, int(os.environ["LOCAL_WORLD_SIZE"]))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    join_world(cuda, PATIENCE)
    return dist.get_rank(), device


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["dense", "pipeline", "moe"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--keep-traces", type=Path, default=None)
    options = parser.parse_args()
    rank, device = join()
    temporary = tempfile.mkdtemp(prefix="calibration-") if rank == 0 and not options.keep_traces else ""
    folder = options.keep_traces or Path(everyone(temporary)[0])
    bench = Bench(rank, device, folder, options.steps)
    known = shapes(dist.get_world_size(), small=device.type == "cpu")
    found = {}
    for name in options.shapes:
        found[name] = measure(bench, name, known[name])
        if rank == 0:
            print(write("calibration", {"shapes": found}, options.out, options.commit), flush=True)
    leave_world()
    if temporary:
        shutil.rmtree(temporary)


if __name__ == "__main__":
    main()
