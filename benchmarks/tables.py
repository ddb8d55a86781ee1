"""Writes every table, plan excerpt and plan picture of the documents, and prints the table of any result.

    python -m benchmarks.tables                        renew README.md and docs/
    python -m benchmarks.tables --list                 the names of all tables
    python -m benchmarks.tables fsdp fsdp_settings     print the table of a result, and the settings of its contenders

No measured or planned figure in a table is typed by hand. The text between two markers in README.md or docs/ is made
from benchmarks/results/*.json, or is what a command prints. `tests/test_docs.py` fails when they differ.

    <!-- table:saves --> ... <!-- /table -->                          a table of results, and where they come from
    <!-- summary:fsdp_adamw_compiled --> ... <!-- /summary -->        these results in short, or `all`, or `short`
    <!-- plan:tiny --ops 20 --> ... <!-- /plan -->                    what `hocket plan tiny --ops 20` prints
    <!-- timeline:tiny --> ... <!-- /timeline -->                     of that, the predicted step alone
    <!-- search:tiny --> ... <!-- /search -->                        what `hocket plan tiny --search` prints
    <!-- ops:1; fwd attn m0 ..; recv act ..; tiny --> ... <!-- /ops -->   rank 1, from the first op to the last
    <!-- trace:tests/trace/fixtures --> ... <!-- /trace -->           what `hocket trace tests/trace/fixtures` prints
    <!-- step:--microbatches 2 --> ... <!-- /step -->                 what `benchmarks.shard_step` draws for such a step
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence

from benchmarks import eight_gpus, settings_tables, summary_tables, tensor_tables
from benchmarks.aim_tables import expert_aims
from benchmarks.bench.record import origins
from benchmarks.contender_tables import before_and_after, contenders, host_cost, settings, shared_memory
from benchmarks.context_balance import balance
from benchmarks.family_tables import families, weights_memory
from benchmarks.faults import reliability
from benchmarks.kernel_tables import expert_grads, layer_kernels, layers, pieces, updates
from benchmarks.markdown import WIDTH, Result, table
from benchmarks.order_tables import bubbles, bubbles_of_8b, merged_ends, orders, send_controls
from benchmarks.outcomes import KINDS
from benchmarks.prediction_tables import STEPS, predicted, predicted_compute, predicted_steps, recomputation
from benchmarks.published import comparison
from benchmarks.record import RESULTS, ROOT
from benchmarks.saves import saves
from benchmarks.shard_step import drawn
from benchmarks.sharding_tables import (
    aims,
    copy_engine,
    copy_engine_sum,
    copy_engine_tax,
    expert_steps,
    headline,
    parts,
    parts_settings,
    real_models,
    row_exchange,
    weight_grads,
)
from benchmarks.trace_tables import hidden, overlap_tax, overlap_trace, sends_tax
from benchmarks.training_tables import fp8, training
from benchmarks.zoo import counts as zoo_counts
from benchmarks.zoo import rows as zoo
from hocket.commands.options import parse
from hocket.commands.plan import Plan, resolve_for_plan, task_of
from hocket.gpus import GPUS, peak_flops
from hocket.planning import predict, program_of, report
from hocket.predict.hardware import hardware_of
from hocket.predict.simulate import Timeline
from hocket.program.ops import Program
from hocket.program.text import to_text
from hocket.timeline import svg_timeline
from hocket.tune import search as tuner
from hocket_trace import load
from hocket_trace import report as trace_report
from hocket_trace.cli import trace_files
from hocket_trace.picture import svg

DOCS = (ROOT / "README.md", ROOT / "hocket_trace" / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
TRAINED = (
    "llama3_8b", "experts", "experts_balanced", "experts_6", "experts_6_fp8", "dense_peer", "dense_peer_2", "dense_fp8",
    "experts_6_late?", "experts_peer", "whole_experts?", "whole_8b?", "whole_8b_8192?", "whole_8b_65536?",
    "whole_8b_fp8?",
)  # fmt: skip
"""Runs of some hundred steps with results, or a question mark."""
PICTURES = {
    "docs/pictures/tiny-plan.svg": "plan tiny",
    "docs/pictures/trace.svg": "trace tests/trace/fixtures",
    "docs/pictures/copy-engine.svg": "trace tests/trace/copy_engine.json.gz",
}
"""Picture of a step, predicted or measured -> the words behind `hocket` that draw it."""


def step_time(result: Result) -> str:
    peak = peak_flops(result["hardware"])
    rows = []
    for name, row in result["contenders"].items():
        flops = row["tflops_per_gpu"]
        ratios = [row[key] for key in ("speed_up_over_sequential", "speed_up_over_interleaved", "fraction_of_bound")]
        cells = [name, f"{1e3 * row['seconds']:,.0f} ms", f"{flops:.0f} ({1e12 * flops / peak:.0%})"]
        rows.append([*cells, *(f"{r['median']:.2f} ({r['low']:.2f} to {r['high']:.2f})" for r in ratios)])
    head = ["plan", "step", "TFLOP/s per GPU (MFU)", "speed-up over sequential", "over interleaved", "share of bound"]
    return table(head, rows)


def executor_cost(result: Result) -> str:
    rows = [
        [name, f"{row['ops']:,}", f"{row['microseconds_per_op']:.2f} µs", f"{row['worst']:.2f} µs"]
        for name, row in result.items()
        if name in ("cpu", "cuda")
    ]
    return table(["lanes", "ops", "host time per op", "slowest step"], rows)


def plan_scaling(result: Result) -> str:
    rows = [
        [
            row["size"],
            f"{row['ops']:,}",
            f"{row['build_s']:.2f} s",
            f"{row['check_s']:.2f} s",
            f"{row['us_per_op']:.0f} µs",
            f"{row['peak_mib']:.0f} MiB",
        ]
        for row in result["rows"]
    ]
    return table(["pp x chunks x microbatches x layers", "ops", "plan", "check", "per op", "peak memory"], rows)


def explain_scaling(result: Result) -> str:
    rows = [
        [
            row["what"],
            f"{row['gpus']:,}",
            f"{row['resolve_s']:.2f} s",
            f"{row['explain_s']:.2f} s",
            f"{row['resolve_s'] + row['explain_s']:.2f} s",
        ]
        for row in result["rows"]
    ]
    return table(["configuration", "ranks", "resolve", "explain", "both"], rows)


def choices(result: Result) -> str:
    """Cases in which two trees choose differently, and how long this one's step is beside the other's."""
    rows = [
        [row["words"], "; ".join(f"{name} {a} -> {b}" for name, (a, b) in row["other"].items()), f"{row['ratio']:.3f}"]
        for row in result["rows"]
        if row.get("ratio")
    ]
    return table(["plan", "choice before -> now", "predicted step now / before"], rows)


def shard_layouts(result: Result) -> str:
    """Gathers and reductions of flat units beside those of their parameters' pieces: device, then host, in µs."""
    rows = []
    for name, found in result["units"].items():
        times = [found[f"{what}, {layout}"] for what in ("gather", "reduce") for layout in ("flat", "pieces")]
        rows.append([name, *(f"{1e6 * one['device']:,.0f} / {1e6 * one['host']:,.0f}" for one in times)])
    return table(["unit, transport", "gather, flat", "gather, pieces", "reduce, flat", "reduce, pieces"], rows)


