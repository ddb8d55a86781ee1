"""What is to be measured on four and eight GPUs, and what the cost model expects of it.

    python -m benchmarks.eight_gpus            # predicts every step
    python -m benchmarks.eight_gpus --list     # the commands that measure them, one a line

Predictions go to benchmarks/results/predictions_8gpu.json. They need no GPU, and are of H200s of one host and hocket's
own contender in the command. The bound is the same program whose communication takes no time and slows nothing down, as
*hocket_null* or *hocket_signal* runs it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from benchmarks import baselines, training
from benchmarks.bench.command import Bench, for_bench
from benchmarks.bench.contender import entry
from benchmarks.markdown import Result, table
from benchmarks.model_steps import Modelled
from benchmarks.options import arguments
from benchmarks.record import write
from hocket.commands.options import parse
from hocket.config import Config
from hocket.config.schema import changed
from hocket.machine import host_for_plan
from hocket.predict.cost import overheads_of
from hocket.predict.hardware import hardware_of
from hocket.predict.part_sizes import model_flops_per_token
from hocket.predict.simulate import Overheads, cost_key, kind_of, simulate
from hocket.resolve import Settings, resolve

GPU = {"hardware.gpu": "h200"}
_CONTEXT = tuple(
    (f"context_{model}{long} --gpus {gpus} --name context_{model}{long}_{gpus}{more}", "hocket")
    for model in ("dense", "experts")
    for gpus in (4, 8)
    for long, more in (("", " --against hocket,hocket_null,torch_cp_gather,torch_cp_ring"), ("_long", ""))
)
RUNS = (
    ("whole_experts --gpus 8", "hocket_ce"),
    ("fsdp --gpus 8", "hocket_ce"),
    ("fsdp_long --gpus 8", "hocket_ce"),
    ("fsdp --gpus 8 --precision.compute fp8 --name fsdp_fp8", "hocket_ce"),
    ("fsdp_long --gpus 8 --precision.compute fp8 --name fsdp_long_fp8", "hocket_ce"),
    *_CONTEXT,
    ("everything --gpus 8", "hocket_ce"),
    ("pipeline_dense_8 --gpus 8", "hocket_ce"),
)
"""Words of `benchmarks.baselines`, and the contender that is predicted."""
TRAINED = (
    "whole_experts --gpus 8 --steps 150",
    "whole_experts --gpus 8 --steps 30 --model.routing even --out runs/even",
)
"""Words of `benchmarks.training`: with the optimizer, on text, and with even routing."""
OTHERS = (
    "python -m benchmarks.gpu_tests --seconds 540",
    "python -m benchmarks.baselines fsdp --gpus 4",
    "python -m benchmarks.baselines fsdp_long --gpus 4",
    "python -m benchmarks.baselines data_parallel --gpus 4 --lengths 8192 --blocks 3",
    "python -m benchmarks.baselines expert_parallel --gpus 4 --blocks 3",
    "python -m benchmarks.baselines pipeline_dense_8 --gpus 4 --blocks 3",
    "python -m benchmarks.baselines everything --gpus 4 --blocks 3",
)
"""Tests that need four GPUs, and the tables of four GPUs at earlier commits."""


@dataclass(frozen=True)
class Predicted:
    """One step."""

    name: str
    gpus: int
    tokens: int
    """Of one sequence."""
    step: float
    """Seconds."""
    bound: float
    """Seconds of the same step without communication."""
    hidden: dict[str, float]
    """Kind of communication -> share of its time that runs beside compute."""
    tokens_per_second: float
    """Of one GPU."""
    tflops: float
    """Model TFLOP/s of one GPU."""
    peak: int
    """Bytes of the rank that needs most."""


def steps() -> Iterator[tuple[str, Settings, bool]]:
    """Every step that is predicted: its name, its settings, and whether the optimizer is part of it."""
    for command, contender in RUNS:
        name, *more = shlex.split(command)
        gpus = int(more[more.index("--gpus") + 1])
        rest = more[more.index("--gpus") + 2 :]
        if "--name" in rest:
            rest = rest[: rest.index("--name")] + rest[rest.index("--name") + 2 :]
        options, origins = parse(Bench, "bench", baselines.words(name, gpus, rest))
        config = changed(for_bench(options, origins), {**entry(contender).settings, **GPU})
        for length in options.lengths:
            yield name, _settled(changed(config, {"data.sequence_length": length})), options.optimizer == "on"
    name, *more = shlex.split(TRAINED[0])
    gpus = int(more[more.index("--gpus") + 1])
    words = [*shlex.split(training.RUNS[name].format(gpus=gpus)), "--gpus", str(gpus)]
    options, _ = parse(Bench, "bench", words)
    yield f"{name}, trained", _settled(changed(options.config, GPU)), True


def _settled(config: Config) -> Settings:
    return resolve(config, host_for_plan(config))


def predicted(name: str, settings: Settings, optimizer: bool) -> Predicted:
    """A step by the cost model."""
    found, mesh = Modelled.of(settings, updates=optimizer), settings.mesh
    tokens = settings.train.microbatches * mesh.dp * settings.train.sequences * settings.data.sequence_length
    flops = model_flops_per_token(settings.model, settings.data.sequence_length)
    rate = tokens / found.seconds / mesh.world
    fp8 = " in fp8" if settings.precision.compute == "fp8" else ""
    return Predicted(
        name=name + fp8,
        gpus=mesh.world,
        tokens=settings.data.sequence_length,
        step=found.seconds,
        bound=_bound(found, settings),
        hidden=_hidden(found),
        tokens_per_second=rate,
        tflops=rate * flops / 1e12,
        peak=max(use.peak_bytes for use in found.timeline.ranks),
    )


def _bound(found: Modelled, settings: Settings) -> float:
    """Seconds of the same program without communication; a pipeline still waits for its ranks."""
    kinds, free = found.program.layout.kinds, dict(found.costs.table)
    for op in (op for ops in found.program.ranks for op in ops):
        key = cost_key(op, kinds)
        if kind_of(op.lane) is not None and key in free:
            free[key] = replace(free[key], seconds=0.0, wire_bytes=0, inner_bytes=0)
    costs, hardware = replace(found.costs, table=free), hardware_of(settings)
    overheads = overheads_of(settings, hardware, free)
    return float(simulate(found.program, costs, Overheads({}, overheads.issue, overheads.counts)).makespan)


def _hidden(found: Modelled) -> dict[str, float]:
    """Share of each kind's time that runs beside compute, over all pipeline ranks."""
    busy: dict[str, float] = {}
    for ops, spans in zip(found.program.ranks, found.timeline.spans, strict=True):
        for op, span in zip(ops, spans, strict=True):
            if (kind := kind_of(op.lane)) is not None:
                busy[kind] = busy.get(kind, 0.0) + float(span.end - span.start)
    exposed = {kind: sum(float(use.exposed[kind]) for use in found.timeline.ranks) for kind in busy}
    return {kind: 1 - exposed[kind] / seconds for kind, seconds in busy.items() if seconds}


