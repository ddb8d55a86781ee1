"""Tables of training runs, and of what products in fp8 save."""

from __future__ import annotations

import re

from benchmarks.markdown import Result, table


def training(*results: Result) -> str:
    """First steps, the worst load, validation losses and rates of runs."""
    rows = []
    for result in results:
        # beyond what the run is by itself
        own = re.findall(r"--(?:(?:model|precision|data|plan)\.\S+|train\.microbatches) \S+", result["command"])
        name = " ".join([result["run"], *own])
        for side, seeds in result["runs"].items():
            for seed, run in seeds.items():
                losses, loads = run["loss"], run.get("load") or [0.0]
                validation = ", ".join(f"{loss:.2f} at {step}" for step, loss in run["validation_loss"].items())
                rows.append(
                    [
                        f"{name}, seed {seed}" + ("" if side == "hocket" else f": {side}"),
                        str(len(losses)),
                        " ".join(f"{loss:.1f}" for loss in losses[:6]),
                        f"{max(run['grad_norm'][:10]):.0f}, {run['grad_norm'][-1]:.1f}",
                        f"{loads[0]:.1f}, {max(loads):.1f}, {loads[-1]:.1f}" if max(loads) else "",
                        validation,
                        f"{1e3 * run['seconds']:.0f} ms",
                        f"{run['tflops_per_gpu']:.0f}" if "tflops_per_gpu" in run else "",
                    ]
                )
    norm, load = "norm: largest of 10, last", "load: first, worst, last"
    heads = ["run", "steps", "first losses", norm, load, "validation", "step", "TFLOP/s/GPU"]
    return table(heads, rows)


def fp8(result: Result) -> str:
    """Layers forward and backward in bf16 and in fp8."""
    rows = []
    for kind in ("dense layer", "experts", "MoE layer"):
        entries = {entry["name"]: entry for entry in result[kind]}
        for name, entry in entries.items():
            size, _, rest = name.partition(" ")
            bf16 = entries[f"{size} bf16"]
            if rest in ("fp8", "fp8, weights cast before"):
                rows.append(
                    [
                        f"{kind}, {size}",
                        "once a step" if "before" in rest else "for each microbatch",
                        f"{bf16['milliseconds']:.2f} ms",
                        f"{entry['milliseconds']:.2f} ms",
                        f"{bf16['milliseconds'] / entry['milliseconds']:.2f}",
                        f"{bf16['mib']:,}, {entry['mib']:,}",
                    ]
                )
    return table(["what", "weights are cast", "bf16", "fp8", "gain", "MiB: bf16, fp8"], rows)