def trace_reading(result: Result) -> str:
    rows = [
        [
            f"{row['mb']:.0f} MB",
            f"{row['events']:,}",
            f"{row['kernels']:,}",
            f"{row['read_s']:.2f} s",
            f"{row['report_s']:.2f} s",
            f"{row['peak_mib']:.0f} MiB",
        ]
        for row in result["rows"]
    ]
    return table(["trace", "events", "kernels", "read", "report", "peak memory"], rows)


def gpu_tests(result: Result) -> str:
    """Outcomes by file, and by commit where runs at several are in the result."""
    files: dict[tuple[str, str], list[str]] = {}
    for name, test in result["tests"].items():
        file, commit = name.split("::")[0].replace(".", "/") + ".py", test.get("commit", result["commit"])
        files.setdefault((file, commit), []).append(test["outcome"])
    several = len({commit for _, commit in files}) > 1
    rows = [
        [f"`{file}`" + f" at `{commit}`" * several, *(str(found.count(kind)) for kind in KINDS)]
        for (file, commit), found in sorted(files.items())
    ]
    return table(["tests", *KINDS], rows)


KNOWN: dict[str, tuple[str, Callable[..., str]]] = {
    "step_time": ("step_time", step_time),
    "tensor_parallel": ("tensor_parallel", tensor_tables.layers),
    "tensor_parallel_auto": (
        "tensor_parallel tensor_parallel_as_8? tensor_parallel_2? tensor_parallel_2_as_8?",
        tensor_tables.chosen,
    ),
    "tp_layers": ("tensor_parallel tensor_parallel_as_8? tensor_parallel_2?", tensor_tables.whole),
    "predicted": ("step_time", predicted),
    "predicted_compute": (" ".join(STEPS), predicted_compute),
    "predicted_steps": (" ".join(STEPS), predicted_steps),
    "recomputation": ("recomputation", recomputation),
    "offload": ("offload", recomputation),
    "overlap_trace": ("overlap_trace", overlap_trace),
    "overlap_hidden": ("overlap_trace_expert_parallel overlap_trace_expert_parallel_long?", hidden),
    "overlap_tax_experts": ("overlap_trace_expert_parallel", overlap_tax),
    "sends_tax": ("overlap_trace_pipeline_2 overlap_trace_pipeline_2_ce", sends_tax),
    "overlap_trace_everything": ("overlap_trace_everything", overlap_trace),
    "executor_cost": ("executor_cost_gpu", executor_cost),
    "plan_scaling": ("plan_scaling", plan_scaling),
    "explain_scaling": ("explain_scaling", explain_scaling),
    "weights_memory": ("weights_memory", weights_memory),
    "bubbles": ("", bubbles),
    "bubbles_of_8b": ("", bubbles_of_8b),
    "send_controls": ("send_controls", send_controls),
    "orders": ("orders", orders),
    "merged_ends": ("", merged_ends),
    "weight_grads": ("weight_grads", weight_grads),
    "kernels": ("kernels", pieces),
    "kernels_layer": ("kernels", layers),
    "kernels_update": ("kernels", updates),
    "kernels_of_layer": ("kernels", layer_kernels),
    "expert_grads": ("expert_grads", expert_grads),
    "trace_reading": ("trace_reading", trace_reading),
    "gpu_tests": ("gpu_tests", gpu_tests),
    "training": (
        f"training_{' training_'.join(TRAINED)}",
        training,
    ),
    "fp8_products": ("fp8_products", fp8),
    "gpu_tests_rerun": ("gpu_tests_rerun", gpu_tests),
    "fsdp_headline": ("fsdp fsdp_long", headline),
    "fsdp_aims": ("fsdp fsdp_long fsdp_peers", aims),
    "fsdp_host": ("fsdp_host", host_cost),
    "fsdp_parts": ("fsdp_steps", parts),
    "fsdp_parts_settings": ("fsdp_steps", parts_settings),
    "copy_engine": ("copy_engine", copy_engine),
    "copy_engine_2": ("copy_engine_2", copy_engine),
    "copy_engine_tax": ("copy_engine", copy_engine_tax),
    "copy_engine_sum": ("copy_engine", copy_engine_sum),
    "row_exchange": ("row_exchange", row_exchange),
    "expert_parallel_host": ("expert_parallel_host", host_cost),
    "expert_steps": ("expert_steps", expert_steps),
    "expert_aims": (
        "expert_parallel expert_parallel_long? expert_parallel_2? shared_expert? skinny? pipeline_dense_8? everything?",
        expert_aims,
    ),
    "context_memory": ("context_dense context_dense_whole context_experts? context_experts_whole?", shared_memory),
    "families": ("", families),
    "context_balance": ("", balance),
    "published": ("published", comparison),
    "predictions_8gpu": ("predictions_8gpu", eight_gpus.expected),
    "commands_8gpu": ("", eight_gpus.listed),
    "faults": ("faults", reliability),
    "fsdp_zoo": ("fsdp_zoo", zoo),
    "zoo_counts": ("fsdp_zoo", zoo_counts),
    **{name: (name, real_models) for name in ("real_models_llama", "real_models_vit", "real_models_t5")},
    "saves": ("saves", saves),
    "saves_memory": ("saves_memory", saves),
    **{
        name: (name, before_and_after)
        for name in (
            "before_after",
            "before_after_one",
            "before_after_late",
            "before_after_rows",
            "before_after_dtensors",
        )
    },
    "choices": ("choices", choices),
    "shard_layouts": ("shard_layouts", shard_layouts),
}
"""Table -> the result files it is made from (none: predicted; with a question mark: if they are there), its maker.

A result of contenders needs no row: its table has its name, and `NAME_settings` has the settings and the gate."""