def expected(result: Result) -> str:
    """A row for each step."""
    rows = []
    for each in result["rows"]:
        hidden = ", ".join(f"{kind} {share:.1%}" for kind, share in each["hidden"].items())
        rows.append(
            [
                f"{each['name']}, {each['tokens']:,} tokens",
                str(each["gpus"]),
                f"{1e3 * each['step']:,.0f} ms",
                f"{each['tokens_per_second']:,.0f}",
                f"{each['tflops']:.0f}",
                f"{each['bound'] / each['step']:.3f}",
                hidden,
                f"{each['peak'] / 2**30:.0f}",
            ]
        )
    head = ["step", "GPUs", "predicted", "tokens/s per GPU", "TFLOP/s", "share of the bound", "hidden", "GiB"]
    return table(head, rows)


def listed() -> str:
    """The commands, as a document shows them, each in a line that can be copied."""
    return "\n".join(["```", *commands(), "```"])


def commands() -> list[str]:
    """What measures it all."""
    benches = [f"python -m benchmarks.baselines {words}" for words, _ in RUNS]
    return [*benches, *(f"python -m benchmarks.training {words}" for words in TRAINED), *OTHERS]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--list", action="store_true", help="print the commands that measure the steps")
    options = parser.parse_args()
    if options.list:
        print("\n".join(commands()))
        return
    found = {"rows": [asdict(predicted(*each)) for each in steps()]}
    print(expected(found))
    print(write("predictions_8gpu", found, options.out, options.commit))


if __name__ == "__main__":
    main()
