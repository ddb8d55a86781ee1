"""Time and memory of planning and checking, against the number of ops.

    python -m benchmarks.plan_scaling

Each size runs in a fresh process on one core; the largest is PP 8 x VPP 4 x 64 microbatches x 64 layers. The targets
for it are 5 s and 2 GiB. Writes `benchmarks/results/plan_scaling.json` and prints a table.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.fresh import answer, in_fresh_process, options, peak_mib
from hocket.config import Config, PlanConfig
from hocket.program.check import check
from hocket.program.lower import build_program
from hocket.program.ops import Layout
from hocket.program.shard import Sharding


@dataclass(frozen=True)
class Size:
    pp: int
    chunks: int
    microbatches: int
    layers: int

    def __str__(self) -> str:
        return f"{self.pp} x {self.chunks} x {self.microbatches} x {self.layers}"


SIZES = (
    Size(2, 2, 8, 16), Size(4, 2, 16, 32), Size(8, 4, 8, 64), Size(8, 4, 16, 64), Size(8, 4, 32, 64),
    Size(8, 4, 64, 64), Size(8, 4, 128, 64),
)  # fmt: skip
TARGET = Size(8, 4, 64, 64)


def measure(size: Size, repeats: int) -> dict[str, float]:
    """Shortest of `repeats` times in seconds of CPU time, and the peak memory of the process in MiB."""
    layout = Layout(("dense",) + ("moe",) * (size.layers - 1), pp=size.pp, chunks=size.chunks, ep=2)
    config, sharding = Config(plan=PlanConfig(chunks=size.chunks)), Sharding(dense=8, experts=4)
    before = peak_mib()
    build_s = check_s = float("inf")
    ops = 0
    for _ in range(repeats):
        start = time.process_time()
        program = build_program(layout, size.microbatches, config, sharding)
        built = time.process_time()
        found = check(program)
        checked = time.process_time()
        assert not found, found[0]
        build_s, check_s, ops = min(build_s, built - start), min(check_s, checked - built), len(program)
    return {"ops": ops, "build_s": build_s, "check_s": check_s, "peak_mib": peak_mib(), "start_mib": before}


def main() -> None:
    given = options(__doc__)
    if given.one:
        answer(lambda: measure(Size(**json.loads(given.one)), given.repeats))
        return
    from benchmarks.record import write  # imports torch, which the measured processes don't

    rows: list[dict[str, Any]] = []
    print(f"{'PP x VPP x microbatches x layers':>34} {'ops':>8} {'build s':>8} {'check s':>8} {'us/op':>6} {'MiB':>6}")
    for size in SIZES:
        row = in_fresh_process("benchmarks.plan_scaling", json.dumps(asdict(size)), given.repeats)
        row["us_per_op"] = 1e6 * (row["build_s"] + row["check_s"]) / row["ops"]
        rows.append({"size": str(size), **asdict(size), **{k: round(v, 4) for k, v in row.items()}})
        print(
            f"{size!s:>34} {row['ops']:>8} {row['build_s']:>8.2f} {row['check_s']:>8.2f} {row['us_per_op']:>6.1f} "
            f"{row['peak_mib']:>6.0f}"
        )
    target = next(row for row in rows if row["size"] == str(TARGET))
    total = target["build_s"] + target["check_s"]
    print(f"{TARGET}: {total:.2f} s of 5 s, {target['peak_mib']:.0f} MiB of 2048 MiB")
    result = {
        "question": "How do time and memory of planning and checking grow with the number of ops?",
        "method": f"shortest of {given.repeats} CPU times on one core, one process per size",
        "target": {"size": str(TARGET), "seconds": 5, "mib": 2048},
        "rows": rows,
    }
    print(write("plan_scaling", result, given.out, given.commit))


if __name__ == "__main__":
    main()