def there(file: str) -> bool:
    return (RESULTS / f"{file.rstrip('?')}.json").exists()


TABLES = {
    name: ([file.rstrip("?") for file in files.split() if there(file)], make)
    for name, (files, make) in KNOWN.items()
    if all(file.endswith("?") or there(file) for file in files.split())
}
"""Those of results that have been recorded."""


def names() -> list[str]:
    """All tables that can be made."""
    found = [path.stem for path in RESULTS.glob("*.json")]
    return sorted({*TABLES, *(name for name in found if "workloads" in result_of(name))})


def result_of(name: str) -> Result:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def origin(results: Sequence[Result]) -> str:
    """Hardware, versions, commit, day and commands of the runs behind results; early ones don't know their day."""
    commands: dict[str, dict[str, None]] = {}
    for run in (run for result in results for run in origins(result)):
        versions = run["versions"]
        nccl = "" if versions["nccl"] == "none" else f", NCCL {versions['nccl']}"
        where = f"{run['hardware']}, Python {versions['python']}, torch {versions['torch']}{nccl}"
        day = f", {run['date']}" if "date" in run else ""
        commands.setdefault(f"{where}, commit `{run['commit']}`{day}", {})[f"`{run['command']}`"] = None
    return "\n".join(f"{where}: {', '.join(found)}" for where, found in commands.items())


