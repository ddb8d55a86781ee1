"""What the executor's loop costs the host per op, without autograd and kernels.

    python -m benchmarks.executor_cost

Runs the real op list of a recipe through the real loop, lanes, events and recorder, with actions that do nothing. On a
GPU host with CUDA lanes, elsewhere with CPU lanes. The target is 20 microseconds per op.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.options import arguments
from benchmarks.record import write
from hocket.engine.executor import Executor
from hocket.program.lower import build_program
from hocket.program.ops import Op
from hocket.program.stages import layout_of, sharding_of
from hocket.recipes import recipe
from hocket.runtime.comm import Pending
from hocket.runtime.hangs import Recorder
from hocket.runtime.lanes import CpuLanes, CudaLanes


class Idle:
    """Actions that do nothing."""

    losses: tuple[()] = ()
    microbatches: Any = ()

    def find(self, op: Op) -> Callable[..., Any]:
        done = Pending()
        return (lambda op, *values: None) if op.lane == "compute" else (lambda op, *values: (None, done))

    def discard(self) -> None:
        pass


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--recipe", default="moe_8gpu")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    config = recipe(options.recipe)
    program = build_program(layout_of(config), config.train.microbatches, config, sharding_of(config))
    ops = program.ranks[0]
    results = {}
    kinds = {"cpu": CpuLanes} | ({"cuda": lambda: CudaLanes(torch.device("cuda"))} if torch.cuda.is_available() else {})
    for name, make_lanes in kinds.items():
        idle: Any = Idle()
        executor = Executor(program, 0, idle, make_lanes(), Recorder(ops), range(len(ops)))
        gc.freeze()
        times = []
        for _ in range(options.repeats):
            started = time.perf_counter()
            executor.run(())
            times.append((time.perf_counter() - started) / len(ops) * 1e6)
            if name == "cuda":
                torch.cuda.synchronize()
        results[name] = {"ops": len(ops), "microseconds_per_op": statistics.median(times), "worst": max(times)}
        print(f"{name}: {len(ops)} ops, {results[name]['microseconds_per_op']:.2f} us per op (worst {max(times):.2f})")
    print(
        write("executor_cost" if "cuda" not in results else "executor_cost_gpu", results, options.out, options.commit)
    )


if __name__ == "__main__":
    main()
