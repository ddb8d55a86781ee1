"""What it costs that weight gradients of experts are copied to where they are sent from, and what would spare it.

    python -m benchmarks.expert_grads

`torch._grouped_mm` has no `out=`, so its result is copied into the gradient's slot. Beside it stand the product alone,
which is what a kernel that writes to the slot itself would have to reach, and one product per expert, which cuBLAS can
write there, with as many launches as there are experts. Rows are spread evenly.

About 10 s on one H200. Without a GPU the sizes are tiny and show only that everything works.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import seconds
from benchmarks.record import write
from hocket.runtime.functional import grouped_wgrad

SIZES = {"qwen3_30b_a3b": (2048, 768), "skinny": (1024, 384)}
"""Hidden width and width of an expert."""
LOCAL = (16, 32)
"""Experts of a rank."""


def ways(x_RD: Tensor, g_RF: Tensor, experts: int) -> dict[str, Callable[[], object]]:
    """How the gradient of one matrix of all experts can be computed."""
    rows = len(x_RD) // experts
    offsets_E = torch.arange(rows, len(x_RD) + 1, rows, dtype=torch.int32, device=x_RD.device)
    slot_EDF = x_RD.new_empty(experts, x_RD.shape[1], g_RF.shape[1])

    def apart() -> None:
        for e in range(experts):
            lo, hi = e * rows, (e + 1) * rows
            torch.mm(x_RD[lo:hi].t(), g_RF[lo:hi], out=slot_EDF[e])

    return {
        "product": lambda: torch._grouped_mm(x_RD.t(), g_RF, offs=offsets_E),
        "product and copy": lambda: grouped_wgrad(x_RD, g_RF, offsets_E, slot_EDF),
        "one product per expert": apart,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[32768, 65536], help="rows of a rank, over all experts")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    device, shrink = torch.device("cuda" if gpu else "cpu"), 1 if gpu else 64
    found: list[dict[str, Any]] = []
    for name, (hidden, inner) in SIZES.items():
        for experts in LOCAL:
            for rows in options.rows:
                for d, f in ((hidden, 2 * inner), (inner, hidden)):
                    count, d, f = rows // shrink, max(d // shrink, 8) // 8 * 8, max(f // shrink, 8) // 8 * 8
                    x, g = (torch.randn(count, width, device=device, dtype=torch.bfloat16) for width in (d, f))
                    times = {way: seconds(run, device, options.repeats) for way, run in ways(x, g, experts).items()}
                    row = {"model": name, "experts": experts, "rows": count, "matrix": [d, f], "seconds": times}
                    found.append({**row, "flops": 2 * count * d * f})
                    shown = "  ".join(f"{way} {1e6 * took:7.1f} us" for way, took in times.items())
                    print(f"{name:14} {experts} experts, {count} rows, {d} x {f}: {shown}", flush=True)
    print(write("expert_grads", {"found": found}, options.out, options.commit))


if __name__ == "__main__":
    main()