def make_table(name: str) -> str:
    """A table of results. Raises ValueError if there is none of this name."""
    if name in TABLES:
        files, make = TABLES[name]
    elif there(file := name.removesuffix("_settings")) and "workloads" in result_of(file):
        files, make = [file], settings if file != name else contenders
    else:
        raise ValueError(f"{name}: there is no such table; fix: python -m benchmarks.tables --list")
    results = [result_of(file) for file in files]
    return f"{make(*results)}\n\n{origin(results)}".rstrip()  # what is predicted has no origin


def make_summary(words: str) -> str:
    """Rows of the summary: of all results, of the README's few, or of those that are named."""
    rows = summary_tables.rows_of(words)
    results = {row.file: result_of(row.file) for row in rows}
    return f"{summary_tables.summary(rows, results)}\n\n{origin(list(results.values()))}"


def planned(words: str) -> tuple[Program, Timeline, str]:
    """The program, prediction and report of `hocket plan WORDS`."""
    options, origins = parse(Plan, "plan", shlex.split(words))
    settings = resolve_for_plan(options.config, origins)
    program, hardware = program_of(settings), hardware_of(settings)
    return program, predict(settings, program, hardware), report(settings, program, hardware, WIDTH, options.ops)


def make_plan(words: str) -> str:
    return f"```\n$ hocket plan {words}\n{planned(words)[2]}\n```"


def make_timeline(words: str) -> str:
    """Of `hocket plan WORDS` the drawing of the predicted step, without its legend."""
    drawing = planned(words)[2].partition("PREDICTED STEP")[2].partition("\none character is")[0]
    return f"```\n$ hocket plan {words}\n...\nPREDICTED STEP{drawing}\n```"


def make_search(words: str) -> str:
    """What `hocket plan WORDS --search` prints, without the time that it took."""
    task = task_of(*parse(Plan, "plan", [*shlex.split(words), "--search"]))
    found = tuner.report(task, dataclasses.replace(tuner.search(task), seconds=0.0))
    return f"```\n$ hocket plan {words} --search\n{found}\n```"


