"""Tables of steps as the simulator sees them, beside the same steps as measured."""

from __future__ import annotations

import dataclasses
import json
import shlex

from benchmarks.baselines import words
from benchmarks.contender_tables import tokens_of, workloads
from benchmarks.markdown import Result, table
from hocket.commands.bench import Bench, for_bench
from hocket.commands.options import parse
from hocket.commands.plan import Plan, resolve_for_plan
from hocket.config import Config
from hocket.plan.formulas import STOCK
from hocket.plan.network import hardware_of
from hocket.plan.simulate import Timeline, simulate
from hocket.plan.stages import costs_of
from hocket.planning import predict, program_of
from hocket.presets import PLAIN
from hocket.recipes import recipe
from hocket.resolve import Settings, resolve
from hocket.settings.leaves import changed
from hocket.settings.rule import Host

PLAIN_FLAGS = " ".join(f"--{name} {value}" for name, value in PLAIN.items())
CONTENDERS = {
    "sequential": f"--plan.order sequential {PLAIN_FLAGS}",
    "interleaved": PLAIN_FLAGS,
    "merged": "",
    "merged, defer all": "--overlap.pp.defer_layers -1 --overlap.pp.defer_parts all",
}
"""Plans of benchmarks/step_time.py -> the settings that make them."""


def predicted(result: Result) -> str:
    """The steps of `step_time` on the same mesh. They ran torch's operations between matmuls."""
    config, found = result["config"], result["contenders"]
    _same_work(config)
    words_of = [config["run"]["name"], *(f"--mesh.{axis} {size}" for axis, size in config["mesh"].items())]
    copies = config.get("overlap", {}).get("ep", {}).get("copies", "per_expert")  # as it was before there was a choice
    words_of.append(f"--overlap.ep.copies {copies}")
    rows = []
    for name, changes in CONTENDERS.items():
        options, origins = parse(Plan, "plan", shlex.split(" ".join([*words_of, changes])))
        settings = resolve_for_plan(options.config, origins)
        hardware = dataclasses.replace(hardware_of(settings, options.hardware), formulas=STOCK)
        timeline = predict(settings, program_of(settings), hardware)
        step, use = float(timeline.makespan), timeline.ranks[0]
        measured = found[name]["seconds"]
        shares = [float(use.busy) / step, float(use.exposed_total) / step, float(use.idle) / step]
        cells = [name, f"{1e3 * step:,.0f} ms", f"{1e3 * measured:,.0f} ms", f"{measured / step:.2f}"]
        rows.append([*cells, *(f"{share:.0%}" for share in shares)])
    head = ["plan", "predicted", "measured", "ratio", "predicted compute", "exposed", "idle (rank 0)"]
    return table(head, rows)


def _same_work(config: Result) -> None:
    """Assert that a recipe still is what was measured under its name."""
    now = json.loads(json.dumps(dataclasses.asdict(recipe(config["run"]["name"]))))
    changed = [name for name, value in config["model"].items() if now["model"].get(name) != value]
    for section, name in (("train", "microbatches"), ("train", "sequences"), ("data", "sequence_length")):
        changed += [name] if now[section][name] != config[section][name] else []
    assert not changed, f"the recipe {config['run']['name']} has changed since it was measured: {changed}"


def predicted_steps(*results: Result) -> str:
    """Steps of hocket's kernels: in all, their compute, and what they add to memory, beside what was measured."""
    rows = []
    for result in results:
        preset, *more = shlex.split(result["command"].split("benchmarks.baselines ")[1])
        gpus = int(more[more.index("--gpus") + 1])
        options, origins = parse(Bench, "bench", words(preset, gpus, more))
        for found in workloads([result]):
            length = found["config"]["data"]["sequence_length"]
            config = changed(for_bench(options, origins), {"data.sequence_length": length})
            if found["config"]["train"]["microbatches"] != config.train.microbatches:
                continue  # of a time when the preset had others
            rows.append([f"{preset}, {tokens_of(found)} tokens", *_beside(config, gpus, found)])
    head = ["step", "predicted", "of which compute", "measured without communication", "measured", "ratio"]
    return table([*head, "predicted to need beside weights", "measured to need"], rows)


def fastest(found: Result) -> str:
    """The fastest of hocket's own contenders."""
    ours = [name for name in ("hocket", "hocket_ce", "hocket_graph", "hocket_graph_ce") if name in found["contenders"]]
    return min(ours, key=lambda name: found["contenders"][name]["seconds"])


def as_measured(config: Config, gpus: int, found: Result, name: str) -> Settings:
    """A configuration as a contender had it."""
    graphs = "on" if "graphs = on" in found["contenders"][name]["settings"]["plan"] else "off"
    return resolve(changed(config, {"plan.graphs": graphs}), Host(gpus=gpus))


def needed(settings: Settings) -> tuple[Timeline, int]:
    """The predicted step, and the bytes that the rank with the most needs beside weights, optimizer and slots."""
    program, costs = program_of(settings), costs_of(settings, hardware_of(settings))
    timeline = simulate(program, costs)
    return timeline, max(use.peak_bytes - costs.fixed_bytes(program, rank) for rank, use in enumerate(timeline.ranks))


def _beside(config: Config, gpus: int, found: Result) -> list[str]:
    """One step as predicted and as measured, both of the slowest rank."""
    by_name, best = found["contenders"], fastest(found)
    timeline, needs = needed(as_measured(config, gpus, found, best))
    step, busy = float(timeline.makespan), max(float(use.busy) for use in timeline.ranks)
    null = by_name.get("hocket_null", {}).get("seconds")
    measured = by_name[best]["seconds"]
    times = [step, busy, null, measured]
    cells = ["not measured" if seconds is None else f"{1e3 * seconds:,.0f} ms" for seconds in times]
    taken = by_name[best]["peak_bytes"] - by_name[best]["resident_bytes"]
    cells[-1] = f"*{best}*: {cells[-1]}"
    return [*cells, f"{measured / step:.2f}", f"{needs / 2**30:.0f} GiB", f"{taken / 2**30:.0f} GiB"]
