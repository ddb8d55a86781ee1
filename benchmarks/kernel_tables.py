"""Tables of `benchmarks.kernels` and `benchmarks.expert_grads`: kernels beside what torch has instead."""

from __future__ import annotations

from benchmarks.markdown import Result, table, us


def pieces(result: Result) -> str:
    """Forward and backward of every piece, both ways, and how near the kernels come to a copy's speed."""
    rows = []
    for piece in result["pieces"]:
        cells = [f"{piece['name']}, {piece['tokens']:,} tokens"]
        for what in ("forward", "backward"):
            formula, kernel = piece["formula"][what], piece["kernel"][what]
            share = kernel["bytes_per_second"] / result["copy_bytes_per_second"]
            times = formula["seconds"] / kernel["seconds"]
            cells += [us(formula["seconds"]), us(kernel["seconds"]), f"{times:.1f}", f"{share:.0%}"]
        rows.append(cells)
    head = [
        f"{what}: {column}" for what in ("forward", "backward") for column in ("torch", "kernel", "times", "of copy")
    ]
    return table(["", *head], rows)


def layers(result: Result) -> str:
    """Forward and backward of a MoE layer."""
    rows = []
    for layer in result["layers"]:
        formula, kernel = layer["formula"], layer["kernel"]
        cells = [f"{way['seconds'] * 1e3:.2f} ms, {way['tflop_per_s']:.0f} TFLOP/s" for way in (formula, kernel)]
        rows.append([f"{layer['tokens']:,} tokens", *cells, f"{formula['seconds'] / kernel['seconds']:.2f}"])
    return table(["a MoE layer, forward and backward", "torch", "kernels", "times as fast"], rows)


def layer_kernels(result: Result) -> str:
    """What the layer's time goes to, with kernels, at most tokens."""
    layer = result["layers"][-1]["kernel"]
    rows = [
        [f"`{kernel['name'][:60]}`", f"{kernel['count']:.0f}", f"{kernel['microseconds']:,.0f} µs"]
        for kernel in layer["kernels"][:20]
    ]
    return table(["kernel", "launches", "in all"], rows)


def updates(result: Result) -> str:
    """A clipped AdamW update of a unit that is held whole, with its copy in bf16."""
    rows = []
    for row in result["updates"]:
        dtype, nbytes = {"float32": ("fp32", 30), "bfloat16": ("bf16", 22)}[row["averages"]]
        share = row["elements"] * nbytes / row["kernel"] / result["copy_bytes_per_second"]
        times = f"{row['torch'] / row['kernel']:.2f}"
        rows.append([f"averages in {dtype}", us(row["torch"]), us(row["kernel"]), times, f"{share:.0%}"])
    return table(["268 million weights", "torch", "kernel", "times", "of copy"], rows)


def expert_grads(result: Result) -> str:
    """Experts' weight gradients where they belong, by torch and by the kernel, with the fastest of its tiles."""
    rows = []
    for row in result["found"]:
        if not row["even"]:
            continue
        times = row["seconds"]
        cells = [f"{row['experts']} experts, {row['rows']:,} rows, {' x '.join(map(str, row['matrix']))}"]
        cells += [us(times["product"])]
        for way, mode in (("copy", "written"), ("sum", "added")):
            torchs, kernel = times[f"product and {way}"], min(t for name, t in times.items() if name.startswith(mode))
            cells += [us(torchs), us(kernel), f"{torchs / kernel:.2f}"]
        rows.append([*cells, f"{row['break_even']:.2f}"])
    head = ["", "torch: product", "and copy", "kernel writes", "times", "torch: and sum", "kernel adds", "times"]
    return table([*head, "break-even"], rows)