def make_ops(words: str) -> str:
    """The lines of one rank from one op to another. Raises ValueError if there are no such ops."""
    rank, first, last, command = (word.strip() for word in words.split(";"))
    lines = to_text(planned(command)[0]).split(f"\nrank {rank}\n")[1].split("\n\n")[0].splitlines()
    starts = [[i for i, line in enumerate(lines) if line.split(maxsplit=1)[1].startswith(op)] for op in (first, last)]
    if not all(starts):
        raise ValueError(f"rank {rank} of `hocket plan {command}` has no op {first if starts[1] else last}")
    shown = "\n".join(line.rstrip() for line in lines[starts[0][0] : starts[1][0] + 1])
    return f"```\n$ hocket plan {command} --ops -1      # rank {rank}\n{shown}\n```"


def make_trace(words: str) -> str:
    """What `hocket trace WORDS` prints on a terminal of fixed width, run in the root. `WORDS; N` gives N lines."""
    words, _, count = words.partition("; ")
    command = [sys.executable, "-m", "hocket", "trace", *shlex.split(words)]
    terminal = {**os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=ROOT, env=terminal, capture_output=True, text=True, timeout=60, check=True)
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    shown = [*lines[: int(count)], "..."] if count else lines
    return "\n".join(["```", f"$ hocket trace {words}", *shown, "```"])


def make_step(words: str) -> str:
    """A step of a sharded model, drawn from a record of it."""
    return f"```\n{drawn(words)}\n```"


def make_golden(words: str) -> str:
    """A command, and the output that tests compare with: `NAME; COMMAND`."""
    name, command = (word.strip() for word in words.split(";"))
    return f"```\n$ hocket {command}\n{(ROOT / 'tests' / 'golden' / name).read_text(encoding='utf-8').rstrip()}\n```"


def make_gpus() -> str:
    """The table of GPUs: figures of data sheets."""
    rows = [
        [
            f"`{name}`", f"{gpu.flops / 1e12:g}", f"{gpu.memory}", f"{gpu.memory_bandwidth / 1e12:g}",
            f"{gpu.link / 1e9:g}", f"{gpu.watts}",
        ]
        for name, gpu in GPUS.items()
    ]  # fmt: skip
    return table(["`hardware.gpu`", "TFLOP/s", "GB", "TB/s", "link GB/s", "W"], rows)


MAKERS = {
    "table": make_table, "summary": make_summary, "plan": make_plan, "timeline": make_timeline,
    "search": make_search, "ops": make_ops, "trace": make_trace,
    "step": make_step, "golden": make_golden, "settings": settings_tables.table,
    "presets": lambda words: settings_tables.presets(), "gpus": lambda words: make_gpus(),
}  # fmt: skip
_MARKED = re.compile(rf"(<!-- ({'|'.join(MAKERS)}):(.+?) -->\n).*?(<!-- /\2 -->)", re.DOTALL)


def renew(text: str) -> str:
    """A document with everything between markers made anew."""
    return _MARKED.sub(lambda found: f"{found[1]}{MAKERS[found[2]](found[3])}\n{found[4]}", text)


def picture(words: str) -> str:
    """What `hocket WORDS --svg FILE` draws, for `plan` and `trace`."""
    command, _, rest = words.partition(" ")
    if command == "trace":
        traces = load(trace_files([str(ROOT / name) for name in shlex.split(rest)]))
        return svg(trace_report(traces), traces)
    program, timeline, _ = planned(rest)
    return svg_timeline(timeline, program)


def main() -> None:
    if wanted := sys.argv[1:]:
        print("\n".join(names()) if wanted == ["--list"] else "\n\n".join(map(make_table, wanted)))
        return
    for path in DOCS:
        text = path.read_text(encoding="utf-8")
        if (new := renew(text)) != text:
            path.write_text(new, encoding="utf-8")
            print(f"renewed {path.relative_to(ROOT)}")
    for name, words in PICTURES.items():
        path, new = ROOT / name, picture(words)
        if not path.exists() or path.read_text(encoding="utf-8") != new:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(new, encoding="utf-8")
            print(f"drew {name}")


if __name__ == "__main__":
    main()
