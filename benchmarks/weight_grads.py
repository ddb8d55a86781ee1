"""What it saves to write weight gradients where the reduction reads them, on the linear layers of Llama-3 8B.

    python -m benchmarks.weight_grads

Every weight gradient of a layer is computed in four ways, which take turns: as autograd does it, then copied into the
flat buffer in bfloat16, or added to it in float32; and by the product itself (`hocket/runtime/weights.py`), written or
added, as planned steps do.

About 10 s on one H200. Without a GPU the shapes are tiny and show only that everything works.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.options import arguments
from benchmarks.record import write
from hocket.fsdp.layout import FlatLayout
from hocket.runtime.weights import put, write_product

LLAMA = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""Output and input width of the linears of one layer."""

WAYS = {
    "copied": (torch.bfloat16, False),
    "written": (torch.bfloat16, False),
    "added": (torch.float32, True),
    "added in the product": (torch.float32, True),
}
"""The dtype of the buffer, and whether the gradient is added to what is there."""
BY_AUTOGRAD = ("copied", "added")


def _seconds(ways: Mapping[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each way; they take turns, after two rounds that are not counted."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(repeats + 2):
        for name, run in ways.items():
            seconds = _time(run, device)
            if i >= 2:
                found[name].append(seconds)
    return {name: statistics.median(times) for name, times in found.items()}


def _time(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def flat_views(shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Views of one flat buffer, laid out as a unit's."""
    layout = FlatLayout.build(shapes.items(), 1)
    flat = torch.zeros(layout.total, dtype=dtype, device=device)
    return {entry.name: flat[entry.offset : entry.end].view(entry.shape) for entry in layout.entries}


def gradients(
    shapes: Mapping[str, tuple[int, int]], tokens: int, repeats: int, device: torch.device
) -> list[dict[str, Any]]:
    """One row per weight: seconds of each way, and whether what is written has autograd's bits."""
    buffers = {dtype: flat_views(shapes, dtype, device) for dtype in (torch.bfloat16, torch.float32)}
    rows = []
    for name, (out, into) in shapes.items():
        x = torch.randn(tokens, into, device=device, dtype=torch.bfloat16)
        g = torch.randn(tokens, out, device=device, dtype=torch.bfloat16)

        def run(way: str, name: str = name, x: Tensor = x, g: Tensor = g) -> None:
            dtype, add = WAYS[way]
            view = buffers[dtype][name]
            if way in BY_AUTOGRAD:
                put(g.t() @ x, view, add)
            else:
                write_product(g.t(), x, view, add)

        seconds = _seconds({way: lambda way=way, run=run: run(way) for way in WAYS}, repeats, device)
        run("written")
        same = torch.equal(buffers[torch.bfloat16][name], g.t() @ x)
        rows.append({"weight": name, "shape": [out, into], "tokens": tokens, "seconds": seconds, "same_bits": same})
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = LLAMA if device.type == "cuda" else {name: (a // 64, b // 64) for name, (a, b) in LLAMA.items()}
    tokens = options.tokens if device.type == "cuda" else [count // 64 for count in options.tokens]
    rows = []
    for count in tokens:
        rows += gradients(shapes, count, options.repeats, device)
        print(f"{count} tokens: {_words(rows[-len(shapes) :])}", flush=True)
    print(write("weight_grads", {"weights": rows}, options.out, options.commit))


def _words(rows: list[dict[str, Any]]) -> str:
    sums = {way: sum(row["seconds"][way] for row in rows) for way in WAYS}
    return ", ".join(f"{way} {1e6 * seconds:.0f} us" for way, seconds in sums.items())


if __name__ == "__main__":
    main()
