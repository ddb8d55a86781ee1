"""What it costs to bring experts' weight gradients to where they belong, and what a kernel that adds them there saves.

    python -m benchmarks.expert_grads
    python -m benchmarks.expert_grads --tiles all

`torch._grouped_mm` has a result of its own. Where each rank has its own experts, that is summed up in fp32; where ranks
share experts, it is copied into the slot from which the reduction sends it. Both ways run beside one kernel that does
all of it (`hocket/kernels/products.py`), with the tile it uses or with others too. Rows are spread evenly, or half
of them go to a quarter of the experts.

`break_even` is the share of torch's rate which the kernel's product needs, for both ways to take equally long: the
time of torch's product over that of product and sum.

About 15 s on one H200, with all tiles a minute. Without a GPU the sizes are tiny, there is no kernel, and it shows only
that everything works.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import seconds
from benchmarks.options import arguments
from benchmarks.record import write
from hocket.runtime.transports import local_sum

SIZES = {"qwen3_30b_a3b": (2048, 768), "skinny": (1024, 384)}
"""Hidden width and width of an expert."""
LOCAL = (32, 16)
"""Experts of a rank."""
TILES = (
    (128, 256, 64, 8, 4), (128, 256, 64, 8, 3), (128, 256, 32, 8, 5), (256, 128, 64, 8, 4), (256, 128, 64, 8, 3),
    (128, 128, 64, 8, 3), (128, 128, 64, 4, 3), (128, 128, 32, 4, 5), (64, 256, 32, 4, 5), (64, 256, 64, 4, 4),
)  # fmt: skip
"""Tiles to try: height, width, depth, warps, stages. The first is what `hocket/kernels/products.py` has."""


def ends(rows: int, experts: int, even: bool, device: torch.device) -> Tensor:
    """Last rows of the experts, int32."""
    counts = torch.full((experts,), rows // experts)
    if not even:
        few = experts // 4
        counts[:few] = rows // 2 // few
        counts[few:] = rows // 2 // (experts - few)
    counts[-1] += rows - counts.sum()
    return counts.cumsum(0).to(torch.int32).to(device)


def ways(x_RD: Tensor, g_RF: Tensor, ends_E: Tensor, tiles: Mapping[str, Any]) -> dict[str, Callable[[], object]]:
    """How the gradient of one matrix of all experts can be computed."""
    shape = len(ends_E), x_RD.shape[1], g_RF.shape[1]
    slot_EDF, sum_EDF = x_RD.new_empty(shape), torch.zeros(shape, device=x_RD.device)

    def product() -> Tensor:
        return torch._grouped_mm(x_RD.t(), g_RF, offs=ends_E)

    def summed() -> None:
        local_sum(product().view(1, -1), sum_EDF.view(-1), 0.25)

    found: dict[str, Callable[[], object]] = {
        "product": product,
        "product and copy": lambda: slot_EDF.copy_(product()),
        "product and sum": summed,
    }
    if x_RD.is_cuda:
        from hocket.kernels.products import weight_gradients

        for name, tile in tiles.items():
            found[f"written, {name}"] = lambda tile=tile: weight_gradients(x_RD, g_RF, ends_E, slot_EDF, tile=tile)
            found[f"added, {name}"] = lambda tile=tile: weight_gradients(
                x_RD, g_RF, ends_E, sum_EDF, True, 0.25, tile=tile
            )
    return found


def apart(x_RD: Tensor, g_RF: Tensor, ends_E: Tensor) -> float:
    """Largest difference between torch's product and the kernel's, over the largest number."""
    if not x_RD.is_cuda:
        return 0.0
    from hocket.kernels.products import weight_gradients

    expected = torch._grouped_mm(x_RD.t(), g_RF, offs=ends_E).float()
    found = torch.zeros_like(expected)
    weight_gradients(x_RD, g_RF, ends_E, found, add=True)
    return float((found - expected).abs().max() / expected.abs().max())


def tiles_of(which: str) -> dict[str, Any]:
    """The tiles to measure, by a name."""
    if not torch.cuda.is_available():
        return {}
    from hocket.kernels.products import TILE, Tile

    return {" x ".join(map(str, t)): Tile(*t) for t in TILES} if which == "all" else {"chosen tile": TILE}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[32768, 65536], help="rows of a rank, over all experts")
    parser.add_argument("--tiles", choices=["chosen", "all"], default="chosen")
    parser.add_argument("--only", default="", help="one of the models")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    device, shrink = torch.device("cuda" if gpu else "cpu"), 1 if gpu else 64
    cases = [
        (name, experts, rows // shrink, even, max(d // shrink, 8) // 8 * 8, max(f // shrink, 8) // 8 * 8)
        for name, (hidden, inner) in SIZES.items()
        if options.only in ("", name)
        for experts in LOCAL
        for rows in options.rows
        for even in (True, False)
        for d, f in ((hidden, 2 * inner), (inner, hidden))
    ]
    found: list[dict[str, Any]] = []
    for name, experts, rows, even, d, f in cases:
        x, g = (torch.randn(rows, width, device=device, dtype=torch.bfloat16) for width in (d, f))
        last = ends(rows, experts, even, device)
        calls = ways(x, g, last, tiles_of(options.tiles)).items()
        times = {way: seconds(run, device, options.repeats) for way, run in calls}
        row = {"model": name, "experts": experts, "rows": rows, "even": even, "matrix": [d, f], "seconds": times}
        flops, share = 2 * rows * d * f, times["product"] / times["product and sum"]
        found.append({**row, "flops": flops, "break_even": share, "apart": apart(x, g, last)})
        words = f"{experts} experts, {rows} rows{'' if even else ' unevenly'}, {d} x {f}"
        print(f"{name}, {words}: break-even {share:.2f}, apart by {found[-1]['apart']:.1e}", flush=True)
        for way, took in sorted(times.items(), key=lambda item: item[1]):
            print(f"    {1e6 * took:8.1f} us  {flops / took / 1e12:6.1f} TFLOP/s  {way}", flush=True)
    print(write("expert_grads", {"found": found}, options.out, options.commit))


if __name__ == "__main__":
    main()
