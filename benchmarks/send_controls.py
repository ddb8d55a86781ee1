"""What weight gradients behind pipeline sends are worth: of any layers and parts, on the real link and on a slow one.

    torchrun --nproc-per-node 4 -m benchmarks.send_controls
    torchrun --nproc-per-node 2 -m benchmarks.send_controls --cpu

One pipeline rank per process, a dense model of Llama-3 8B's widths, two chunks of two layers per rank, merged 1F1B. All
plans run on the same weights and groups and take turns, so that nothing but the order of ops and the link differs.
Beside them: what `auto` picks, the classic interleaved order, and one plan whose p2p transfers carry an
element, so that its waits are those of the pipeline. On the emulated link every send is late by latency and bytes over
bandwidth.

About 90 s on 4 H200, of which 15 are the start. The small CPU form shows that everything works, and what slow p2p
transfers do to each plan.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist

from benchmarks.bench.measure import Timer
from benchmarks.bench.workload import Workload, batches
from benchmarks.pipelines import Bench, arguments, bench_of, finish, same_model, sized, start
from hocket.collector import no_collection
from hocket.config import (
    Config,
    ExpertOverlap,
    OverlapConfig,
    PipelineOverlap,
    PlanConfig,
)
from hocket.config.rule import Host, leaf
from hocket.config.schema import changed
from hocket.predict.cost import costs_of
from hocket.predict.hardware import hardware_of
from hocket.predict.simulate import simulate
from hocket.program.lower import build_program
from hocket.program.ops import Program
from hocket.program.stages import layout_of, sharding_of
from hocket.resolve import resolve
from hocket.runtime.transports import Link

LAYERS = 2
"""Of one chunk."""
CHUNKS = 2
CONTROL = "overlap.pp.defer_layers"
COVERS = {f"{layers} layers, attn": f"attn:{layers}" if layers else 0 for layers in range(LAYERS + 1)} | {
    f"{layers} layers, all": layers for layers in range(1, LAYERS + 1)
}
"""What may run after sends -> the value of the setting."""
_FORMER = "lane on, "
"""How results of before call plans in which gradients arrive on a lane of their own, as they always do now."""
Blocks = dict[str, dict[str, list[list[float]]]]
"""Seconds of the steps of every block, by link and plan."""


def settings(options: argparse.Namespace, ranks: int) -> Config:
    """The configuration that all plans share; its plan is the field's default."""
    sends = PipelineOverlap(defer_layers="attn:1")
    overlap = OverlapConfig(pp=sends, ep=ExpertOverlap(merge="on"), defer_wgrad="on")
    config = Config(plan=PlanConfig(order="interleaved", chunks=CHUNKS), overlap=overlap)
    return sized(options, ranks, CHUNKS * LAYERS, options.microbatches, config)


def on_slow_link(config: Config, link: Link) -> Config:
    """The same on the emulated link, for predictions and for what `auto` picks there."""
    slow = tuple(f"{purpose}:{link.latency:.9f}s,{link.bandwidth:.0f}B/s" for purpose in ("pp_fwd", "pp_bwd"))
    train = replace(config.train, transport="slow", slow=slow)
    return replace(config, train=train)


def plans(config: Config, links: Mapping[str, Config]) -> dict[str, Config]:
    """The contenders by name: everything that may be behind sends, then the others."""
    found = {name: changed(config, {CONTROL: value}) for name, value in COVERS.items()}
    for name, on in links.items():
        chosen = resolve(changed(on, {CONTROL: "auto"}), Host(gpus=config.mesh.pp))
        found[f"auto for the {name} link"] = replace(config, overlap=chosen.overlap)
    found["not merged"] = changed(config, {"overlap.ep.merge": "off"})
    found["not merged, nothing deferred"] = changed(
        found["not merged"], {"overlap.defer_wgrad": "off", "overlap.pp.defer_layers": 0}
    )
    return found


def prepare(options: argparse.Namespace) -> tuple[dict[str, Config], dict[str, Config], Link]:
    """Every plan, the configuration for each link, and the slow link."""
    slow = Link(options.latency, options.bandwidth)
    config = settings(options, dist.get_world_size())
    links = {"real": config, "slow": on_slow_link(config, slow)}
    return plans(config, links), links, slow


