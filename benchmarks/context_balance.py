"""How even the attention of context-parallel ranks is where documents share sequences.

    python -m benchmarks.context_balance

Lengths of documents are log-normal with a mean of 2,048 tokens and a heavy tail, cut at the sequence's end. `busiest`
is the busiest rank's attention over the mean of all ranks. Needs no GPU and measures nothing but the time to choose.
"""

from __future__ import annotations

import math
import random
import time

from benchmarks.markdown import table
from hocket.model.context import shares, work_of, zigzag

BATCHES = 40
SPREAD = 1.6
"""Standard deviation of the logarithm of a document's length."""


def lengths_of(seed: int, length: int, mean: int = 2048) -> list[int]:
    """Where documents of one sequence begin and end."""
    draws, bounds = random.Random(seed), [0]
    while bounds[-1] < length:
        drawn = draws.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)
        bounds.append(min(length, bounds[-1] + max(1, round(drawn))))
    return bounds


def balance() -> str:
    """A table of zigzag chunks against those chosen by documents."""
    rows = []
    for length in (32 * 1024, 128 * 1024):
        for ranks in (2, 4, 8):
            plain, chosen, chunks = [], [], []
            for seed in range(BATCHES):
                bounds = lengths_of(seed, length)
                work, found = work_of(bounds, zigzag(1, length, ranks)), shares(bounds, length, ranks)
                plain.append(max(work) * ranks / sum(work))
                chosen.append(1 + found.imbalance)
                chunks.append(max(map(len, found.chunks)))
            gain = sum(a / b for a, b in zip(plain, chosen, strict=True)) / BATCHES
            means = [f"{sum(each) / BATCHES:.3f} ({max(each):.3f})" for each in (plain, chosen)]
            rows.append([f"{length:,}", str(ranks), *means, f"{gain:.2f}", f"{sum(chunks) / BATCHES:.1f}"])
    header = [
        "tokens",
        "ranks",
        "zigzag: busiest, mean (worst)",
        "chosen: busiest, mean (worst)",
        "gain",
        "chunks a rank",
    ]
    return table(header, rows)


def main() -> None:
    print(balance())
    bounds, start = lengths_of(0, 128 * 1024), time.process_time()
    for _ in range(20):
        shares(bounds, 128 * 1024, 8)
    print(f"\n128k tokens over 8 ranks are shared out in {(time.process_time() - start) / 20 * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
