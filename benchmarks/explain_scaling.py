"""Time to resolve and to explain a configuration, against the number of GPUs.

    python -m benchmarks.explain_scaling

Each size runs in a fresh process on one core. The aim is 1 s for both together, on 1,024 GPUs. Writes
`benchmarks/results/explain_scaling.json` and prints a table.
"""

from __future__ import annotations

import json
import time
from typing import Any

from benchmarks.fresh import answer, in_fresh_process, options
from hocket.config.schema import changed
from hocket.explain.build import explain
from hocket.explain.explanation import to_text
from hocket.machine import host_for_plan
from hocket.recipes import recipe
from hocket.resolve import resolve
from hocket.variables import survey

OPEN = {"plan.recompute": ("auto",), "overlap.dp.strategy": "auto", "plan.layers_per_stage": ("auto",)}
"""What is set in recipes and chosen here, by simulating steps."""
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("tiny", {}),
    "moe_8gpu": ("moe_8gpu", {}),
    "qwen3_30b_a3b, data": ("qwen3_30b_a3b", {"mesh.dp": 512, "mesh.ep": 8}),
    "qwen3_30b_a3b, pipeline": (
        "qwen3_30b_a3b",
        {"mesh.pp": 8, "mesh.dp": 128, "mesh.ep": 32, "plan.chunks": 2, "train.microbatches": 32},
    ),
    "qwen3_30b_a3b, pipeline, all open": (
        "qwen3_30b_a3b",
        {"mesh.pp": 8, "mesh.dp": 64, "mesh.ep": 8, "plan.chunks": 2, "train.microbatches": 64, **OPEN},
    ),
    "llama3_8b, pipeline, all open": (
        "llama3_8b",
        {"mesh.pp": 16, "mesh.dp": 32, "plan.chunks": 2, "train.microbatches": 64, **OPEN},
    ),
    "llama3_8b, tensor": ("llama3_8b", {"mesh.tp": 8, "mesh.dp": 32, "mesh.pp": 4, "train.microbatches": 16}),
    "qwen3_30b_a3b, 65,536": ("qwen3_30b_a3b", {"mesh.pp": 8, "mesh.dp": 8192, "mesh.ep": 128}),
}
"""What is explained: recipe and changes."""
LARGE = 1024
"""GPUs of what the aim is about."""
AIM = 1.0
"""Seconds."""


def measure(name: str, repeats: int) -> dict[str, float]:
    """Shortest of `repeats` times, in seconds of CPU time, and what they were for."""
    base, changes = SIZES[name]
    config = changed(recipe(base), changes)
    host = host_for_plan(config)
    resolve_s = explain_s = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        settings = resolve(config, host)
        resolved = time.process_time()
        assert to_text(explain(settings, survey({})))
        done = time.process_time()
        resolve_s, explain_s = min(resolve_s, resolved - start), min(explain_s, done - resolved)
    return {"gpus": config.mesh.world, "resolve_s": round(resolve_s, 4), "explain_s": round(explain_s, 4)}


def main() -> None:
    given = options(__doc__)
    if given.one:
        answer(lambda: measure(json.loads(given.one), given.repeats))
        return
    from benchmarks.record import write  # imports torch, which the measured processes don't

    rows: list[dict[str, Any]] = []
    for name in SIZES:
        row = {"what": name, **in_fresh_process("benchmarks.explain_scaling", json.dumps(name), given.repeats)}
        rows.append(row)
        print(f"{name:>34} {row['gpus']:>7,} ranks  resolve {row['resolve_s']:.2f} s, explain {row['explain_s']:.2f} s")
    result = {
        "question": "How long does it take to resolve and to explain a configuration?",
        "method": f"shortest of {given.repeats} CPU times on one core, one process per size",
        "target": {"gpus": LARGE, "seconds": AIM},
        "worst": max(row["resolve_s"] + row["explain_s"] for row in rows if row["gpus"] == LARGE),
        "rows": rows,
    }
    print(write("explain_scaling", result, given.out, given.commit))


if __name__ == "__main__":
    main()
