"""Which sizes of tiles do the kernels of rows and routing like? Their constants are the answer.

    python -m benchmarks.kernel_sweep

Each kernel runs with some values of each constant of `hocket/kernels/rows.py` and `routing.py`, one constant or pair of
constants at a time, at the sizes of `benchmarks.kernels`. Half a minute on one H200, most of it for compiling.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.kernels import Sizes, seconds
from benchmarks.record import write
from hocket.model.families import qwen3_30b_a3b
from hocket.parallel.routing import route

Values = Mapping[str, tuple[int, ...]]

TILES: Values = {"BLOCK": (512, 1024, 2048), "WARPS": (2, 4, 8)}
PAIRS: Values = {"PAIRS": (2048, 4096, 8192, 16384), "PAIRS_WARPS": (4, 8)}
COPIES: Values = {"GATHERED": (1, 2, 4, 8), "WARPS": (2, 4, 8)}
TOKENS: Values = {"TILE": (1024, 2048, 4096)}


def calls(sizes: Sizes) -> dict[str, tuple[Any, Values, Callable[[], object], int]]:
    """By name: the module with the constants, which of them, what to run, and the bytes it moves at the least."""
    from hocket.kernels import routing, rows

    m = sizes.model
    logits = torch.randn(sizes.tokens, m.experts, device=sizes.device)
    probs, routed = route(logits, m)
    x, sent = (torch.randn(n, m.hidden, device=sizes.device, dtype=sizes.dtype) for n in (sizes.tokens, sizes.rows))
    place, order = routed.inverse_TK, routed.order_R
    return {
        "gather": (rows, COPIES, lambda: rows.gather(sent, order), 2 * sent.nbytes),
        "spread": (rows, TILES, lambda: rows.spread(x, place, sent), x.nbytes + sent.nbytes),
        "total": (rows, TILES, lambda: rows.total(sent, probs, place, x, None), 2 * x.nbytes + sent.nbytes),
        "total_backward": (
            rows, PAIRS, lambda: rows.total_backward(x, sent, probs, place), x.nbytes + 2 * sent.nbytes,
        ),
        "route": (routing, TOKENS, lambda: routing.choose(logits, None, m, 0.0), 2 * logits.nbytes),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    for name, (module, values, run, nbytes) in calls(
        Sizes(qwen3_30b_a3b(), options.tokens, torch.device("cuda"))
    ).items():
        for numbers in itertools.product(*values.values()):
            constants = dict(zip(values, numbers, strict=True))
            with ExitStack() as changed:
                for constant, number in constants.items():
                    changed.enter_context(patch.object(module, constant, number))
                took = seconds(run, torch.device("cuda"), options.repeats)
            found.append({"kernel": name, "constants": constants, "seconds": took, "bytes_per_second": nbytes / took})
            print(f"{name:18} {constants}  {1e6 * took:7.1f} us  {nbytes / took / 1e12:.2f} TB/s", flush=True)
    print(write("kernel_sweep", {"tokens": options.tokens, "found": found}, options.out, options.commit))


if __name__ == "__main__":
    main()
