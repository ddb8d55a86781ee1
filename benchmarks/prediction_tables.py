"""Tables of steps as the simulator sees them, beside the same steps as measured."""

from __future__ import annotations

import dataclasses
import json
import shlex
import statistics

from benchmarks.bench.stats import ratio
from benchmarks.markdown import Result, ms, table
from benchmarks.model_steps import SHARDED, Modelled, host_was_late, measured, modelled
from benchmarks.stored import config_of
from hocket.commands.options import parse
from hocket.commands.plan import Plan, resolve_for_plan
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.planning import predict, program_of
from hocket.predict.hardware import hardware_of
from hocket.predict.part_sizes import STOCK
from hocket.recipes import PLAIN, recipe
from hocket.resolve import resolve

PLAIN_FLAGS = " ".join(f"--{name} {value}" for name, value in PLAIN.items())
CONTENDERS = {
    "sequential": f"--plan.order sequential {PLAIN_FLAGS}",
    "interleaved": PLAIN_FLAGS,
    "merged": "",
    "merged, defer all": "--overlap.pp.defer_layers -1",
}
"""Plans of benchmarks/step_time.py -> the settings that make them."""
STEPS = (
    "fsdp", "fsdp_long", "fsdp_peers", "data_parallel", "data_parallel_adamw", "updates", "pipeline_dense_2",
    "pipeline_dense_8", "expert_parallel", "expert_parallel_long", "expert_parallel_even", "expert_parallel_2",
    "expert_parallel_torchtitan",
    "expert_steps", "shared_expert", "skinny", "pipeline_peers", "everything", "dense_fp8", "expert_routing",
    "expert_routing_even", "expert_adamw", "context_dense_long", "context_experts",
)  # fmt: skip
"""Results with steps that are predicted."""


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
        hardware = dataclasses.replace(hardware_of(settings), formulas=STOCK)
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
    others = [name for name, value in config["model"].items() if now["model"].get(name) != value]
    for section, name in (("train", "microbatches"), ("train", "sequences"), ("data", "sequence_length")):
        others += [name] if now[section][name] != config[section][name] else []
    assert not others, f"the recipe {config['run']['name']} has changed since it was measured: {others}"


def predicted_compute(*results: Result) -> str:
    """Compute of steps without communication, as predicted and as measured, and the clock that they ran at."""
    rows = []
    for step in measured(results):
        if step.communicates or host_was_late(step):
            continue
        found = modelled(step)
        clocks = [f"{hertz / 1e9:.2f}" for hertz in (found.costs.clock, step.clock)]
        rows.append([step.words, ms(found.compute), ms(step.seconds), f"{step.seconds / found.compute:.2f}", *clocks])
    return table(
        ["step without communication", "predicted", "measured", "ratio", "predicted GHz", "measured GHz"], rows
    )


def predicted_steps(*results: Result) -> str:
    """Steps that communicate, as predicted and as measured, and what those of a plan need beside weights and slots."""
    rows = []
    for step in measured(results):
        if not step.communicates:
            continue
        found = modelled(step)
        needs = [found.needs, step.row["peak_bytes"] - step.row["resident_bytes"]]
        cells = [f"{nbytes / 2**30:.0f} GiB" if step.name not in SHARDED else "-" for nbytes in needs]
        rows.append([step.words, ms(found.seconds), ms(step.seconds), f"{step.seconds / found.seconds:.2f}", *cells])
    return table(["step", "predicted", "measured", "ratio", "predicted to need", "measured to need"], rows)


def recomputation(result: Result) -> str:
    """What recomputed or offloaded parts cost and save, measured and predicted. Asserts that they change no loss."""
    rows = []
    for found in result["lengths"]:
        config, blocks = config_of(found["config"]), found["blocks"]
        assert len({str(block["first_losses"]) for each in blocks.values() for block in each}) == 1, "losses differ"
        times = {part: [statistics.median(block["seconds"]) for block in each] for part, each in blocks.items()}
        peaks = {part: max(block["peak_bytes"] for block in each) for part, each in blocks.items()}
        choices = found.get("choices", {part: {"plan.recompute": (part,) if part else ()} for part in blocks})
        parts = {part: {name: tuple(value) for name, value in own.items()} for part, own in choices.items()}
        model = {part: Modelled.of(resolve(changed(config, own), Host(gpus=1))) for part, own in parts.items()}
        needs = {part: each.timeline.ranks[0].peak_bytes for part, each in model.items()}
        for part in blocks:
            over, said = ratio(times[part], times[""]), model[part].seconds / model[""].seconds
            longer = [f"{over.median - 1:+.1%} ({over.low - 1:+.1%} to {over.high - 1:+.1%})", f"{said - 1:+.1%}"]
            rows.append(
                [f"{config.tokens:,}, {part or 'nothing'}", ms(statistics.median(times[part])), ms(model[part].seconds)]
                + (longer if part else ["-", "-"])
                + [f"{of[part] / 2**30:.2f} GiB" for of in (peaks, needs)]
            )
    said = "predicted"
    return table(["tokens of a microbatch, what is done", "step", said, "longer by", said, "peak memory", said], rows)