def measure(options: argparse.Namespace, bench: Bench, slow: Link, rank: int) -> Blocks:
    """Seconds of steps by link and plan, block by block. Fails if two plans have different losses."""
    config, timer = bench.engine.config, Timer(bench.device)
    microbatches = batches(Workload(config), rank, 0, bench.device)
    losses = {name: bench.step(name, microbatches) for name in bench.programs}  # on a GPU also their rehearsal
    assert_same(losses, 0.0 if bench.device.type == "cpu" else 1e-3)
    found: Blocks = {link: {name: [] for name in bench.programs} for link in ("real", "slow", "signal")}
    with no_collection():
        for number in range(options.blocks):
            for link, rows in found.items():
                bench.use(link, slow)
                for name in list(rows)[:: 1 if number % 2 == 0 else -1]:
                    if link == "signal" and not name.startswith("auto for the real"):
                        continue  # one plan to compare all others with
                    rows[name].append(bench.block(name, microbatches, timer, options.steps))
    bench.use("real", slow)
    return found


def assert_same(losses: Mapping[str, list[float]], tolerance: float) -> None:
    """Fail if a plan's losses of a step differ from another's by more than `tolerance`."""
    first = next(iter(losses.values()))
    for name, found in losses.items():
        worst = max((abs(a - b) for a, b in zip(first, found, strict=True)), default=0.0)
        assert worst <= tolerance, f"{name} computes something else: losses differ by {worst}"


def predicted(programs: Mapping[str, Program], links: Mapping[str, Config]) -> dict[tuple[str, str], float]:
    """Seconds of every plan's step on every link, by link and plan, as the cost model has them."""
    costs = {link: costs_of(on, hardware_of(links["real"])) for link, on in links.items()}
    return {
        (link, name): float(simulate(program, of_link).makespan)
        for link, of_link in costs.items()
        for name, program in programs.items()
    }


def of_result(result: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """`predicted` of the plans of a result. Those that `auto` picked only if it says what they were."""
    was, link = result["config"], result["slow_link"]
    options = argparse.Namespace(
        cpu=was["train"]["device"] == "cpu",
        microbatches=was["train"]["microbatches"],
        tokens=was["data"]["sequence_length"],
    )
    config = settings(options, was["mesh"]["pp"])
    same_model(config, was)
    links = {"real": config, "slow": on_slow_link(config, Link(link["latency"], link["bandwidth"]))}
    picked = {name: changed(config, {CONTROL: value}) for name, value in result.get("picked", {}).items()}
    known = plans(config, {})
    there = {name: known.get(name.removeprefix(_FORMER)) for name in result["in_flight"]}
    chosen = {name: plan for name, plan in there.items() if plan} | picked
    programs = {
        name: build_program(layout_of(plan), options.microbatches, plan, sharding_of(plan))
        for name, plan in chosen.items()
    }
    return predicted(programs, links)


def report(bench: Bench, chosen: Mapping[str, Config], config: Config, slow: Link, found: Blocks) -> dict[str, Any]:
    """What is written: every plan's steps on every link, and what `auto` picked."""
    rows = []
    for link, by_plan in found.items():
        for name, blocks in by_plan.items():
            if not blocks:
                continue
            seconds = statistics.median(statistics.median(block) for block in blocks)
            rows.append({"link": link, "plan": name, "seconds": seconds, "blocks": blocks})
    picked = {name: plan for name, plan in chosen.items() if name.startswith("auto")}
    return {
        "config": asdict(config),
        "slow_link": {**asdict(slow), "emulated": True},
        "picked": {name: leaf(plan, CONTROL) for name, plan in picked.items()},
        "in_flight": {name: list(program.in_flight) for name, program in bench.programs.items()},
        "rows": rows,
    }


def main() -> None:
    parser = arguments(__doc__, microbatches=12)
    parser.add_argument("--latency", type=float, default=30e-6)
    parser.add_argument("--bandwidth", type=float, default=25e9)
    options = parser.parse_args()
    rank, device = start(options.cpu)
    chosen, links, slow = prepare(options)
    bench = bench_of({name: (plan, options.microbatches) for name, plan in chosen.items()}, rank, device)
    found = measure(options, bench, slow, rank)
    result = report(bench, chosen, links["real"], slow, found) if rank == 0 else None
    model = predicted(bench.programs, links) if rank == 0 else {}
    for row in sorted(result["rows"] if result else (), key=lambda row: (row["link"], row["seconds"])):
        seconds = model.get((row["link"], row["plan"]))
        said = "" if seconds is None else f"predicted {1e3 * seconds:8.2f} ms"
        print(f"{row['link']:6} {row['plan']:32} {1e3 * row['seconds']:8.2f} ms  {said}", flush=True)
    finish("send_controls", result, options)


if __name__ == "__main__":
    main()
